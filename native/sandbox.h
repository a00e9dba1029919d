// The inside of a namespace sandbox: from a fresh clone of the launcher to an agent and a worker with nothing left to give away.
#ifndef UNTAX_SANDBOX_H
#define UNTAX_SANDBOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "cgroup.h"
#include "slot.h"

#define VIEWS_MAX 32
#define TMPFS_INODES(bytes) ((bytes) / 4096 + 1024)

// A detached mount and where it goes.
struct view {
    int mount;
    const char *at;
};

struct plan {
    bool in_userns;
    const char *hostname, *workdir;  // "": it is given its name later, from outside
    struct slot slot;
    struct cg_box cg;
    int empty_ns, dev;   // mount namespace to start from; a detached mount of /dev
    const char *const *places;  // where the mounts go that come, after the root's, over `control`
    size_t place_count;
    uint64_t tmp_bytes, shm_bytes, disk_bytes;
    uint32_t pids;
    int channel, control, status;
};

// What a failing set-up tells the launcher on `status`; silence and end of file mean success.
struct setup_failure {
    int error;
    char step[60];
};

// In the cloned child, PID 1 of its namespace. Does not return.
_Noreturn void sandbox_main(struct plan *plan);

// In a forked child of the launcher: enters a live sandbox and leaves a worker for `user` behind that serves on `sock`.
// "" is the default user, "root" and numbers are taken as they are, other names are looked up inside. Does not return.
struct birth;

struct entry {
    bool in_userns;
    int pidfd, userns, sock, status;
    int setup;  // where the sandbox's own set-up reports; its end is waited for. -1: it is over
    struct cg_box cg;
    const char *user, *workdir;
    struct birth *birth;  // shared with the agent
    uint64_t disk_bytes;
    uint32_t pids;
};
_Noreturn void sandbox_enter(struct entry *entry);

#endif
