// File systems for sandboxes, made by the launcher and handed to each sandbox as descriptors of detached mounts.
//
// The launcher keeps a small stage: a tmpfs in its own mount namespace with what all sandboxes share (a /dev, read-only views of host
// directories), and a descriptor of an empty mount namespace that sandboxes start from, so that making one copies nothing of the host's.
#ifndef UNTAX_MOUNTS_H
#define UNTAX_MOUNTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LAYERS_MAX 500  // the kernel's own limit

struct mounts {
    bool in_userns;   // an ordinary user's launcher: overlay keeps its marks in user.* attributes
    int stage;        // directory of the tmpfs
    int empty_ns;     // mount namespace that holds nothing but an empty read-only tmpfs
    int next_bind;
};

// `dir` is an existing directory of the launcher's, used as mount point. 0, or -1 with errno and *step.
int mounts_open(struct mounts *m, const char *dir, bool in_userns, const char **step);
// A new detached, recursive, read-only view of a host directory; made once and cloned afterwards.
int mounts_bind(struct mounts *m, const char *source);
// A new detached view of the shared /dev.
int mounts_dev(struct mounts *m);
// An overlay over `lowers` (uppermost first) with the given upper and work directories, detached. With `userns` ≥ 0 the layers' owners
// are shifted into that user namespace, where kernel and file system can. -1 with errno and *step on failure.
int mounts_overlay(struct mounts *m, const int *lowers, size_t count, int upper, int work, int userns, const char **step);
// A detached tmpfs of that size; `inodes` 0 means the kernel's default.
int mounts_tmpfs(uint64_t bytes, uint64_t inodes, const char *mode, unsigned attributes);

#endif
