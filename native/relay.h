// A socket inside joined to a stream of frames: OUT and DATA with credits both ways, until both directions have ended.
//
// Used by CONNECT (the host reaches a port inside) and by the proxy (a program inside reaches out).
#ifndef UNTAX_RELAY_H
#define UNTAX_RELAY_H

#include "input.h"
#include "loop.h"
#include "wire.h"

struct relay {
    uint32_t id;         // of the frames
    struct source read;  // the socket; `in` writes to a duplicate of it
    struct input in;     // DATA on its way into the socket
    uint32_t window;     // what may still be sent to the host
    bool read_over, write_over, over_told;
    void (*over)(struct relay *);  // both directions have ended; may free it
};

// Takes the socket (nonblocking). False: it could not be set up, and is closed. Reading starts with relay_start.
bool relay_init(struct relay *r, uint32_t id, int fd, void (*over)(struct relay *));
void relay_start(struct relay *r);
// Bytes that were read from the socket before it became a relay.
void relay_send(struct relay *r, const void *data, size_t size);
bool relay_data(struct relay *r, bool eof, struct span data);  // false: beyond the window
void relay_credit(struct relay *r, uint32_t bytes);
void relay_free(struct relay *r);

void connect_handle(const struct frame *f);
void relays_free(void);

#endif
