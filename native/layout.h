// What a sandbox stands on, and the overlays made of it: its root, and one for each view of a host directory.
//
// All of them write into one upper directory: the overlay at /usr has upper/usr. A frozen upper directory therefore is a layer like any
// other, and a view is seen through `layer/<place>` of each layer above it. As root, layers and upper directories hold the ids that are seen
// inside (0–65535); each sandbox looks at them through mounts that shift them into its own range.
#ifndef UNTAX_LAYOUT_H
#define UNTAX_LAYOUT_H

#include "disk.h"
#include "mounts.h"
#include "sandbox.h"
#include "slot.h"
#include "wire.h"

struct layout {
    char *text;                             // owns the strings
    const char **lowers;                    // directories, uppermost first
    uint32_t pushed;                        // how many of them came later, each with memory of its own
    const char *sources[VIEWS_MAX], *places[VIEWS_MAX];  // views: host directory and place, outermost first
    const char *cache;                      // a host directory that is seen, writable, at LAYOUT_CACHE_AT; NULL: none
    uint32_t lower_count, view_count;
    uint32_t place_count;                   // of the views and, last, of the cache
    const char **dirs;                      // directories of the workload's own, to be made in a fresh upper directory
    uint32_t dir_count;
};

#define LAYOUT_CACHE_AT "/var/cache/untax"

// strs lowers, strs views (source and place in turn), bytes cache, strs dirs. False: malformed, or no memory.
bool layout_parse(struct layout *l, struct rd *r);
void layout_free(struct layout *l);
// Layers below one of these directories are shifted together, by one mount. Called once; the strings are kept.
void layout_bases(const char *boxes, const char *layers);
const char *layout_boxes(void);

// Puts a directory over the lowers, or takes the last one so put off again.
bool layout_push(struct layout *l, const char *directory);
void layout_pop(struct layout *l);

// The mounts over a fresh upper directory, all detached. `on_own`: the uppermost lower is a frozen upper of the same sandbox, which has everything that is
// otherwise made, as the workload left it. 0, or -1 with errno and *step; what was made is closed again.
int layout_mount(const struct layout *l, bool on_own, const struct slot *slot, const struct disk_box *disk, int *root, struct view *views, size_t *count,
                 const char **step);
// What mounts over a frozen upper directory of its own depend on beside its layers: how the places of its views look there. 0 is none.
uint64_t layout_glance(const struct layout *l, const char *frozen);
// Takes down what the mounts were made from. It costs a grace period of the kernel's, so whoever waits for the mounts is given them first.
void layout_let_go(void);

#endif
