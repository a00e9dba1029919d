// Holding the threads of a sandbox by ptrace, and having one of them change its working directory without its ever knowing.
//
// A held thread stands where it was interrupted. A system call it was in goes on afterwards as after a stop and continue, with what was left
// of its time; signals that came meanwhile are delivered then, and end it with EINTR where they should. When its tracer dies, one that was only held
// goes on; one whose registers were borrowed is killed, because nobody can give them back.
#ifndef UNTAX_INJECT_H
#define UNTAX_INJECT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/user.h>


typedef struct user_regs_struct inject_regs;  // x86_64 and aarch64 alike

struct held {
    pid_t tgid, tid;
    bool stopped;       // false: not yet, or it is gone
    bool gone;
    bool borrowed;      // its registers are ours until inject_release
    bool ready;         // and it can be made to call
    bool has_run;       // since it was stopped
    bool restarts;      // it was in a system call that is to go on
    inject_regs saved;
    long number;        // of that call, where it is not in `saved`
    uint64_t code;      // address of an instruction that makes a system call
    uint64_t mask;      // its blocked signals
    uint64_t owed;      // signals that came while they could not be delivered
    uint64_t at;        // where the path lies in its memory
    uint32_t size;
    char *kept;         // what lay there before
};

// From now on nothing here waits longer than until `deadline_ns` in all; waiting then fails with ETIMEDOUT. 0 ends it.
void inject_deadline(uint64_t deadline_ns);

// Becomes its tracer and asks it to stop. 0; -1 with errno: ESRCH it is gone, EPERM another traces it.
int inject_hold(struct held *h, pid_t tgid, pid_t tid);
// Waits until it stands. 0, also when it has ended instead (`gone`), or -1 with errno: then it still is ours, and is let go by our own end.
int inject_wait(struct held *h);
// Has it call chdir(path). 0, or -1 with errno, its own call's among them. `proc` is a directory of procfs that knows it by this number. It may be called again.
int inject_chdir(struct held *h, int proc, const char *path);
// It goes on as if nothing had been. False: its state could not be given back, and the sandbox cannot be trusted any more.
bool inject_release(struct held *h);

#endif
