// Requests come as packets of a sequenced socket and carry a number; the answer carries it back. Packet fields are those of
// wire.h. Requests: u32 seq, u8 op, then
//   CONFIG   bytes run, bytes dir, bytes image, u32 first_range, u32 ranges
//   CREATE   bytes id, strs lowers, strs views (source and place in turn), u8 upper (0 disk, 1 tmpfs), u64 memory, u32 pids,
//            u32 cpu_permille, u64 disk, u64 tmp, u64 shm, bytes workdir, strs directories of the workload's own
//   DESTROY  u32 handle       answered when everything is gone
//   ENTER    u32 handle, bytes user, bytes name  what the agent shall know it by; empty: the default
//   FREEZE   u32 handle, u8 on
//   SWEEP    bytes run        remove what a dead engine of that name left in the control groups
// Answers: u32 seq, u8 status; status 0 and fields, or 1, bytes step, i32 errno. With seq 0 and status 2: u32 handle died, u8 had_failed, bytes step, i32 errno.
#define _GNU_SOURCE
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cgroup.h"
#include "disk.h"
#include "io.h"
#include "kernel.h"
#include "mounts.h"
#include "sandbox.h"
#include "slot.h"
#include "wire.h"

#define PACKET_MAX (128u << 10)
#define BOXES_MAX 4096
#define RANGE_BITS 12        // a handle is a generation and the sandbox's range
#define QUIET_MS 3           // slots are prepared when nothing has happened for so long: a sandbox just made has the CPU first
#define RETRY_MS 50          // a control group whose last process is still going

enum op { OP_CONFIG = 1, OP_CREATE, OP_DESTROY, OP_ENTER, OP_FREEZE, OP_SWEEP };

struct box {
    uint32_t handle;
    char id[64];
    char *workdir;
    struct slot slot;
    int pidfd, control, status;
    uint64_t disk_bytes;
    uint32_t pids;
    uint32_t destroy_seq;  // who waits for its end; 0: nobody
    struct setup_failure failure;
    bool failed;
};

static struct {
    int engine, epoll;
    bool in_userns, ready;
    struct mounts mounts;
    struct box *boxes[BOXES_MAX];
    uint32_t generation;
    char leftovers[BOXES_MAX][64];  // ids whose control groups would not go yet
    unsigned leftover_count;
    pid_t sweeper;
    bool buried;                    // a sandbox ended in this round
} L;  // set up by launcher_main: an initialiser would put all of it into the file

// What an epoll event is about: the engine, or a box's pidfd or status pipe.
enum source { SRC_ENGINE, SRC_BOX, SRC_STATUS };
static uint64_t tag(enum source s, uint32_t handle) { return (uint64_t)s << 32 | handle; }

static void watch(int fd, uint64_t what) {
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = what};
    epoll_ctl(L.epoll, EPOLL_CTL_ADD, fd, &e);
}

// ---- answers ----

static struct wr begin_answer(uint32_t seq, uint8_t status) {
    struct wr w = {0};
    wr_u32(&w, seq);
    wr_u8(&w, status);
    return w;
}

static void send_answer(struct wr *w, const int *fds, size_t count) {
    // A full socket means an engine that does not read; it is asked to wait, as any caller would be.
    if (!w->failed) io_send_fds(L.engine, w->data, w->size, fds, count);
    wr_free(w);
}

static void answer_ok(uint32_t seq) {
    struct wr w = begin_answer(seq, 0);
    send_answer(&w, NULL, 0);
}

static void answer_failure(uint32_t seq, const char *step, int error) {
    struct wr w = begin_answer(seq, 1);
    wr_bytes(&w, step, strlen(step));
    wr_u32(&w, (uint32_t)error);
    send_answer(&w, NULL, 0);
}

static struct box *find(uint32_t handle) {
    struct box *b = L.boxes[handle & (BOXES_MAX - 1)];
    return b && b->handle == handle ? b : NULL;
}

// A NUL-terminated copy; the caller frees.
static char *text_of(struct span s) { return strndup((const char *)s.at, s.size); }

// ---- ending ----

static void free_box(struct box *b) {
    io_close(&b->pidfd);
    io_close(&b->control);
    io_close(&b->status);
    free(b->workdir);
    free(b);
}

static void sweep_trash(void) {
    if (L.sweeper <= 0) L.sweeper = disk_sweep_trash();
}

// What its set-up had to say: a failure, or its end, which is success.
static void on_status(struct box *b) {
    if (read(b->status, &b->failure, sizeof b->failure) == (ssize_t)sizeof b->failure) b->failed = true;
    io_close(&b->status);
}

// The sandbox's first process is dead, and with it all others: the kernel saw to that before it let us know.
static void bury(struct box *b) {
    siginfo_t info;
    waitid((idtype_t)3 /* P_PIDFD */, (id_t)b->pidfd, &info, WEXITED);
    if (!cg_box_remove(b->id) && L.leftover_count < BOXES_MAX) strcpy(L.leftovers[L.leftover_count++], b->id);
    disk_drop(b->id);
    slot_give(&b->slot);
    L.buried = true;
    L.boxes[b->handle & (BOXES_MAX - 1)] = NULL;
    if (b->status >= 0) on_status(b);
    if (b->destroy_seq) {
        answer_ok(b->destroy_seq);
    } else {
        struct wr w = begin_answer(0, 2);
        wr_u32(&w, b->handle);
        wr_u8(&w, b->failed);
        wr_bytes(&w, b->failure.step, strnlen(b->failure.step, sizeof b->failure.step));
        wr_u32(&w, (uint32_t)b->failure.error);
        send_answer(&w, NULL, 0);
    }
    free_box(b);
}

static void end_box(struct box *b) {
    cg_box_kill(b->id);
    k_pidfd_send_signal(b->pidfd, SIGKILL);
}

static void on_destroy(uint32_t seq, struct rd *r) {
    struct box *b = find(rd_u32(r));
    if (!b) {
        answer_ok(seq);  // it died by itself and has been told
        return;
    }
    b->destroy_seq = seq;
    cg_box_freeze(b->id, false);
    end_box(b);
}

// ---- creating ----

struct create {
    char id[64];
    struct rd lowers, views, dirs;
    uint32_t lower_count, view_count, dir_count;
    uint8_t upper;
    struct cg_limits limits;
    uint64_t disk, tmp, shm;
    char *workdir;
};

// Letters, digits and hyphens: an id becomes a directory, a control group and a host name.
static bool valid_id(struct span s) {
    if (!s.size || s.size > 60) return false;
    for (uint32_t i = 0; i < s.size; i++)
        if (!strchr("abcdefghijklmnopqrstuvwxyz0123456789-", s.at[i])) return false;
    return true;
}

static bool parse_create(struct rd *r, struct create *c) {
    struct span id = rd_name(r);
    struct span lowers = rd_strs(r, &c->lower_count);
    struct span views = rd_strs(r, &c->view_count);
    c->upper = rd_u8(r);
    c->limits = (struct cg_limits){.memory_bytes = rd_u64(r), .pids = rd_u32(r), .cpu_permille = rd_u32(r)};
    c->disk = rd_u64(r), c->tmp = rd_u64(r), c->shm = rd_u64(r);
    struct span workdir = rd_name(r);
    struct span dirs = rd_strs(r, &c->dir_count);
    if (!rd_done(r) || !valid_id(id) || !c->lower_count || c->lower_count > LAYERS_MAX || c->view_count % 2 || c->view_count / 2 > VIEWS_MAX) return false;
    memcpy(c->id, id.at, id.size);
    c->id[id.size] = 0;
    c->lowers = rd_of(lowers.at + 4, lowers.size - 4);
    c->views = rd_of(views.at + 4, views.size - 4);
    c->dirs = rd_of(dirs.at + 4, dirs.size - 4);
    c->workdir = text_of(workdir);
    return c->workdir != NULL;
}

// mkdir -p below a fresh upper directory that nobody else has touched; the last part belongs to `uid`.
static int make_path(int upper, struct span path, uid_t root, uid_t uid) {
    char text[4096];
    if (path.size >= sizeof text) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(text, path.at, path.size);
    text[path.size] = 0;
    char *at = text;
    while (*at == '/') at++;
    for (char *slash; *at; at = slash) {
        slash = strchr(at, '/');
        if (slash) *slash = 0;
        const char *whole = text + strspn(text, "/");
        bool is_last = !slash || !slash[1];
        if (!strcmp(at, "..") || (mkdirat(upper, whole, 0755) && errno != EEXIST)) return -1;
        if (fchownat(upper, whole, is_last ? uid : root, is_last ? uid : root, AT_SYMLINK_NOFOLLOW)) return -1;
        if (!slash) break;
        *slash++ = '/';
    }
    return 0;
}

// Mount points are made in the upper directory: whatever an image has there, a link for instance, is covered by a plain directory.
static int fill_upper(int upper, const struct slot *slot, struct create *c) {
    static const char *const points[] = {"proc", "dev", "tmp"};
    uid_t root = slot->base, user = L.in_userns ? 0 : slot->base + WORKLOAD_UID;
    if (!L.in_userns && fchown(upper, root, root)) return -1;
    for (size_t i = 0; i < 3; i++)
        if (mkdirat(upper, points[i], 0755)) return -1;
    for (uint32_t i = 0; i < c->dir_count; i++)
        if (make_path(upper, rd_bytes(&c->dirs), root, user)) return -1;
    return 0;
}

static void close_plan(struct plan *p) {
    io_close(&p->root);
    io_close(&p->dev);
    for (size_t i = 0; i < p->view_count; i++) {
        io_close(&p->views[i].mount);
        free((char *)(uintptr_t)p->views[i].at);
    }
    p->view_count = 0;
    io_close(&p->channel);
    io_close(&p->control);
    io_close(&p->status);
    cg_box_close(&p->cg);
}

static int add_views(struct plan *p, struct create *c, const char **step) {
    *step = "view of a host directory";
    for (uint32_t i = 0; i < c->view_count / 2; i++) {
        char *source = text_of(rd_bytes(&c->views)), *at = text_of(rd_bytes(&c->views));
        int fd = source && at ? mounts_bind(&L.mounts, source) : -1;
        int error = errno;
        free(source);
        if (fd < 0) {
            free(at);
            errno = error;
            return -1;
        }
        p->views[p->view_count++] = (struct view){fd, at};
    }
    return 0;
}

// A sized tmpfs in place of the directory on disk. It is attached while overlay looks at it; overlay keeps it from then on.
static int tmpfs_upper(uint64_t bytes, struct disk_box *box) {
    autoclose int fs = mounts_tmpfs(bytes, 0, "755", K_ATTR_NOSUID | K_ATTR_NODEV);
    if (fs < 0 || (mkdirat(L.mounts.stage, "u", 0700) && errno != EEXIST)) return -1;
    if (k_move_mount(fs, "", L.mounts.stage, "u", K_MOVE_FROM_EMPTY)) return -1;
    if (mkdirat(fs, "upper", 0755) || mkdirat(fs, "work", 0755)) return -1;
    disk_box_close(box);
    box->upper = openat(fs, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    box->work = openat(fs, "work", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return box->upper < 0 || box->work < 0 ? -1 : 0;
}

static int open_lowers(struct create *c, int *fds) {
    for (uint32_t i = 0; i < c->lower_count; i++) {
        char *path = text_of(rd_bytes(&c->lowers));
        fds[i] = path ? open(path, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
        int error = errno;
        free(path);
        if (fds[i] >= 0) continue;
        while (i--) close(fds[i]);
        errno = error;
        return -1;
    }
    return 0;
}

static int mount_root(struct plan *p, struct create *c, const char **step) {
    static int lowers[LAYERS_MAX];
    struct disk_box box;
    *step = "upper directory";
    if (disk_make(c->id, p->slot.range, c->disk, &box)) return -1;
    bool in_memory = c->upper == 1;
    if ((in_memory && tmpfs_upper(c->disk, &box)) || fill_upper(box.upper, &p->slot, c)) {
        disk_box_close(&box);
        return -1;
    }
    *step = "image";
    if (!open_lowers(c, lowers)) {
        p->root = mounts_overlay(&L.mounts, lowers, c->lower_count, box.upper, box.work, L.in_userns ? -1 : p->slot.userns, step);
        int error = errno;
        for (uint32_t i = 0; i < c->lower_count; i++) close(lowers[i]);
        errno = error;
    }
    int error = errno;
    disk_box_close(&box);
    if (in_memory) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d/u", L.mounts.stage);
        umount2(path, MNT_DETACH);
    }
    errno = error;
    return p->root < 0 ? -1 : 0;
}

// Everything the child needs that only the launcher can make. What is made is found in the plan, also after a failure.
static int prepare(struct plan *p, struct create *c, const char **step) {
    if (cg_box_make(c->id, &c->limits, &p->cg, step)) return -1;
    if (mount_root(p, c, step) || add_views(p, c, step)) return -1;
    *step = "device directory";
    p->dev = mounts_dev(&L.mounts);
    return p->dev < 0 ? -1 : 0;
}

static int start_child(struct plan *p, struct box *b, int *channel, const char **step) {
    int pair[2], control[2], status[2];
    *step = "sockets";
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair)) return -1;
    *channel = pair[0], p->channel = pair[1];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control)) return -1;
    b->control = control[0], p->control = control[1];
    if (pipe2(status, O_CLOEXEC | O_NONBLOCK)) return -1;
    b->status = status[0], p->status = status[1];
    *step = "clone";
    struct k_clone_args args = {
        .flags = CLONE_PIDFD | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS, .pidfd = (uint64_t)(uintptr_t)&b->pidfd, .exit_signal = SIGCHLD,
    };
    pid_t pid = k_clone3(&args);
    if (!pid) sandbox_main(p);
    return pid;
}

static void on_create(uint32_t seq, struct rd *r) {
    struct create c = {0};
    if (!parse_create(r, &c)) {
        free(c.workdir);
        answer_failure(seq, "request", EINVAL);
        return;
    }
    struct plan p = {.in_userns = L.in_userns, .hostname = c.id, .workdir = c.workdir, .empty_ns = L.mounts.empty_ns, .root = -1, .dev = -1,
                     .tmp_bytes = c.tmp, .shm_bytes = c.shm, .disk_bytes = c.disk, .pids = c.limits.pids, .channel = -1, .control = -1, .status = -1,
                     .cg = {.memory_events = -1, .pids_events = -1}};
    const char *step = "memory";
    struct box *b = calloc(1, sizeof *b);
    autoclose int channel = -1;
    pid_t pid = -1;
    if (b) *b = (struct box){.pidfd = -1, .control = -1, .status = -1, .workdir = c.workdir, .disk_bytes = c.disk, .pids = c.limits.pids};
    bool has_slot = b && !slot_take(&p.slot, &step);
    if (has_slot && !prepare(&p, &c, &step)) pid = start_child(&p, b, &channel, &step);
    int error = errno;
    close_plan(&p);
    if (pid < 0) {
        if (has_slot) {
            cg_box_remove(c.id);
            disk_drop(c.id);
            slot_give(&p.slot);
        }
        if (b) free_box(b);
        else free(c.workdir);
        answer_failure(seq, step, error);
        return;
    }
    strcpy(b->id, c.id);
    b->slot = p.slot;
    b->handle = ++L.generation << RANGE_BITS | p.slot.range;
    L.boxes[p.slot.range] = b;
    struct wr w = begin_answer(seq, 0);
    wr_u32(&w, b->handle);
    wr_u32(&w, (uint32_t)pid);
    send_answer(&w, &channel, 1);
    watch(b->pidfd, tag(SRC_BOX, b->handle));
    watch(b->status, tag(SRC_STATUS, b->handle));
    io_close(&b->slot.netns);  // it lives in its processes now
}

// ---- the other requests ----

static void on_enter(uint32_t seq, struct rd *r) {
    struct box *b = find(rd_u32(r));
    char *user = text_of(rd_name(r)), *name = text_of(rd_name(r));
    int pair[2], status[2];
    if (!b || !user || !name || !rd_done(r) || strlen(user) > 64) {
        answer_failure(seq, "sandbox", b ? EINVAL : ESRCH);
    } else if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) {
        answer_failure(seq, "sockets", errno);
    } else {
        struct entry e = {.in_userns = L.in_userns, .pidfd = b->pidfd, .userns = b->slot.userns, .sock = pair[1], .user = user,
                          .workdir = b->workdir, .disk_bytes = b->disk_bytes, .pids = b->pids};
        pid_t pid = -1;
        if (!cg_box_open(b->id, &e.cg) && !pipe2(status, O_CLOEXEC)) {
            e.status = status[1];
            pid = fork();
            if (!pid) sandbox_enter(&e);
            close(status[1]);
            // The children hold the writing end until the worker stands or has said why not.
            struct setup_failure f = {.error = errno};
            ssize_t n = pid < 0 ? -1 : read(status[0], &f, sizeof f);
            close(status[0]);
            if (pid > 0) waitpid(pid, NULL, 0);
            if (pid < 0 || n == (ssize_t)sizeof f) answer_failure(seq, pid < 0 ? "worker" : f.step, f.error);
            else if (io_send_fds(b->control, name, strlen(name), &pair[0], 1) < 0) answer_failure(seq, "worker", errno);
            else answer_ok(seq);
        } else {
            answer_failure(seq, "pipe", errno);
        }
        cg_box_close(&e.cg);
        close(pair[0]), close(pair[1]);
    }
    free(user), free(name);
}

static void on_freeze(uint32_t seq, struct rd *r) {
    struct box *b = find(rd_u32(r));
    bool on = rd_u8(r);
    if (!b) answer_failure(seq, "sandbox", ESRCH);
    else if (cg_box_freeze(b->id, on)) answer_failure(seq, "freeze", errno);
    else answer_ok(seq);
}

static void on_sweep(uint32_t seq, struct rd *r) {
    struct span run = rd_name(r);
    char *name = valid_id(run) ? text_of(run) : NULL;
    if (!name) answer_failure(seq, "request", EINVAL);
    else if (!cg_sweep(name)) answer_failure(seq, "control groups of a dead engine", EBUSY);
    else answer_ok(seq);
    free(name);
}

// ---- starting up ----

// An ordinary user is root in a user namespace of its own, where it may mount and make namespaces.
static int become_userns_root(void) {
    uid_t uid = geteuid();
    gid_t gid = getegid();
    char map[64];
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS)) return -1;
    snprintf(map, sizeof map, "0 %u 1", uid);
    if (io_write_file(AT_FDCWD, "/proc/self/setgroups", "deny") || io_write_file(AT_FDCWD, "/proc/self/uid_map", map)) return -1;
    snprintf(map, sizeof map, "0 %u 1", gid);
    return io_write_file(AT_FDCWD, "/proc/self/gid_map", map);
}

static const char *configure(const char *run, const char *dir, const char *image, unsigned first, unsigned ranges, char *why, size_t size) {
    const char *step;
    L.in_userns = geteuid() != 0;
    cg_open(run);
    if (L.in_userns ? become_userns_root() : unshare(CLONE_NEWNS)) return L.in_userns ? "user namespace" : "mount namespace";
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return "mount namespace";
    if (disk_open(dir, L.in_userns ? "" : image, why, size)) return "state directory";
    char stage[4200];
    snprintf(stage, sizeof stage, "%s/mnt", dir);
    if (mkdir(stage, 0700) && errno != EEXIST) return "state directory";
    if (mounts_open(&L.mounts, stage, L.in_userns, &step)) return step;
    if (slots_open(first, ranges, L.in_userns)) return "network namespace";
    return NULL;
}

static void on_config(uint32_t seq, struct rd *r) {
    char *run = text_of(rd_name(r)), *dir = text_of(rd_name(r)), *image = text_of(rd_name(r));
    unsigned first = rd_u32(r), ranges = rd_u32(r);
    char why[256];
    if (!run || !dir || !image || !rd_done(r) || L.ready) {
        answer_failure(seq, "request", EINVAL);
    } else {
        const char *step = configure(run, dir, image, first, ranges, why, sizeof why);
        if (step) {
            answer_failure(seq, step, errno);
        } else {
            L.ready = true;
            struct wr w = begin_answer(seq, 0);
            wr_u8(&w, L.in_userns);
            wr_u8(&w, (uint8_t)cg_abilities());
            wr_u8(&w, (uint8_t)disk_mode());
            wr_bytes(&w, why, strlen(why));
            send_answer(&w, NULL, 0);
        }
    }
    free(run), free(dir), free(image);
}

// False: the engine is gone.
static bool on_packet(void) {
    static uint8_t packet[PACKET_MAX];
    ssize_t n;
    do n = recv(L.engine, packet, sizeof packet, 0);
    while (n < 0 && errno == EINTR);
    if (n <= 0) return n < 0 && errno == EAGAIN;
    struct rd r = rd_of(packet, (size_t)n);
    uint32_t seq = rd_u32(&r);
    uint8_t op = rd_u8(&r);
    if (op != OP_CONFIG && !L.ready) {
        answer_failure(seq, "not configured", EINVAL);
        return true;
    }
    switch (op) {
    case OP_CONFIG: on_config(seq, &r); break;
    case OP_CREATE: on_create(seq, &r); break;
    case OP_DESTROY: on_destroy(seq, &r); break;
    case OP_ENTER: on_enter(seq, &r); break;
    case OP_FREEZE: on_freeze(seq, &r); break;
    case OP_SWEEP: on_sweep(seq, &r); break;
    default: answer_failure(seq, "request", EINVAL);
    }
    return true;
}

// Children that are no sandboxes: whoever empties the trash or removes a dead engine's tree.
static void reap_others(void) {
    if (L.sweeper > 0 && waitpid(L.sweeper, NULL, WNOHANG) == L.sweeper) L.sweeper = -1;
}

static void retry_leftovers(void) {
    for (unsigned i = 0; i < L.leftover_count;)
        if (cg_box_remove(L.leftovers[i])) memmove(L.leftovers[i], L.leftovers[--L.leftover_count], sizeof L.leftovers[i]);
        else i++;
}

// Nothing has happened for a while: work that nobody should wait for.
static int on_quiet(void) {
    reap_others();
    retry_leftovers();
    sweep_trash();
    if (slots_prepare()) return 0;
    return L.leftover_count || L.sweeper > 0 ? RETRY_MS : -1;
}

static void serve(void) {
    int wait_ms = -1;
    for (;;) {
        struct epoll_event events[64];
        int n = epoll_wait(L.epoll, events, 64, wait_ms);
        if (n < 0 && errno != EINTR) return;
        for (int i = 0; i < n; i++) {
            struct box *b = find((uint32_t)events[i].data.u64);
            if (events[i].data.u64 >> 32 == SRC_BOX && b) bury(b);
            else if (events[i].data.u64 >> 32 == SRC_STATUS && b && b->status >= 0) on_status(b);
            else if (events[i].data.u64 >> 32 == SRC_ENGINE && !on_packet()) return;
        }
        // Whoever ends one sandbox may soon want another: what it used up is replaced while nobody waits.
        if (L.buried && n < 2) slots_prepare();
        L.buried = false;
        wait_ms = n > 0 ? (L.ready ? QUIET_MS : -1) : on_quiet();
    }
}

// The engine is gone. Everything of its is ended and removed; what would take longer than this is left to the next engine's sweep.
static void close_all(void) {
    for (unsigned i = 0; i < BOXES_MAX; i++)
        if (L.boxes[i]) end_box(L.boxes[i]);
    uint64_t until = io_now_ns() + 8000000000u;
    for (unsigned i = 0; i < BOXES_MAX; i++) {
        struct epoll_event e;
        while (L.boxes[i] && io_now_ns() < until)
            if (epoll_wait(L.epoll, &e, 1, 100) == 1 && e.data.u64 >> 32 == SRC_BOX && find((uint32_t)e.data.u64)) bury(find((uint32_t)e.data.u64));
    }
    retry_leftovers();
    cg_close();
    sweep_trash();
    if (L.sweeper > 0) waitpid(L.sweeper, NULL, 0);
}

// The running program becomes a sealed copy in memory, so that no way through /proc can ever reach the file on the host.
static void seal_program(char **argv) {
    autoclose int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    autoclose int copy = memfd_create("cell", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct stat st;
    if (self < 0 || copy < 0 || fstat(self, &st)) return;
    for (off_t at = 0; at < st.st_size;)
        if (sendfile(copy, self, &at, (size_t)(st.st_size - at)) <= 0) return;
    if (fcntl(copy, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) return;
    char *args[] = {argv[0], argv[1], argv[2], "sealed", NULL}, *env[] = {NULL};
    fexecve(copy, args, env);  // a host that forbids this (vm.memfd_noexec) runs the file itself
}

static void raise_file_limit(void) {
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files)) return;
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
}

int launcher_main(int argc, char **argv) {
    if (argc < 3) return 2;
    if (argc == 3) seal_program(argv);
    L.sweeper = -1;
    L.engine = atoi(argv[2]);
    L.epoll = epoll_create1(EPOLL_CLOEXEC);
    if (L.epoll < 0) return 1;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, SIG_IGN);   // Ctrl-C reaches the whole terminal group; the engine decides what it means
    signal(SIGTERM, SIG_IGN);
    umask(022);
    raise_file_limit();
    watch(L.engine, tag(SRC_ENGINE, 0));
    serve();
    close_all();
    return 0;
}
