#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "io.h"
#include "result.h"
#include "spawn.h"

#define BUCKETS 256u
#define STOP_GRACE_NS 200000000u  // how long a kill may take before the deadline is answered without it
#define ARGV_KEPT 1024u           // bytes of an argument list
#define INPUT_MAX (8u << 20)     // that came with requests and waits for its commands to read it
#define FINISHED_MAX 64           // streamed, ended, and not claimed

static struct process *table[BUCKETS];
struct process *processes_newest;
unsigned processes_kept;
static bool die_with_parent;

// ---- the table ----

struct process *process_find(uint32_t pid) {
    struct process *p = pid ? table[pid % BUCKETS] : NULL;
    while (p && p->pid != pid) p = p->next;
    return p;
}

static struct process *process_new(void) {
    struct process *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->pty = -1;
    output_init(&p->out, -1, 1, &p->request);
    output_init(&p->err, -1, 2, &p->request);
    input_init(&p->in, -1, 0, NULL);
    p->older = processes_newest;
    if (processes_newest) processes_newest->newer = p;
    processes_newest = p;
    return p;
}

static void unhash(struct process *p) {
    struct process **at = &table[p->pid % BUCKETS];
    while (*at && *at != p) at = &(*at)->next;
    if (*at) *at = p->next;
}

void process_free(struct process *p) {
    unhash(p);
    if (p->newer) p->newer->older = p->older;
    else processes_newest = p->older;
    if (p->older) p->older->newer = p->newer;
    if (p->exec.worker) exec_pending(-1);
    call_end(&p->exec);
    call_end(&p->kill);
    call_end(&p->probe);
    timer_stop(&p->grace);
    timer_stop(&p->deadline);
    output_free(&p->out);
    output_free(&p->err);
    input_free(&p->in);
    free(p->argv);
    free(p);
}

void processes_open(const struct agent_opts *opts) {
    die_with_parent = !opts->is_init;
    counters_open(opts->memory_events_fd, opts->pids_events_fd);
}

void processes_free(void) {
    while (processes_newest) process_free(processes_newest);
    processes_kept = 0;
}

// ---- ending ----

static void send_done(struct process *p) {
    struct request *r = p->request;
    struct outcome_fields o = {0};
    if (p->exited) outcome_status(&o, p->ending.status);
    if (p->stopping) o.outcome = p->why == STOP_DEADLINE ? OUTCOME_TIMEOUT : OUTCOME_CANCELLED;
    uint64_t end = p->exited ? p->ending.at_ns : io_now_ns();
    o.wall_ns = p->start_ns && end > p->start_ns ? end - p->start_ns : 0;
    o.user_ns = p->ending.user_ns;
    o.system_ns = p->ending.system_ns;
    o.peak_kib = p->ending.peak_kib;
    o.disk_full = p->disk_full;
    struct counters now = counters_read();
    o.oom_kills = now.oom_kills - p->before.oom_kills;
    o.pids_refused = now.pids_refused - p->before.pids_refused;
    if (!(p->options & SPAWN_STREAM)) {
        output_settle(&p->out);
        output_settle(&p->err);
    }
    size_t begun = request_frame(r, K_DONE);
    outcome_write(&o, &p->out, &p->err);
    p->request = NULL;
    p->answered = true;
    request_finish(r, begun, o.outcome == OUTCOME_EXITED && o.code == 0);
}

// Ended while nobody was attached: kept until claimed, the oldest make room.
static void keep_finished(struct process *p) {
    source_close(&p->in.source);
    if (++processes_kept <= FINISHED_MAX) return;
    struct process *oldest = NULL;
    for (struct process *q = processes_newest; q; q = q->older)
        if (q->exited && !q->request && !q->answered && q != p) oldest = q;
    if (!oldest) return;
    processes_kept--;
    process_free(oldest);
}

static void on_probed(struct call *c, const struct frame *f, const uint8_t *raw, size_t size) {
    (void)raw, (void)size;
    struct process *p = (struct process *)((char *)c - offsetof(struct process, probe));
    struct rd r = f->payload;
    p->disk_full = rd_u8(&r);
    p->probing = false;
    call_end(c);
    finish_if_over(p);
}
static void probe_lost(struct call *c) {
    struct process *p = (struct process *)((char *)c - offsetof(struct process, probe));
    p->probing = false;
    call_end(c);
    finish_if_over(p);
}

// A full disk is the likeliest reason that a result cannot tell by itself; only failures pay for the question.
static void probe_disk(struct process *p) {
    p->probed = true;
    if (p->stopping || p->ending.status == 0 || !worker_live(p->worker)) return;
    size_t begun = call_begin(&p->probe, p->worker, K_PROBE, on_probed, probe_lost);
    frame_end(&worker_link(p->worker)->out, begun);
    p->probing = true;
}

void finish_if_over(struct process *p) {
    if (!p->exited || p->probing || (p->stopping && p->killing)) return;
    if (p->answered) {
        process_free(p);
        return;
    }
    if (!p->request) return;
    bool flushed = true;
    if (p->out.streamed) {
        flushed &= output_flush(&p->out);
        flushed &= output_flush(&p->err);
    }
    if (!flushed && !p->stopping) return;
    send_done(p);
    process_free(p);
}

static void ended(struct process *p, const struct ending *e) {
    p->running = false;
    p->exited = true;
    p->ending = *e;
    output_drain(&p->out);
    output_drain(&p->err);
    if (!p->probed) probe_disk(p);
    if (!p->request && !p->answered) keep_finished(p);
    else finish_if_over(p);
}

bool processes_exited(const struct ending *e) {
    struct process *p = process_find(e->pid);
    if (p) ended(p, e);
    return p != NULL;
}

// ---- stopping ----

static void on_grace(struct timer *t) {
    struct process *p = (struct process *)((char *)t - offsetof(struct process, grace));
    p->killing = false;
    if (p->exited || !p->request) {
        finish_if_over(p);
        return;
    }
    output_drain(&p->out);
    output_drain(&p->err);
    send_done(p);  // it lingers in the table until it has been reaped
}

static void kill_over(struct call *c) {
    struct process *p = (struct process *)((char *)c - offsetof(struct process, kill));
    call_end(c);
    p->killing = false;
    finish_if_over(p);
}
static void on_killed(struct call *c, const struct frame *f, const uint8_t *raw, size_t size) {
    (void)f, (void)raw, (void)size;
    kill_over(c);
}

static void kill_all(struct process *p) {
    if (p->kill.worker) return;
    if (!worker_live(p->worker)) {  // no tree then; as a plain program we may at least do this ourselves
        kill_group(p->pid);
        return;
    }
    size_t begun = call_begin(&p->kill, p->worker, K_KILL, on_killed, kill_over);
    kill_fields(p->worker, p->pid, SIGKILL, false, true);
    frame_end(&worker_link(p->worker)->out, begun);
    p->killing = true;
}

static void stop(struct process *p, enum stop_reason why) {
    if (p->stopping) return;
    p->stopping = true;
    p->why = why;
    if (p->running) kill_all(p);
    if (!timer_set(&p->grace, io_now_ns() + STOP_GRACE_NS, on_grace)) on_grace(&p->grace);
    else if (p->exited) finish_if_over(p);
}

static void request_stop(struct request *r, enum stop_reason why) { stop(r->owner, why); }
void process_deadline(struct timer *t) { stop((struct process *)((char *)t - offsetof(struct process, deadline)), STOP_DEADLINE); }

// ---- input and credits ----

static void input_ended(struct input *in) {
    struct process *p = (struct process *)((char *)in - offsetof(struct process, in));
    if (!(p->options & SPAWN_PTY)) source_close(&in->source);
    else if (in->eof && !in->discard) {  // a terminal has no end of file of its own: the line discipline makes it from ^D
        ssize_t n = write(in->source.fd, "\004", 1);
        (void)n;
        in->eof = false;
    }
}

void process_data(struct request *r, bool eof, struct span data) {
    struct process *p = r->owner;
    if (!(p->options & SPAWN_STDIN) || input_data(&p->in, data, eof, true)) return;
    p->request = NULL;
    p->answered = true;
    if (p->running) worker_kill(p->worker, p->pid, SIGKILL, false, true);
    request_fail(r, E_REJECTED, 0, "more input than the window allows");
    finish_if_over(p);
}

void process_credit(struct request *r, uint8_t stream, uint32_t bytes) {
    struct process *p = r->owner;
    if (stream == 1) output_credit(&p->out, bytes);
    else if (stream == 2) output_credit(&p->err, bytes);
    finish_if_over(p);
}

static const struct request_ops spawn_ops = {.stop = request_stop, .data = process_data, .credit = process_credit};

// ---- starting ----

void process_started(struct process *p) {
    size_t begun = request_frame(p->request, K_STARTED);
    wr_u32(&host, p->pid);
    frame_end(&host, begun);
}

// The command never ran. Its request may be gone already (its deadline was answered without waiting for the worker).
static void start_failed(struct process *p, enum spawn_step step, int error) {
    struct request *r = p->request;
    if (!r) {
        process_free(p);
        return;
    }
    if (step == STEP_EXEC && exec_exit_status(error)) {
        char text[256];
        struct span name = p->options & SPAWN_SHELL ? (struct span){(const uint8_t *)"bash", 4} : first_of((struct span){p->argv, p->argv_size});
        int size = snprintf(text, sizeof text, "untax: %.*s: %s\n", (int)(name.size > 150 ? 150 : name.size), (const char *)name.at, words(error));
        if (p->options & SPAWN_STREAM) process_started(p);
        output_say(p->options & (SPAWN_MERGE | SPAWN_PTY) ? &p->out : &p->err, text, (size_t)size);
        p->exited = true;
        p->ending = (struct ending){.status = exec_exit_status(error) << 8};
        finish_if_over(p);
        return;
    }
    p->request = NULL;
    process_free(p);
    if (step == STEP_CHDIR && exec_exit_status(error)) request_fail(r, E_OS, error, "the working directory: %s", words(error));
    else if (error == E2BIG) request_fail(r, E_TOO_LARGE, error, "arguments and environment are more than the kernel takes");
    else request_fail(r, E_SPAWN_FAILED, error, "%s: %s", spawn_step_words(step), words(error));
}

// The command runs, or has ended already.
static void began(struct process *p, uint32_t pid, int pty, const struct ending *early) {
    p->pid = pid;
    p->next = table[pid % BUCKETS];
    table[pid % BUCKETS] = p;
    p->running = true;
    if (pty >= 0) {
        p->pty = pty;
        p->out.source.fd = pty;
        p->out.source.duplicated = p->in.source.duplicated = true;
        p->in.source.fd = fcntl(pty, F_DUPFD_CLOEXEC, 3);
    }
    if (p->options & SPAWN_STREAM && p->request) process_started(p);
    if (early) {
        ended(p, early);
        return;
    }
    output_start(&p->out);
    output_start(&p->err);
    p->in.held = false;
    input_flush(&p->in);
    if (p->stopping || p->answered) kill_all(p);
}

static void on_execed(struct call *c, const struct frame *f, const uint8_t *raw, size_t size) {
    (void)raw, (void)size;
    struct process *p = (struct process *)((char *)c - offsetof(struct process, exec));
    struct rd r = f->payload;
    uint32_t pid = rd_u32(&r);
    int error = rd_i32(&r);
    enum spawn_step step = rd_u8(&r);
    p->start_ns = rd_u64(&r);
    int pty = -1;
    if (rd_u8(&r)) link_take_fds(worker_link(c->worker), &pty, 1);
    call_end(c);
    struct ending early;
    bool over = exec_early(pid, &early);
    exec_pending(-1);
    if (step || !pid || r.bad) {
        io_close(&pty);
        start_failed(p, step, error);
        return;
    }
    began(p, pid, pty, over ? &early : NULL);
}

// The worker died over it. A command that was started all the same, and killed the worker perhaps, is the agent's child and gets its own outcome;
// one with a terminal has lost that with the worker.
static void exec_lost(struct call *c) {
    struct process *p = (struct process *)((char *)c - offsetof(struct process, exec));
    uint32_t pid;
    struct ending early;
    bool started = call_gave_birth(c, &pid, &p->start_ns) && !(p->options & SPAWN_PTY) && !process_find(pid);
    bool over = started && exec_early(pid, &early);
    started = over || (started && !waitid(P_PID, (id_t)pid, &(siginfo_t){0}, WEXITED | WNOHANG | WNOWAIT));
    call_end(c);
    exec_pending(-1);
    if (started) began(p, pid, -1, over ? &early : NULL);
    else start_failed(p, STEP_CLONE, ECONNRESET);
}

// Pipes for the command; its ends go into `theirs`. Returns how many, or -1.
static int make_pipes(struct process *p, const struct command *c, bool with_input, int theirs[3]) {
    int n = 0, ends[2];
    if (c->options & SPAWN_PTY) return 0;
    if (with_input) {
        if (pipe2(ends, O_CLOEXEC) < 0) return -1;
        io_nonblocking(ends[1]);
        p->in.source.fd = ends[1];
        theirs[n++] = ends[0];
    }
    for (int i = 0; i < 2; i++) {
        if (i && c->options & SPAWN_MERGE) {
            ends[1] = fcntl(theirs[n - 1], F_DUPFD_CLOEXEC, 3);
        } else if (pipe2(ends, O_CLOEXEC) < 0) {
            ends[1] = -1;
        } else {
            (i ? &p->err : &p->out)->source.fd = ends[0];
        }
        if (ends[1] < 0) {
            while (n) close(theirs[--n]);
            return -1;
        }
        theirs[n++] = ends[1];
    }
    return n;
}

// The argument list may be megabytes; messages and the process list need its beginning.
static bool keep_argv(struct process *p, struct span argv) {
    struct wr w = {0};
    struct rd r = rd_of(argv.at, argv.size);
    uint32_t count = 0;
    wr_u32(&w, 0);
    for (uint32_t n = rd_u32(&r); n && w.size < ARGV_KEPT; n--, count++) {
        struct span s = rd_bytes(&r);
        wr_bytes(&w, s.at, s.size < ARGV_KEPT ? s.size : ARGV_KEPT);
    }
    if (w.failed) return false;
    w.data[0] = (uint8_t)count, w.data[1] = (uint8_t)(count >> 8);
    p->argv = w.data;
    p->argv_size = (uint32_t)w.size;
    return true;
}

static void start(struct request *r, struct worker *w, struct command *c, uint32_t cap, struct span input) {
    struct process *p = process_new();
    if (!p) {
        request_fail(r, E_BUSY, 0, "out of memory");
        return;
    }
    p->request = r;
    p->worker = w;
    p->options = c->options;
    p->before = counters_cached();
    r->owner = p;
    bool streamed = c->options & SPAWN_STREAM, with_input = c->options & SPAWN_STDIN || input.size;
    int theirs[3], count = keep_argv(p, c->argv) ? make_pipes(p, c, with_input, theirs) : -1;
    if (count < 0 || (count && !link_attach(worker_link(w), theirs, (size_t)count))) {
        int error = errno;
        for (int i = 0; i < count; i++) close(theirs[i]);
        p->request = NULL;
        process_free(p);
        request_fail(r, E_SPAWN_FAILED, error, "pipes for the command: %s", words(error));
        return;
    }
    for (int i = 0; i < 2; i++) {
        struct output *o = i ? &p->err : &p->out;
        if (streamed) output_stream(o);
        else output_cap(o, cap);
    }
    p->in.id = c->options & SPAWN_STDIN ? r->id : 0;
    p->in.ended = input_ended;
    c->null_input = !with_input && count;
    c->fds = (uint8_t)count;
    size_t begun = call_begin(&p->exec, w, K_EXEC, on_execed, exec_lost);
    exec_pending(1);
    command_write(&worker_link(w)->out, c, die_with_parent);
    frame_end(&worker_link(w)->out, begun);
    if (with_input) {
        p->in.held = c->options & SPAWN_PTY;
        input_data(&p->in, input, !(c->options & SPAWN_STDIN), false);
    }
}

void spawn_handle(const struct frame *f) {
    struct rd r = f->payload;
    struct command c = {0};
    c.options = rd_u16(&r);
    uint32_t cap = rd_u32(&r);
    c.rows = rd_u16(&r);
    c.cols = rd_u16(&r);
    c.cwd = rd_name(&r);
    struct span user = rd_name(&r);
    c.argv = rd_strs(&r, &c.argc);
    c.env = rd_strs(&r, &c.env_count);
    struct span input = rd_bytes(&r);
    const char *fault = !rd_done(&r)                                                 ? "a malformed SPAWN"
                        : c.options & ~(SPAWN_MERGE | SPAWN_STREAM | SPAWN_STDIN | SPAWN_PTY | SPAWN_SHELL) ? "unknown options"
                        : !c.argc                                                    ? "no program to run"
                        : c.options & SPAWN_SHELL && c.argc != 1                     ? "a shell command is one string"
                                                                                     : env_fault(c.env);
    if (fault) {
        reject(f, fault);
        return;
    }
    if (c.options & SPAWN_PTY) c.options |= SPAWN_MERGE | SPAWN_STREAM | SPAWN_STDIN;
    struct request *q = request_new(f, &spawn_ops, NULL);
    if (q && input.size > STREAM_WINDOW && inputs_waiting() + input.size > INPUT_MAX) {
        request_fail(q, E_BUSY, 0, "too much input waits for other commands to read it");
        return;
    }
    struct worker *w = q ? worker_for(q, user) : NULL;
    if (w) start(q, w, &c, cap, input);
}
