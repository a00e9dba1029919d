// The worker's loop: frames from the agent in, programs started and file actions done, answers out.
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "actions.h"
#include "link.h"
#include "spawn.h"

#define PROBE_SIZE (64u << 10)
#define PROBE_AHEAD (1 << 20)
#define QUEUE_FULL (1u << 20)  // jobs rest while this much waits for the agent

static struct link agent;
static struct actions *actions;
static char *workdir;
static struct birth *birth;

// ---- EXEC ----

// Strings of an EXEC carry their NUL, so that they can be used where they lie.
static char *c_string(struct rd *r) {
    struct span s = rd_bytes(r);
    if (!s.size || s.at[s.size - 1]) {
        r->bad = true;
        return NULL;
    }
    return (char *)(uintptr_t)s.at;
}

static char **c_strings(struct rd *r) {
    uint32_t count = rd_u32(r);
    if (r->bad || count > (size_t)(r->end - r->at) / 5) {  // each takes its length and one byte at least
        r->bad = true;
        return NULL;
    }
    char **list = calloc(count + 1u, sizeof *list);
    if (!list) r->bad = true;
    for (uint32_t i = 0; i < count && !r->bad; i++) list[i] = c_string(r);
    return list;
}

static void handle_exec(const struct frame *f) {
    struct rd r = f->payload;
    struct spawn s = {0};
    s.call = f->id;
    s.birth = birth;
    s.options = rd_u16(&r);
    s.rows = rd_u16(&r);
    s.cols = rd_u16(&r);
    bool null_input = rd_u8(&r);
    uint8_t count = rd_u8(&r);
    s.cwd = c_string(&r);
    s.argv = c_strings(&r);
    s.env = c_strings(&r);
    int first = null_input ? 1 : 0;
    struct spawned done = {.error = EINVAL, .step = STEP_MALFORMED, .pty = -1};
    s.fds[0] = -1;
    if (rd_done(&r) && s.argv[0] && first + count <= 6 && link_take_fds(&agent, s.fds + first, count)) {
        s.fds_count = first + count;
        done = spawn_run(&s);
        for (int i = first; i < s.fds_count; i++) close(s.fds[i]);
    }
    free(s.argv);
    free(s.env);
    if (done.pty >= 0) link_attach(&agent, &done.pty, 1);
    size_t begun = frame_begin(&agent.out, f->id, K_EXECED);
    wr_u32(&agent.out, (uint32_t)done.pid);
    wr_u32(&agent.out, (uint32_t)done.error);
    wr_u8(&agent.out, (uint8_t)done.step);
    wr_u64(&agent.out, done.start_ns);
    wr_u8(&agent.out, done.pty >= 0);
    frame_end(&agent.out, begun);
}

// ---- KILL and PROBE ----

static void handle_kill(const struct frame *f) {
    struct rd r = f->payload;
    uint32_t pid = rd_u32(&r);
    int32_t signal = rd_i32(&r);
    bool spare_root = rd_u8(&r), tree = rd_u8(&r);
    unsigned n = rd_done(&r) ? kill_processes((pid_t)pid, signal, spare_root, tree) : 0;
    size_t begun = frame_begin(&agent.out, f->id, K_KILLED);
    wr_u32(&agent.out, n);
    frame_end(&agent.out, begun);
}

static bool no_room_in(const char *path) {
    struct statvfs s;
    return statvfs(path, &s) == 0 && s.f_blocks && !s.f_bavail;
}

// A file without a name where the file system knows none, as overlay before Linux 6.3. The name is taken away at once.
static int open_probe(void) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/.untax-probe-%d", workdir, getpid()) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = open(path, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0600);
    if (fd >= 0) unlink(path);
    return fd;
}

// Tries rather than asks: quotas do not show in statvfs. A program that fails writes more at once than the last free kilobytes hold, so a
// larger piece is asked for first, where that costs no writing, and written where it cannot be asked for (gVisor).
static bool write_fails(void) {
    static char block[PROBE_SIZE];  // not const: 64 KiB less in the file
    block[0] = 1;
    autoclose int fd = open(workdir, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) fd = open_probe();
    if (fd < 0) return errno == ENOSPC || errno == EDQUOT;
    size_t left = sizeof block;
    if (fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, PROBE_AHEAD) < 0) {
        if (errno == ENOSPC || errno == EDQUOT) return true;
        left = PROBE_AHEAD;
    }
    while (left) {
        ssize_t n = write(fd, block, left < sizeof block ? left : sizeof block);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return errno == ENOSPC || errno == EDQUOT;
        left -= (size_t)n;
    }
    return false;
}

static void handle_probe(const struct frame *f) {
    size_t begun = frame_begin(&agent.out, f->id, K_PROBED);
    wr_u8(&agent.out, write_fails() || no_room_in("/tmp") || no_room_in("/dev/shm"));
    frame_end(&agent.out, begun);
}

// ---- the loop ----

static void set_workdir(const char *path, size_t size) {
    char *copy = strndup(path, size);
    if (!copy) return;
    free(workdir);
    workdir = copy;
    actions_workdir(actions, workdir);
}

static void handle(const struct frame *f) {
    struct rd r = f->payload;
    switch (f->kind) {
    case K_EXEC: handle_exec(f); return;
    case K_KILL: handle_kill(f); return;
    case K_PROBE: handle_probe(f); return;
    case K_CONFIGURE: {
        struct span dir = rd_name(&r);
        if (dir.size) set_workdir((const char *)dir.at, dir.size);
        return;
    }
    case K_CANCEL: case K_CREDIT: case K_DATA: actions_handle(actions, f); return;
    default:
        if (!actions_handle(actions, f)) frame_error(&agent.out, f->id, E_UNSUPPORTED, 0, "no such action");
    }
}

// Fetches input, waiting for it when there is nothing else to do. False: the agent is gone.
static bool receive(bool jobs) {
    int watch = actions_fd(actions);
    bool sending = link_queued(&agent);
    if (!jobs && !sending && watch < 0) return link_recv(&agent, true) > 0;
    struct pollfd p[2] = {{.fd = agent.fd, .events = (short)(POLLIN | (sending ? POLLOUT : 0))}, {.fd = watch, .events = POLLIN}};
    if (poll(p, 2, jobs ? 0 : -1) < 0) return errno == EINTR;
    if (p[1].revents) actions_ready(actions);
    return !(p[0].revents & ~POLLOUT) || link_recv(&agent, false) >= 0;
}

// Signals are blocked for good: a child starts with them blocked and clears the mask when it is ready for them.
static void set_up_process(void) {
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_NAME, "cell-worker");
    umask(022);
    for (int s = 1; s < NSIG; s++) signal(s, SIG_DFL);
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    // 0, 1 and 2 must be taken, or a descriptor that arrives could land there and be overwritten in the child.
    int fd;
    do fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    while (fd >= 0 && fd <= 2);
    io_close(&fd);
}

int worker_main(int sock, const struct worker_opts *opts) {
    set_up_process();
    link_init(&agent, sock);
    actions = actions_new(&agent.out);
    if (!actions) return 1;
    birth = opts->birth;
    set_workdir(opts->workdir ? opts->workdir : "/", opts->workdir ? strlen(opts->workdir) : 1);
    bool jobs = false;
    while (receive(jobs && link_queued(&agent) < QUEUE_FULL)) {
        struct frame f;
        size_t size;
        while (link_next(&agent, &f, &size)) {
            handle(&f);
            if (f.kind == K_EXEC && !link_flush(&agent)) break;
        }
        // A job that was held up by a full queue goes on when the queue is sent, though nothing new comes in.
        jobs = link_queued(&agent) >= QUEUE_FULL || actions_step(actions);
        if (!link_flush(&agent)) break;
    }
    actions_free(actions);
    free(workdir);
    link_free(&agent);
    return 0;
}
