// Requests in flight: what each is waiting for, its deadline, its idempotency key, and its one final frame.
#ifndef UNTAX_REQUEST_H
#define UNTAX_REQUEST_H

#include "channel.h"

struct request;
struct key;
struct batch;

enum stop_reason { STOP_CANCEL, STOP_DEADLINE };

// What a kind of request does with what comes for it later; NULL entries ignore it.
struct request_ops {
    void (*stop)(struct request *, enum stop_reason);  // must lead to a final frame soon
    void (*data)(struct request *, bool eof, struct span data);
    void (*credit)(struct request *, uint8_t stream, uint32_t bytes);
};

struct request {
    uint32_t id;
    uint8_t kind;
    const struct request_ops *ops;
    void *owner;  // for the ops
    struct timer deadline;
    struct key *key;
    struct request *next_waiting;  // for the same key
    struct batch *batch;           // it is a part of this one
    struct request *next;
};

// Registers the request of this frame, or answers it (too many, id in use, key known) and gives NULL.
struct request *request_new(const struct frame *f, const struct request_ops *ops, void *owner);
struct request *request_find(uint32_t id);
uint32_t requests_count(void);
void requests_free(void);
void request_drop(struct request *r);  // nobody is there to be answered

// A frame to the host under the request's id is begun with this, filled through `host`, and ended with frame_end …
size_t request_frame(struct request *r, uint8_t kind);
// … or, when it is the final one, with this, which forgets the request.
void request_finish(struct request *r, size_t begun, bool success);
void request_done(struct request *r);  // an empty DONE
void request_fail(struct request *r, uint16_t code, int error, const char *format, ...) __attribute__((format(printf, 4, 5)));
// The same for a frame that never became a request.
void reject(const struct frame *f, const char *why);
const char *words(int error);  // of an errno

// Runs the requests of a BATCH one after another through `dispatch`.
void batch_handle(const struct frame *f, bool (*dispatch)(const struct frame *, const uint8_t *, size_t));

#endif
