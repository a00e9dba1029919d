#define _GNU_SOURCE
#include "attach.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/ioctl.h>

#include "io.h"
#include "process.h"

#define ARGV_SHOWN 1024u  // bytes of one process's arguments; a list must fit a frame

static void no_stop(struct request *r, enum stop_reason why) { (void)r, (void)why; }
static const struct request_ops at_once = {.stop = no_stop};

static void gone(struct request *r, uint32_t pid) { request_fail(r, E_GONE, ESRCH, "no such process: %u", pid); }

// ---- SIGNAL ----

struct signalling {
    struct call call;
    struct request *request;
    uint32_t pid;
};

static void signal_stop(struct request *r, enum stop_reason why) {
    struct signalling *s = r->owner;
    s->request = NULL;
    request_fail(r, why == STOP_CANCEL ? E_CANCELLED : E_DEADLINE, 0, "the worker has not answered");
}
static const struct request_ops signal_ops = {.stop = signal_stop};

static void signal_lost(struct call *c) {
    struct signalling *s = (struct signalling *)c;
    struct request *r = s->request;
    call_end(c);
    free(s);
    if (r) request_fail(r, E_OS, ECONNRESET, "the worker died during this action");
}
static void on_signalled(struct call *c, const struct frame *f, const uint8_t *raw, size_t size) {
    (void)raw, (void)size;
    struct signalling *s = (struct signalling *)c;
    struct request *r = s->request;
    uint32_t pid = s->pid;
    struct rd p = f->payload;
    bool reached = rd_u32(&p);
    call_end(c);
    free(s);
    if (!r) return;
    if (reached) request_done(r);
    else gone(r, pid);
}

void signal_handle(const struct frame *f) {
    struct rd r = f->payload;
    uint32_t pid = rd_u32(&r);
    int32_t number = rd_i32(&r);
    uint8_t scope = rd_u8(&r);
    if (!rd_done(&r) || scope > 1 || number < 0 || number > 64) {
        reject(f, "a malformed SIGNAL");
        return;
    }
    struct request *q = request_new(f, &signal_ops, NULL);
    if (!q) return;
    struct process *p = process_find(pid);
    struct signalling *s = p && p->running && worker_live(p->worker) ? calloc(1, sizeof *s) : NULL;
    if (!s) {
        gone(q, pid);
        return;
    }
    s->request = q;
    s->pid = pid;
    q->owner = s;
    size_t begun = call_begin(&s->call, p->worker, K_KILL, on_signalled, signal_lost);
    kill_fields(p->worker, pid, number, false, scope);
    frame_end(&worker_link(p->worker)->out, begun);
}

// ---- RESIZE ----

void resize_handle(const struct frame *f) {
    struct rd r = f->payload;
    uint32_t pid = rd_u32(&r);
    struct winsize size = {0};
    size.ws_row = rd_u16(&r);
    size.ws_col = rd_u16(&r);
    if (!rd_done(&r)) {
        reject(f, "a malformed RESIZE");
        return;
    }
    struct request *q = request_new(f, &at_once, NULL);
    if (!q) return;
    struct process *p = process_find(pid);
    if (!p || !p->running) gone(q, pid);
    else if (p->pty < 0 || p->out.source.fd < 0) request_fail(q, E_UNSUPPORTED, ENOTTY, "process %u has no terminal", pid);
    else if (ioctl(p->out.source.fd, TIOCSWINSZ, &size) < 0) request_fail(q, E_OS, errno, "resizing: %s", words(errno));
    else request_done(q);
}

// ---- PROCESSES ----

static void put_argv(const struct process *p) {
    struct rd r = rd_of(p->argv, p->argv_size);
    size_t at = host.size;
    uint32_t shown = 0;
    wr_u32(&host, 0);
    for (uint32_t n = rd_u32(&r); n && !r.bad && host.size - at < ARGV_SHOWN; n--) {
        struct span s = rd_bytes(&r);
        wr_bytes(&host, s.at, s.size < ARGV_SHOWN ? s.size : ARGV_SHOWN);
        shown++;
    }
    if (!host.failed) host.data[at] = (uint8_t)shown, host.data[at + 1] = (uint8_t)(shown >> 8);
}

void processes_handle(const struct frame *f) {
    if (!rd_done(&f->payload)) {
        reject(f, "a malformed PROCESSES");
        return;
    }
    struct request *q = request_new(f, &at_once, NULL);
    if (!q) return;
    uint64_t now = io_now_ns();
    size_t begun = request_frame(q, K_DONE), at = host.size;
    uint32_t n = 0;
    wr_u32(&host, 0);
    for (struct process *p = processes_newest; p && host.size - at < DATA_MAX - 4 * ARGV_SHOWN; p = p->older) {
        if (!p->pid || p->answered) continue;
        wr_u32(&host, p->pid);
        wr_u8(&host, p->running);
        wr_u8(&host, p->pty >= 0);
        wr_u64(&host, now > p->start_ns ? now - p->start_ns : 0);
        put_argv(p);
        n++;
    }
    if (!host.failed) host.data[at] = (uint8_t)n, host.data[at + 1] = (uint8_t)(n >> 8);
    request_finish(q, begun, true);
}

// ---- ATTACH ----

// An attached request only watches: stopping it leaves the process alone.
static void attach_stop(struct request *r, enum stop_reason why) {
    struct process *p = r->owner;
    p->request = NULL;
    p->in.id = 0;
    request_fail(r, why == STOP_CANCEL ? E_CANCELLED : E_DEADLINE, 0, "detached");
    if (p->exited) processes_kept++;
    output_rewatch(&p->out);
    output_rewatch(&p->err);
}
static const struct request_ops attach_ops = {.stop = attach_stop, .data = process_data, .credit = process_credit};

void attach_handle(const struct frame *f) {
    struct rd r = f->payload;
    uint32_t pid = rd_u32(&r);
    if (!rd_done(&r)) {
        reject(f, "a malformed ATTACH");
        return;
    }
    struct request *q = request_new(f, &attach_ops, NULL);
    if (!q) return;
    struct process *p = process_find(pid);
    if (!p || p->answered) {
        gone(q, pid);
        return;
    }
    if (!(p->options & SPAWN_STREAM)) {
        request_fail(q, E_UNSUPPORTED, 0, "process %u was not started with STREAM", pid);
        return;
    }
    struct request *before = p->request;
    q->owner = p;
    p->request = q;
    if (p->in.id || p->options & SPAWN_STDIN) p->in.id = q->id;
    if (before) {
        // The deadline was the command's; it stays when the request goes.
        if (before->ops != &attach_ops && before->deadline.slot) timer_set(&p->deadline, before->deadline.at_ns, process_deadline);
        request_fail(before, E_CANCELLED, 0, "another request has taken the stream over");
    } else if (p->exited) {
        processes_kept--;
    }
    process_started(p);
    output_attach(&p->out);
    output_attach(&p->err);
    finish_if_over(p);
}
