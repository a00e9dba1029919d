// What one command of a session has used: the shell lives on, so no wait4 tells it.
//
// Processor time is the kernel's: the shell's own to the nanosecond, that of the children it has waited for in clock ticks.
// The peak is the largest high-water mark seen of the shell or a descendant, at the end and while it runs after 4, 8, 16 … ms,
// at most a second apart. The kernel tells nobody but the shell how large a child was that has ended, so one that grows
// and ends between two looks is missed.
#ifndef UNTAX_USAGE_H
#define UNTAX_USAGE_H

#include "loop.h"
#include "result.h"

struct cpu {
    uint64_t all_ns, system_ns;  // of the shell and the children it has waited for; system time in ticks
};

struct usage {
    uint32_t pid;
    int stat, status;  // of the shell in /proc
    struct cpu before;
    uint64_t shell_high_kib, peak_kib;
    struct timer look;
    uint64_t pause_ns;
};

void usage_open(struct usage *u, uint32_t pid);
void usage_begin(struct usage *u);
// Fills in user_ns, system_ns and peak_kib. `ending`: of the shell, where the command has ended it.
void usage_end(struct usage *u, const struct ending *ending, struct outcome_fields *o);
void usage_close(struct usage *u);

#endif
