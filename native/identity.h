// The id of the machine that an image brought with it: every sandbox has one of its own in its place, or what identifies machines by it takes all for one.
#ifndef UNTAX_IDENTITY_H
#define UNTAX_IDENTITY_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define IDENTITY_PLACES 2
extern const char *const identity_places[IDENTITY_PLACES];

// In a sandbox whose root and /dev are in place and in which nothing runs yet: covers the id of its image, where it has one, with a new one that nobody
// can write to. Nothing of it is in the upper directory, so a snapshot has none and a clone gets another. `owner` is root inside. 0, or -1 with errno.
int identity_put(bool in_userns, uid_t owner);
// The file at one of the places below `root`, whatever somebody inside has put there: a descriptor, or -1 for what is no file.
int identity_at(int root, const char *place);

#endif
