// What each live sandbox has to itself and is dear to make: a range of user ids with its user namespace, and a network namespace.
//
// A few are made ahead of need while the launcher is idle. A user namespace stays with its range and serves one
// sandbox after another; a network namespace is used once.
#ifndef UNTAX_SLOT_H
#define UNTAX_SLOT_H

#include <stdbool.h>
#include <sys/types.h>

#define RANGE_SIZE 65536u
#define WORKLOAD_UID 1000
#define AGENT_UID 65533

struct slot {
    int userns, netns;
    uid_t base;   // host id of inner 0; in an ordinary user's launcher the only id there is
    unsigned range;
};

// `first` and `count`: the ranges this engine may use, in units of RANGE_SIZE; count 0 in an ordinary user's launcher.
int slots_open(unsigned first, unsigned count, bool in_userns);
// 0, or -1 with errno and *step.
int slot_take(struct slot *out, const char **step);
// Without a network namespace, which somebody else makes. False: there is none to spare.
bool slot_take_bare(struct slot *out);
int slot_make_net(void);  // with its loopback up; -1 with errno
// The sandbox is gone with all its processes.
void slot_give(struct slot *slot);
// Makes one thing ahead of need. False: enough is ready.
bool slots_prepare(void);

#endif
