#define _GNU_SOURCE
#include "sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <grp.h>
#include <poll.h>
#include <unistd.h>

#include "agent.h"
#include "birth.h"
#include "identity.h"
#include "io.h"
#include "kernel.h"
#include "mounts.h"
#include "seccomp.h"
#include "worker.h"

#define PTYS_MAX "64"
#define SETUP_PATIENCE_MS 4000  // less than the launcher waits for a worker

static int status_fd = -1;

_Noreturn static void fail(const char *step) {
    struct setup_failure f = {.error = errno};
    snprintf(f.step, sizeof f.step, "%s", step);
    if (status_fd >= 0 && write(status_fd, &f, sizeof f) < 0) _exit(71);
    _exit(70);
}

// ---- descriptors ----

static int by_number(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

// Everything from 3 up that is not listed.
static void close_others(int *keep, size_t count) {
    qsort(keep, count, sizeof *keep, by_number);
    unsigned from = 3;
    for (size_t i = 0; i < count; i++) {
        if (keep[i] < (int)from) continue;
        if ((unsigned)keep[i] > from) k_close_range(from, (unsigned)keep[i] - 1);
        from = (unsigned)keep[i] + 1;
    }
    k_close_range(from, ~0u);
}

// The launcher's own descriptors, and those it holds for other sandboxes, end here: before any limit on their number is set.
static void keep_plan_only(const struct plan *p) {
    int keep[32];
    size_t n = 0;
    const int single[] = {p->channel, p->control, p->status, p->slot.userns, p->slot.netns, p->empty_ns, p->dev, p->cg.memory_events, p->cg.pids_events, p->cg.work_group};
    for (size_t i = 0; i < sizeof single / sizeof *single; i++) keep[n++] = single[i];
    for (int i = 0; i < p->cg.agent_joins; i++) keep[n++] = p->cg.agent_join[i];
    for (int i = 0; i < p->cg.work_joins; i++) keep[n++] = p->cg.work_join[i];
    close_others(keep, n);
}

// ---- the file system ----

static int attach(int mount_fd, const char *at) { return k_move_mount(mount_fd, "", AT_FDCWD, at, K_MOVE_FROM_EMPTY); }

static int new_proc(void) {
    autoclose int fs = k_fsopen("proc");
    if (fs < 0 || k_fsconfig(fs, K_FSCONFIG_CREATE, NULL, NULL)) return -1;
    return k_fsmount(fs, K_ATTR_NOSUID | K_ATTR_NODEV | K_ATTR_NOEXEC);
}

static int new_pts(void) {
    autoclose int fs = k_fsopen("devpts");
    if (fs < 0 || k_fsconfig(fs, K_FSCONFIG_STRING, "ptmxmode", "0666") || k_fsconfig(fs, K_FSCONFIG_STRING, "mode", "0620") ||
        k_fsconfig(fs, K_FSCONFIG_STRING, "max", PTYS_MAX) || k_fsconfig(fs, K_FSCONFIG_CREATE, NULL, NULL))
        return -1;
    return k_fsmount(fs, K_ATTR_NOSUID | K_ATTR_NOEXEC);
}

// Puts a view of `source` over `target`; both are in this namespace and neither was made by the workload.
static int cover(const char *source, const char *target, bool read_only) {
    // Looked at first: a view that was made for nothing costs a grace period of the kernel's when it is closed, and there were six of them.
    if (faccessat(AT_FDCWD, target, F_OK, AT_SYMLINK_NOFOLLOW)) return errno == ENOENT ? 0 : -1;  // ENOENT: this kernel has no such entry
    autoclose int tree = k_open_tree(AT_FDCWD, source, K_OPEN_TREE_CLONE | K_OPEN_TREE_CLOEXEC);
    struct k_mount_attr attr = {.set = K_ATTR_RDONLY | K_ATTR_NOSUID | K_ATTR_NODEV | K_ATTR_NOEXEC};
    if (tree >= 0 && read_only && k_mount_setattr(tree, "", K_AT_EMPTY_PATH, &attr)) return -1;
    return tree < 0 ? -1 : attach(tree, target);
}

// The paths container runtimes hide or protect. /dev and the empty /dev/shm are ours: what covers an entry is never the workload's.
static int protect_proc(void) {
    static const char *const files[] = {"/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/timer_list", "/proc/timer_stats"};
    static const char *const dirs[] = {"/proc/acpi", "/proc/asound", "/proc/scsi"};
    static const char *const fixed[] = {"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (cover("/dev/null", files[i], false)) return -1;
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++)
        if (cover("/dev/shm", dirs[i], false)) return -1;
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (cover(fixed[i], fixed[i], true)) return -1;
    return 0;
}

// The launcher makes the overlays while this process makes everything else; they come over the control socket, the root first.
static void receive_mounts(int control, int *mounts, size_t count) {
    for (size_t got = 0; got < count;) {
        int fds[FDS_MAX];
        size_t more = 0;
        char byte;
        ssize_t n = io_recv_fds(control, &byte, 1, fds, &more);
        if (n < 0 && errno == EAGAIN) {
            if (poll(&(struct pollfd){.fd = control, .events = POLLIN}, 1, -1) < 0 && errno != EINTR) fail("mounts");
            continue;
        }
        if (n != 1 || !more || got + more > count) _exit(70);  // the launcher has given up, and has told why
        for (size_t i = 0; i < more; i++) mounts[got++] = fds[i];
    }
}

static void build_root(const struct plan *p) {
    if (setns(p->empty_ns, CLONE_NEWNS) || unshare(CLONE_NEWNS)) fail("mount namespace");
    // The kernel lets an ordinary user mount /proc only while another is in sight; the empty namespace holds one for that.
    autoclose int proc = new_proc();
    if (proc < 0) fail("proc");
    if (p->in_userns && umount2("/proc", MNT_DETACH)) fail("proc of the host");
    autoclose int pts = new_pts();
    if (pts < 0) fail("pts");
    autoclose int shm = mounts_tmpfs(p->shm_bytes, TMPFS_INODES(p->shm_bytes), "1777", K_ATTR_NOSUID | K_ATTR_NODEV);
    if (shm < 0) fail("shm");
    autoclose int tmp = mounts_tmpfs(p->tmp_bytes, TMPFS_INODES(p->tmp_bytes), "1777", K_ATTR_NOSUID | K_ATTR_NODEV);
    if (tmp < 0) fail("tmp");
    int mounts[1 + VIEWS_MAX];
    receive_mounts(p->control, mounts, 1 + p->place_count);
    // Mounting over the empty root and changing into it takes the same time however many processes the host has; pivot_root walks them all.
    if (attach(mounts[0], "/") || fchdir(mounts[0]) || chroot(".")) fail("root");
    for (size_t i = 0; i < p->place_count; i++)
        if (attach(mounts[1 + i], p->places[i])) fail(p->places[i]);
    for (size_t i = 0; i <= p->place_count; i++) close(mounts[i]);
    if (attach(p->dev, "/dev")) fail("dev");
    if (attach(proc, "/proc") || protect_proc()) fail("proc");
    if (identity_put(p->in_userns, p->slot.base)) fail("machine id");
    if (attach(pts, "/dev/pts")) fail("pts");
    if (attach(shm, "/dev/shm")) fail("shm");
    if (attach(tmp, "/tmp")) fail("tmp");
    char where[8];
    if (chdir("/") || !getcwd(where, sizeof where)) fail("working directory");
}

// ---- identity ----

static void limit(int what, rlim_t most) {
    struct rlimit now;
    if (getrlimit((__rlimit_resource_t)what, &now)) fail("limits");
    rlim_t hard = now.rlim_max < most ? now.rlim_max : most;
    struct rlimit set = {hard, hard};
    if (setrlimit((__rlimit_resource_t)what, &set)) fail("limits");
}

static void set_limits(uint64_t disk_bytes, uint32_t pids) {
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_NOFILE, 4096);
    limit(RLIMIT_MEMLOCK, 64 << 10);
    limit(RLIMIT_MSGQUEUE, 800 << 10);
    limit(RLIMIT_RTPRIO, 0);
    limit(RLIMIT_NICE, 0);
    limit(RLIMIT_FSIZE, disk_bytes);
    // Counted within the sandbox's user namespace: holds even where there is no pids group. Where there is one it is left to that, which counts what it
    // refused and can be changed later. The agent, which is in no such group, has the same user where there is only one.
    if (!(cg_abilities() & CG_PIDS)) limit(RLIMIT_NPROC, (rlim_t)pids + 1);
}

// What "root inside" may do, within its own user namespace: enough to install packages.
static const uint32_t ROOT_INSIDE = 1u << CAP_CHOWN | 1u << CAP_DAC_OVERRIDE | 1u << CAP_FOWNER | 1u << CAP_FSETID | 1u << CAP_SETGID | 1u << CAP_SETUID;

static void set_capabilities(uint32_t keep) {
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{.effective = keep, .permitted = keep}};
    if (syscall(SYS_capset, &header, data)) fail("capabilities");
}

static void drop_bounding(uint32_t keep) {
    for (int cap = 0; cap < 64; cap++) {
        if (cap < 32 && keep >> cap & 1) continue;
        if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) && errno == EINVAL) break;  // past the kernel's last one
    }
}

// Nobody may look into this process. First of all, and not last: an ordinary user's workload has its user id from the start, and could trace
// one that has given up its capabilities and has no filter yet.
static void hide(void) {
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)) fail("dumpable");
}

struct bounds {
    uint64_t disk_bytes;
    uint32_t pids;
};

// What holds for every process of a sandbox alike, and is inherited. The limits come after the user namespace, within which the kernel counts
// processes. Of what follows only a change of identity is still allowed.
static void confine(int userns, uint32_t keep, struct bounds bounds) {
    if (setns(userns, CLONE_NEWUSER)) fail("user namespace");
    close(userns);
    set_limits(bounds.disk_bytes, bounds.pids);
    drop_bounding(keep);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("no_new_privs");
    if (seccomp_apply()) fail("seccomp");
}

// The last of the launcher's rights go. In an ordinary user's sandbox there is one id and it is everybody's.
static void become(bool in_userns, uid_t uid, gid_t gid, uint32_t keep) {
    if (!in_userns && (setgroups(0, NULL) || setresgid(gid, gid, gid) || setresuid(uid, uid, uid))) fail("user id");
    set_capabilities(keep);
    hide();  // again: the change of credentials has undone it
}

static void reset_signals(void) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
}

// ---- the two processes ----

_Noreturn static void be_worker(const struct plan *p, int sock, struct birth *birth) {
    if (cg_join(p->cg.work_join, p->cg.work_joins)) fail("cgroup of the workload");
    int keep[] = {sock, status_fd, p->slot.userns};
    close_others(keep, 3);
    prctl(PR_SET_NAME, "cell-worker");
    if (unshare(CLONE_NEWCGROUP)) fail("cgroup namespace");
    confine(p->slot.userns, 0, (struct bounds){p->disk_bytes, p->pids});
    become(p->in_userns, WORKLOAD_UID, WORKLOAD_UID, 0);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("worker");
    io_close(&status_fd);
    struct worker_opts opts = {.workdir = p->workdir, .birth = birth};
    _exit(worker_main(sock, &opts));
}

_Noreturn void sandbox_main(struct plan *p) {
    status_fd = p->status;
    hide();
    keep_plan_only(p);
    reset_signals();
    setsid();
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("parent");
    // The launcher may have died before that: then nobody reads the status any more, and nobody wants this sandbox.
    if (poll(&(struct pollfd){.fd = status_fd}, 1, 0) != 0) _exit(70);
    if (cg_join(p->cg.agent_join, p->cg.agent_joins)) fail("cgroup of the agent");
    if (setns(p->slot.netns, CLONE_NEWNET)) fail("network namespace");
    if (*p->hostname && sethostname(p->hostname, strlen(p->hostname))) fail("host name");
    build_root(p);
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) fail("worker socket");
    io_roomy(pair[0]), io_roomy(pair[1]);
    struct birth *birth = birth_new();
    struct k_clone_args args = {.exit_signal = SIGCHLD};
    pid_t worker = cg_clone(&args, p->cg.work_group);
    if (worker < 0) fail("worker");
    if (!worker) be_worker(p, pair[1], birth);
    int keep[] = {p->channel, p->control, pair[0], p->cg.memory_events, p->cg.pids_events, p->slot.userns, status_fd};
    close_others(keep, sizeof keep / sizeof *keep);
    prctl(PR_SET_NAME, "cell");
    if (unshare(CLONE_NEWCGROUP)) fail("cgroup namespace");
    confine(p->slot.userns, 0, (struct bounds){p->disk_bytes, p->pids});
    become(p->in_userns, AGENT_UID, AGENT_UID, 0);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("parent");  // again: the change of credentials has cleared it
    io_close(&status_fd);
    struct agent_opts opts = {
        .channel_in = p->channel, .channel_out = p->channel, .worker_fd = pair[0], .control_fd = p->control,
        .memory_events_fd = p->cg.memory_events, .pids_events_fd = p->cg.pids_events, .birth = birth, .workdir = p->workdir, .is_init = true,
    };
    _exit(agent_main(&opts));
}

// ---- entering a live one ----

struct identity {
    uid_t uid;
    gid_t gid;
};

static bool parse_number(const char *text, const char *end, unsigned *out) {
    unsigned long value = 0;
    if (text == end) return false;
    for (; text < end; text++) {
        if (*text < '0' || *text > '9') return false;
        value = value * 10 + (unsigned long)(*text - '0');
        if (value >= RANGE_SIZE) return false;
    }
    *out = (unsigned)value;
    return true;
}

// One line of the sandbox's own /etc/passwd, which the workload may have written: name:x:uid:gid:…
static bool line_names(const char *line, const char *end, const char *user, struct identity *out) {
    const char *field[5] = {line};
    int n = 1;
    for (const char *at = line; at < end && n < 5; at++)
        if (*at == ':') field[n++] = at + 1;
    size_t length = strlen(user);
    if (n < 5 || (size_t)(field[1] - 1 - line) != length || memcmp(line, user, length)) return false;
    unsigned uid, gid;
    if (!parse_number(field[2], field[3] - 1, &uid) || !parse_number(field[3], field[4] - 1, &gid)) return false;
    *out = (struct identity){uid, gid};
    return true;
}

// Called after the root switch. The agent's own id is not to be had.
static bool look_up(const char *user, struct identity *out) {
    const char *colon = strchr(user, ':');
    const char *end = user + strlen(user);
    unsigned uid, gid;
    if (!*user) {
        *out = (struct identity){WORKLOAD_UID, WORKLOAD_UID};
    } else if (!strcmp(user, "root")) {
        *out = (struct identity){0, 0};
    } else if (parse_number(user, colon ? colon : end, &uid)) {
        gid = uid;
        if (colon && !parse_number(colon + 1, end, &gid)) return false;
        *out = (struct identity){uid, gid};
    } else {
        static char text[64 << 10];
        autoclose int fd = open("/etc/passwd", O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
        struct stat st;
        if (fd < 0 || fstat(fd, &st) || !S_ISREG(st.st_mode)) return false;
        ssize_t size = read(fd, text, sizeof text);
        bool found = false;
        for (const char *at = text, *stop = text + (size > 0 ? size : 0); at < stop && !found;) {
            const char *eol = memchr(at, '\n', (size_t)(stop - at));
            if (!eol) eol = stop;
            found = line_names(at, eol, user, out);
            at = eol + 1;
        }
        if (!found) return false;
    }
    return out->uid != AGENT_UID;
}

_Noreturn static void be_entered_worker(struct entry *e) {
    struct identity who;
    if (!look_up(e->user, &who)) {
        errno = ESRCH;
        fail("user");
    }
    if (e->in_userns && who.uid != WORKLOAD_UID) {
        errno = EPERM;
        fail("user");
    }
    if (cg_join(e->cg.work_join, e->cg.work_joins)) fail("cgroup of the workload");
    int keep[] = {e->sock, status_fd, e->userns};
    close_others(keep, 3);
    prctl(PR_SET_NAME, "cell-worker");
    uint32_t caps = who.uid == 0 ? ROOT_INSIDE : 0;
    confine(e->userns, caps, (struct bounds){e->disk_bytes, e->pids});
    become(e->in_userns, who.uid, who.gid, caps);  // no death signal: its parent until now is about to go, and the next is PID 1
    io_close(&status_fd);
    struct worker_opts opts = {.workdir = e->workdir, .birth = e->birth};
    _exit(worker_main(e->sock, &opts));
}

// Until its set-up is over the first process is still in some of the launcher's own namespaces, and whoever followed it there would have the host's.
static void wait_for_setup(int setup) {
    struct pollfd p = {.fd = setup};
    int n;
    do n = poll(&p, 1, SETUP_PATIENCE_MS);
    while (n < 0 && errno == EINTR);
    if (n == 1 && p.revents & POLLHUP) return;
    if (!n) errno = ETIMEDOUT;
    fail("sandbox");
}

_Noreturn void sandbox_enter(struct entry *e) {
    status_fd = e->status;
    hide();
    if (e->setup >= 0) wait_for_setup(e->setup);
    int keep[8] = {e->pidfd, e->userns, e->sock, e->status};
    for (int i = 0; i < e->cg.work_joins; i++) keep[4 + i] = e->cg.work_join[i];
    close_others(keep, 4 + (size_t)e->cg.work_joins);
    reset_signals();
    setsid();
    // Every namespace at once; entering the mount namespace also changes root and working directory to the sandbox's.
    if (setns(e->pidfd, CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)) fail("namespaces");
    if (chdir("/")) fail("working directory");
    // The pid namespace holds for children only, and a worker must be PID 1's child so that its commands are too:
    // a first child goes at once and leaves the second to the sandbox's reaper.
    pid_t first = fork();
    if (first < 0) fail("worker");
    if (first) {
        int how;
        waitpid(first, &how, 0);
        _exit(0);
    }
    pid_t second = fork();
    if (second < 0) fail("worker");
    if (second) _exit(0);
    be_entered_worker(e);
}
