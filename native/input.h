// Bytes on their way into a descriptor inside: standard input, a terminal, a connection. Consumed DATA is credited to the host.
#ifndef UNTAX_INPUT_H
#define UNTAX_INPUT_H

#include "loop.h"
#include "wire.h"

struct input {
    struct source source;
    uint32_t id;          // whose CREDIT frames; 0: none are sent
    struct wr waiting;
    size_t at;
    uint64_t uncounted;   // bytes that came with the request and not as DATA
    uint32_t outstanding; // DATA received and not credited
    bool eof, discard;
    bool held;            // the descriptor is still to come
    void (*ended)(struct input *);  // everything is written and the end was said, or nobody reads any more
};

void input_init(struct input *in, int fd, uint32_t id, void (*ended)(struct input *));
// False: the host sent more than the window allows.
bool input_data(struct input *in, struct span data, bool eof, bool counted);
void input_flush(struct input *in);
void input_free(struct input *in);
size_t inputs_waiting(void);  // bytes in all of them

#endif
