// Dispatch of file actions, and the list of those that take longer than one call.
#define _GNU_SOURCE
#include "actions.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "io.h"
#include "job.h"

#define CREDIT_AT (STREAM_WINDOW / 4)  // consumed bytes worth a CREDIT frame: early enough that the sender never stalls

struct actions *actions_new(struct wr *out) {
    struct actions *a = calloc(1, sizeof *a);
    if (!a) return NULL;
    a->out = out;
    a->epoll = a->timer = -1;
    a->umask = umask(0);
    umask(a->umask);
    return a;
}

static void job_end(struct job *j) {
    struct actions *a = j->a;
    struct job **at = &a->jobs;
    while (*at && *at != j) at = &(*at)->next;
    if (*at) *at = j->next;
    if (a->turn == j) a->turn = j->next;
    j->dispose(j);
}

void actions_free(struct actions *a) {
    if (!a) return;
    while (a->jobs) job_end(a->jobs);
    io_close(&a->timer);
    io_close(&a->epoll);
    free(a->workdir);
    free(a);
}

void actions_workdir(struct actions *a, const char *path) {
    char *copy = strdup(path);
    if (!copy) return;
    free(a->workdir);
    a->workdir = copy;
}

// ---- answers ----

void done_empty(struct actions *a, uint32_t id) { frame_end(a->out, frame_begin(a->out, id, K_DONE)); }

void fail(struct actions *a, uint32_t id, uint16_t code, int error, const char *format, ...) {
    char message[512];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    frame_error(a->out, id, code, error, message);
}

void fail_os(struct actions *a, uint32_t id, int error, const char *step, const char *path) {
    const char *why = strerrordesc_np(error);
    if (path) fail(a, id, E_OS, error, "%s %.300s: %s", step, path, why ? why : "unknown error");
    else fail(a, id, E_OS, error, "%s: %s", step, why ? why : "unknown error");
}

bool malformed(struct actions *a, const struct frame *f) {
    if (rd_done(&f->payload)) return false;
    fail(a, f->id, E_REJECTED, 0, "malformed payload of kind 0x%02x", f->kind);
    return true;
}

const char *path_of(const struct actions *a, struct span s, char room[static PATH_ROOM]) {
    size_t have = 0;
    if (!s.size || s.at[0] != '/') {
        const char *base = a->workdir ? a->workdir : ".";
        have = strnlen(base, PATH_ROOM - 2);
        memcpy(room, base, have);
        if (s.size) room[have++] = '/';
    }
    size_t size = s.size < PATH_ROOM - 1 - have ? s.size : PATH_ROOM - 1 - have;
    memcpy(room + have, s.at, size);
    room[have + size] = 0;
    return room;
}

// ---- jobs ----

static void job_free(struct job *j) { free(j); }

void *job_new(struct actions *a, const struct frame *f, size_t size) {
    struct job *j = calloc(1, size);
    if (!j) {
        fail_os(a, f->id, ENOMEM, "start", NULL);
        return NULL;
    }
    j->a = a;
    j->id = f->id;
    j->deadline_ns = f->deadline_ms ? io_now_ns() + f->deadline_ms * UINT64_C(1000000) : 0;
    j->window = j->ahead = STREAM_WINDOW;
    j->dispose = job_free;
    return j;
}

static int poll_on(struct actions *a, int fd, void *whom) {
    if (a->epoll < 0) a->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (a->epoll < 0) return errno;
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = whom};  // edges: a job that may not be stepped now must not make us spin
    return epoll_ctl(a->epoll, EPOLL_CTL_ADD, fd, &event) ? errno : 0;
}

int job_poll(struct job *j, int fd) { return poll_on(j->a, fd, j); }

// The timer is only ever moved forward to an earlier time; one that goes off for a job that has ended does no harm.
static void timer_at(struct actions *a, uint64_t ns) {
    if (!ns || (a->timer_ns && a->timer_ns <= ns)) return;
    if (a->timer < 0) {
        a->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
        if (a->timer < 0 || poll_on(a, a->timer, NULL)) {
            io_close(&a->timer);  // deadlines are then noticed at the next slice only
            return;
        }
    }
    struct itimerspec at = {.it_value = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)}};
    if (timerfd_settime(a->timer, TFD_TIMER_ABSTIME, &at, NULL) == 0) a->timer_ns = ns;
}

void job_wake(struct job *j, uint64_t ns) {
    j->wake_ns = ns;
    timer_at(j->a, ns);
}

void job_consumed(struct job *j, uint32_t size) {
    j->owed += size;
    if (j->owed < CREDIT_AT) return;
    size_t begun = frame_begin(j->a->out, j->id, K_CREDIT);
    wr_u8(j->a->out, 0);
    wr_u32(j->a->out, j->owed);
    frame_end(j->a->out, begun);
    j->ahead += j->owed;
    j->owed = 0;
}

// What a step has led to; `linked` says whether the job is in the list yet.
static void job_settle(struct job *j, enum step how, bool linked) {
    if (how == STEP_END) {
        if (linked) job_end(j);
        else j->dispose(j);
        return;
    }
    j->waiting = how == STEP_WAIT;
    if (linked) return;
    struct job **at = &j->a->jobs;
    while (*at) at = &(*at)->next;
    *at = j;
    timer_at(j->a, j->deadline_ns);
    timer_at(j->a, j->wake_ns);
}

void job_start(struct job *j) {
    bool full = j->a->out->size > OUT_FULL;
    job_settle(j, full ? STEP_MORE : j->step(j, io_now_ns() + SLICE_NS), false);
}

static struct job *job_find(const struct actions *a, uint32_t id) {
    struct job *j = a->jobs;
    while (j && j->id != id) j = j->next;
    return j;
}

static bool job_expired(struct job *j, uint64_t now) {
    if (!j->deadline_ns || now < j->deadline_ns) return false;
    fail(j->a, j->id, E_DEADLINE, 0, "the deadline passed before it was finished");
    job_end(j);
    return true;
}

bool actions_step(struct actions *a) {
    struct job *first = a->turn ? a->turn : a->jobs, *j = first;
    while (j && j->waiting) {
        j = j->next ? j->next : a->jobs;
        if (j == first) j = NULL;
    }
    if (!j) return false;
    a->turn = j->next;
    uint64_t now = io_now_ns();
    if (!job_expired(j, now)) job_settle(j, j->step(j, now + SLICE_NS), true);
    return true;
}

int actions_fd(const struct actions *a) { return a->epoll; }

static void timer_fired(struct actions *a) {
    uint64_t times, now = io_now_ns();
    if (read(a->timer, &times, sizeof times) < 0 && errno != EAGAIN) return;
    a->timer_ns = 0;
    for (struct job *j = a->jobs, *next; j; j = next) {
        next = j->next;
        if (job_expired(j, now)) continue;
        if (j->wake_ns && j->wake_ns <= now) j->wake_ns = 0, j->waiting = false;
        timer_at(a, j->deadline_ns);
        timer_at(a, j->wake_ns);
    }
}

void actions_ready(struct actions *a) {
    struct epoll_event events[16];
    int n = a->epoll < 0 ? 0 : epoll_wait(a->epoll, events, 16, 0);
    bool timer = false;
    for (int i = 0; i < n; i++) {
        struct job *j = events[i].data.ptr;
        if (j) j->waiting = false;
        else timer = true;
    }
    if (timer) timer_fired(a);  // last: it ends jobs
}

// ---- frames ----

static void on_cancel(struct job *j) {
    if (j->ends_well) done_empty(j->a, j->id);
    else fail(j->a, j->id, E_CANCELLED, 0, "cancelled");
    job_end(j);
}

static void on_credit(struct job *j, struct rd r) {
    rd_u8(&r);
    uint32_t bytes = rd_u32(&r);
    if (!rd_done(&r)) return;
    j->window = bytes > STREAM_WINDOW - j->window ? STREAM_WINDOW : j->window + bytes;
    if (j->window) j->waiting = false;
}

static void on_data(struct job *j, struct rd r) {
    bool eof = rd_u8(&r) != 0;
    struct span data = rd_rest(&r);
    if (r.bad || !j->data || data.size > j->ahead) {
        fail(j->a, j->id, E_REJECTED, 0, "%s", !j->data ? "this action takes no data" : r.bad ? "malformed DATA" : "more data than the window allows");
        job_end(j);
        return;
    }
    j->ahead -= data.size;
    enum step how = j->data(j, data, eof);
    if (how == STEP_END) {
        job_end(j);
        return;
    }
    job_consumed(j, data.size);
    j->waiting = how == STEP_WAIT;
}

typedef void action(struct actions *, const struct frame *);
static action *const table[256] = {
    [K_READ] = action_read, [K_WRITE] = action_write, [K_LIST] = action_list, [K_STAT] = action_stat, [K_MKDIR] = action_mkdir,
    [K_REMOVE] = action_remove, [K_MOVE] = action_move, [K_UPLOAD] = action_upload, [K_DOWNLOAD] = action_download,
    [K_SEARCH] = action_search, [K_EDIT] = action_edit, [K_PATCH] = action_patch, [K_WATCH] = action_watch,
    [K_MARK] = action_mark, [K_MARKS] = action_marks,
};

bool actions_handle(struct actions *a, const struct frame *f) {
    if (f->kind == K_CANCEL || f->kind == K_CREDIT || f->kind == K_DATA) {
        struct job *j = job_find(a, f->id);
        if (!j) return false;
        if (f->kind == K_CANCEL) on_cancel(j);
        else if (f->kind == K_CREDIT) on_credit(j, f->payload);
        else on_data(j, f->payload);
        return true;
    }
    if (!table[f->kind]) return false;
    if (job_find(a, f->id)) fail(a, f->id, E_REJECTED, 0, "id %u is in use", f->id);
    else table[f->kind](a, f);
    return true;
}
