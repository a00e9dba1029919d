// The agent's event loop: descriptors by epoll, deadlines by a heap of timers. One per process.
#ifndef UNTAX_LOOP_H
#define UNTAX_LOOP_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>

struct source {
    int fd;
    uint32_t wanted;  // events asked for; 0: not in the epoll set (a mere mask of 0 would still report hang-ups)
    bool duplicated;  // the descriptor is a duplicate of another one of ours: closing it does not end the watching
    void (*ready)(struct source *, uint32_t events);
};

// A source starts unwatched; -1 as descriptor is allowed and then everything below does nothing.
void source_init(struct source *s, int fd, void (*ready)(struct source *, uint32_t));
bool source_want(struct source *s, uint32_t events);
void source_close(struct source *s);  // also forgets events that were already fetched for it

struct timer {
    uint64_t at_ns;
    uint32_t slot;  // place in the heap, from 1; 0: not set
    void (*fired)(struct timer *);
};

bool timer_set(struct timer *t, uint64_t at_ns, void (*fired)(struct timer *));
void timer_stop(struct timer *t);

bool loop_init(void);
void loop_free(void);
// Calls `settle` before each wait, until it says false.
void loop_run(bool (*settle)(void));
// One round: fetches what is ready (waiting at most until the next timer when `wait`) and hands it out.
void loop_once(bool wait);

#endif
