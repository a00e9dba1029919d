// The agent: serves the channel inside a sandbox. See docs/protocol.md, "Agent and worker".
#ifndef UNTAX_AGENT_H
#define UNTAX_AGENT_H

#include <stdbool.h>
#include <stdint.h>

struct birth;
struct identity;

struct agent_opts {
    int channel_in, channel_out;  // the same descriptor for a socket
    int worker_fd;                // socket to the ready default worker; -1: fork one
    int control_fd;               // SOCK_SEQPACKET from the launcher; further workers arrive on it; -1: none
    int memory_events_fd;         // the work group's oom_kill counter, read with pread; -1: none
    int pids_events_fd;           // its "max N" counter of refused forks; -1: none
    struct birth *birth;          // shared with the default worker; NULL: none
    const struct identity *identity;  // whom a worker that is forked acts as by default; NULL: as the agent itself
    int work_join;                // cgroup.procs of the group that workers which are forked join; 0: none
    const char *workdir;          // until CONFIGURE says otherwise
    bool is_init;                 // PID 1 of a pid namespace
    bool is_told;                 // of memory that ran out, by SIGUSR1 from outside the sandbox; the kernel counts no kills here
    const char *held_name;        // the streams come to this abstract socket and may break; NULL: the channel is the stream
    int held_fd;                  // then: the other end of the channel
    uint32_t held_patience_s;     // then: how long to wait for the first or the next stream
};

// Serves until the channel ends; everything started is killed. Returns the exit status for the process.
int agent_main(const struct agent_opts *opts);

#endif
