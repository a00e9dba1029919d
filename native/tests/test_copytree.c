// A copy of a tree compared with the tree, entry by entry.
#define _GNU_SOURCE
#include "copytree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "check.h"
#include "disk.h"
#include "io.h"

static char place[] = "/tmp/untax-test-copy-XXXXXX";
static bool has_xattrs;

static void put(int dir, const char *name, const char *text) {
    autoclose int fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL, 0640);
    CHECK(fd >= 0 && io_write_all(fd, text, strlen(text)));
}

static void age(int dir, const char *name, long seconds) {
    CHECK(!utimensat(dir, name, (struct timespec[]){{seconds, 123456789}, {seconds + 1, 987654321}}, AT_SYMLINK_NOFOLLOW));
}

static void plant(int from) {
    put(from, "plain", "hello");
    put(from, "empty", "");
    CHECK(!mkdirat(from, "d", 0751) && !mkdirat(from, "d/e", 0700) && !mkdirat(from, "d/closed", 0700));
    put(from, "d/e/deep", "deep");
    CHECK(!linkat(from, "plain", from, "d/again", 0) && !linkat(from, "plain", from, "d/e/third", 0));
    CHECK(!symlinkat("nowhere/at/all", from, "dangling") && !symlinkat("/etc/passwd", from, "out") && !linkat(from, "out", from, "out2", 0));
    CHECK(!mkfifoat(from, "fifo", 0600) && !mknodat(from, "gone", S_IFCHR, 0) && !linkat(from, "gone", from, "d/gone", 0));
    autoclose int sparse = openat(from, "sparse", O_RDWR | O_CREAT, 0644);
    CHECK(!ftruncate(sparse, 64 << 20) && pwrite(sparse, "middle", 6, 32 << 20) == 6);
    CHECK(!fchmodat(from, "plain", 04755, 0) && !fchmodat(from, "d/closed", 0, 0));
    if (!geteuid()) CHECK(!fchownat(from, "d/e", 1234, 4321, 0) && !fchownat(from, "dangling", 7, 8, AT_SYMLINK_NOFOLLOW));
    autoclose int e = openat(from, "d/e", O_RDONLY | O_DIRECTORY), plain = openat(from, "plain", O_RDONLY);
    has_xattrs = !fsetxattr(plain, "user.k", "v\0w", 3, 0);
    if (!geteuid()) has_xattrs &= !fsetxattr(e, "trusted.overlay.opaque", "y", 1, 0) && !fsetxattr(e, "user.mine", "1", 1, 0);
    age(from, "plain", 1000000000), age(from, "dangling", 1000000002), age(from, "d/e", 1000000004), age(from, "d", 1000000006), age(from, "fifo", 1000000008);
}

static bool same_contents(int a, int b, const char *path) {
    autoclose int fa = openat(a, path, O_RDONLY), fb = openat(b, path, O_RDONLY);
    static char one[65536], two[65536];
    for (;;) {
        ssize_t n = read(fa, one, sizeof one), m = read(fb, two, sizeof two);
        if (n != m || n < 0 || memcmp(one, two, (size_t)n)) return false;
        if (!n) return true;
    }
}

static bool same(int a, int b, const char *path) {
    struct stat sa, sb;
    if (fstatat(a, path, &sa, AT_SYMLINK_NOFOLLOW) || fstatat(b, path, &sb, AT_SYMLINK_NOFOLLOW)) return false;
    if (sa.st_mode != sb.st_mode || sa.st_uid != sb.st_uid || sa.st_gid != sb.st_gid || sa.st_nlink != sb.st_nlink || sa.st_rdev != sb.st_rdev) return false;
    if (memcmp(&sa.st_mtim, &sb.st_mtim, sizeof sa.st_mtim) || (!S_ISDIR(sa.st_mode) && sa.st_size != sb.st_size)) return false;
    return !S_ISREG(sa.st_mode) || same_contents(a, b, path);
}

static void compare(int a, int b) {
    static const char *const paths[] = {"plain", "empty", "d", "d/e", "d/closed", "d/e/deep", "d/again", "d/e/third", "dangling", "out", "out2", "fifo", "gone", "d/gone", "sparse"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        CHECK(same(a, b, paths[i]));
        if (!same(a, b, paths[i])) fprintf(stderr, "  %s\n", paths[i]);
    }
    struct stat one, two;
    CHECK(!fstatat(b, "plain", &one, 0) && !fstatat(b, "d/e/third", &two, 0) && one.st_ino == two.st_ino);
    CHECK(!fstatat(b, "sparse", &one, 0) && one.st_blocks * 512 < 1 << 20);
    char target[64] = "", value[8];
    CHECK(readlinkat(b, "dangling", target, sizeof target) == 14 && !memcmp(target, "nowhere/at/all", 14));
    autoclose int plain = openat(b, "plain", O_RDONLY), e = openat(b, "d/e", O_RDONLY | O_DIRECTORY);
    if (has_xattrs) CHECK(fgetxattr(plain, "user.k", value, sizeof value) == 3 && !memcmp(value, "v\0w", 3));
    if (has_xattrs && !geteuid()) CHECK(fgetxattr(e, "trusted.overlay.opaque", value, sizeof value) == 1);
}

static unsigned entries(int dir) {
    DIR *d = fdopendir(fcntl(dir, F_DUPFD_CLOEXEC, 3));
    unsigned n = 0;
    rewinddir(d);
    while (readdir(d)) n++;
    closedir(d);
    return n - 2;
}

static int fresh(int top, const char *name) {
    CHECK(!mkdirat(top, name, 0700));
    return openat(top, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int main(void) {
    if (!mkdtemp(place)) return 1;
    autoclose int top = open(place, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    autoclose int from = fresh(top, "from"), to = fresh(top, "to"), links = fresh(top, "links");
    umask(0);
    plant(from);
    age(top, "from", 1000000010);
    CHECK(!copy_tree(from, to, links));
    compare(from, to);
    CHECK(entries(links) == 0 && entries(to) == entries(from));
    struct stat a, b;
    CHECK(!fstat(from, &a) && !fstat(to, &b) && !memcmp(&a.st_mtim, &b.st_mtim, sizeof a.st_mtim));

    // Overlay's own marks only when asked for.
    autoclose int plain = openat(from, "d/e", O_RDONLY | O_DIRECTORY), bare = fresh(top, "bare");
    char value[8];
    CHECK(!copy_attributes(plain, bare, false));
    if (has_xattrs && !geteuid()) CHECK(fgetxattr(bare, "trusted.overlay.opaque", value, sizeof value) < 0 && fgetxattr(bare, "user.mine", value, sizeof value) == 1);

    // Deeper than can be followed: told, not crashed.
    autoclose int deep = fresh(top, "deep"), deep_to = fresh(top, "deep-to");
    int at = fcntl(deep, F_DUPFD_CLOEXEC, 3);
    for (int i = 0; i < 1000; i++) {
        CHECK(!mkdirat(at, "x", 0700));
        int next = openat(at, "x", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        close(at);
        at = next;
    }
    close(at);
    CHECK(copy_tree(deep, deep_to, links) && errno == ELOOP);
    CHECK(disk_remove_tree(AT_FDCWD, place));
    return check_report();
}
