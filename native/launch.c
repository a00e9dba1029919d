// Requests come as packets of a sequenced socket and carry a number; the answer carries it back. Packet fields are those of
// wire.h. Requests: u32 seq, u8 op, then
//   CONFIG   bytes run, bytes dir, bytes image, bytes layers, u32 first_range, u32 ranges, u8 is_ahead
//   CREATE   bytes id, a layout (layout.h), u8 upper (0 disk, 1 tmpfs), u64 memory, u32 pids, u32 cpu_permille, u64 disk, u64 tmp, u64 shm,
//            bytes workdir
//   DESTROY  u32 handle       answered when everything is gone
//   ENTER    u32 handle, bytes user, bytes name  what the agent shall know it by; empty: the default
//   FREEZE   u32 handle, u8 on (2: on, if there are few to be stopped)
//   SNAPSHOT u32 handle, bytes fresh  a name for the upper directory that it goes on with, unless it is copied. Answer: u8 how (0 swapped, 1 copied),
//            u64 ns for which everything stood still, bytes name of the layer
//   DROP_LAYER bytes name     of a layer on which nobody stands any more
//   PRISTINE u32 handle       answer: u8 whether nothing has been done in it
//   LIMIT    u32 handle, u64 memory, u32 pids, u32 cpu_permille, u64 disk, u64 tmp. Answer: u8 what holds now (bits of enum held, limit.c),
//            u8 whether its workers have to be replaced for that
//   SWEEP    bytes run        remove what a dead engine of that name left in the control groups
// Answers: u32 seq, u8 status; status 0 and fields, or 1, bytes step, i32 errno. With seq 0 and status 2: u32 handle died, u8 had_failed, bytes step, i32 errno.
#define _GNU_SOURCE
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
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
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cgroup.h"
#include "disk.h"
#include "io.h"
#include "kernel.h"
#include "launcher.h"
#include "maker.h"
#include "next.h"
#include "seccomp.h"
#include "spare.h"

#define PACKET_MAX (128u << 10)
#define QUIET_MS 15          // slots and spares are prepared when nothing has happened for so long: a sandbox just made, and its first command, have the CPU first
#define FEW 16               // processes; each has to be woken to be stopped, which takes it 10 µs
#define RETRY_MS 50          // a control group whose last process is still going

struct launcher L;  // set up by launcher_main: an initialiser would put all of it into the file

// What an epoll event is about: the engine, a box's pidfd or status pipe, or the status pipe of a worker that enters one.
enum source { SRC_ENGINE, SRC_BOX, SRC_STATUS, SRC_ENTRY, SRC_SNAPSHOT, SRC_MAKER };
static uint64_t tag(enum source s, uint32_t handle) { return (uint64_t)s << 32 | handle; }

static int watch(int fd, uint64_t what) {
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = what};
    return epoll_ctl(L.epoll, EPOLL_CTL_ADD, fd, &e);
}

// ---- answers ----

struct wr launcher_answer(uint32_t seq, uint8_t status) {
    struct wr w = {0};
    wr_u32(&w, seq);
    wr_u8(&w, status);
    return w;
}

void launcher_send(struct wr *w, const int *fds, size_t count) {
    // A full socket means an engine that does not read; it is asked to wait, as any caller would be.
    if (!w->failed) io_send_fds(L.engine, w->data, w->size, fds, count);
    wr_free(w);
}

void launcher_done(uint32_t seq) {
    struct wr w = launcher_answer(seq, 0);
    launcher_send(&w, NULL, 0);
}

void launcher_refuse(uint32_t seq, const char *step, int error) {
    struct wr w = launcher_answer(seq, 1);
    wr_bytes(&w, step, strlen(step));
    wr_u32(&w, (uint32_t)error);
    launcher_send(&w, NULL, 0);
}

struct box *launcher_find(uint32_t handle) {
    struct box *b = L.boxes[handle & (BOXES_MAX - 1)];
    return b && b->handle == handle ? b : NULL;
}

char *launcher_text(struct span s) { return strndup((const char *)s.at, s.size); }

bool launcher_valid_id(struct span s) {
    if (!s.size || s.size > 60) return false;
    for (uint32_t i = 0; i < s.size; i++)
        if (!strchr("abcdefghijklmnopqrstuvwxyz0123456789-", s.at[i])) return false;
    return true;
}

int launcher_watch(struct box *b) { return watch(b->pidfd, tag(SRC_BOX, b->handle)) || watch(b->status, tag(SRC_STATUS, b->handle)) ? -1 : 0; }
int launcher_watch_entry(int fd, uint32_t index) { return watch(fd, tag(SRC_ENTRY, index)); }
int launcher_watch_snapshot(int fd, uint32_t index) { return watch(fd, tag(SRC_SNAPSHOT, index)); }

void launcher_unwatch(int *fd) {
    if (*fd >= 0) epoll_ctl(L.epoll, EPOLL_CTL_DEL, *fd, NULL);
    io_close(fd);
}

// ---- ending ----

void launcher_free(struct box *b) {
    launcher_unwatch(&b->pidfd);
    launcher_unwatch(&b->status);
    io_close(&b->control);
    io_close(&b->mounts);
    free(b->workdir);
    layout_free(&b->layout);
    free(b);
}

static void sweep_trash(void) {
    if (L.sweeper <= 0) L.sweeper = disk_sweep_trash();
}

// What its set-up had to say: a failure, or its end, which is success.
static void on_status(struct box *b) {
    if (read(b->status, &b->failure, sizeof b->failure) == (ssize_t)sizeof b->failure) b->failed = true;
    launcher_unwatch(&b->status);
}

// Its mounts stand. Who lets go of them last waits for several grace periods of the kernel's; its processes would be the last, and whoever waits for their end would
// wait for that too.
static void hold_mounts(struct box *b) {
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", b->pid);
    if (!b->failed) b->mounts = open(path, O_RDONLY | O_CLOEXEC);
}

// The sandbox's first process is dead, and with it all others: the kernel saw to that before it let us know.
void launcher_bury(struct box *b) {
    siginfo_t info;
    waitid((idtype_t)3 /* P_PIDFD */, (id_t)b->pidfd, &info, WEXITED);
    // Whoever waits hears of it first: the rest is a matter of this process alone, and done before its next request.
    if (b->destroy_seq) launcher_done(b->destroy_seq);
    maker_discard_one(&b->mounts);
    if (!cg_box_remove(b->group) && L.leftover_count < BOXES_MAX) strcpy(L.leftovers[L.leftover_count++], b->group);
    disk_drop(b->disk);
    slot_give(&b->slot);
    next_drop(b);
    L.buried = true;
    L.boxes[b->handle & (BOXES_MAX - 1)] = NULL;
    if (b->status >= 0) on_status(b);
    if (b->is_spare) {
        spares_lost(b);
    } else if (!b->destroy_seq) {
        struct wr w = launcher_answer(0, 2);
        wr_u32(&w, b->handle);
        wr_u8(&w, b->failed);
        wr_bytes(&w, b->failure.step, strnlen(b->failure.step, sizeof b->failure.step));
        wr_u32(&w, (uint32_t)b->failure.error);
        launcher_send(&w, NULL, 0);
    }
    launcher_free(b);
}

// The agent first: it would tell of a command that died by our hand as if that were its result, to a holder whose channel is still open.
static void end_box(struct box *b) {
    k_pidfd_send_signal(b->pidfd, SIGKILL);
    cg_box_kill(b->group);
}

void launcher_end(struct box *b) {
    launcher_abandon(b->handle);
    end_box(b);
    cg_box_freeze(b->group, false);  // the dead need not be thawed, but a tree that cannot kill may hold some that are not reached otherwise
}

static void on_destroy(uint32_t seq, struct rd *r) {
    struct box *b = launcher_find(rd_u32(r));
    if (!b) {
        launcher_done(seq);  // it died by itself and has been told
        return;
    }
    b->destroy_seq = seq;
    launcher_end(b);
}

// ---- the other requests ----

static void on_freeze(uint32_t seq, struct rd *r) {
    struct box *b = launcher_find(rd_u32(r));
    uint8_t on = rd_u8(r);
    if (b && on == 2 && cg_box_count(b->group, FEW + 1) > FEW) launcher_done(seq);
    else if (!b) launcher_refuse(seq, "sandbox", ESRCH);
    else if (cg_box_freeze(b->group, on)) launcher_refuse(seq, "freeze", errno);
    else launcher_done(seq);
}

static void on_sweep(uint32_t seq, struct rd *r) {
    struct span run = rd_name(r);
    char *name = launcher_valid_id(run) ? launcher_text(run) : NULL;
    if (!name) launcher_refuse(seq, "request", EINVAL);
    else if (!cg_sweep(name)) launcher_refuse(seq, "control groups of a dead engine", EBUSY);
    else launcher_done(seq);
    free(name);
}

// ---- starting up ----

// Root of the machine, and not of a container's user namespace or without the right to mount: those have what an ordinary user has.
static bool is_host_root(void) {
    char map[64];
    if (geteuid() != 0 || io_read_file(AT_FDCWD, "/proc/self/uid_map", map, sizeof map) < 0) return false;
    char *at = map;
    for (int field = 0; field < 2; field++)
        if (strtoul(at, &at, 10) != 0) return false;
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {0};
    return strtoul(at, NULL, 10) == UINT32_MAX && !syscall(SYS_capget, &header, data) && data[0].effective >> CAP_SYS_ADMIN & 1;
}

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

static const char *configure(const char *run, const char *dir, const char *image, const char *layers, unsigned first, unsigned ranges, bool is_ahead, char *why, size_t size) {
    static char boxes[4200], trees[4200];
    const char *step;
    snprintf(boxes, sizeof boxes, "%s/boxes", dir);
    snprintf(trees, sizeof trees, "%s", layers);
    layout_bases(boxes, trees);
    if (L.userns_error) {
        errno = L.userns_error;
        return "user namespace";
    }
    cg_open(run);
    if ((!L.in_userns && unshare(CLONE_NEWNS)) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return "mount namespace";
    if (disk_open(dir, L.in_userns ? "" : image, why, size)) return "state directory";
    char stage[4200];
    snprintf(stage, sizeof stage, "%s/mnt", dir);
    if (mkdir(stage, 0700) && errno != EEXIST) return "state directory";
    if (mounts_open(&L.mounts, stage, L.in_userns, &step)) return step;
    if (slots_open(first, ranges, L.in_userns)) return "network namespace";
    if (unshare(CLONE_NEWUTS) || sethostname("sandbox", 7) || (L.home_uts = open("/proc/self/ns/uts", O_RDONLY | O_CLOEXEC)) < 0) return "host name";
    int maker = is_ahead ? maker_open() : -1;  // nobody else makes anything ahead of need
    if (maker >= 0 && watch(maker, tag(SRC_MAKER, 0))) return "memory";
    return NULL;
}

static void on_config(uint32_t seq, struct rd *r) {
    char *run = launcher_text(rd_name(r)), *dir = launcher_text(rd_name(r)), *image = launcher_text(rd_name(r)), *layers = launcher_text(rd_name(r));
    unsigned first = rd_u32(r), ranges = rd_u32(r);
    bool is_ahead = rd_u8(r);
    char why[256];
    if (!run || !dir || !image || !layers || !rd_done(r) || L.ready) {
        launcher_refuse(seq, "request", EINVAL);
    } else {
        const char *step = configure(run, dir, image, layers, first, ranges, is_ahead, why, sizeof why);
        if (step) {
            launcher_refuse(seq, step, errno);
        } else {
            L.ready = true;
            struct wr w = launcher_answer(seq, 0);
            wr_u8(&w, L.in_userns);
            wr_u8(&w, (uint8_t)cg_abilities());
            wr_u8(&w, (uint8_t)disk_mode());
            wr_bytes(&w, why, strlen(why));
            launcher_send(&w, NULL, 0);
        }
    }
    free(run), free(dir), free(image), free(layers);
}

void launcher_packet(const uint8_t *packet, size_t size) {
    struct rd r = rd_of(packet, size);
    uint32_t seq = rd_u32(&r);
    uint8_t op = rd_u8(&r);
    if (op != OP_CONFIG && !L.ready) {
        launcher_refuse(seq, "not configured", EINVAL);
        return;
    }
    if (op == OP_ENTER || op == OP_FREEZE || op == OP_SNAPSHOT || op == OP_PRISTINE || op == OP_LIMIT) {
        struct rd about = r;
        if (launcher_defer(rd_u32(&about), packet, size)) return;
    }
    switch (op) {
    case OP_CONFIG: on_config(seq, &r); break;
    case OP_CREATE: launcher_create(seq, &r); break;
    case OP_DESTROY: on_destroy(seq, &r); break;
    case OP_ENTER: launcher_enter(seq, &r); break;
    case OP_FREEZE: on_freeze(seq, &r); break;
    case OP_SWEEP: on_sweep(seq, &r); break;
    case OP_SNAPSHOT: launcher_snapshot(seq, &r); break;
    case OP_DROP_LAYER: launcher_drop_layer(seq, &r); break;
    case OP_PRISTINE: launcher_pristine(seq, &r); break;
    case OP_LIMIT: launcher_limit(seq, &r); break;
    default: launcher_refuse(seq, "request", EINVAL);
    }
}

// False: the engine is gone.
static bool on_packet(void) {
    static uint8_t packet[PACKET_MAX];
    ssize_t n;
    do n = recv(L.engine, packet, sizeof packet, 0);
    while (n < 0 && errno == EINTR);
    if (n <= 0) return n < 0 && errno == EAGAIN;
    launcher_packet(packet, (size_t)n);
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
    layout_let_go();
    reap_others();
    retry_leftovers();
    sweep_trash();
    bool is_entering = launcher_entering(), is_snapshotting = launcher_snapshotting();
    // While a snapshot is taken everything in that sandbox waits for this loop.
    if (!next_prepare()) spares_prepare();
    if (slots_prepare() || (!is_snapshotting && disk_prepare())) return 0;
    if (is_entering || is_snapshotting || L.leftover_count || L.sweeper > 0) return RETRY_MS;
    int spare_ms = spares_expire(), next_ms = next_expire();
    return spare_ms < 0 || (next_ms >= 0 && next_ms < spare_ms) ? next_ms : spare_ms;
}

static void on_made(void) {
    struct furniture f;
    enum maker_says said = maker_said(&f);
    if (said == MAKER_NOTHING) return;
    bool was_spare = spares_made(said, &f);
    if (!was_spare) next_made(said, &f);
    if (!next_prepare() && was_spare) spares_prepare();
}

// How many there were; -1: the engine is gone.
static int take_events(int wait_ms) {
    struct epoll_event events[64];
    int n = epoll_wait(L.epoll, events, 64, wait_ms);
    if (n < 0) return errno == EINTR ? 0 : -1;
    for (int i = 0; i < n; i++) {
        uint32_t which = (uint32_t)events[i].data.u64;
        struct box *b = launcher_find(which);
        switch ((enum source)(events[i].data.u64 >> 32)) {
        case SRC_ENGINE:
            if (!on_packet()) return -1;
            break;
        case SRC_BOX:
            if (b) launcher_bury(b);
            break;
        case SRC_STATUS:
            if (b && b->status >= 0) on_status(b), hold_mounts(b);
            break;
        case SRC_ENTRY: launcher_entered(which); break;
        case SRC_SNAPSHOT: launcher_snapshot_said(which); break;
        case SRC_MAKER: on_made(); break;
        }
    }
    return n;
}

static void serve(void) {
    int wait_ms = -1, n;
    while ((n = take_events(wait_ms)) >= 0) {
        launcher_entering();
        launcher_snapshotting();
        // Whoever ends one sandbox may soon want another.
        if (L.buried) spares_prepare();
        L.buried = false;
        wait_ms = n > 0 ? (L.ready ? QUIET_MS : -1) : on_quiet();
    }
}

// The engine is gone. Everything of its is ended and removed; what would take longer than this is left to the next engine's sweep.
static void close_all(void) {
    epoll_ctl(L.epoll, EPOLL_CTL_DEL, L.engine, NULL);  // its end would be told again and again
    spares_close();
    for (unsigned i = 0; i < BOXES_MAX; i++)
        if (L.boxes[i]) io_close(&L.boxes[i]->mounts), launcher_end(L.boxes[i]);  // with its snapshot, which would hold on to its dead
    uint64_t until = io_now_ns() + 8000000000u;
    for (unsigned i = 0; i < BOXES_MAX; i++)
        while (L.boxes[i] && io_now_ns() < until) take_events(100);
    retry_leftovers();
    disk_close();
    cg_close();
    // What was thrown away since the sweeper that still runs was started needs another one.
    for (int round = 0; round < 2; round++) {
        if (L.sweeper > 0) waitpid(L.sweeper, NULL, 0);
        L.sweeper = -1;
        sweep_trash();
    }
    if (L.sweeper > 0) waitpid(L.sweeper, NULL, 0);
}

// The running program becomes a sealed copy in memory, so that no way through /proc can ever reach the file on the host.
static void seal_program(char **argv, const char *how) {
    autoclose int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    autoclose int copy = memfd_create("cell", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct stat st;
    if (self < 0 || copy < 0 || fstat(self, &st)) return;
    for (off_t at = 0; at < st.st_size;)
        if (sendfile(copy, self, &at, (size_t)(st.st_size - at)) <= 0) return;
    if (fcntl(copy, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) return;
    char *args[] = {argv[0], argv[1], argv[2], (char *)(uintptr_t)how, NULL}, *env[] = {NULL};
    fexecve(copy, args, env);
    fexecve(self, args, env);  // a host that forbids the copy (vm.memfd_noexec) runs the file itself
}

static void raise_file_limit(void) {
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files)) return;
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
}

int launcher_main(int argc, char **argv) {
    if (argc < 3) return 2;
    if (argc == 3) {
        // The user namespace comes before the exec: memory belongs to the namespace in which its program was started, and only
        // who has rights there may later enter the sandboxes, which cannot be looked into otherwise.
        const char *how = is_host_root() ? "root" : become_userns_root() ? "failed" : "userns";
        L.userns_error = strcmp(how, "failed") ? 0 : errno;
        if (!L.userns_error) seal_program(argv, how);
        L.in_userns = !strcmp(how, "userns");
    } else {
        L.in_userns = !strcmp(argv[3], "userns");
    }
    L.sweeper = -1;
    L.engine = atoi(argv[2]);
    L.epoll = epoll_create1(EPOLL_CLOEXEC);
    if (L.epoll < 0) return 1;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, SIG_IGN);   // Ctrl-C reaches the whole terminal group; the engine decides what it means
    signal(SIGTERM, SIG_IGN);
    umask(022);
    raise_file_limit();
    seccomp_prepare();
    if (watch(L.engine, tag(SRC_ENGINE, 0))) return 1;
    serve();
    close_all();
    return 0;
}
