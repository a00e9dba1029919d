#define _GNU_SOURCE
#include "mounts.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include "io.h"
#include "kernel.h"

int mounts_tmpfs(uint64_t bytes, uint64_t inodes, const char *mode, unsigned attributes) {
    autoclose int fs = k_fsopen("tmpfs");
    if (fs < 0) return -1;
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)bytes);
    if (k_fsconfig(fs, K_FSCONFIG_STRING, "size", text)) return -1;
    snprintf(text, sizeof text, "%llu", (unsigned long long)inodes);
    if (inodes && k_fsconfig(fs, K_FSCONFIG_STRING, "nr_inodes", text)) return -1;
    if (k_fsconfig(fs, K_FSCONFIG_STRING, "mode", mode)) return -1;
    if (k_fsconfig(fs, K_FSCONFIG_CREATE, NULL, NULL)) return -1;
    return k_fsmount(fs, attributes);
}

int mounts_resize(int root, uint64_t bytes, uint64_t inodes) {
    autoclose int fs = k_fspick(root);
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)bytes);
    if (fs < 0 || k_fsconfig(fs, K_FSCONFIG_STRING, "size", text)) return -1;
    snprintf(text, sizeof text, "%llu", (unsigned long long)inodes);
    if (inodes && k_fsconfig(fs, K_FSCONFIG_STRING, "nr_inodes", text)) return -1;
    return k_fsconfig(fs, K_FSCONFIG_RECONFIGURE, NULL, NULL);
}

// ---- the stage ----

static const struct {
    const char *name;
    unsigned major, minor;
} devices[] = {{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}};

static int make_device(const struct mounts *m, int dir, size_t i) {
    if (!m->in_userns) {
        if (mknodat(dir, devices[i].name, S_IFCHR | 0666, makedev(devices[i].major, devices[i].minor))) return -1;
        return fchmodat(dir, devices[i].name, 0666, 0);
    }
    // An ordinary user cannot make device nodes, but can show the host's.
    char path[32];
    snprintf(path, sizeof path, "/dev/%s", devices[i].name);
    autoclose int file = openat(dir, devices[i].name, O_CREAT | O_RDONLY | O_CLOEXEC, 0666);
    autoclose int tree = k_open_tree(AT_FDCWD, path, K_OPEN_TREE_CLONE | K_OPEN_TREE_CLOEXEC);
    if (file < 0 || tree < 0) return -1;
    return k_move_mount(tree, "", dir, devices[i].name, K_MOVE_FROM_EMPTY);
}

// One /dev for all: nothing in it can be written, and each sandbox mounts its own pts and shm over the empty directories.
static int make_dev(struct mounts *m) {
    if (mkdirat(m->stage, "dev", 0755)) return -1;
    autoclose int fs = mounts_tmpfs(1 << 20, 0, "755", K_ATTR_NOSUID | K_ATTR_NOEXEC);
    if (fs < 0 || k_move_mount(fs, "", m->stage, "dev", K_MOVE_FROM_EMPTY)) return -1;
    autoclose int dir = openat(m->stage, "dev", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) return -1;
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (make_device(m, dir, i)) return -1;
    if (mkdirat(dir, "pts", 0755) || mkdirat(dir, "shm", 0755)) return -1;
    if (symlinkat("/proc/self/fd", dir, "fd") || symlinkat("/proc/self/fd/0", dir, "stdin") || symlinkat("/proc/self/fd/1", dir, "stdout") ||
        symlinkat("/proc/self/fd/2", dir, "stderr") || symlinkat("pts/ptmx", dir, "ptmx"))
        return -1;
    struct k_mount_attr attr = {.set = K_ATTR_RDONLY | K_ATTR_NOSUID};
    return k_mount_setattr(dir, "", K_AT_EMPTY_PATH, &attr);
}

// In a child: an empty read-only tmpfs becomes the root and everything else is let go. An ordinary user's keeps the host's /proc
// in sight, without which the kernel would not let it mount new ones; each sandbox lets go of it once it has its own.
static int become_empty(bool keep_proc) {
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return -1;
    autoclose int fs = mounts_tmpfs(4096, 0, "555", K_ATTR_NOSUID | K_ATTR_NODEV | K_ATTR_NOEXEC);
    autoclose int proc = keep_proc ? k_open_tree(AT_FDCWD, "/proc", K_OPEN_TREE_CLONE | K_OPEN_TREE_CLOEXEC | K_AT_RECURSIVE) : -1;
    if (fs < 0 || (keep_proc && (proc < 0 || mkdirat(fs, "proc", 0555)))) return -1;
    if (k_move_mount(fs, "", AT_FDCWD, "/", K_MOVE_FROM_EMPTY)) return -1;
    if (fchdir(fs) || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH)) return -1;
    if (keep_proc && k_move_mount(proc, "", AT_FDCWD, "/proc", K_MOVE_FROM_EMPTY)) return -1;
    struct k_mount_attr attr = {.set = K_ATTR_RDONLY};
    return k_mount_setattr(AT_FDCWD, "/", 0, &attr);
}

// The namespace lives on through the descriptor after the child that made it is gone.
static int make_empty_ns(bool keep_proc) {
    int ready[2], done[2];
    if (pipe2(ready, O_CLOEXEC)) return -1;
    if (pipe2(done, O_CLOEXEC)) {
        close(ready[0]), close(ready[1]);
        return -1;
    }
    pid_t pid = fork();
    if (!pid) {
        char c = become_empty(keep_proc) ? (char)errno : 0;
        close(done[1]);
        if (write(ready[1], &c, 1) == 1 && read(done[0], &c, 1) < 0) _exit(1);
        _exit(0);
    }
    close(ready[1]), close(done[0]);
    char c = EIO;
    int ns = -1;
    if (pid > 0 && read(ready[0], &c, 1) == 1 && !c) {
        char path[48];
        snprintf(path, sizeof path, "/proc/%d/ns/mnt", pid);
        ns = open(path, O_RDONLY | O_CLOEXEC);
    }
    int error = ns < 0 && c ? c : errno;
    close(ready[0]), close(done[1]);
    if (pid > 0) waitpid(pid, NULL, 0);
    errno = error;
    return ns;
}

int mounts_open(struct mounts *m, const char *dir, bool in_userns, const char **step) {
    *m = (struct mounts){.in_userns = in_userns, .stage = -1, .empty_ns = -1};
    autoclose int fs = mounts_tmpfs(4 << 20, 0, "700", K_ATTR_NOSUID);
    *step = "stage";
    if (fs < 0 || k_move_mount(fs, "", AT_FDCWD, dir, K_MOVE_FROM_EMPTY)) return -1;
    m->stage = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (m->stage < 0) return -1;
    *step = "device directory";
    if (make_dev(m)) return -1;
    *step = "empty mount namespace";
    m->empty_ns = make_empty_ns(in_userns);
    return m->empty_ns < 0 ? -1 : 0;
}

int mounts_dev(struct mounts *m) { return k_open_tree(m->stage, "dev", K_OPEN_TREE_CLONE | K_OPEN_TREE_CLOEXEC | K_AT_RECURSIVE); }

// ---- shifted views ----

// Where the view that all others of a sandbox hang below is attached while overlay looks at them.
static const char *shifted(const struct mounts *m) { return m->is_second ? "y" : "x"; }

int mounts_shift_at(int dir, int userns, int at, const char *name) {
    autoclose int tree = k_open_tree(dir, "", K_OPEN_TREE_CLONE | K_OPEN_TREE_CLOEXEC | K_AT_EMPTY_PATH);
    if (tree < 0) return -1;
    struct k_mount_attr attr = {.set = K_ATTR_IDMAP, .userns_fd = (uint64_t)userns};
    if (k_mount_setattr(tree, "", K_AT_EMPTY_PATH, &attr) || k_move_mount(tree, "", at, name, K_MOVE_FROM_EMPTY)) return -1;
    return openat(at, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

int mounts_shift(struct mounts *m, int dir, int userns) {
    if (mkdirat(m->stage, shifted(m), 0700) && errno != EEXIST) return -1;
    if (m->is_held) mounts_let_go(m);  // nothing can be attached where a directory that is gone was seen
    if (m->is_held) return -1;
    m->is_held = true;
    return mounts_shift_at(dir, userns, m->stage, shifted(m));
}

void mounts_let_go(struct mounts *m) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d/%s", m->stage, shifted(m));
    m->is_held = umount2(path, MNT_DETACH) && errno != EINVAL;  // overlay holds its own references
}

int mounts_writable(int dir) {
    int tree = k_open_tree(dir, "", K_OPEN_TREE_CLONE | K_OPEN_TREE_CLOEXEC | K_AT_EMPTY_PATH);
    struct k_mount_attr attr = {.set = K_ATTR_NOSUID | K_ATTR_NODEV};
    if (tree >= 0 && k_mount_setattr(tree, "", K_AT_EMPTY_PATH, &attr)) io_close(&tree);
    return tree;
}

// ---- overlay ----

// Before Linux 6.5 overlay takes any option without a word and refuses the mount later.
static bool accepts_nonsense(void) {
    static int answer = -1;
    if (answer < 0) {
        autoclose int fs = k_fsopen("overlay");
        answer = fs >= 0 && !k_fsconfig(fs, K_FSCONFIG_FLAG, "untax", NULL);
    }
    return answer;
}

// All layers in one string, which fsconfig limits to 255 bytes: as older kernels want it.
static int add_lowers_at_once(int fs, const int *lowers, size_t count) {
    char text[256] = "";
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        int n = snprintf(text + used, sizeof text - used, "%s/proc/self/fd/%d", i ? ":" : "", lowers[i]);
        used += (size_t)n;
        if (used >= sizeof text) {
            errno = E2BIG;
            return -1;
        }
    }
    return k_fsconfig(fs, K_FSCONFIG_STRING, "lowerdir", text);
}

// Layers are named by descriptor: no path of theirs is parsed as mount options, and none is too long.
static int add_lowers(int fs, const int *lowers, size_t count) {
    if (accepts_nonsense()) return add_lowers_at_once(fs, lowers, count);
    char one[32];
    for (size_t i = 0; i < count; i++) {
        snprintf(one, sizeof one, "/proc/self/fd/%d", lowers[i]);
        if (k_fsconfig(fs, K_FSCONFIG_STRING, "lowerdir+", one) == 0) continue;
        if (i || errno != EINVAL) return -1;
        return add_lowers_at_once(fs, lowers, count);  // from 6.5 to 6.7
    }
    return 0;
}

static int configure_overlay(int fs, bool in_userns, const int *lowers, size_t count, int upper, int work) {
    char up[32], wk[32];
    snprintf(up, sizeof up, "/proc/self/fd/%d", upper);
    snprintf(wk, sizeof wk, "/proc/self/fd/%d", work);
    if (add_lowers(fs, lowers, count) || k_fsconfig(fs, K_FSCONFIG_STRING, "upperdir", up) || k_fsconfig(fs, K_FSCONFIG_STRING, "workdir", wk))
        return -1;
    if (in_userns ? k_fsconfig(fs, K_FSCONFIG_FLAG, "userxattr", NULL) : k_fsconfig(fs, K_FSCONFIG_STRING, "redirect_dir", "on")) return -1;
    // A layer is read without overlay too, so a file's data must be where its name is.
    if (!in_userns && k_fsconfig(fs, K_FSCONFIG_STRING, "metacopy", "off")) return -1;
    // Nobody asks for its number, which would be written to the upper directory; older kernels have none.
    if (!accepts_nonsense()) k_fsconfig(fs, K_FSCONFIG_STRING, "uuid", "null");
    // Without `volatile` killing a sandbox would sync its file system; what must last is synced when it is stored.
    if (k_fsconfig(fs, K_FSCONFIG_STRING, "index", "off") || k_fsconfig(fs, K_FSCONFIG_FLAG, "volatile", NULL)) return -1;
    return k_fsconfig(fs, K_FSCONFIG_CREATE, NULL, NULL);
}

// Overlay acts with the rights and as the user of whoever made it, and over a shifted upper directory that user must be one that is mapped there:
// otherwise it comes up, and every write fails (EOVERFLOW). A change of the file-system user takes capabilities away, which are taken up again.
static void act_as(uid_t uid) {
    setfsgid(uid);
    setfsuid(uid);
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {0};
    if (syscall(SYS_capget, &header, data)) return;
    for (int i = 0; i < 2; i++) data[i].effective = data[i].permitted;
    syscall(SYS_capset, &header, data);
}

int mounts_overlay(struct mounts *m, const int *lowers, size_t count, int upper, int work, uid_t as) {
    if (count > LAYERS_MAX) {
        errno = E2BIG;
        return -1;
    }
    autoclose int fs = k_fsopen("overlay");
    if (fs < 0) return -1;
    if (as) act_as(as);
    int failed = configure_overlay(fs, m->in_userns, lowers, count, upper, work), error = errno;
    if (as) act_as(0);
    errno = error;
    return failed ? -1 : k_fsmount(fs, K_ATTR_NOSUID | K_ATTR_NODEV);
}
