// In the order of what can go wrong: as long as nothing has been moved, whatever fails is undone and told. Between the first move and the last
// nothing can fail that the workload has a hand in; if it does all the same, the sandbox is given up.
#define _GNU_SOURCE
#include "swap.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cgroup.h"
#include "disk.h"
#include "identity.h"
#include "io.h"
#include "kernel.h"
#include "still.h"

#define SETUP_PATIENCE_MS 4000
#define HELD_ANYWAY_MAX 64       // threads, at 10 µs each
#define MOUNTS_PATIENCE_MS 8000  // the launcher may have many sandboxes to make before it comes to this

static const struct box *box;
static int launcher;

static void say(enum swap_said said, const char *step, int error, uint64_t still_ns) {
    struct swap_note n = {.said = said, .error = error, .still_ns = still_ns};
    snprintf(n.step, sizeof n.step, "%s", step);
    send(launcher, &n, sizeof n, MSG_NOSIGNAL);
}

_Noreturn static void end(enum swap_said said, const char *step, int error) {
    // With our end the kernel kills whom we made to act. Who would tell of that as of a command's own end goes first.
    if (said == SWAP_SPOILED) k_pidfd_send_signal(box->pidfd, SIGKILL);
    say(said, step, error, 0);
    _exit(0);
}

// ---- the overlays it stands on ----

static int open_beneath(int dir, const char *path) {
    struct k_open_how how = {.flags = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, .resolve = K_RESOLVE_BENEATH | K_RESOLVE_NO_SYMLINKS};
    path += strspn(path, "/");
    return k_openat2(dir, *path ? path : ".", &how);
}

static bool add_ground(struct still *s, int fd) {
    struct statfs fs;
    struct ground *g = &s->grounds[s->ground_count];
    bool is_root;
    if (fd < 0 || fstatfs(fd, &fs) || fs.f_type != OVERLAYFS_SUPER_MAGIC || !still_ground(fd, "", g, &is_root) || !is_root) {
        io_close(&fd);
        return false;
    }
    g->fd = fd;
    s->ground_count++;
    return true;
}

static bool is_mounted(int root, const char *place) {
    autoclose int at = open_beneath(root, place);
    struct ground g;
    bool is_root;
    return at >= 0 && still_ground(at, "", &g, &is_root) && is_root;
}

// False: one of them is not where it was put, because a directory above it was renamed. Only while everything stands still is that true for long.
static bool find_grounds(struct still *s) {
    if (!add_ground(s, open("/", O_PATH | O_DIRECTORY | O_CLOEXEC))) return false;
    for (uint32_t i = 0; i < box->layout.view_count; i++)
        if (!add_ground(s, open_beneath(s->grounds[0].fd, box->layout.places[i]))) return false;
    for (uint32_t i = box->layout.view_count; i < box->layout.place_count; i++)
        if (!is_mounted(s->grounds[0].fd, box->layout.places[i])) return false;
    return true;
}

// No longer to be written through: the kernel refuses while anything is open for writing. 0, or -1 with errno and all as it was.
static int make_read_only(struct still *s) {
    struct k_mount_attr off = {.set = K_ATTR_RDONLY}, on = {.clear = K_ATTR_RDONLY};
    for (size_t i = 0; i < s->ground_count; i++) {
        if (!k_mount_setattr(s->grounds[i].fd, "", K_AT_EMPTY_PATH, &off)) continue;
        int error = errno;
        while (i--)
            if (k_mount_setattr(s->grounds[i].fd, "", K_AT_EMPTY_PATH, &on)) end(SWAP_SPOILED, "writable again", errno);
        errno = error;
        return -1;
    }
    return 0;
}

static void make_writable(struct still *s) {
    struct k_mount_attr on = {.clear = K_ATTR_RDONLY};
    for (size_t i = 0; i < s->ground_count; i++)
        if (k_mount_setattr(s->grounds[i].fd, "", K_AT_EMPTY_PATH, &on)) end(SWAP_SPOILED, "writable again", errno);
}

// ---- the new ones ----

struct fresh {
    int mounts[1 + VIEWS_MAX];
    size_t count;
};

static void fresh_close(struct fresh *f) {
    while (f->count) close(f->mounts[--f->count]);
}

// What was asked for comes. 0, or -1 with errno and *step.
static int receive_mounts(struct fresh *f, const char **step) {
    static struct swap_note no;
    *step = "mounts";
    uint64_t until_ns = io_now_ns() + MOUNTS_PATIENCE_MS * 1000000ull;
    while (f->count < 1 + box->layout.place_count) {
        int fds[FDS_MAX];
        size_t more = 0;
        struct pollfd p = {.fd = launcher, .events = POLLIN};
        uint64_t now_ns = io_now_ns();
        int ready = poll(&p, 1, now_ns < until_ns ? (int)((until_ns - now_ns) / 1000000u) + 1 : 0);
        if (ready < 0 && errno == EINTR) continue;
        if (!ready) errno = ETIMEDOUT;
        if (ready <= 0) return -1;
        ssize_t n = io_recv_fds(launcher, &no, sizeof no, fds, &more);
        if (n < 0 && errno == EMFILE) return -1;
        if (n <= 0) end(SWAP_SPOILED, "launcher", EPIPE);  // it is gone, and will not end the sandbox
        for (size_t i = 0; i < more; i++)
            if (f->count < 1 + VIEWS_MAX) f->mounts[f->count++] = fds[i];
        if (n == (ssize_t)sizeof no) {
            *step = no.step;
            errno = no.error;
            return -1;
        }
    }
    return 0;
}

// ---- the swap ----

static int move(int from, int to) { return k_move_mount(from, "", to, "", K_MOVE_FROM_EMPTY | K_MOVE_TO_EMPTY); }

// What lies at that place of the old root, over to the new one.
static int move_over(int old, int new, const char *place) {
    autoclose int from = open_beneath(old, place), to = open_beneath(new, place);
    return from < 0 || to < 0 ? -1 : move(from, to);
}

static int put_at(int mount_fd, int new, const char *place) {
    autoclose int to = open_beneath(new, place);
    return to < 0 ? -1 : move(mount_fd, to);
}

static const char *const points[] = {"proc", "dev", "tmp"};

// The machine's id, where one was put in place of the image's; -1 for none, also when a directory above it was renamed: then it stays behind.
static int identity_of(int root, const char *place) {
    int fd = identity_at(root, place);
    struct ground g;
    bool is_root;
    if (fd >= 0 && (!still_ground(fd, "", &g, &is_root) || !is_root)) io_close(&fd);
    return fd;
}

// Whether the new root has what will be mounted on; looked at while nothing has been moved.
static int check_points(int old, int new) {
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        autoclose int at = open_beneath(new, points[i]);
        if (at < 0) return -1;
    }
    for (size_t i = 0; i < IDENTITY_PLACES; i++) {
        autoclose int from = identity_of(old, identity_places[i]), at = from < 0 ? -1 : identity_at(new, identity_places[i]);
        if (from >= 0 && at < 0) return -1;
    }
    return 0;
}

// ---- letting go of the old root ----

// The call returns only after a grace period of the kernel's. What else there is to do does not wait for it: a process beside this one makes the call.
static struct {
    _Alignas(16) char stack[16 << 10];
    pid_t pid;
    int error;
} detaching;

static int detach(void *unused) {
    (void)unused;
    detaching.error = umount2(".", MNT_DETACH) ? errno : 0;
    return 0;
}

static int begin_detaching(void) {
    detaching.error = EIO;
    detaching.pid = clone(detach, detaching.stack + sizeof detaching.stack, CLONE_VM, NULL);
    return detaching.pid < 0 ? -1 : 0;
}

// Nobody goes on before that: the way up from the new root leads to the old one.
static int end_detaching(void) {
    while (waitpid(detaching.pid, NULL, __WCLONE) < 0)
        if (errno != EINTR) return -1;
    errno = detaching.error;
    return errno ? -1 : 0;
}

static const char *swap_roots(const struct still *s, const struct fresh *f) {
    int old = s->grounds[0].fd, new = f->mounts[0];
    for (uint32_t i = 0; i < box->layout.view_count; i++)
        if (put_at(f->mounts[1 + i], new, box->layout.places[i])) return box->layout.places[i];
    // The cache moves as it is, and so does everything that is not made of layers.
    for (uint32_t i = box->layout.view_count; i < box->layout.place_count; i++)
        if (move_over(old, new, box->layout.places[i])) return box->layout.places[i];
    for (size_t i = 0; i < sizeof points / sizeof *points; i++)
        if (move_over(old, new, points[i])) return points[i];
    for (size_t i = 0; i < IDENTITY_PLACES; i++) {
        autoclose int from = identity_of(old, identity_places[i]), to = from < 0 ? -1 : identity_at(new, identity_places[i]);
        if (from >= 0 && (to < 0 || move(from, to))) return identity_places[i];
    }
    if (fchdir(new) || syscall(SYS_pivot_root, ".", ".") || begin_detaching() || chdir("/")) return "root";
    return NULL;
}

// Everybody held and sent once to where it stands: who can do that now can do it again afterwards. Few enough are held also when none has to be sent,
// because some calls are then kept from noticing that they were interrupted.
static bool can_send(struct still *s) {
    bool needed = false;
    for (size_t i = 0; i < s->count; i++) needed |= s->standers[i].cwd != NULL;
    if (!needed && s->count > HELD_ANYWAY_MAX) return true;
    bool held = !still_hold(s);
    return !needed || (held && !still_send(s));
}

static void swap(struct still *s) {
    struct fresh f = {.count = 0};
    const char *step;
    if (receive_mounts(&f, &step) || (step = "new root", check_points(s->grounds[0].fd, f.mounts[0])) || k_move_mount(f.mounts[0], "", AT_FDCWD, "/", K_MOVE_FROM_EMPTY)) {
        int error = errno;
        make_writable(s);
        end(still_end(s) ? SWAP_FAILED : SWAP_SPOILED, step, error);
    }
    struct ground now;
    bool is_root;
    step = swap_roots(s, &f);
    if (!step && (!still_ground(f.mounts[0], "", &now, &is_root) || !still_is_in_place(s, now.mount))) step = "new root", errno = EIO;
    if (!step && still_send(s)) step = "working directory";
    if (!step && end_detaching()) step = "root";
    if (step) end(SWAP_SPOILED, step, errno);
    fresh_close(&f);
    if (!still_end(s)) end(SWAP_SPOILED, "going on", EIO);
    say(SWAP_SWAPPED, "", 0, io_now_ns() - s->since_ns);
}

static void copy(struct still *s, const char *name) {
    say(SWAP_COPIES, "", 0, 0);
    inject_deadline(0);
    int failed = disk_clone(box->disk, name), error = errno;
    if (!still_end(s)) end(SWAP_SPOILED, "going on", EIO);
    if (failed) end(SWAP_FAILED, "copy", error);
    say(SWAP_COPIED, "", 0, io_now_ns() - s->since_ns);
}

// ---- the child ----

// Until its set-up is over the first process is not yet in its own namespaces.
static void wait_for_setup(int setup) {
    struct pollfd p = {.fd = setup};
    int n;
    do n = setup < 0 ? 0 : poll(&p, 1, SETUP_PATIENCE_MS);
    while (n < 0 && errno == EINTR);
    if (setup >= 0 && (n != 1 || !(p.revents & POLLHUP))) end(SWAP_FAILED, "sandbox", ETIMEDOUT);
}

_Noreturn void swap_main(const struct box *b, int sock, const char *name, bool may_swap) {
    box = b, launcher = sock;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) _exit(1);
    io_close(&L.engine);  // its end must be seen
    wait_for_setup(b->status);
    struct still s = {.id = b->group, .agent = b->pid, .proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC), .group = cg_box_dir(b->group)};
    s.freezes = s.group >= 0 && cg_abilities() & CG_FREEZE;
    if (!s.freezes) io_close(&s.group);
    // Entering the mount namespace also changes root and working directory to the sandbox's.
    if (s.proc < 0 || setns(b->pidfd, CLONE_NEWNS)) end(SWAP_FAILED, "namespaces", errno);
    if (still_begin(&s)) {
        int error = errno;
        end(still_end(&s) ? SWAP_FAILED : SWAP_SPOILED, s.freezes ? "freezing" : "stopping its processes", error);
    }
    bool swaps = may_swap && find_grounds(&s) && !make_read_only(&s);
    if (swaps) say(SWAP_WANTS_MOUNTS, "", 0, 0);  // from now on nothing below them changes: the launcher makes them while it is found out whether they can be used
    if (swaps && !(still_is_movable(&s) && can_send(&s))) {
        make_writable(&s);
        swaps = false;
    }
    if (swaps) swap(&s);
    else copy(&s, name);
    _exit(0);
}
