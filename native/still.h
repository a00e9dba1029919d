// A sandbox standing still: all its processes but the agent, stopped by the freezer where there is one and by ptrace otherwise, and what they hold.
#ifndef UNTAX_STILL_H
#define UNTAX_STILL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "inject.h"
#include "sandbox.h"

struct stander {
    pid_t tgid, tid;
    struct held held;
    bool is_held;
    char *cwd;  // where it has to be sent again; NULL: nowhere
};

// An overlay of the sandbox's, as it is told by what stands on it.
struct ground {
    uint64_t mount;
    uint32_t major, minor;
    int fd;
};

struct still {
    const char *id;          // of its control groups
    pid_t agent;
    int proc, group;         // procfs as the launcher sees it; the workload's directory in the v2 tree, -1: none
    bool freezes;            // there is a freezer
    bool was_frozen;         // before us
    bool is_frozen, is_held;
    uint64_t since_ns;
    struct ground grounds[VIEWS_MAX + 1];  // the root first
    size_t ground_count;
    struct stander *standers;
    size_t count, room;
};

// Stops everything. 0, or -1 with errno: whatever was stopped goes on with still_end.
int still_begin(struct still *s);
// Holds every thread by ptrace and lets go of the freezer: each can now be made to act alone. 0, or -1 with errno; then the freezer is as it was.
int still_hold(struct still *s);
// True: nothing stands open that a change of root would leave behind. Fills in who has to be sent to its working directory again.
// It does not look for writers: the kernel does, when the overlays are made read-only.
bool still_is_movable(struct still *s);
bool still_is_in_place(struct still *s, uint64_t root);  // everybody's root is now that mount
int still_send(struct still *s);  // everybody who has to be, to where it stood. 0, or -1 with errno
// Everything goes on. False: something could not be given back.
bool still_end(struct still *s);
// The mount that `path` below `dir` leads to. False when the kernel does not say.
bool still_ground(int dir, const char *path, struct ground *out, bool *is_root);

#endif
