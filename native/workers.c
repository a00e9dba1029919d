#define _GNU_SOURCE
#include "workers.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "birth.h"
#include "contained.h"
#include "worker.h"

#define WORKERS_MAX 32
#define USER_MAX 256
#define QUEUE_FULL (4u << 20)   // for one worker; beyond it no more requests are taken
#define QUEUE_ROOM (1u << 20)
#define STOP_GRACE_NS 200000000u  // how long a stopped file action may take to say so itself

struct worker {
    struct source source;
    struct link link;
    char user[USER_MAX];  // as the host names it; empty: the default
    int pid;              // 0: not our child
    struct birth *birth;  // what it was starting when it died; NULL: not known
    bool live;
    uint32_t epoch;  // counts its lives; calls of an earlier one are lost
    struct call *calls;
};

static struct worker *workers[WORKERS_MAX];
static const struct agent_opts *options;
static struct source control;
static char *workdir;
static struct rlimit files_limit;
static uint32_t last_call;

static void on_worker(struct source *s, uint32_t events);

// ---- gaining and losing workers ----

static struct worker *find(const char *user, size_t size) {
    for (int i = 0; i < WORKERS_MAX; i++)
        if (workers[i] && strlen(workers[i]->user) == size && !memcmp(workers[i]->user, user, size)) return workers[i];
    return NULL;
}

// The slot stays: whoever holds the pointer finds the next worker for that user in it.
static void lose(struct worker *w) {
    w->live = false;
    w->pid = 0;
    uint32_t epoch = ++w->epoch;
    channel_forget(&w->source);
    source_want(&w->source, 0);
    w->link.fd = -1;
    source_close(&w->source);
    link_free(&w->link);
    // An answer may lead to the next request, and that to a new worker in this very slot: look again after each.
    for (struct call *c = w->calls; c;) {
        if (c->epoch >= epoch) {
            c = c->next;
            continue;
        }
        c->lost(c);
        c = w->calls;
    }
}

static void send_workdir(struct worker *w) {
    size_t begun = frame_begin(&w->link.out, 0, K_CONFIGURE);
    wr_bytes(&w->link.out, workdir, strlen(workdir));
    frame_end(&w->link.out, begun);
}

// Takes over a socket to a ready worker; one already there for that user is replaced.
static struct worker *adopt(int fd, const char *user, size_t size, int pid, struct birth *birth) {
    struct worker *w = find(user, size);
    if (w && w->live) lose(w);
    int slot = 0;
    while (slot < WORKERS_MAX && workers[slot]) slot++;
    if (!w && slot < WORKERS_MAX && size < USER_MAX) w = workers[slot] = calloc(1, sizeof *w);
    if (!w) {
        close(fd);
        birth_free(birth);
        return NULL;
    }
    birth_free(w->birth);
    w->birth = birth;
    memcpy(w->user, user, size);
    w->pid = pid;
    link_init(&w->link, fd);
    source_init(&w->source, fd, on_worker);
    source_want(&w->source, EPOLLIN);
    w->live = true;
    send_workdir(w);
    return w;
}

static void become_worker(int sock, const struct identity *who, struct birth *birth) {
    if (options->work_join > 0 && write(options->work_join, "0", 1) != 1) _exit(1);
    // Everything of the agent goes: above all the channel, and pipes that would otherwise never end.
    int fd = dup3(sock, 3, O_CLOEXEC) < 0 ? sock : 3;
    if (close_range(4, ~0u, 0) < 0)
        for (int i = 4; i < (int)files_limit.rlim_max && i < 65536; i++) close(i);
    setrlimit(RLIMIT_NOFILE, &files_limit);
    if (who && !identity_take(who)) _exit(1);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_DUMPABLE, 0);
    if (write(fd, "", 1) != 1) _exit(1);
    _exit(worker_main(fd, &(struct worker_opts){.workdir = workdir, .birth = birth}));
}

// Waits until the child has let go of our descriptors, so that closing one of them later really closes it.
static struct worker *fork_worker(const char *user, size_t size, const struct identity *who) {
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    (void)user, (void)size, (void)who;
    return NULL;
#else
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0) return NULL;
    io_roomy(pair[0]), io_roomy(pair[1]);
    struct birth *birth = birth_new();
    pid_t pid = fork();
    if (pid == 0) become_worker(pair[1], who, birth);
    close(pair[1]);
    char byte;
    ssize_t n = -1;
    if (pid > 0)
        do n = read(pair[0], &byte, 1);
        while (n < 0 && errno == EINTR);
    if (n != 1) {
        close(pair[0]);
        birth_free(birth);
        return NULL;
    }
    return adopt(pair[0], user, size, pid, birth);
#endif
}

// Packets from the launcher: a user's name, and the worker's socket beside it.
static void take_workers(void) {
    while (control.fd >= 0) {
        char user[USER_MAX];
        int fds[FDS_MAX];
        size_t count = 0;
        ssize_t n = io_recv_fds(control.fd, user, sizeof user, fds, &count);
        if (n < 0 && errno == EAGAIN) return;
        if (n < 0 && errno == EMFILE) continue;  // its worker sees the end of a socket that nobody has
        struct birth *birth = count > 1 ? birth_map(fds[1]) : NULL;
        for (size_t i = 1; i < count; i++) close(fds[i]);
        if (n < 0 || (n == 0 && !count)) source_close(&control);
        if (count) adopt(fds[0], user, n > 0 ? (size_t)n : 0, 0, birth);
    }
}

static void on_control(struct source *s, uint32_t events) {
    (void)s, (void)events;
    take_workers();
}

bool workers_open(const struct agent_opts *opts) {
    options = opts;
    getrlimit(RLIMIT_NOFILE, &files_limit);
    workdir = strdup(opts->workdir ? opts->workdir : "/");
    source_init(&control, opts->control_fd, on_control);
    if (!workdir) return false;
    if (opts->control_fd >= 0 && (!io_nonblocking(opts->control_fd) || !source_want(&control, EPOLLIN))) return false;
    if (opts->worker_fd >= 0) return adopt(opts->worker_fd, "", 0, 0, opts->birth) != NULL;
    bool ok = fork_worker("", 0, opts->identity) != NULL;
    struct rlimit most = {files_limit.rlim_max, files_limit.rlim_max};
    setrlimit(RLIMIT_NOFILE, &most);
    return ok;
}

void workers_free(void) {
    options = NULL;  // from here on nobody gets a new worker
    for (int i = 0; i < WORKERS_MAX; i++)
        if (workers[i]) {
            if (workers[i]->live) lose(workers[i]);
            birth_free(workers[i]->birth);
            free(workers[i]);
            workers[i] = NULL;
        }
    source_close(&control);
    free(workdir);
    workdir = NULL;
}

bool workers_kill(void) {
    bool any = false;
    for (int i = 0; i < WORKERS_MAX; i++)
        if (workers[i] && workers[i]->live && workers[i]->pid > 1) any |= kill(workers[i]->pid, SIGKILL) == 0;
    return any;
}

void workers_configure(const char *path) {
    char *copy = strdup(path);
    if (!copy) return;
    free(workdir);
    workdir = copy;
    for (int i = 0; i < WORKERS_MAX; i++)
        if (workers[i] && workers[i]->live) send_workdir(workers[i]);
}

bool worker_is(int pid) {
    for (int i = 0; i < WORKERS_MAX; i++)
        if (workers[i] && workers[i]->live && workers[i]->pid == pid) return true;
    return false;
}

bool workers_reaped(int pid) {
    for (int i = 0; i < WORKERS_MAX; i++)
        if (workers[i] && workers[i]->live && workers[i]->pid == pid) {
            lose(workers[i]);
            return true;
        }
    return false;
}

struct link *worker_link(struct worker *w) { return &w->link; }

bool call_gave_birth(const struct call *c, uint32_t *pid, uint64_t *start_ns) {
    if (!c->worker->birth) return false;
    struct birth b = *(const volatile struct birth *)c->worker->birth;
    *pid = (uint32_t)b.pid;
    *start_ns = b.start_ns;
    return b.call == c->id && b.pid > 1;
}
bool worker_live(const struct worker *w) { return w->live; }

struct worker *worker_for(struct request *r, struct span user) {
    const char *name = (const char *)user.at;
    struct worker *w = find(name, user.size);
    if (w && w->live) return w;
    take_workers();  // the one asked for may have arrived just before this request and not been seen yet
    w = find(name, user.size);
    if (w && w->live) return w;
    if (user.size >= USER_MAX) {
        request_fail(r, E_GONE, 0, "no such user");
        return NULL;
    }
    if (!options || options->control_fd >= 0 || options->worker_fd >= 0) {
        request_fail(r, E_NO_WORKER, 0, "nobody inside acts for user '%.*s'", (int)user.size, name);
        return NULL;
    }
    struct identity who = {0}, own = options->identity ? *options->identity : (struct identity){getuid(), getgid()};
    bool other = false;
    if (user.size) {
        if (!user_known(user, &who)) {
            request_fail(r, E_GONE, 0, "no such user: %.*s", (int)user.size, name);
            return NULL;
        }
        other = who.uid != own.uid || who.gid != own.gid;
        if (!other) return worker_for(r, (struct span){(const uint8_t *)"", 0});
        if (geteuid() != 0) {
            request_fail(r, E_GONE, EPERM, "not permitted to act as user %.*s: the cell is not root here", (int)user.size, name);
            return NULL;
        }
    }
    w = fork_worker(name, user.size, other ? &who : options->identity);
    if (!w) request_fail(r, E_NO_WORKER, errno, "could not start a worker for user '%.*s'", (int)user.size, name);
    return w;
}

// ---- calls ----

size_t call_begin(struct call *c, struct worker *w, uint8_t kind, void (*reply)(struct call *, const struct frame *, const uint8_t *, size_t),
                  void (*lost)(struct call *)) {
    if (!++last_call) last_call = 1;
    *c = (struct call){.id = last_call, .worker = w, .reply = reply, .lost = lost, .epoch = w->epoch, .next = w->calls};
    w->calls = c;
    return frame_begin(&w->link.out, c->id, kind);
}

void call_end(struct call *c) {
    if (!c->worker) return;
    for (struct call **p = &c->worker->calls; *p; p = &(*p)->next)
        if (*p == c) {
            *p = c->next;
            break;
        }
    c->worker = NULL;
}

void kill_fields(struct worker *w, uint32_t pid, int signal, bool spare_root, bool tree) {
    wr_u32(&w->link.out, pid);
    wr_u32(&w->link.out, (uint32_t)signal);
    wr_u8(&w->link.out, spare_root);
    wr_u8(&w->link.out, tree);
}

void worker_kill(struct worker *w, uint32_t pid, int signal, bool spare_root, bool tree) {
    if (!w->live) return;
    size_t begun = frame_begin(&w->link.out, 0, K_KILL);
    kill_fields(w, pid, signal, spare_root, tree);
    frame_end(&w->link.out, begun);
}

static void on_worker(struct source *s, uint32_t events) {
    struct worker *w = (struct worker *)((char *)s - offsetof(struct worker, source));
    if (events & EPOLLOUT && !link_flush(&w->link)) {
        lose(w);
        return;
    }
    if (!(events & ~(uint32_t)EPOLLOUT)) return;
    int got = link_recv(&w->link, false);
    struct frame f;
    size_t size;
    for (uint8_t *raw; got > 0 && (raw = link_next(&w->link, &f, &size));) {
        struct call *c = w->calls;
        while (c && c->id != f.id) c = c->next;
        if (c) c->reply(c, &f, raw, size);
    }
    if (got < 0 || w->link.broken) lose(w);
    else if (channel_congested()) channel_resume_later(s, EPOLLIN);
}

void workers_flush(void) {
    bool full = false;
    for (int i = 0; i < WORKERS_MAX; i++) {
        struct worker *w = workers[i];
        if (!w || !w->live) continue;
        if (link_queued(&w->link) && !link_flush(&w->link)) {
            lose(w);
            continue;
        }
        size_t queued = link_queued(&w->link);
        if (queued > QUEUE_FULL) full = true;
        uint32_t reading = w->source.wanted & EPOLLIN;
        if (queued || w->source.wanted & EPOLLOUT) source_want(&w->source, reading | (queued ? EPOLLOUT : 0));
    }
    channel_hold(full);
}

// ---- file actions ----

struct forwarded {
    struct call call;
    struct request *request;  // NULL once answered without the worker
    struct timer grace;
    enum stop_reason why;
    bool stopped;
};

static void forwarded_free(struct forwarded *w) {
    call_end(&w->call);
    timer_stop(&w->grace);
    free(w);
}

static void send_on(struct forwarded *w, uint8_t kind) {
    if (!w->call.worker) return;
    frame_end(&w->call.worker->link.out, frame_begin(&w->call.worker->link.out, w->call.id, kind));
}

static void answer_stop(struct forwarded *w) {
    struct request *r = w->request;
    w->request = NULL;
    if (w->why == STOP_CANCEL) request_fail(r, E_CANCELLED, 0, "cancelled");
    else request_fail(r, E_DEADLINE, 0, "the deadline passed");
}

static void forward_grace(struct timer *t) { answer_stop((struct forwarded *)((char *)t - offsetof(struct forwarded, grace))); }

static void forward_stop(struct request *r, enum stop_reason why) {
    struct forwarded *w = r->owner;
    if (w->stopped) return;
    w->stopped = true;
    w->why = why;
    send_on(w, K_CANCEL);
    if (!timer_set(&w->grace, io_now_ns() + STOP_GRACE_NS, forward_grace)) answer_stop(w);
}

static void forward_data(struct request *r, bool eof, struct span data) {
    struct forwarded *w = r->owner;
    struct wr *out = &w->call.worker->link.out;
    size_t begun = frame_begin(out, w->call.id, K_DATA);
    wr_u8(out, eof);
    wr_raw(out, data.at, data.size);
    frame_end(out, begun);
}

static void forward_credit(struct request *r, uint8_t stream, uint32_t bytes) {
    struct forwarded *w = r->owner;
    struct wr *out = &w->call.worker->link.out;
    size_t begun = frame_begin(out, w->call.id, K_CREDIT);
    wr_u8(out, stream);
    wr_u32(out, bytes);
    frame_end(out, begun);
}

static const struct request_ops forward_ops = {.stop = forward_stop, .data = forward_data, .credit = forward_credit};

static void forward_reply(struct call *c, const struct frame *f, const uint8_t *raw, size_t size) {
    struct forwarded *w = (struct forwarded *)c;
    bool final = f->kind == K_DONE || f->kind == K_ERROR;
    struct request *r = w->request;
    if (!r) {
        if (final) forwarded_free(w);
        return;
    }
    if (f->kind == K_ERROR && w->stopped && w->why == STOP_DEADLINE) {
        forwarded_free(w);
        request_fail(r, E_DEADLINE, 0, "the deadline passed");
        return;
    }
    size_t begun = request_frame(r, f->kind);
    wr_raw(&host, raw + FRAME_HEADER, size - FRAME_HEADER);
    if (!final) {
        frame_end(&host, begun);
        return;
    }
    forwarded_free(w);
    request_finish(r, begun, f->kind == K_DONE);
}

static void forward_lost(struct call *c) {
    struct forwarded *w = (struct forwarded *)c;
    struct request *r = w->request;
    forwarded_free(w);
    if (r) request_fail(r, E_OS, ECONNRESET, "the worker died during this action");
}

void forward(const struct frame *f, const uint8_t *raw, size_t size) {
    struct request *r = request_new(f, &forward_ops, NULL);
    if (!r) return;
    struct worker *w = worker_for(r, (struct span){(const uint8_t *)"", 0});
    if (!w) return;
    struct forwarded *p = calloc(1, sizeof *p);
    if (!p) {
        request_fail(r, E_BUSY, 0, "out of memory");
        return;
    }
    p->request = r;
    r->owner = p;
    size_t begun = call_begin(&p->call, w, f->kind, forward_reply, forward_lost);
    const uint8_t *payload = f->payload.at;
    wr_raw(&w->link.out, payload, size - (size_t)(payload - raw));
    frame_end(&w->link.out, begun);
}
