// A BATCH: its requests run one after another, each answers under its own id.
#include <stdlib.h>
#include <string.h>

#include "keys.h"

#define WAITING_MAX (8u << 20)  // bytes of all batches that run

static size_t waiting;

struct batch {
    struct request *request;  // NULL: answered, the rest is only being told so
    uint8_t *frames;
    size_t size, at;
    uint32_t count, next, completed;
    uint32_t current;   // id of the one that runs
    bool stop_on_failure, stopped, running, attached, ended;
    enum stop_reason why;
    bool (*dispatch)(const struct frame *, const uint8_t *, size_t);
};

static struct batch *starting;  // whose request is being dispatched

struct batch *batch_starting(void) {
    struct batch *b = starting;
    if (b) b->attached = true;
    starting = NULL;
    return b;
}

static bool may_be_inside(const struct frame *f) {
    struct rd r = f->payload;
    switch (f->kind) {
    case K_SPAWN: return !(rd_u16(&r) & (SPAWN_STREAM | SPAWN_STDIN | SPAWN_PTY));
    case K_WRITE: {
        rd_bytes(&r);
        rd_u32(&r);
        return !(rd_u8(&r) & 8);
    }
    case K_CONFIGURE: case K_PING: case K_SIGNAL: case K_RESIZE: case K_PROCESSES: case K_SESSION_OPEN: case K_SESSION_RUN: case K_SESSION_CLOSE:
    case K_READ: case K_LIST: case K_STAT: case K_MKDIR: case K_REMOVE: case K_MOVE: case K_SEARCH: case K_EDIT: case K_PATCH: case K_MARK: case K_MARKS:
        return true;
    default: return false;
    }
}

// Nothing runs unless all of it is well formed.
static const char *fault_in(const uint8_t *data, size_t size, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        int64_t n = frame_size(data, size, FRAME_MAX_IN);
        struct frame f;
        if (n <= 0 || !frame_open(data, (size_t)n, &f)) return "a malformed request in the batch";
        if (!may_be_inside(&f)) return "a request that cannot be in a batch";
        if (!f.id || f.id & EGRESS_BIT || request_find(f.id)) return "an id in the batch that is in use or not allowed";
        data += n, size -= (size_t)n;
    }
    return size ? "bytes behind the last request of the batch" : NULL;
}

void batch_free(struct batch *b) {
    waiting -= b->size;
    free(b->frames);
    free(b);
}

static void finish(struct batch *b) {
    struct request *r = b->request;
    uint32_t completed = b->completed;
    bool stopped = b->stopped, whole = completed == b->count;
    enum stop_reason why = b->why;
    batch_free(b);
    if (stopped) {
        request_fail(r, why == STOP_CANCEL ? E_CANCELLED : E_DEADLINE, 0, "stopped after %u requests", completed);
        return;
    }
    size_t begun = request_frame(r, K_DONE);
    wr_u32(&host, completed);
    request_finish(r, begun, whole);
}

// Runs until one has to be waited for. A loop, not a recursion: a batch may hold a hundred thousand.
static void run(struct batch *b) {
    if (b->running) return;
    b->running = true;
    while (b->next < b->count) {
        size_t size = (size_t)frame_size(b->frames + b->at, b->size - b->at, FRAME_MAX_IN);
        const uint8_t *raw = b->frames + b->at;
        struct frame f;
        frame_open(raw, size, &f);
        b->at += size;
        b->next++;
        if (b->stopped || (b->stop_on_failure && b->completed + 1 < b->next)) {
            frame_error(&host, f.id, E_CANCELLED, 0, "left out: the batch had stopped");
            continue;
        }
        b->current = f.id;
        b->attached = b->ended = false;
        starting = b;
        b->dispatch(&f, raw, size);
        starting = NULL;
        if (!b->attached) b->ended = true;  // refused before it became a request
        if (!b->ended) {
            b->running = false;
            return;
        }
    }
    finish(b);
}

void batch_step_ended(struct batch *b, bool success) {
    b->ended = true;
    b->current = 0;
    if (success) b->completed++;
    run(b);
}

static void stop(struct request *r, enum stop_reason why) {
    struct batch *b = r->owner;
    if (b->stopped) return;
    b->stopped = true;
    b->why = why;
    struct request *current = b->current ? request_find(b->current) : NULL;
    if (current && current->batch == b) current->ops->stop(current, STOP_CANCEL);
}
static const struct request_ops batch_ops = {.stop = stop};

void batch_handle(const struct frame *f, bool (*dispatch)(const struct frame *, const uint8_t *, size_t)) {
    struct rd r = f->payload;
    uint8_t flags = rd_u8(&r);
    uint32_t count = rd_u32(&r);
    struct span frames = rd_rest(&r);
    const char *fault = r.bad || flags > 1 ? "a malformed BATCH" : fault_in(frames.at, frames.size, count);
    if (fault) {
        reject(f, fault);
        return;
    }
    struct request *q = request_new(f, &batch_ops, NULL);
    if (!q) return;
    bool room = frames.size <= WAITING_MAX - waiting;
    struct batch *b = room ? calloc(1, sizeof *b) : NULL;
    uint8_t *copy = room ? malloc(frames.size + 1u) : NULL;
    if (!b || !copy) {
        free(b);
        free(copy);
        request_fail(q, E_BUSY, 0, room ? "out of memory" : "the batches that run leave no room for this one");
        return;
    }
    waiting += frames.size;
    memcpy(copy, frames.at, frames.size);
    *b = (struct batch){.request = q, .frames = copy, .size = frames.size, .count = count, .stop_on_failure = flags & 1, .dispatch = dispatch};
    q->owner = b;
    run(b);
}
