#define _GNU_SOURCE
#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "io.h"

#define READ_AT_ONCE (64u << 10)
#define TAILS_MAX (16u << 20)  // of all tails together: the agent's memory group is small

#define HEADS_MAX (8u << 20)  // of all beginnings that wait for their DONE; beyond it they go out early

static size_t tails;  // bytes that rings have taken
static size_t heads;

// ---- the ring ----

static bool ring_grow(struct ring *r, size_t room) {
    if (tails + (room - r->room) > TAILS_MAX) return false;
    uint8_t *data = malloc(room);
    if (!data) return false;
    size_t first = r->room - r->start < r->have ? r->room - r->start : r->have;
    if (first) memcpy(data, r->data + r->start, first);
    if (r->have > first) memcpy(data + first, r->data, r->have - first);
    free(r->data);
    tails += room - r->room;
    r->data = data;
    r->room = room;
    r->start = 0;
    return true;
}

uint64_t ring_put(struct ring *r, const uint8_t *data, size_t size, size_t most) {
    size_t wanted = r->have + size > most ? most : r->have + size;
    if (r->room < wanted) {
        size_t room = r->room ? r->room : 4096;
        while (room < wanted) room *= 2;
        ring_grow(r, room < most ? room : most);
    }
    size_t limit = r->room < most ? r->room : most;
    uint64_t dropped = 0;
    if (size > limit) {
        dropped = size - limit;
        data += size - limit;
        size = limit;
    }
    if (r->have + size > limit) {
        size_t old = r->have + size - limit;
        dropped += old;
        ring_take(r, old);
    }
    if (!size) return dropped;
    size_t at = (r->start + r->have) % r->room;
    size_t first = r->room - at < size ? r->room - at : size;
    memcpy(r->data + at, data, first);
    memcpy(r->data, data + first, size - first);
    r->have += size;
    return dropped;
}

struct span ring_front(const struct ring *r) {
    size_t first = r->room - r->start < r->have ? r->room - r->start : r->have;
    return first ? (struct span){r->data + r->start, (uint32_t)first} : (struct span){(const uint8_t *)"", 0};
}

void ring_take(struct ring *r, size_t size) {
    r->have -= size;
    r->start = r->have && r->room ? (r->start + size) % r->room : 0;
}

void ring_free(struct ring *r) {
    tails -= r->room;
    free(r->data);
    *r = (struct ring){0};
}

// ---- reading ----

static uint8_t scratch[READ_AT_ONCE];

// Reads up to `most` without waiting, also what was said to be readable: where the workload shares our user id it can open its pipe for reading
// too, and take what we were told of. RWF_NOWAIT spares a call for each command; kernels before 6.4 refuse it on pipes.
static bool unsupported;
void outputs_distrust_nowait(void) { unsupported = true; }

static ssize_t read_now(int fd, size_t most) {
    ssize_t n;
    if (!unsupported) {
        struct iovec iov = {scratch, most};
        do n = preadv2(fd, &iov, 1, -1, RWF_NOWAIT);
        while (n < 0 && errno == EINTR);
        if (n >= 0 || (errno != EOPNOTSUPP && errno != ENOSYS && errno != ESPIPE && errno != EINVAL)) return n;
        unsupported = true;
    }
    io_nonblocking(fd);
    do n = read(fd, scratch, most);
    while (n < 0 && errno == EINTR);
    return n;
}

void out_frame(struct request *r, uint8_t stream, const void *data, size_t size) {
    size_t begun = request_frame(r, K_OUT);
    wr_u8(&host, stream);
    wr_raw(&host, data, size);
    frame_end(&host, begun);
}

static void head_clear(struct output *o) {
    heads -= o->head.size;
    wr_free(&o->head);
}

static void send_head(struct output *o) {
    if (!o->head.size) return;
    if (*o->request) out_frame(*o->request, o->number, o->head.data, o->head.size);
    head_clear(o);
}

static void capture(struct output *o, const uint8_t *data, size_t size) {
    size_t first = o->head_most - o->head_have < size ? o->head_most - o->head_have : size;
    size_t before = o->head.size;
    wr_raw(&o->head, data, first);
    heads += o->head.size - before;
    o->head_have += (uint32_t)first;
    if (o->head.size > INLINE_MAX || (heads > HEADS_MAX && *o->request)) send_head(o);
    if (size > first) o->dropped += ring_put(&o->ring, data + first, size - first, o->tail_most);
}

static void pass_on(struct output *o, const uint8_t *data, size_t size) {
    if (*o->request && !o->ring.have && size <= o->window) {
        out_frame(*o->request, o->number, data, size);
        o->window -= (uint32_t)size;
        return;
    }
    o->dropped += ring_put(&o->ring, data, size, o->draining ? DRAIN_MAX + KEPT_MAX_BYTES : KEPT_MAX_BYTES);
    output_flush(o);
}

static void received(struct output *o, size_t size) {
    if (o->streamed) pass_on(o, scratch, size);
    else capture(o, scratch, size);
}

void output_say(struct output *o, const char *text, size_t size) {
    if (o->streamed) pass_on(o, (const uint8_t *)text, size);
    else capture(o, (const uint8_t *)text, size);
}

// Only watched while there is somewhere to put it.
void output_rewatch(struct output *o) {
    if (o->source.fd < 0 || o->draining) return;
    bool full = o->streamed && *o->request && (!o->window || o->ring.have);
    if (full) source_want(&o->source, 0);
    else if (channel_congested() && *o->request) channel_resume_later(&o->source, EPOLLIN);
    else source_want(&o->source, EPOLLIN);
}

static void on_output(struct source *s, uint32_t events) {
    (void)events;
    struct output *o = (struct output *)((char *)s - offsetof(struct output, source));
    size_t most = o->streamed && *o->request && o->window < sizeof scratch ? o->window : sizeof scratch;
    ssize_t n = most ? read_now(s->fd, most) : 0;
    if (n < 0 && errno == EAGAIN) return;
    if (n > 0) received(o, (size_t)n);
    else if (most) source_close(s);
    output_rewatch(o);
}

void output_init(struct output *o, int fd, uint8_t number, struct request **request) {
    *o = (struct output){.number = number, .request = request};
    source_init(&o->source, fd, on_output);
}
void output_cap(struct output *o, uint32_t cap) {
    o->head_most = cap - cap / 2;
    o->tail_most = cap / 2;
}
void output_stream(struct output *o) {
    o->streamed = true;
    o->window = STREAM_WINDOW;
}
void output_start(struct output *o) { source_want(&o->source, EPOLLIN); }

// False: the stream has ended.
static bool empty(struct output *o) {
    for (size_t total = 0; o->source.fd >= 0 && total < DRAIN_MAX;) {
        ssize_t n = read_now(o->source.fd, sizeof scratch);
        if (n <= 0) return n < 0 && errno == EAGAIN;
        received(o, (size_t)n);
        total += (size_t)n;
    }
    return o->source.fd >= 0;
}
void output_empty(struct output *o) { empty(o); }

// ---- what children left behind go on to write ----

// A closed pipe would kill them by SIGPIPE though they are meant to live on, so it is kept and emptied into nothing. At a
// walking pace: a child that never stops must cost the agent next to nothing, and may wait.
#define SINKS_MAX 128
#define SINK_PAUSE_NS 20000000u

static struct source sinks[SINKS_MAX];
static size_t sinks_used, sinks_next;
static struct timer sinks_pause;

static void sinks_on(struct timer *t) {
    (void)t;
    for (size_t i = 0; i < sinks_used; i++) source_want(&sinks[i], EPOLLIN);
}

static void on_sink(struct source *s, uint32_t events) {
    (void)events;
    ssize_t n = read_now(s->fd, sizeof scratch);
    if (n == 0 || (n < 0 && errno != EAGAIN)) {
        source_close(s);
        return;
    }
    source_want(s, 0);
    if (!sinks_pause.slot && !timer_set(&sinks_pause, io_now_ns() + SINK_PAUSE_NS, sinks_on)) source_close(s);
}

static void sink(int fd) {
    size_t at = 0;
    while (at < sinks_used && sinks[at].fd >= 0) at++;
    if (at == SINKS_MAX) {  // the oldest one's writers get SIGPIPE after all
        at = sinks_next++ % SINKS_MAX;
        source_close(&sinks[at]);
    } else if (at == sinks_used) {
        sinks_used++;
    }
    source_init(&sinks[at], fd, on_sink);
    if (!source_want(&sinks[at], EPOLLIN)) source_close(&sinks[at]);
}

void outputs_close(void) {
    for (size_t i = 0; i < sinks_used; i++) source_close(&sinks[i]);
    timer_stop(&sinks_pause);
    sinks_used = sinks_next = 0;
}

void output_drain(struct output *o) {
    o->draining = true;
    bool open = empty(o);
    channel_forget(&o->source);
    struct stat s;
    int kept = open && !fstat(o->source.fd, &s) && S_ISFIFO(s.st_mode) ? fcntl(o->source.fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (kept >= 0) {
        sink(kept);
        o->source.duplicated = true;
    }
    source_close(&o->source);
}

void output_settle(struct output *o) {
    if (o->head.size + o->ring.have <= INLINE_MAX) return;
    send_head(o);
    while (o->ring.have > INLINE_MAX) {
        struct span part = ring_front(&o->ring);
        if (part.size > INLINE_MAX) part.size = INLINE_MAX;
        if (*o->request) out_frame(*o->request, o->number, part.at, part.size);
        ring_take(&o->ring, part.size);
    }
}

void output_field(struct output *o) {
    wr_u32(&host, (uint32_t)(o->head.size + o->ring.have));
    wr_raw(&host, o->head.data, o->head.size);
    head_clear(o);
    while (o->ring.have) {
        struct span part = ring_front(&o->ring);
        wr_raw(&host, part.at, part.size);
        ring_take(&o->ring, part.size);
    }
}

void output_reset(struct output *o, uint32_t cap) {
    head_clear(o);
    ring_free(&o->ring);
    o->dropped = 0;
    o->head_have = 0;
    output_cap(o, cap);
}

void output_next(struct output *o, uint32_t cap) {
    struct wr late = {0};
    wr_raw(&late, o->head.data, o->head.size);
    while (o->ring.have) {
        struct span part = ring_front(&o->ring);
        wr_raw(&late, part.at, part.size);
        ring_take(&o->ring, part.size);
    }
    output_reset(o, cap);
    if (late.size) output_say(o, (const char *)late.data, late.size);
    wr_free(&late);
}

bool output_flush(struct output *o) {
    while (o->ring.have && *o->request && o->window) {
        struct span part = ring_front(&o->ring);
        if (part.size > o->window) part.size = o->window;
        out_frame(*o->request, o->number, part.at, part.size);
        o->window -= part.size;
        ring_take(&o->ring, part.size);
    }
    return !o->ring.have;
}

void output_attach(struct output *o) {
    o->window = STREAM_WINDOW;
    output_flush(o);
    output_rewatch(o);
}

void output_credit(struct output *o, uint32_t bytes) {
    if (!o->streamed) return;
    o->window = bytes > STREAM_WINDOW - o->window ? STREAM_WINDOW : o->window + bytes;
    output_flush(o);
    output_rewatch(o);
}

void output_free(struct output *o) {
    channel_forget(&o->source);
    source_close(&o->source);
    head_clear(o);
    ring_free(&o->ring);
}
