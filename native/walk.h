// A directory tree, entry by entry, by descriptors and never through a link.
//
// Depth costs no descriptors beyond a fixed number and no path is ever looked up from the top again, so that a tree made deeper than
// PATH_MAX is walked like any other. Names come sorted (directories too large to hold come in sorted pieces).
#ifndef UNTAX_WALK_H
#define UNTAX_WALK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum walk_event {
    WALK_END,
    WALK_ENTRY,  // something in the current directory; a directory is gone into only when walk_enter is called
    WALK_LEAVE,  // everything below the directory `name` has been seen; `dir` is its parent
    WALK_ERROR,  // a directory could not be read further (`error`); the walk goes on beside it
};

struct walk_level;

struct walk {
    // what the last event was about
    int dir;                // the directory that `name` is in
    const char *name;
    uint8_t type;           // DT_*, never DT_UNKNOWN
    const char *path;       // from the top, without a leading "./"
    size_t path_size;
    int error;
    // private
    struct walk_level *levels;
    size_t depth, room, path_room;
    char *path_buffer;
};

// Starts below `fd`, which is the walk's from then on; 0 or errno.
int walk_open(struct walk *w, int fd);
enum walk_event walk_next(struct walk *w);
// After WALK_ENTRY of a directory: what follows is inside it. 0 or errno.
int walk_enter(struct walk *w);
void walk_close(struct walk *w);

#endif
