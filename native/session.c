#define _GNU_SOURCE
#include "session.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "command.h"
#include "io.h"
#include "usage.h"

#define SESSIONS_MAX 64
#define STOP_GRACE_NS 200000000u  // for a shell to report after its commands were killed
#define LATE_CAP (64u << 10)      // of what background jobs print between two commands
#define TEXT_KEPT (64u << 10)     // a longer text is cut off the memory file afterwards

// The shell reads its script from a pipe, one line of ours for each command, rather than running a loop of its own: so
// `break`, `continue` and `return` in a text mean nothing, and no function makes variables local. The text lies in a
// memory file: an unterminated quote ends with it. Descriptors 3 to 5 move up and are closed for the commands.
struct shell {
    const char *argv[4];
    uint32_t argc;
    const char *set_up, *line;
};
static const struct shell shells[2] = {
    {{"bash", "--noprofile", "--norc", "/proc/self/fd/3"}, 4,
     "BASH_ARGV0=bash;exec 61>&4 62<&5 3<&- 4>&- 5<&-;__untax_s=0;"
     "__untax_a(){ IFS= read -rd '' -u62 __untax_t;return $__untax_s;};__untax_z(){ __untax_s=$?;printf '%d\\n' $__untax_s >&61;}\n",
     "__untax_a;eval \"$__untax_t\" 61>&- 62<&-;__untax_z\n"},
    {{"sh", "/proc/self/fd/3"}, 2,
     "exec 8>&4 9<&5 3<&- 4>&- 5<&-;__untax_s=0;"
     "__untax_a(){ __untax_t=$(cat <&9);return $__untax_s;};__untax_z(){ __untax_s=$?;printf '%d\\n' $__untax_s >&8;}\n",
     "__untax_a;command eval \"$__untax_t\" 8>&- 9<&-;__untax_z\n"},
};

struct session {
    uint32_t id, pid;
    struct worker *worker;
    const struct shell *shell;
    struct request *request;  // the command that runs
    struct request *opener, *closer;
    struct call exec, kill;
    struct output out, err;
    struct source done;
    int go, text;
    bool reported, stopping, killing, closing;
    int status;
    enum stop_reason why;
    struct timer grace;
    uint64_t start_ns;
    struct usage usage;
    struct counters before;
    uint8_t *open_frame;  // the fields of SESSION_OPEN until the shell has started: a second one may have to be tried
    struct command command;
};

static struct session *sessions[SESSIONS_MAX];
static uint32_t last_id;
static bool die_with_parent;

static void start(struct session *s);

void sessions_open(const struct agent_opts *opts) { die_with_parent = !opts->is_init; }

static void session_free(struct session *s) {
    for (int i = 0; i < SESSIONS_MAX; i++)
        if (sessions[i] == s) sessions[i] = NULL;
    if (s->exec.worker) exec_pending(-1);
    call_end(&s->exec);
    call_end(&s->kill);
    timer_stop(&s->grace);
    output_free(&s->out);
    output_free(&s->err);
    source_close(&s->done);
    io_close(&s->go);
    io_close(&s->text);
    usage_close(&s->usage);
    free(s->open_frame);
    free(s);
}

void sessions_free(void) {
    for (int i = 0; i < SESSIONS_MAX; i++)
        if (sessions[i]) session_free(sessions[i]);
}

static struct session *find(uint32_t id) {
    for (int i = 0; i < SESSIONS_MAX; i++)
        if (sessions[i] && sessions[i]->id == id && !sessions[i]->closing && sessions[i]->pid) return sessions[i];
    return NULL;
}

// ---- the end of a command ----

static void answer(struct session *s, const struct ending *ending) {
    struct request *r = s->request;
    struct outcome_fields o = {.code = s->status};
    uint64_t now = ending ? ending->at_ns : io_now_ns();
    if (ending) outcome_status(&o, ending->status);
    if (s->stopping) o.outcome = s->why == STOP_DEADLINE ? OUTCOME_TIMEOUT : OUTCOME_CANCELLED;
    o.wall_ns = now > s->start_ns ? now - s->start_ns : 0;
    usage_end(&s->usage, ending, &o);
    struct counters after = counters_read();
    o.oom_kills = after.oom_kills - s->before.oom_kills;
    o.pids_refused = after.pids_refused - s->before.pids_refused;
    bool alive = !ending && !s->closing;
    output_settle(&s->out);
    output_settle(&s->err);
    size_t begun = request_frame(r, K_DONE);
    outcome_write(&o, &s->out, &s->err);
    wr_u8(&host, alive);
    s->request = NULL;
    s->stopping = s->reported = false;
    timer_stop(&s->grace);
    output_reset(&s->out, LATE_CAP);
    output_reset(&s->err, LATE_CAP);
    request_finish(r, begun, o.outcome == OUTCOME_EXITED && o.code == 0);
}

static void answer_if_reported(struct session *s) {
    if (!s->request || !s->reported || s->killing) return;
    output_empty(&s->out);
    output_empty(&s->err);
    answer(s, NULL);
}

static void on_done(struct source *source, uint32_t events) {
    (void)events;
    struct session *s = (struct session *)((char *)source - offsetof(struct session, done));
    char text[64];
    ssize_t n = read(source->fd, text, sizeof text - 1);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {  // the shell gave way to another program (`exec`); its exit will tell
        source_close(source);
        return;
    }
    text[n] = 0;
    if (!s->request || s->reported) return;
    s->status = atoi(text) & 255;
    s->reported = true;
    answer_if_reported(s);
}

static void ended(struct session *s, const struct ending *e) {
    output_drain(&s->out);
    output_drain(&s->err);
    struct request *closer = s->closer, *opener = s->opener;
    s->closing = true;
    s->closer = s->opener = NULL;
    if (s->request) answer(s, e);
    session_free(s);
    if (closer) request_done(closer);
    if (opener) request_fail(opener, E_SPAWN_FAILED, 0, "the shell ended at once");
}

bool sessions_exited(const struct ending *e) {
    for (int i = 0; i < SESSIONS_MAX; i++)
        if (sessions[i] && sessions[i]->pid == e->pid) {
            ended(sessions[i], e);
            return true;
        }
    return false;
}

// ---- stopping ----

static void kill_over(struct call *c) {
    struct session *s = (struct session *)((char *)c - offsetof(struct session, kill));
    call_end(c);
    s->killing = false;
    answer_if_reported(s);
}
static void on_killed(struct call *c, const struct frame *f, const uint8_t *raw, size_t size) {
    (void)f, (void)raw, (void)size;
    kill_over(c);
}

static void kill_shell(struct session *s) {
    s->closing = true;
    if (worker_live(s->worker)) worker_kill(s->worker, s->pid, SIGKILL, false, true);
    else kill_group(s->pid);
}

// The shell itself did not come back: it goes too, and the answer does not wait for that.
static void on_grace(struct timer *t) {
    struct session *s = (struct session *)((char *)t - offsetof(struct session, grace));
    struct request *closer = s->closer;
    s->closer = NULL;
    s->killing = false;
    kill_shell(s);
    output_empty(&s->out);
    output_empty(&s->err);
    if (s->request) answer(s, NULL);
    if (closer) request_done(closer);
}

static void run_stop(struct request *r, enum stop_reason why) {
    struct session *s = r->owner;
    if (s->stopping) return;
    s->stopping = true;
    s->why = why;
    if (worker_live(s->worker) && !s->kill.worker) {
        size_t begun = call_begin(&s->kill, s->worker, K_KILL, on_killed, kill_over);
        kill_fields(s->worker, s->pid, SIGKILL, true, true);
        frame_end(&worker_link(s->worker)->out, begun);
        s->killing = true;
    }
    if (!timer_set(&s->grace, io_now_ns() + STOP_GRACE_NS, on_grace)) on_grace(&s->grace);
}
static const struct request_ops run_ops = {.stop = run_stop};

// ---- SESSION_RUN ----

static bool put_text(struct session *s, struct span text) {
    bool bash = s->shell == &shells[0];
    struct iovec parts[2] = {{(void *)(uintptr_t)text.at, text.size}, {(char[]){0}, bash}};  // cat takes all there is, `read` stops at NUL
    if (pwritev(s->text, parts, 2, 0) != (ssize_t)(text.size + bash)) return false;
    if ((!bash || text.size > TEXT_KEPT) && ftruncate(s->text, text.size + bash) < 0) return false;
    return lseek(s->text, 0, SEEK_SET) == 0;
}

void session_run_handle(const struct frame *f) {
    struct rd r = f->payload;
    uint32_t id = rd_u32(&r), cap = rd_u32(&r);
    struct span text = rd_name(&r);
    if (!rd_done(&r)) {
        reject(f, "a malformed SESSION_RUN, or a NUL in its text");
        return;
    }
    struct request *q = request_new(f, &run_ops, NULL);
    if (!q) return;
    struct session *s = find(id);
    if (!s) {
        request_fail(q, E_GONE, 0, "no such session: %u was never opened, was closed, or its shell has ended", id);
        return;
    }
    if (s->request) {
        request_fail(q, E_BUSY, 0, "session %u is running another command", id);
        return;
    }
    size_t line = strlen(s->shell->line);
    if (!put_text(s, text) || write(s->go, s->shell->line, line) != (ssize_t)line) {
        request_fail(q, E_SPAWN_FAILED, errno, "handing the command to the shell: %s", words(errno));
        return;
    }
    s->start_ns = io_now_ns();
    s->request = q;
    q->owner = s;
    s->before = counters_cached();
    output_next(&s->out, cap);
    output_next(&s->err, cap);
    usage_begin(&s->usage);
}

// ---- SESSION_OPEN and SESSION_CLOSE ----

static void open_stop(struct request *r, enum stop_reason why) {
    struct session *s = r->owner;
    s->opener = NULL;
    s->closing = true;
    request_fail(r, why == STOP_CANCEL ? E_CANCELLED : E_DEADLINE, 0, "stopped before the shell had started");
}
static const struct request_ops open_ops = {.stop = open_stop};

static void open_failed(struct session *s, uint16_t code, int error, const char *what) {
    struct request *r = s->opener;
    session_free(s);
    if (r) request_fail(r, code, error, "%s: %s", what, words(error));
}

static void on_execed(struct call *c, const struct frame *f, const uint8_t *raw, size_t size) {
    (void)raw, (void)size;
    struct session *s = (struct session *)((char *)c - offsetof(struct session, exec));
    struct rd r = f->payload;
    uint32_t pid = rd_u32(&r);
    int error = rd_i32(&r);
    enum spawn_step step = rd_u8(&r);
    call_end(c);
    struct ending early;
    bool over = exec_early(pid, &early);
    exec_pending(-1);
    if (step == STEP_EXEC && error == ENOENT && s->shell == &shells[0]) {
        s->shell = &shells[1];
        start(s);
    } else if (step == STEP_EXEC && error == ENOENT) {
        open_failed(s, E_UNSUPPORTED, error, "there is neither bash nor sh in this image");
    } else if (step) {
        open_failed(s, step == STEP_CHDIR && exec_exit_status(error) ? E_OS : E_SPAWN_FAILED, error, spawn_step_words(step));
    } else {
        s->pid = pid;
        if (over) {
            ended(s, &early);
            return;
        }
        usage_open(&s->usage, pid);
        output_start(&s->out);
        output_start(&s->err);
        source_want(&s->done, EPOLLIN);
        free(s->open_frame);
        s->open_frame = NULL;
        struct request *opener = s->opener;
        s->opener = NULL;
        if (!opener) {
            kill_shell(s);
            return;
        }
        size_t begun = request_frame(opener, K_DONE);
        wr_u32(&host, s->id);
        wr_u32(&host, pid);
        request_finish(opener, begun, true);
    }
}

static void exec_lost(struct call *c) {
    struct session *s = (struct session *)((char *)c - offsetof(struct session, exec));
    call_end(c);
    exec_pending(-1);
    open_failed(s, E_SPAWN_FAILED, ECONNRESET, "the worker died");
}

// gVisor changes the mode of no pipe without a name. This one has a name for a moment, in a directory that is root's whoever made the image.
static void script_by_name(int *go, int *read_end) {
    static unsigned number;
    char path[48];
    snprintf(path, sizeof path, "/dev/.untax-session-%u", number++);
    if (mkfifo(path, 0604) < 0) return;
    int in = open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    int out = in < 0 ? -1 : open(path, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    unlink(path);
    if (out < 0 || fcntl(in, F_SETFL, 0) < 0) {
        if (in >= 0) close(in);
        if (out >= 0) close(out);
        return;
    }
    close(*go), close(*read_end);
    *go = out, *read_end = in;
}

// Descriptors 1 to 5 of the shell, and our ends of them.
static bool make_pipes(struct session *s, int theirs[5]) {
    int pipes[4][2];
    for (int i = 0; i < 4; i++)
        if (pipe2(pipes[i], O_CLOEXEC) < 0) {
            while (i--) close(pipes[i][0]), close(pipes[i][1]);
            return false;
        }
    io_close(&s->text);
    s->text = memfd_create("untax-session", MFD_CLOEXEC);
    theirs[4] = fcntl(s->text, F_DUPFD_CLOEXEC, 3);
    s->out.source.fd = pipes[0][0], theirs[0] = pipes[0][1];
    s->err.source.fd = pipes[1][0], theirs[1] = pipes[1][1];
    s->go = pipes[2][1], theirs[2] = pipes[2][0];
    s->done.fd = pipes[3][0], theirs[3] = pipes[3][1];
    // The shell opens its script anew through /proc, for which the mode counts: the pipe is ours, the shell another user's.
    if (fchmod(s->go, 0604) < 0) script_by_name(&s->go, &theirs[2]);
    io_nonblocking(s->go);
    io_nonblocking(s->done.fd);
    if (theirs[4] >= 0) return true;
    for (int i = 0; i < 4; i++) close(theirs[i]);
    return false;
}

static void start(struct session *s) {
    struct link *l = worker_link(s->worker);
    output_free(&s->out);
    output_free(&s->err);
    source_close(&s->done);
    io_close(&s->go);
    int theirs[5];
    size_t set_up = strlen(s->shell->set_up);
    if (!make_pipes(s, theirs) || write(s->go, s->shell->set_up, set_up) != (ssize_t)set_up || !link_attach(l, theirs, 5)) {
        open_failed(s, E_SPAWN_FAILED, errno, "pipes for the shell");
        return;
    }
    struct wr argv = {0};
    wr_u32(&argv, s->shell->argc);
    for (uint32_t i = 0; i < s->shell->argc; i++) wr_bytes(&argv, s->shell->argv[i], strlen(s->shell->argv[i]));
    s->command.argv = (struct span){argv.data, (uint32_t)argv.size};
    s->command.argc = s->shell->argc;
    size_t begun = call_begin(&s->exec, s->worker, K_EXEC, on_execed, exec_lost);
    exec_pending(1);
    command_write(&l->out, &s->command, die_with_parent);
    frame_end(&l->out, begun);
    wr_free(&argv);
}

void session_open_handle(const struct frame *f) {
    size_t size = (size_t)(f->payload.end - f->payload.at);
    uint8_t *copy = malloc(size + 1);
    if (copy) memcpy(copy, f->payload.at, size);
    struct rd r = rd_of(copy, size);
    struct command c = {.null_input = true, .fds = 5};
    c.cwd = rd_name(&r);
    struct span user = rd_name(&r);
    c.env = rd_strs(&r, &c.env_count);
    const char *fault = !copy || !rd_done(&r) ? "a malformed SESSION_OPEN" : env_fault(c.env);
    if (fault) reject(f, fault);
    struct request *q = fault ? NULL : request_new(f, &open_ops, NULL);
    struct worker *w = q ? worker_for(q, user) : NULL;
    int slot = 0;
    while (slot < SESSIONS_MAX && sessions[slot]) slot++;
    struct session *s = w && slot < SESSIONS_MAX ? calloc(1, sizeof *s) : NULL;
    if (!s) {
        free(copy);
        if (w) request_fail(q, E_BUSY, 0, "too many sessions");
        return;
    }
    *s = (struct session){.id = ++last_id, .worker = w, .opener = q, .shell = &shells[0], .go = -1, .text = -1, .usage = {.stat = -1, .status = -1}, .open_frame = copy, .command = c};
    output_init(&s->out, -1, 1, &s->request);
    output_init(&s->err, -1, 2, &s->request);
    output_cap(&s->out, LATE_CAP);
    output_cap(&s->err, LATE_CAP);
    source_init(&s->done, -1, on_done);
    sessions[slot] = s;
    q->owner = s;
    start(s);
}

static void close_stop(struct request *r, enum stop_reason why) {
    struct session *s = r->owner;
    (void)why;
    s->closer = NULL;
    request_done(r);
}
static const struct request_ops close_ops = {.stop = close_stop};

void session_close_handle(const struct frame *f) {
    struct rd r = f->payload;
    uint32_t id = rd_u32(&r);
    if (!rd_done(&r)) {
        reject(f, "a malformed SESSION_CLOSE");
        return;
    }
    struct request *q = request_new(f, &close_ops, NULL);
    if (!q) return;
    struct session *s = find(id);
    if (!s) {
        request_fail(q, E_GONE, 0, "no such session: %u", id);
        return;
    }
    q->owner = s;
    s->closer = q;
    if (s->request && !s->stopping) s->stopping = true, s->why = STOP_CANCEL;
    kill_shell(s);
    if (!timer_set(&s->grace, io_now_ns() + STOP_GRACE_NS, on_grace)) on_grace(&s->grace);
}
