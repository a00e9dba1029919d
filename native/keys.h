// Idempotency keys and batches: the two ways in which one request's end concerns another.
#ifndef UNTAX_KEYS_H
#define UNTAX_KEYS_H

#include "request.h"

// True: the request is the first with this key and goes on. False: it has been answered, or waits for the first one.
bool keys_admit(struct request *r, const uint8_t *key);
// The final frame of the first request lies in `host` from `begun`.
void keys_finish(struct key *k, size_t begun);
void keys_free(void);

void batch_step_ended(struct batch *b, bool success);
// The batch whose request is being dispatched, for request_new to note; or NULL.
struct batch *batch_starting(void);
void batch_free(struct batch *b);

#endif
