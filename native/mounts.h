// File systems for sandboxes, made by the launcher and handed to each sandbox as descriptors of detached mounts.
//
// The launcher keeps a small stage: a tmpfs in its own mount namespace with what all sandboxes share (a /dev), and a descriptor of an empty mount namespace that sandboxes start from, so that making one copies nothing of the host's.
#ifndef UNTAX_MOUNTS_H
#define UNTAX_MOUNTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define LAYERS_MAX 500  // the kernel's own limit

struct mounts {
    bool in_userns;   // an ordinary user's launcher: overlay keeps its marks in user.* attributes
    int stage;        // directory of the tmpfs
    int empty_ns;     // mount namespace that holds nothing but an empty read-only tmpfs
    bool shifts, cannot_shift;  // has been seen to work; or not to, by kernel or file system: see layout.c. Neither: not known yet
    bool is_second;   // the maker's, which has a place of its own for that
    bool is_held;     // something is attached where shifted views are, or could not be let go of
};

// `dir` is an existing directory of the launcher's, used as mount point. 0, or -1 with errno and *step.
int mounts_open(struct mounts *m, const char *dir, bool in_userns, const char **step);
// A new detached view of the shared /dev.
int mounts_dev(struct mounts *m);
// A view of `dir` with its owners shifted into a user namespace, attached at a place of the launcher's own, for overlay takes no other: a descriptor,
// or -1 with errno. One view at a time has that place; others are attached below it (`at`, `name`), and all are let go of together.
int mounts_shift(struct mounts *m, int dir, int userns);
int mounts_shift_at(int dir, int userns, int at, const char *name);
void mounts_let_go(struct mounts *m);
// A detached mount of `dir` as it is seen there, writable.
int mounts_writable(int dir);
// A detached overlay over `lowers` (uppermost first), made as the file-system user `as` (0: the caller's own). -1 with errno on failure.
int mounts_overlay(struct mounts *m, const int *lowers, size_t count, int upper, int work, uid_t as);
// A detached tmpfs of that size; `inodes` 0 means the kernel's default.
int mounts_tmpfs(uint64_t bytes, uint64_t inodes, const char *mode, unsigned attributes);
// Another size for a tmpfs that `root` is the root of. 0, or -1 with errno; it cannot become smaller than what is in it.
int mounts_resize(int root, uint64_t bytes, uint64_t inodes);

#endif
