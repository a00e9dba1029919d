// How a command ended, in the words and fields of the protocol.
#ifndef UNTAX_RESULT_H
#define UNTAX_RESULT_H

#include "output.h"
#include "spawn.h"

// A child that ended, as the reaper saw it.
struct ending {
    uint32_t pid;
    int status;
    uint64_t at_ns, user_ns, system_ns, peak_kib;
};

// A child may end before the worker's EXECED has told its pid: endings that nobody knows are kept while a start is under way.
void exec_pending(int change);
void exec_remember(const struct ending *e);
bool exec_early(uint32_t pid, struct ending *out);

struct outcome_fields {
    uint8_t outcome;
    int32_t code;
    uint64_t wall_ns, user_ns, system_ns, peak_kib;
    uint32_t oom_kills, pids_refused;
    bool disk_full;
};
void outcome_status(struct outcome_fields *o, int status);  // of wait4
// The fields of the DONE of SPAWN and SESSION_RUN; empties the outputs.
void outcome_write(const struct outcome_fields *o, struct output *out, struct output *err);

// 127, 126, or 0 when a failed exec, or chdir before it, is not the command's fault.
int exec_exit_status(int error);
const char *spawn_step_words(enum spawn_step step);

// Counters of the work group: as last read, and read now.
struct counters {
    uint32_t oom_kills, pids_refused;
};
void counters_open(int memory_events_fd, int pids_events_fd);
struct counters counters_cached(void);
struct counters counters_read(void);
void counters_oom(void);  // killed by the agent itself, where no kernel counts

// SIGKILL to a group by the agent itself: only works where it has the workload's identity.
void kill_group(uint32_t pid);

#endif
