#define _GNU_SOURCE
#include "identity.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"
#include "kernel.h"
#include "mounts.h"

// The second is a link to the first on most systems, and a copy of it on some.
const char *const identity_places[IDENTITY_PLACES] = {"etc/machine-id", "var/lib/dbus/machine-id"};

#define STAGE "/dev/shm"  // empty, and never seen again: the sandbox's own is mounted over it

int identity_at(int root, const char *place) {
    struct k_open_how how = {.flags = O_PATH | O_NOFOLLOW | O_CLOEXEC, .resolve = K_RESOLVE_BENEATH | K_RESOLVE_NO_SYMLINKS};
    struct stat st;
    int fd = k_openat2(root, place, &how);
    if (fd >= 0 && (fstat(fd, &st) || !S_ISREG(st.st_mode))) io_close(&fd);
    return fd;
}

// An empty file is how an image says that it has none.
static bool says_something(int fd) {
    struct stat st;
    return fd >= 0 && !fstat(fd, &st) && st.st_size > 0;
}

// As systemd draws them: random, in the form of a UUID of version 4.
static int draw(char out[34]) {
    uint8_t id[16];
    if (getrandom(id, sizeof id, 0) != (ssize_t)sizeof id) return -1;
    id[6] = (uint8_t)((id[6] & 0x0f) | 0x40), id[8] = (uint8_t)((id[8] & 0x3f) | 0x80);
    for (size_t i = 0; i < sizeof id; i++) snprintf(out + 2 * i, 3, "%02x", id[i]);
    out[32] = '\n', out[33] = 0;
    return 0;
}

// A file system for one file of one page.
static int make(bool in_userns, uid_t owner) {
    char text[34];
    autoclose int fs = mounts_tmpfs(4096, 2, "755", K_ATTR_NOSUID | K_ATTR_NODEV | K_ATTR_NOEXEC);
    if (fs < 0 || draw(text) || k_move_mount(fs, "", AT_FDCWD, STAGE, K_MOVE_FROM_EMPTY)) return -1;
    autoclose int file = openat(fs, "machine-id", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0444);
    if (file < 0 || write(file, text, 33) != 33) return -1;
    return in_userns ? 0 : fchown(file, owner, owner);
}

static int cover(int place) {
    autoclose int tree = k_open_tree(AT_FDCWD, STAGE "/machine-id", K_OPEN_TREE_CLONE | K_OPEN_TREE_CLOEXEC);
    struct k_mount_attr attr = {.set = K_ATTR_RDONLY};
    if (tree < 0 || k_mount_setattr(tree, "", K_AT_EMPTY_PATH, &attr)) return -1;
    return k_move_mount(tree, "", place, "", K_MOVE_FROM_EMPTY | K_MOVE_TO_EMPTY);
}

int identity_put(bool in_userns, uid_t owner) {
    bool is_made = false;
    autoclose int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) return -1;
    for (size_t i = 0; i < IDENTITY_PLACES; i++) {
        autoclose int place = identity_at(root, identity_places[i]);
        if (!says_something(place)) continue;
        if (!is_made && make(in_userns, owner)) return -1;
        is_made = true;
        if (cover(place)) return -1;
    }
    return 0;
}
