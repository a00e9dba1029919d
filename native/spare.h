// Sandboxes made ahead of need, whole but for a holder: a create that finds one has nothing left to wait for.
//
// A spare belongs to what it stands on (a layout) and to a range of user ids, and is handed to the next who asks for the same. Nothing has run in it but its own agent
// and worker. There are few, made for what was asked for last, and given up when nobody has asked for a while, so that an idle engine holds nobody's files.
#ifndef UNTAX_SPARE_H
#define UNTAX_SPARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sandbox.h"
#include "slot.h"
#include "wire.h"

struct box;
struct order;

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

#define FURNITURE_NONE ((struct furniture){.slot.netns = -1, .cg = CG_BOX_NONE, .root = -1})

void furniture_close(struct furniture *f);  // the descriptors; what they stand for is its holder's

// A sandbox that is as was asked for, under the name `id`, with its channel; NULL: there is none. Either way it is remembered what was asked for.
struct box *spares_take(const struct order *o, const char *id, int *channel);
// Has one made, or gives up one that nobody will want. False: nothing is to be done, or it is being done.
bool spares_prepare(void);
// What the maker has to say (maker.h). False: it is not about a spare.
enum maker_says { MAKER_NOTHING, MAKER_DONE, MAKER_FAILED, MAKER_GONE };
bool spares_made(enum maker_says said, struct furniture *f);
// A spare has died: it is forgotten, and so is what it was made for, until somebody asks for that again.
void spares_lost(const struct box *b);
// Milliseconds until spares are given up for want of use; -1: there are none. Gives up what is due.
int spares_expire(void);
// Whatever stands on that directory, or with NULL all of them, is given up.
void spares_drop(const char *directory);
// Ends the maker; spares are given up.
void spares_close(void);
// Gives up all, and waits until they are gone. False: there were none.
bool spares_empty(void);

#endif
