#define _GNU_SOURCE
#include "copytree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "io.h"

#define DEPTH_MAX 300            // each level takes three descriptors and a buffer
#define NAMES_MAX 65536          // what the kernel gives at most
#define PIECE (1u << 20)

// ---- attributes ----

static bool is_mark(const char *name) { return !strncmp(name, "trusted.overlay.", 16) || !strncmp(name, "user.overlay.", 13); }

static int copy_xattrs(int from, int to, bool with_marks) {
    static char names[NAMES_MAX], value[XATTR_SIZE_MAX];
    ssize_t size = flistxattr(from, names, sizeof names);
    if (size < 0) return errno == EOPNOTSUPP ? 0 : -1;
    for (const char *name = names; name < names + size; name += strlen(name) + 1) {
        if (!with_marks && is_mark(name)) continue;
        ssize_t length = fgetxattr(from, name, value, sizeof value);
        if (length < 0 && errno == ENODATA) continue;
        if (length >= 0 && !fsetxattr(to, name, value, (size_t)length, 0)) continue;
        if (strncmp(name, "security.", 9) || !strcmp(name, "security.capability")) return -1;  // the rest belongs to the host's own policy
    }
    return 0;
}

static int copy_times(const struct stat *st, int dir, const char *name) {
    return utimensat(dir, name, (struct timespec[]){st->st_atim, st->st_mtim}, AT_SYMLINK_NOFOLLOW);
}

int copy_attributes(int from, int to, bool with_marks) {
    struct stat st;
    if (fstat(from, &st) || fchown(to, st.st_uid, st.st_gid) || copy_xattrs(from, to, with_marks) || fchmod(to, st.st_mode & 07777)) return -1;
    return futimens(to, (struct timespec[]){st.st_atim, st.st_mtim});
}

// ---- contents ----

static int copy_piece(int from, int to, off_t at, off_t end) {
    static bool by_hand;
    static char *buffer;
    while (at < end) {
        size_t want = end - at < PIECE ? (size_t)(end - at) : PIECE;
        off_t in = at, out = at;
        ssize_t n = by_hand ? -1 : copy_file_range(from, &in, to, &out, want, 0);
        if (n < 0 && !by_hand && (errno == ENOSPC || errno == EDQUOT || errno == EIO || errno == EFBIG)) return -1;
        if (n < 0) {
            by_hand = true;
            if (!buffer && !(buffer = malloc(PIECE))) return -1;
            n = pread(from, buffer, want, at);
            if (n > 0) n = pwrite(to, buffer, (size_t)n, at);
            if (n < 0) return -1;
        }
        if (!n) return 0;  // it has become shorter
        at += n;
    }
    return 0;
}

static int copy_contents(int from, int to, off_t size) {
    static bool cannot_share;
    if (!size) return 0;
    if (!cannot_share && !ioctl(to, FICLONE, from)) return 0;
    if (errno == EOPNOTSUPP || errno == EXDEV || errno == ENOTTY || errno == EINVAL) cannot_share = true;
    if (ftruncate(to, size)) return -1;
    for (off_t at = 0; at < size;) {
        off_t data = lseek(from, at, SEEK_DATA);
        if (data < 0) return errno == ENXIO ? 0 : -1;  // a hole up to the end
        off_t hole = lseek(from, data, SEEK_HOLE);
        if (hole < 0 || copy_piece(from, to, data, hole)) return -1;
        at = hole;
    }
    return 0;
}

// ---- entries ----

static void link_name(const struct stat *st, char out[static 32]) { snprintf(out, 32, "%llx", (unsigned long long)st->st_ino); }

static int copy_file(int from, int to, const char *name) {
    struct stat st;
    autoclose int in = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (in < 0 || fstat(in, &st)) return -1;
    if (!S_ISREG(st.st_mode)) {
        errno = EAGAIN;
        return -1;
    }
    autoclose int out = openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return out < 0 || copy_contents(in, out, st.st_size) ? -1 : copy_attributes(in, out, true);
}

static int copy_link(int from, int to, const char *name) {
    char target[PATH_MAX + 1];
    ssize_t n = readlinkat(from, name, target, sizeof target - 1);
    if (n < 0) return -1;
    target[n] = 0;
    return symlinkat(target, to, name);
}

// Whatever is no directory.
static int copy_other(int from, int to, int links, const char *name, const struct stat *st) {
    char linked[32];
    link_name(st, linked);
    if (st->st_nlink > 1 && !linkat(links, linked, to, name, 0)) return 0;
    if (S_ISREG(st->st_mode)) {
        if (copy_file(from, to, name)) return -1;
    } else {
        if (S_ISLNK(st->st_mode) ? copy_link(from, to, name) : mknodat(to, name, st->st_mode, st->st_rdev)) return -1;
        if (fchownat(to, name, st->st_uid, st->st_gid, AT_SYMLINK_NOFOLLOW)) return -1;
        if (!S_ISLNK(st->st_mode) && fchmodat(to, name, st->st_mode & 07777, 0)) return -1;
        if (copy_times(st, to, name)) return -1;
    }
    // One that has all the links a file may have is copied again.
    return st->st_nlink > 1 && linkat(to, name, links, linked, 0) && errno != EEXIST && errno != EMLINK ? -1 : 0;
}

static int copy_dir(int from, int to, int links, unsigned depth);

static int copy_entry(int from, int to, int links, const char *name, unsigned depth) {
    struct stat st;
    if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW)) return errno == ENOENT ? 0 : -1;
    if (!S_ISDIR(st.st_mode)) return copy_other(from, to, links, name, &st);
    autoclose int in = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (in < 0 || mkdirat(to, name, 0700)) return -1;
    autoclose int out = openat(to, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return out < 0 ? -1 : copy_dir(in, out, links, depth + 1);
}

static int copy_dir(int from, int to, int links, unsigned depth) {
    if (depth > DEPTH_MAX) {
        errno = ELOOP;
        return -1;
    }
    int again = fcntl(from, F_DUPFD_CLOEXEC, 3);
    DIR *d = again < 0 ? NULL : fdopendir(again);
    if (!d) {
        io_close(&again);
        return -1;
    }
    int error = 0;
    while (!error) {
        errno = 0;
        struct dirent *e = readdir(d);
        if (!e) {
            error = errno;
            break;
        }
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..") && copy_entry(from, to, links, e->d_name, depth)) error = errno;
    }
    closedir(d);
    if (error) {
        errno = error;
        return -1;
    }
    return copy_attributes(from, to, true);
}

static void forget_links(int links) {
    int again = fcntl(links, F_DUPFD_CLOEXEC, 3);
    DIR *d = again < 0 ? NULL : fdopendir(again);
    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.') unlinkat(links, e->d_name, 0);
    if (d) closedir(d);
    else io_close(&again);
}

int copy_tree(int from, int to, int links) {
    int failed = copy_dir(from, to, links, 0), error = errno;
    forget_links(links);
    errno = error;
    return failed;
}
