// Control groups: limits on memory, processes and CPU, and killing or freezing a whole sandbox at once.
//
// Three layouts are met in the field: v2 alone; v1 controllers beside a v2 tree that has none ("hybrid", where kill and
// freeze still work in the v2 tree); and no writable tree at all (an ordinary user without delegation). Each sandbox has two groups, `agent`
// and `work`, so that a workload's out-of-memory kill cannot take the agent and a freeze does not stop it.
#ifndef UNTAX_CGROUP_H
#define UNTAX_CGROUP_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum cg_ability { CG_MEMORY = 1, CG_PIDS = 2, CG_CPU = 4, CG_KILL = 8, CG_FREEZE = 16 };

struct cg_limits {
    uint64_t memory_bytes;  // of the work group, swap included
    uint32_t pids;
    uint32_t cpu_permille;  // 1000 is one CPU
};

// What a sandbox's processes need; every descriptor is close-on-exec and closed by cg_box_close.
struct cg_box {
    int agent_group, work_group;      // directories of the v2 tree to be cloned into; -1 where there is none
    int agent_join[4], work_join[4];  // writing "0" to each moves the writer, which must have one thread
    int agent_joins, work_joins;
    int memory_events, pids_events;   // -1 where there is none
};

#define CG_BOX_NONE ((struct cg_box){.agent_group = -1, .work_group = -1, .memory_events = -1, .pids_events = -1})

// Finds the trees and makes the engine's own group in each, named untax-<run>. Returns the abilities.
unsigned cg_open(const char *run);
unsigned cg_abilities(void);
// 0, or -1 with errno and *step named; what was made is removed again.
int cg_box_make(const char *id, const struct cg_limits *limits, struct cg_box *out, const char **step);
// Other limits for a sandbox that is already there. Which of them hold now, as abilities; the others are as they were.
unsigned cg_box_limit(const char *id, const struct cg_limits *limits);
// The join files of a sandbox that is already there.
int cg_box_open(const char *id, struct cg_box *out);
void cg_box_close(struct cg_box *box);
// Makes the calling process a member. Call in the child while it still has the launcher's privileges. A v1 group is joined through `tasks`: for a single
// thread that moves itself the kernel takes no global lock, which otherwise costs a grace period of several milliseconds after a pause.
// For the same reason the v2 groups are cloned into.
int cg_join(const int *fds, int count);
struct k_clone_args;
// clone3 into that group of the v2 tree; `group` -1: the caller's own. As fork otherwise.
pid_t cg_clone(struct k_clone_args *args, int group);
// The workload's directory in the v2 tree; -1: there is none.
int cg_box_dir(const char *id);
int cg_box_freeze(const char *id, bool on);
void cg_box_kill(const char *id);      // everything in it, where the tree can
bool cg_box_remove(const char *id);    // false: something is still inside
// Kills and removes what a dead engine left; false: not all of it would go.
bool cg_sweep(const char *run);
void cg_close(void);                   // removes the engine's own groups

#endif
