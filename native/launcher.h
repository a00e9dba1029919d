// What the parts of the launcher share: its sandboxes, its state, and how it answers the engine.
#ifndef UNTAX_LAUNCHER_H
#define UNTAX_LAUNCHER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "layout.h"
#include "mounts.h"
#include "sandbox.h"
#include "slot.h"
#include "wire.h"

#define BOXES_MAX 4096
#define RANGE_BITS 12  // a handle is a generation and the sandbox's range
#define ID_MAX 64

struct box {
    uint32_t handle;
    char id[ID_MAX];
    char disk[ID_MAX];  // under which name its upper directory lies; its id until a snapshot put another on top
    char *workdir;
    struct layout layout;
    bool in_memory;
    struct slot slot;
    int pidfd, control, status;
    uint64_t disk_bytes;
    uint32_t pids;
    uint32_t destroy_seq;  // who waits for its end; 0: nobody
    struct setup_failure failure;
    bool failed;
};

extern struct launcher {
    int engine, epoll;
    bool in_userns, ready;
    int userns_error;               // why an ordinary user cannot have sandboxes; 0: nothing is wrong
    struct mounts mounts;
    struct box *boxes[BOXES_MAX];
    uint32_t generation;
    char leftovers[BOXES_MAX][ID_MAX];  // ids whose control groups would not go yet
    unsigned leftover_count;
    pid_t sweeper;
    bool buried;                    // a sandbox ended in this round
} L;

struct wr launcher_answer(uint32_t seq, uint8_t status);
void launcher_send(struct wr *w, const int *fds, size_t count);
void launcher_refuse(uint32_t seq, const char *step, int error);
void launcher_done(uint32_t seq);  // answers that it is done, with nothing more to say
struct box *launcher_find(uint32_t handle);
// From now on its end is noticed, and what its set-up has to say.
void launcher_watch(struct box *b);
void launcher_watch_entry(int fd, uint32_t index);
void launcher_free(struct box *b);
// A NUL-terminated copy; the caller frees.
char *launcher_text(struct span s);
// Letters, digits and hyphens: an id becomes a directory, a control group and a host name.
bool launcher_valid_id(struct span s);

// In create.c: answers with a handle, the first process and its channel, or with the step that failed.
void launcher_create(uint32_t seq, struct rd *r);

// In enter.c: answers when the worker stands and its agent has been told, with the step that failed, or after a while.
void launcher_enter(uint32_t seq, struct rd *r);
void launcher_entered(uint32_t index);  // its status pipe is readable
bool launcher_entering(void);           // true while any are on their way; gives up on those that take too long

#endif
