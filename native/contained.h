// The agent as the first process of a container that somebody else's engine made.
#ifndef UNTAX_CONTAINED_H
#define UNTAX_CONTAINED_H

#include <stdbool.h>
#include <stddef.h>

#include "agent.h"
#include "users.h"

#define OWN_MAX 8

struct contained {
    const char *user;          // whom commands run as unless they name another; NULL: as the agent itself
    const char *own[OWN_MAX];  // directories that are made for that user
    size_t own_count;
    struct identity identity;  // the user's, once prepared
};

// Makes the directories, opens the container's own counters of kills and refused forks, and puts its rights away. False: said on standard error.
bool contained_prepare(struct contained *c, struct agent_opts *opts);

// As `user_lookup` in the sandbox's own file; root is known also where there is none.
bool user_known(struct span user, struct identity *out);

// A name and an identity of its own for a copy of a sandbox, as far as this agent has the right to.
void contained_rename(struct span name, struct span machine);

// Memory has run out, says whoever counts it outside: kills the largest process that `spared` does not name. False: there is none.
bool contained_shed(bool (*spared)(int pid));

// What a worker does to become `who`, for good: its rights end, but for the few that "root inside" has. False with errno.
bool identity_take(const struct identity *who);

#endif
