// The agent's dispatch and life: what each frame means, who reaps, and what is left when the channel ends.
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "attach.h"
#include "contained.h"
#include "dispatch.h"
#include "held.h"
#include "output.h"
#include "process.h"
#include "proxy.h"
#include "reborn.h"
#include "relay.h"
#include "session.h"

#define CLEAN_UP_NS 2000000000u  // for killing what is left; init does not need it

static struct source children;
static bool greeted, is_held;

// ---- frames ----

static void no_stop(struct request *r, enum stop_reason why) { (void)r, (void)why; }
static const struct request_ops at_once = {.stop = no_stop};

static bool hello(const struct frame *f) {
    struct rd r = f->payload;
    uint32_t magic = rd_u32(&r);
    uint16_t major = rd_u16(&r), minor = rd_u16(&r);
    struct span version = rd_bytes(&r);
    char text[256];
    if (f->id || !rd_done(&r) || magic != WIRE_MAGIC) {
        reject(f, "not a HELLO of this protocol");
        return false;
    }
    if (major != WIRE_MAJOR) {
        snprintf(text, sizeof text, "the cell %s speaks protocol %d.%d, the host %.*s speaks %u.%u: install the same release on both sides",
                 UNTAX_VERSION, WIRE_MAJOR, WIRE_MINOR, (int)(version.size > 64 ? 64 : version.size), (const char *)version.at, major, minor);
        frame_error(&host, 0, E_VERSION, 0, text);
        return false;
    }
    greeted = true;
    prctl(PR_SET_NAME, "cell-agent");
    return true;
}

static void say_hello(void) {
    size_t begun = frame_begin(&host, 0, K_HELLO);
    wr_u32(&host, WIRE_MAGIC);
    wr_u16(&host, WIRE_MAJOR);
    wr_u16(&host, WIRE_MINOR);
    wr_bytes(&host, UNTAX_VERSION, strlen(UNTAX_VERSION));
    frame_end(&host, begun);
}

static void ping(const struct frame *f) {
    if (!rd_done(&f->payload)) reject(f, "a malformed PING");
    else {
        struct request *r = request_new(f, &at_once, NULL);
        if (r) request_done(r);
    }
}

// DATA, CREDIT and CANCEL: for a request that is open, or too late.
static void for_open_request(const struct frame *f) {
    struct request *r = request_find(f->id);
    struct rd p = f->payload;
    if (f->flags) return;
    switch (f->kind) {
    case K_CANCEL:
        if (r) r->ops->stop(r, STOP_CANCEL);
        return;
    case K_CREDIT: {
        uint8_t stream = rd_u8(&p);
        uint32_t bytes = rd_u32(&p);
        if (r && r->ops->credit && rd_done(&p)) r->ops->credit(r, stream, bytes);
        return;
    }
    default: {
        bool eof = rd_u8(&p);
        struct span data = rd_rest(&p);
        if (r && r->ops->data && !p.bad) r->ops->data(r, eof, data);
    }
    }
}

bool agent_dispatch(const struct frame *f, const uint8_t *raw, size_t size) {
    if (f->kind == K_HELLO) return hello(f);
    if (!greeted) {
        reject(f, "the first frame must be HELLO");
        return false;
    }
    if (f->id & EGRESS_BIT) {
        proxy_handle(f);
        return true;
    }
    switch (f->kind) {
    case K_CANCEL: case K_CREDIT: case K_DATA: for_open_request(f); break;
    case K_CONFIGURE: config_handle(f); break;
    case K_BATCH: batch_handle(f, agent_dispatch); break;
    case K_PING: ping(f); break;
    case K_QUIESCE: quiesce_handle(f); break;
    case K_GO_ON: channel_speak(false); break;
    case K_REBORN:
        if (!reborn_handle(f)) return false;
        greeted = false;
        say_hello();
        break;
    case K_SPAWN: spawn_handle(f); break;
    case K_SIGNAL: signal_handle(f); break;
    case K_RESIZE: resize_handle(f); break;
    case K_PROCESSES: processes_handle(f); break;
    case K_ATTACH: attach_handle(f); break;
    case K_SESSION_OPEN: session_open_handle(f); break;
    case K_SESSION_RUN: session_run_handle(f); break;
    case K_SESSION_CLOSE: session_close_handle(f); break;
    case K_READ: case K_WRITE: case K_LIST: case K_STAT: case K_MKDIR: case K_REMOVE: case K_MOVE: case K_UPLOAD: case K_DOWNLOAD:
    case K_SEARCH: case K_EDIT: case K_PATCH: case K_WATCH: case K_MARK: case K_MARKS: forward(f, raw, size); break;
    case K_CONNECT: connect_handle(f); break;
    default: frame_error(&host, f->id, E_UNSUPPORTED, 0, "no such request"); break;
    }
    return true;
}

// ---- children ----

static uint64_t ns_of(struct timeval t) { return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_usec * 1000u; }

// Commands, workers, and orphans that have become ours. Signals merge, so all that ended are taken each time.
static void reap(void) {
    int status;
    struct rusage use;
    for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &use)) > 0;) {
        struct ending e = {.pid = (uint32_t)pid, .status = status, .at_ns = io_now_ns(), .user_ns = ns_of(use.ru_utime),
                           .system_ns = ns_of(use.ru_stime), .peak_kib = (uint64_t)use.ru_maxrss};
        if (!processes_exited(&e) && !sessions_exited(&e) && !workers_reaped((int)pid)) exec_remember(&e);
    }
}

static bool is_spared(int pid) { return pid == getpid() || worker_is(pid); }

// A sender outside the sandbox has no number here. Who queues a signal writes its own number into it, 0 if he likes, but cannot call it a plain
// one (SI_USER); one that the kernel sends for a file (F_SETSIG) has none either and is not plain.
static bool is_from_outside(const struct signalfd_siginfo *i) { return i->ssi_signo == SIGUSR1 && i->ssi_code == SI_USER && !i->ssi_pid; }

static void on_children(struct source *s, uint32_t events) {
    (void)events;
    struct signalfd_siginfo info[8];
    for (ssize_t n; (n = read(s->fd, info, sizeof info)) > 0;)
        for (size_t i = 0; i < (size_t)n / sizeof *info; i++)
            if (is_from_outside(&info[i]) && contained_shed(is_spared)) counters_oom();
    reap();
}

static bool watch_children(bool is_told) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    if (is_told && getpid() == 1) sigaddset(&set, SIGUSR1);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGCHLD, SIG_DFL);  // ignored, as some parents leave it, it would let nobody be waited for
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0) return false;
    source_init(&children, signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK), on_children);
    return children.fd >= 0 && source_want(&children, EPOLLIN);
}

// As a plain program nobody else ends what was started here. Everything descends from us: we are its reaper. Most often only workers are
// left, who are known.
static void kill_everything(void) {
    uint64_t end = io_now_ns() + CLEAN_UP_NS;
    bool dying = workers_kill();
    do {
        if (!dying) kill_processes(getpid(), SIGKILL, true, true);
        dying = false;
        siginfo_t info;
        // The next round after somebody has died; not before, and at once.
        while (waitid(P_ALL, 0, &info, WEXITED | WNOWAIT) < 0)
            if (errno != EINTR) return;
        pid_t dead;
        while ((dead = waitpid(-1, NULL, WNOHANG)) > 0) continue;
        if (dead < 0) return;  // nobody is left
    } while (io_now_ns() < end);
}

// ---- life ----

static bool settle(void) {
    workers_flush();
    channel_flush();
    return !channel_ended();
}

bool agent_open(const struct agent_opts *opts) {
    greeted = false;
    is_held = opts->held_name;
    return loop_init() && config_open(opts->workdir) && workers_open(opts) && watch_children(opts->is_told) &&
           channel_open(opts->channel_in, opts->channel_out, agent_dispatch) &&
           (!opts->held_name || held_open(opts->held_name, opts->held_fd, opts->held_patience_s));
}

void agent_close(void) {
    relays_free();
    proxy_free();
    sessions_free();
    processes_free();
    workers_free();
    requests_free();
    config_free();
    source_close(&children);
    outputs_close();
    channel_close();
    if (is_held) held_close();
    loop_free();
}

int agent_main(const struct agent_opts *opts) {
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_NAME, "cell-waiting");  // until its holder has said a word
    if (!opts->is_init) prctl(PR_SET_CHILD_SUBREAPER, 1);
    processes_open(opts);
    sessions_open(opts);
    if (!agent_open(opts)) return 1;
    say_hello();
    loop_run(settle);
    if (!opts->is_init) kill_everything();
    agent_close();
    return 0;
}
