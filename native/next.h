// The upper directory and the overlays that a sandbox goes on with after a snapshot, made ahead of it: they are half of what a snapshot takes.
//
// They stand on the sandbox as it is, so they are made only where snapshots are in use: for new sandboxes while others were taken snapshots of, and for one that
// had several. What is made ahead is used only if what it was made from has not changed (layout_glance); otherwise it is made again.
#ifndef UNTAX_NEXT_H
#define UNTAX_NEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "spare.h"

struct box;

void next_created(const struct box *b);
void next_snapshotted(struct box *b);
// Has one made. False: nothing is wanted, or the maker is busy.
bool next_prepare(void);
// What the maker has to say; always about this.
void next_made(enum maker_says said, struct furniture *f);
// What was made for the sandbox, under the name `fresh` from now on, and the glance at what it was made from. False: there is none.
bool next_take(const struct box *b, const char *fresh, struct furniture *out, uint64_t *glance);
// The sandbox is gone, or with NULL all are given up.
void next_drop(const struct box *b);
// Milliseconds until they are given up because no snapshot has been taken for so long; -1: there are none. Gives up what is due.
int next_expire(void);

#endif
