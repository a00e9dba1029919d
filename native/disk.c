#define _GNU_SOURCE
#include "disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/fs.h>
#include <linux/loop.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
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
#define LARGE 1000                 // files; removing a subvolume first forgets each that the kernel remembers, 2 µs a piece
#define GONE "gone-"               // what waits to be removed, where it cannot be moved to the trash
#define SIMPLE_QUOTA 4             // BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA, Linux 6.7: no accounting at commit time

#define HELD_MAX 64

static struct {
    enum disk_mode mode;
    int boxes, trash;
    bool dirty;  // something lies in the trash
    bool is_second;
    int hold[HELD_MAX], held;
} disk = {.boxes = -1, .trash = -1};

enum disk_mode disk_mode(void) { return disk.mode; }
void disk_is_second(void) { disk.is_second = true; }

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

static void drop_all(const char *beginning) {
    DIR *d = fdopendir(openat(disk.boxes, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.' && !strncmp(e->d_name, beginning, strlen(beginning)) && !destroy_subvolume(e->d_name)) disk_remove_tree(disk.boxes, e->d_name);
    if (d) closedir(d);
}

static bool has_subvolumes(void) { return disk.mode == DISK_BTRFS || disk.mode == DISK_IMAGE; }

// In a subvolume numbers are given in order and never again: the next one tells how many files there have been.
static bool is_large(const char *id) {
    struct stat st;
    autoclose int dir = openat(disk.boxes, id, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return dir >= 0 && !mkdirat(dir, "count", 0700) && !fstatat(dir, "count", &st, AT_SYMLINK_NOFOLLOW) && st.st_ino > 256 + LARGE;
}

static bool drop_subvolume(const char *id) {
    char gone[128];
    snprintf(gone, sizeof gone, GONE "%s", id);
    if (is_large(id) && !disk_rename(id, gone)) return disk.dirty = true;
    return destroy_subvolume(id);
}

pid_t disk_sweep_trash(void) {
    if (!disk.dirty) return -1;
    disk.dirty = false;
    pid_t pid = fork();
    while (pid > 0 && disk.held) close(disk.hold[--disk.held]);
    if (pid) return pid;
    // It may outlive the launcher: nothing that others wait to see closed stays open in it. A disk image must not stay mounted so long: the next engine to
    // take it over removes what is left.
    if (disk.mode == DISK_IMAGE && prctl(PR_SET_PDEATHSIG, SIGKILL)) _exit(1);
    int trash = fcntl(disk.trash, F_DUPFD, 100), boxes = fcntl(disk.boxes, F_DUPFD, 100);
    disk.trash = dup2(trash, 3), disk.boxes = dup2(boxes, 4);
    k_close_range(5, ~0u);
    if (disk.trash < 0 || disk.boxes < 0 || nice(19) < 0) _exit(1);
    remove_all(disk.trash);
    if (has_subvolumes()) drop_all(GONE);
    _exit(0);
}

// Mounted in the launcher's own mount namespace: it goes with the launcher, however that ends.
static bool counts_simply;  // the file system is our own image, with simple quotas: its groups can be joined without all being counted anew

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
    counts_simply = !ioctl(disk.boxes, BTRFS_IOC_QUOTA_CTL, &quota);
    if (!counts_simply) {
        quota.cmd = BTRFS_QUOTA_CTL_ENABLE;
        ioctl(disk.boxes, BTRFS_IOC_QUOTA_CTL, &quota);  // already on when the image was used before
    }
    drop_all("");
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
    uint32_t project = PROJECT_FIRST + ((turn++ * 2 + disk.is_second) % PROJECT_TURNS << 16) + number;
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

// ---- what belongs together ----

// A quota group above those of one sandbox's subvolumes: the upper directory and the frozen ones before it.
struct member {
    struct member *next;
    char name[64];
    uint64_t family, subvolume;
};
static struct member *members;

static struct member **find_member(const char *name) {
    struct member **at = &members;
    while (*at && strcmp((*at)->name, name)) at = &(*at)->next;
    return at;
}

static uint64_t subvolume_number(const char *name) {
    struct btrfs_ioctl_ino_lookup_args args = {.objectid = 256};  // BTRFS_FIRST_FREE_OBJECTID, the root directory of any
    autoclose int dir = openat(disk.boxes, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return dir < 0 || ioctl(dir, BTRFS_IOC_INO_LOOKUP, &args) ? 0 : args.treeid;
}

static int set_relation(const struct member *m, bool on) {
    struct btrfs_ioctl_qgroup_assign_args args = {.assign = on, .src = m->subvolume, .dst = m->family};
    return ioctl(disk.boxes, BTRFS_IOC_QGROUP_ASSIGN, &args);
}

static int keep_family(uint64_t family, bool on) {
    struct btrfs_ioctl_qgroup_create_args args = {.create = on, .qgroupid = family};
    return ioctl(disk.boxes, BTRFS_IOC_QGROUP_CREATE, &args);
}

static int limit_family(uint64_t family, uint64_t bytes) {
    struct btrfs_ioctl_qgroup_limit_args args = {.qgroupid = family, .lim = {.flags = BTRFS_QGROUP_LIMIT_MAX_RFER, .max_rfer = bytes}};
    return ioctl(disk.boxes, BTRFS_IOC_QGROUP_LIMIT, &args);
}

static bool add_member(const char *name, uint64_t family) {
    struct member *m = calloc(1, sizeof *m);
    if (!m) return false;
    snprintf(m->name, sizeof m->name, "%s", name);
    m->family = family, m->subvolume = subvolume_number(name);
    if (!m->subvolume || set_relation(m, true)) {
        free(m);
        return false;
    }
    m->next = members, members = m;
    return true;
}

static void leave_family(const char *name) {
    struct member **at = find_member(name), *m = *at;
    if (!m) return;
    *at = m->next;
    set_relation(m, false);
    bool is_last = true;
    for (const struct member *other = members; other; other = other->next) is_last &= other->family != m->family;
    if (is_last) keep_family(m->family, false);
    free(m);
}

static void join_subvolumes(const char *first, const char *next, uint64_t bytes) {
    static uint64_t families;
    const struct member *m = *find_member(first);
    uint64_t family = m ? m->family : 1ull << 48 | ++families;
    if (!m && ((keep_family(family, true) && errno != EEXIST) || limit_family(family, bytes) || !add_member(first, family))) return;
    add_member(next, family);
}

static void join_projects(const char *first, const char *next) {
    autoclose int from = openat(disk.boxes, first, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    autoclose int to = openat(disk.boxes, next, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    autoclose int upper = to < 0 ? -1 : openat(to, "upper", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct fsxattr theirs, own;
    if (from < 0 || upper < 0 || ioctl(from, FS_IOC_FSGETXATTR, &theirs) || ioctl(to, FS_IOC_FSGETXATTR, &own)) return;
    own.fsx_projid = theirs.fsx_projid;
    if (!ioctl(to, FS_IOC_FSSETXATTR, &own)) ioctl(upper, FS_IOC_FSSETXATTR, &own);
}

void disk_join(const char *first, const char *next, uint64_t bytes) {
    if (counts_simply) join_subvolumes(first, next, bytes);
    else if (disk.mode == DISK_PROJECT) join_projects(first, next);
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

#define BLANKS_MAX 2

static struct blank {
    char name[32];
    uint64_t bytes;
} blanks[BLANKS_MAX];
static unsigned blank_count;
static uint64_t last_bytes;  // what was asked for last will be asked for next

bool disk_prepare(void) {
    static const char *const inside[] = {"upper", "work", "w0", "w1", "w2", "w3", "l0", "l1", "l2", "l3", "l4"};  // as layout.c names them
    static unsigned made;
    if (!has_subvolumes() || !last_bytes || blank_count == BLANKS_MAX) return false;
    struct blank *b = &blanks[blank_count];
    b->bytes = last_bytes;
    snprintf(b->name, sizeof b->name, "spare-%u-blank", made++);
    autoclose int dir = make_subvolume(b->name, b->bytes);
    if (dir < 0) return false;  // whoever needs one is told why
    for (size_t i = 0; i < sizeof inside / sizeof *inside; i++)
        if (mkdirat(dir, inside[i], 0755)) return destroy_subvolume(b->name), false;
    blank_count++;
    return true;
}

void disk_close(void) {
    while (blank_count) destroy_subvolume(blanks[--blank_count].name);
}

static int take_blank(const char *id, uint64_t bytes) {
    const struct blank *b = &blanks[--blank_count];
    int dir = openat(disk.boxes, b->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir >= 0 && (b->bytes == bytes || !limit_subvolume(dir, bytes)) && !disk_rename(b->name, id)) return dir;
    io_close(&dir);
    destroy_subvolume(b->name);
    return -1;
}

static int make_dir(const char *id, uint16_t number, uint64_t bytes) {
    if (has_subvolumes()) {
        int dir = blank_count ? take_blank(id, bytes) : -1;
        last_bytes = bytes;
        return dir >= 0 ? dir : make_subvolume(id, bytes);
    }
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
    if (out->dir >= 0 && (!mkdirat(out->dir, "upper", 0755) || errno == EEXIST)) return 0;
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
    const struct member *m = *find_member(id);
    if (m && limit_family(m->family, bytes)) return -1;
    if (has_subvolumes()) return limit_subvolume(dir, bytes);
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
    if (has_subvolumes() && is_btrfs(from) && !snapshot_subvolume(from, copy)) return 0;
    if (mkdirat(disk.boxes, copy, 0700)) return -1;
    autoclose int to = openat(disk.boxes, copy, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (to < 0 || mkdirat(to, "upper", 0700) || mkdirat(to, "links", 0700)) return -1;
    autoclose int upper = openat(from, "upper", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    autoclose int copied = openat(to, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC), links = openat(to, "links", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (upper < 0 || copied < 0 || links < 0 || copy_tree(upper, copied, links)) return -1;
    return unlinkat(to, "links", AT_REMOVEDIR);
}

int disk_rename(const char *id, const char *to) { return renameat(disk.boxes, id, disk.boxes, to); }

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
    leave_family(id);
    if (has_subvolumes() && drop_subvolume(id)) return;
    if (disk.mode == DISK_IMAGE) {
        disk_remove_tree(disk.boxes, id);  // cannot be renamed out of its file system
        return;
    }
    static unsigned thrown;
    char name[128];
    snprintf(name, sizeof name, "%s.%u", id, thrown++);  // one of that name may still lie there
    if (!renameat(disk.boxes, id, disk.trash, name)) disk.dirty = true;
}
