// A copy of a sandbox goes on from where this one stood, with its processes and their memory, and under another host: docs/protocol.md, "Copies".
#ifndef UNTAX_REBORN_H
#define UNTAX_REBORN_H

#include "wire.h"

// Falls silent behind the answer, unless somebody waits for one that the copy could not give.
void quiesce_handle(const struct frame *f);
// In the copy: forgets the host that was, and takes the name that is its own. False: not one.
bool reborn_handle(const struct frame *f);

#endif
