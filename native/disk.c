#define _GNU_SOURCE
#include "disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/fs.h>
#include <linux/loop.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/quota.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "copytree.h"
#include "io.h"
#include "kernel.h"
#include "mounts.h"

// Project ids of our own, far from those people give by hand: one for each range of user ids of the machine, and in turn several for
// each, because what the last sandbox of a range left is still being deleted when the next one starts.
#define PROJECT_FIRST 0x75000000u
#define PROJECT_TURNS 64u
#define PROJECT_QUOTA 2            // PRJQUOTA, which older headers lack
#define DEPTH_MAX 64               // each level costs a descriptor and 32 KiB; what lies deeper is first brought up beside the tree
#define SIMPLE_QUOTA 4             // BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA, Linux 6.7: no accounting at commit time

#define HELD_MAX 64

static struct {
    enum disk_mode mode;
    int boxes, trash;
    bool dirty;  // something lies in the trash
    int hold[HELD_MAX], held;
} disk = {.boxes = -1, .trash = -1};

enum disk_mode disk_mode(void) { return disk.mode; }

// ---- removing ----

static bool remove_below(int top, int dir, const char *name, unsigned depth);
static unsigned long brought_up;

static void name_of(unsigned long number, char out[static 48]) { snprintf(out, 48, "deep-%d-%lu", getpid(), number); }

static bool remove_entry(int top, int dir, const char *name, bool is_dir, unsigned depth) {
    if (!is_dir && !unlinkat(dir, name, 0)) return true;
    if (!is_dir && errno != EISDIR) return errno == ENOENT;
    if (depth < DEPTH_MAX) return remove_below(top, dir, name, depth);
    char up[48];
    name_of(brought_up, up);
    if (fchmodat(dir, name, 0700, 0)) return false;  // a directory that changes its parent must be writable
    if (renameat(dir, name, top, up)) return false;
    brought_up++;
    return true;
}

static bool remove_below(int top, int dir, const char *name, unsigned depth) {
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && (errno == EACCES || errno == EPERM)) {
        // a workload's chmod 000, or overlay's own work directory
        if (!fchmodat(dir, name, 0700, 0)) fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    }
    if (fd < 0) return (errno == ENOTDIR || errno == ELOOP) ? !unlinkat(dir, name, 0) : errno == ENOENT;
    struct stat st;
    if (!fstat(fd, &st) && (st.st_mode & 0700) != 0700) fchmod(fd, 0700);
    DIR *d = fdopendir(fd);
    if (!d) {
        close(fd);
        return false;
    }
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) remove_entry(top, fd, e->d_name, e->d_type == DT_DIR, depth + 1);
    closedir(d);
    return !unlinkat(dir, name, AT_REMOVEDIR) || errno == ENOENT;
}

bool disk_remove_tree(int dir, const char *name) {
    unsigned long next = brought_up;
    bool gone = remove_below(dir, dir, name, 0);
    for (char up[48]; next < brought_up; next++) {
        name_of(next, up);
        gone &= remove_below(dir, dir, up, 0);
    }
    return gone;
}

static void remove_all(int dir) {
    DIR *d = fdopendir(openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    for (struct dirent *e; d && (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) disk_remove_tree(dir, e->d_name);
    if (d) closedir(d);
}

pid_t disk_sweep_trash(void) {
    if (!disk.dirty) return -1;
    disk.dirty = false;
    pid_t pid = fork();
    while (pid > 0 && disk.held) close(disk.hold[--disk.held]);
    if (pid) return pid;
    // It may outlive the launcher: nothing that others wait to see closed stays open in it.
    int trash = dup2(disk.trash, 3);
    k_close_range(4, ~0u);
    if (trash < 0 || nice(19) < 0) _exit(1);
    remove_all(trash);
    _exit(0);
}

// ---- btrfs ----

static int limit_subvolume(int subvolume, uint64_t bytes) {
    struct btrfs_ioctl_qgroup_limit_args args = {.lim = {.flags = BTRFS_QGROUP_LIMIT_MAX_RFER, .max_rfer = bytes}};
    return ioctl(subvolume, BTRFS_IOC_QGROUP_LIMIT, &args);
}

static int make_subvolume(const char *id, uint64_t bytes) {
    struct btrfs_ioctl_vol_args args = {0};
    snprintf(args.name, sizeof args.name, "%s", id);
    if (ioctl(disk.boxes, BTRFS_IOC_SUBVOL_CREATE, &args)) return -1;
    int fd = openat(disk.boxes, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0 && !limit_subvolume(fd, bytes)) return fd;
    int error = errno;
    io_close(&fd);
    ioctl(disk.boxes, BTRFS_IOC_SNAP_DESTROY, &args);
    errno = error;
    return -1;
}

static bool destroy_subvolume(const char *id) {
    struct btrfs_ioctl_vol_args args = {0};
    snprintf(args.name, sizeof args.name, "%s", id);
    return !ioctl(disk.boxes, BTRFS_IOC_SNAP_DESTROY, &args);
}

static bool is_btrfs(int fd) {
    struct statfs st;
    return !fstatfs(fd, &st) && st.f_type == BTRFS_SUPER_MAGIC;
}

// Whether a subvolume with a limit can be made here; leaves nothing.
static bool try_subvolume(void) {
    int fd = make_subvolume("probe", 1 << 20);
    if (fd < 0) return false;
    close(fd);
    return destroy_subvolume("probe");
}

static int attach_loop(const char *image, char *device, size_t size) {
    autoclose int backing = open(image, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    autoclose int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    if (backing < 0 || control < 0) return -1;
    // Another process may take the number between the two calls.
    for (int tries = 0; tries < 16; tries++) {
        int n = ioctl(control, LOOP_CTL_GET_FREE);
        if (n < 0) return -1;
        snprintf(device, size, "/dev/loop%d", n);
        int loop = open(device, O_RDWR | O_CLOEXEC);
        struct loop_config config = {.fd = (uint32_t)backing, .info = {.lo_flags = LO_FLAGS_AUTOCLEAR}};
        if (loop < 0) return -1;
        if (!ioctl(loop, LOOP_CONFIGURE, &config)) return loop;
        int error = errno;
        close(loop);
        errno = error;
        if (error != EBUSY) return -1;
    }
    return -1;
}

static void drop_leftovers(void) {
    DIR *d = fdopendir(openat(disk.boxes, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.' && !destroy_subvolume(e->d_name)) disk_remove_tree(disk.boxes, e->d_name);
    if (d) closedir(d);
}

// Mounted in the launcher's own mount namespace: it goes with the launcher, however that ends.
static bool mount_image(const char *image, const char *boxes, char *why, size_t size) {
    char device[32];
    autoclose int loop = attach_loop(image, device, sizeof device);
    if (loop < 0) {
        snprintf(why, size, "no loop device: %s", strerror(errno));
        return false;
    }
    if (mount(device, boxes, "btrfs", MS_NOSUID | MS_NODEV | MS_NOATIME, "discard=async")) {
        snprintf(why, size, "cannot mount the btrfs image: %s", strerror(errno));
        return false;
    }
    io_close(&disk.boxes);
    disk.boxes = open(boxes, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct btrfs_ioctl_quota_ctl_args quota = {.cmd = SIMPLE_QUOTA};
    if (ioctl(disk.boxes, BTRFS_IOC_QUOTA_CTL, &quota)) {
        quota.cmd = BTRFS_QUOTA_CTL_ENABLE;
        ioctl(disk.boxes, BTRFS_IOC_QUOTA_CTL, &quota);  // already on when the image was used before
    }
    drop_leftovers();
    if (try_subvolume()) return true;
    snprintf(why, size, "btrfs quotas do not work here: %s", strerror(errno));
    io_close(&disk.boxes);
    umount2(boxes, MNT_DETACH);
    disk.boxes = open(boxes, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return false;
}

// ---- project quotas ----

static int set_project_limit(int dir, uint32_t project, uint64_t bytes) {
    struct dqblk limit = {.dqb_bhardlimit = bytes / 1024, .dqb_valid = QIF_LIMITS};
    return (int)syscall(NR_quotactl_fd, dir, QCMD(Q_SETQUOTA, PROJECT_QUOTA), project, &limit);
}

static int limit_project(int dir, uint16_t number, uint64_t bytes) {
    struct fsxattr attr;
    static unsigned turn;
    uint32_t project = PROJECT_FIRST + (turn++ % PROJECT_TURNS << 16) + number;
    if (ioctl(dir, FS_IOC_FSGETXATTR, &attr)) return -1;
    attr.fsx_projid = project;
    attr.fsx_xflags |= FS_XFLAG_PROJINHERIT;
    if (ioctl(dir, FS_IOC_FSSETXATTR, &attr)) return -1;
    return set_project_limit(dir, project, bytes);
}

static bool try_project(void) {
    if (mkdirat(disk.boxes, "probe", 0700)) return false;
    autoclose int dir = openat(disk.boxes, "probe", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool works = dir >= 0 && !limit_project(dir, 0, 1 << 20);
    unlinkat(disk.boxes, "probe", AT_REMOVEDIR);
    return works;
}

// ---- the interface ----

int disk_open(const char *dir, const char *image, char *why, size_t why_size) {
    char boxes[4200], trash[4200];
    snprintf(boxes, sizeof boxes, "%s/boxes", dir);
    snprintf(trash, sizeof trash, "%s/trash", dir);
    why[0] = 0;
    if ((mkdir(boxes, 0700) && errno != EEXIST) || (mkdir(trash, 0700) && errno != EEXIST)) return -1;
    disk.boxes = open(boxes, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    disk.trash = open(trash, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (disk.boxes < 0 || disk.trash < 0) return -1;
    if (try_project()) disk.mode = DISK_PROJECT;
    else if (is_btrfs(disk.boxes) && try_subvolume()) disk.mode = DISK_BTRFS;
    else if (*image && mount_image(image, boxes, why, why_size)) disk.mode = DISK_IMAGE;
    else if (!*why) snprintf(why, why_size, "the state directory's file system has no project quotas and is not btrfs with quotas on");
    return disk.boxes < 0 ? -1 : 0;
}

static int make_dir(const char *id, uint16_t number, uint64_t bytes) {
    if (disk.mode == DISK_BTRFS || disk.mode == DISK_IMAGE) return make_subvolume(id, bytes);
    if (mkdirat(disk.boxes, id, 0700)) return -1;
    int fd = openat(disk.boxes, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0 && disk.mode == DISK_PROJECT && limit_project(fd, number, bytes)) io_close(&fd);
    return fd;
}

// A sized tmpfs over the directory, in the launcher's own mount namespace.
static int mount_memory(const char *id, uint64_t bytes) {
    if (mkdirat(disk.boxes, id, 0700)) return -1;
    autoclose int fs = mounts_tmpfs(bytes, 0, "700", K_ATTR_NOSUID | K_ATTR_NODEV);
    if (fs < 0 || k_move_mount(fs, "", disk.boxes, id, K_MOVE_FROM_EMPTY)) return -1;
    return openat(disk.boxes, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int disk_make(const char *id, uint16_t number, uint64_t bytes, bool in_memory, struct disk_box *out) {
    out->dir = in_memory ? mount_memory(id, bytes) : make_dir(id, number, bytes);
    if (out->dir >= 0 && !mkdirat(out->dir, "upper", 0755)) return 0;
    int error = errno;
    disk_box_close(out);
    disk_drop(id);
    errno = error;
    return -1;
}

int disk_limit(const char *id, uint64_t bytes, bool in_memory) {
    autoclose int dir = openat(disk.boxes, id, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct fsxattr attr;
    if (dir < 0) return -1;
    if (in_memory) return mounts_resize(dir, bytes, 0);
    if (disk.mode == DISK_BTRFS || disk.mode == DISK_IMAGE) return limit_subvolume(dir, bytes);
    if (disk.mode == DISK_PROJECT) return ioctl(dir, FS_IOC_FSGETXATTR, &attr) ? -1 : set_project_limit(dir, attr.fsx_projid, bytes);
    errno = EOPNOTSUPP;
    return -1;
}

static int snapshot_subvolume(int from, const char *copy) {
    struct btrfs_ioctl_vol_args_v2 args = {.fd = from};
    snprintf(args.name, sizeof args.name, "%s", copy);
    return ioctl(disk.boxes, BTRFS_IOC_SNAP_CREATE_V2, &args);
}

int disk_clone(const char *id, const char *copy) {
    autoclose int from = openat(disk.boxes, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (from < 0) return -1;
    if ((disk.mode == DISK_BTRFS || disk.mode == DISK_IMAGE) && is_btrfs(from) && !snapshot_subvolume(from, copy)) return 0;
    if (mkdirat(disk.boxes, copy, 0700)) return -1;
    autoclose int to = openat(disk.boxes, copy, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (to < 0 || mkdirat(to, "upper", 0700) || mkdirat(to, "links", 0700)) return -1;
    autoclose int upper = openat(from, "upper", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    autoclose int copied = openat(to, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC), links = openat(to, "links", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (upper < 0 || copied < 0 || links < 0 || copy_tree(upper, copied, links)) return -1;
    return unlinkat(to, "links", AT_REMOVEDIR);
}

int disk_peek(const char *path) { return openat(disk.boxes, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }

void disk_box_close(struct disk_box *box) { io_close(&box->dir); }

// Freeing a tmpfs that holds much takes long, and falls to whoever lets go of it last: that shall be the child that empties the trash.
static void drop_memory(const char *id) {
    char path[128];
    snprintf(path, sizeof path, "/proc/self/fd/%d/%s", disk.boxes, id);
    int mounted = openat(disk.boxes, id, O_PATH | O_DIRECTORY | O_CLOEXEC);
    bool was_mounted = mounted >= 0 && !umount2(path, MNT_DETACH);
    if (was_mounted && disk.held < HELD_MAX) disk.hold[disk.held++] = mounted, disk.dirty = true;
    else io_close(&mounted);
}

void disk_drop(const char *id) {
    drop_memory(id);
    if ((disk.mode == DISK_BTRFS || disk.mode == DISK_IMAGE) && destroy_subvolume(id)) return;
    if (disk.mode == DISK_IMAGE) {
        disk_remove_tree(disk.boxes, id);  // cannot be renamed out of its file system
    } else if (!renameat(disk.boxes, id, disk.trash, id)) {
        disk.dirty = true;
    }
}
