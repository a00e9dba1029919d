// What a command prints: collected up to a cap, or passed on as it comes within a window.
#ifndef UNTAX_OUTPUT_H
#define UNTAX_OUTPUT_H

#include "loop.h"
#include "request.h"

#define INLINE_MAX (128u << 10)  // of one stream in a DONE
#define KEPT_MAX_BYTES (64u << 10)  // of a stream that nobody is attached to
#define DRAIN_MAX (256u << 10)   // read at most after the exit: others may keep writing

// The last bytes of something longer. Grows to what it is asked to hold.
struct ring {
    uint8_t *data;
    size_t room, start, have;
};
// Adds; drops the oldest beyond `most`, and says how many bytes went.
uint64_t ring_put(struct ring *r, const uint8_t *data, size_t size, size_t most);
struct span ring_front(const struct ring *r);  // the first contiguous part
void ring_take(struct ring *r, size_t size);
void ring_free(struct ring *r);

struct output {
    struct source source;
    struct request **request;  // who gets it; NULL inside: nobody at the moment
    uint8_t number;            // 1 stdout, 2 stderr
    bool streamed;
    bool draining;  // the process has exited; what it left is in the ring
    uint32_t window;
    uint32_t head_most, head_have, tail_most;
    struct wr head;
    struct ring ring;
    uint64_t dropped;
};

// The output's source is watched from output_start on. -1: there is no such stream.
void output_init(struct output *o, int fd, uint8_t number, struct request **request);
void output_cap(struct output *o, uint32_t cap);
void output_stream(struct output *o);
void output_start(struct output *o);
// Takes what the pipe holds now, without waiting for its end, and lets go of it: what others still write goes nowhere.
void output_drain(struct output *o);
// The same without closing (a session goes on).
void output_empty(struct output *o);
// A capped stream sends what is too long for a DONE; then output_field writes the rest into it.
void output_settle(struct output *o);
void output_field(struct output *o);
void output_reset(struct output *o, uint32_t cap);  // forgets what it holds
// For the next command of a session: what background jobs printed since the last one comes first in its output.
void output_next(struct output *o, uint32_t cap);
// A streamed one: everything kept has been sent.
bool output_flush(struct output *o);
void output_attach(struct output *o);
void output_credit(struct output *o, uint32_t bytes);
void output_say(struct output *o, const char *text, size_t size);  // as if the command had printed it
void output_rewatch(struct output *o);  // after who is attached has changed
void output_free(struct output *o);
void outputs_close(void);  // with the agent

void out_frame(struct request *r, uint8_t stream, const void *data, size_t size);

// gVisor takes RWF_NOWAIT and waits all the same; nothing tells but its other ways.
void outputs_distrust_nowait(void);

#endif
