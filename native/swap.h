// The snapshot itself, in a child of the launcher's: everything stands still, and then either a new upper directory is slipped under the
// sandbox and the old one is a layer, or the old one is copied. docs/decisions/0005-live-snapshot.md says why.
#ifndef UNTAX_SWAP_H
#define UNTAX_SWAP_H

#include <stdint.h>

#include "launcher.h"

enum swap_said {
    SWAP_WANTS_MOUNTS = 1,  // the overlays over the old upper directory, please
    SWAP_COPIES,            // without them after all; this may take long
    SWAP_SWAPPED,
    SWAP_COPIED,
    SWAP_FAILED,            // and nothing has changed
    SWAP_SPOILED,           // the sandbox cannot be trusted any more
};

// What the child tells the launcher on `sock`, and with `said` 0 the launcher that it has no mounts.
struct swap_note {
    uint32_t said;
    int32_t error;
    uint64_t still_ns;  // how long everything stood still
    char step[48];
};

// Does not return. `copy`: under which name a copy is to lie.
_Noreturn void swap_main(const struct box *b, int sock, const char *copy, bool may_swap);

#endif
