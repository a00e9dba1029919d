// Names to ids, from a passwd file read by hand: a static program has no name service.
#ifndef UNTAX_USERS_H
#define UNTAX_USERS_H

#include <stdbool.h>
#include <sys/types.h>

#include "wire.h"

struct identity {
    uid_t uid;
    gid_t gid;
};

// `user` is a name, "uid" or "uid:gid". A bare uid takes its group from the file, or the same number.
bool user_lookup(const char *passwd, struct span user, struct identity *out);

#endif
