#include "loop.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "io.h"

#define EVENTS_AT_ONCE 64

static int epoll_fd = -1;
static struct epoll_event events[EVENTS_AT_ONCE];
static int events_left;  // from the end: those not handed out yet
static int events_got;

static struct timer **heap;
static uint32_t heap_count, heap_room;

void source_init(struct source *s, int fd, void (*ready)(struct source *, uint32_t)) {
    *s = (struct source){.fd = fd, .ready = ready};
}

bool source_want(struct source *s, uint32_t wanted) {
    if (s->fd < 0 || s->wanted == wanted) return true;
    struct epoll_event e = {.events = wanted, .data.ptr = s};
    int op = !wanted ? EPOLL_CTL_DEL : s->wanted ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    if (epoll_ctl(epoll_fd, op, s->fd, &e) < 0) return false;
    s->wanted = wanted;
    return true;
}

// No EPOLL_CTL_DEL as a rule: descriptors that are watched are never shared with another process, so closing removes them.
void source_close(struct source *s) {
    if (s->fd < 0) return;
    for (int i = events_got - events_left; i < events_got; i++)
        if (events[i].data.ptr == s) events[i].data.ptr = NULL;
    if (s->duplicated) source_want(s, 0);
    close(s->fd);
    s->fd = -1;
    s->wanted = 0;
}

static void place(struct timer *t, uint32_t slot) {
    heap[slot] = t;
    t->slot = slot;
}

static void sift(struct timer *t, uint32_t slot) {
    while (slot > 1 && heap[slot / 2]->at_ns > t->at_ns) {
        place(heap[slot / 2], slot);
        slot /= 2;
    }
    for (;;) {
        uint32_t child = slot * 2;
        if (child > heap_count) break;
        if (child < heap_count && heap[child + 1]->at_ns < heap[child]->at_ns) child++;
        if (heap[child]->at_ns >= t->at_ns) break;
        place(heap[child], slot);
        slot = child;
    }
    place(t, slot);
}

bool timer_set(struct timer *t, uint64_t at_ns, void (*fired)(struct timer *)) {
    timer_stop(t);
    if (heap_count + 2 > heap_room) {
        uint32_t room = heap_room ? heap_room * 2 : 64;
        struct timer **grown = realloc(heap, room * sizeof *grown);
        if (!grown) return false;
        heap = grown;
        heap_room = room;
    }
    t->at_ns = at_ns;
    t->fired = fired;
    sift(t, ++heap_count);
    return true;
}

void timer_stop(struct timer *t) {
    uint32_t slot = t->slot;
    if (!slot) return;
    t->slot = 0;
    struct timer *last = heap[heap_count--];
    if (last != t) sift(last, slot);
}

bool loop_init(void) {
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return epoll_fd >= 0;
}

void loop_free(void) {
    io_close(&epoll_fd);
    free(heap);
    heap = NULL;
    heap_count = heap_room = 0;
}

static int wait_ms(void) {
    if (!heap_count) return -1;
    uint64_t now = io_now_ns(), at = heap[1]->at_ns;
    if (at <= now) return 0;
    uint64_t ms = (at - now + 999999) / 1000000;
    return ms > 60000 ? 60000 : (int)ms;
}

void loop_once(bool wait) {
    int n = epoll_wait(epoll_fd, events, EVENTS_AT_ONCE, wait ? wait_ms() : 0);
    events_got = events_left = n > 0 ? n : 0;
    while (events_left) {
        struct epoll_event *e = &events[events_got - events_left--];
        struct source *s = e->data.ptr;
        if (s) s->ready(s, e->events);
    }
    if (!heap_count) return;
    uint64_t now = io_now_ns();
    while (heap_count && heap[1]->at_ns <= now) {
        struct timer *t = heap[1];
        timer_stop(t);
        t->fired(t);
    }
}

void loop_run(bool (*settle)(void)) {
    while (settle()) loop_once(true);
}
