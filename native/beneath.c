#define _GNU_SOURCE
#include "beneath.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "io.h"

#define HOW (O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)

bool beneath_clean(char *path, size_t size) {
    if (memchr(path, 0, size) || (size && path[0] == '/')) return false;
    size_t to = 0;
    for (size_t at = 0; at < size;) {
        size_t end = at;
        while (end < size && path[end] != '/') end++;
        size_t part = end - at;
        if (part == 2 && path[at] == '.' && path[at + 1] == '.') return false;
        if (part && !(part == 1 && path[at] == '.')) {
            if (to) path[to++] = '/';
            memmove(path + to, path + at, part);
            to += part;
        }
        at = end + 1;
    }
    path[to] = 0;
    return true;
}

// Component by component: for kernels without openat2, and where directories have to be made.
static int step_by_step(int root, const char *path, bool make) {
    autoclose int held = -1;
    int dir = root;
    char name[NAME_MAX + 1];
    while (*path) {
        size_t size = strcspn(path, "/");
        if (size > NAME_MAX) {
            errno = ENAMETOOLONG;
            return -1;
        }
        memcpy(name, path, size);
        name[size] = 0;
        path += size + (path[size] == '/');
        int fd = openat(dir, name, HOW);
        if (fd < 0 && errno == ENOENT && make) {
            if (mkdirat(dir, name, 0777) && errno != EEXIST) return -1;
            fd = openat(dir, name, HOW);
        }
        if (fd < 0) {
            struct stat st;
            if (errno == ENOTDIR && fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0) errno = S_ISLNK(st.st_mode) ? ELOOP : ENOTDIR;
            return -1;
        }
        io_close(&held);
        dir = held = fd;
    }
    int fd = held;
    held = -1;
    return fd;
}

int beneath_dir(int root, const char *path, bool make) {
    struct open_how how = {.flags = HOW, .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
    long fd = syscall(SYS_openat2, root, path, &how, sizeof how);
    if (fd >= 0) return (int)fd;
    return step_by_step(root, path, make);  // also for a plain error, so that both ways say the same
}
