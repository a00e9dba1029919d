// Upper directories with their overlays, and control groups, made ahead of need: they are most of what a create takes.
//
// A spare belongs to what it stands on (a layout) and to a range of user ids, and is handed to the next sandbox over the same layout. There are few, made
// while the launcher is idle for what was asked for last, and given up when nobody has asked for a while, so that an idle engine holds nobody's files.
#ifndef UNTAX_SPARE_H
#define UNTAX_SPARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sandbox.h"
#include "slot.h"
#include "wire.h"

// What a sandbox is given before it runs: its range, its control groups, and its file system as detached mounts.
struct furniture {
    struct slot slot;
    struct cg_box cg;
    char group[64];  // "": there are none yet
    int root;
    struct view views[VIEWS_MAX];
    size_t count;
    uint64_t print;  // see launcher_print
};

#define FURNITURE_NONE ((struct furniture){.cg = CG_BOX_NONE, .root = -1})

void furniture_close(struct furniture *f);  // the descriptors; what they stand for is its holder's

// A sandbox over this layout (as it stands in the request) was asked for: there may soon be another.
void spares_note(struct span layout, uint64_t disk_bytes, const struct cg_limits *limits);
// A spare for that layout, its upper directory under the name `id`, held to these limits. False: there is none.
bool spares_take(struct span layout, const char *id, uint64_t disk_bytes, const struct cg_limits *limits, struct furniture *out);
// Makes one ahead of need, or gives up one that nobody will want. False: nothing is to be done.
bool spares_prepare(void);
// Milliseconds until spares are given up for want of use; -1: there are none. Gives up what is due.
int spares_expire(void);
// Whatever stands on that directory, or with NULL all of them, is given up.
void spares_drop(const char *directory);

#endif
