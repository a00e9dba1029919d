// The head of a proxied request: where it wants to go, and how it reads for the origin. No sockets.
#ifndef UNTAX_HTTP_H
#define UNTAX_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire.h"

#define HTTP_HEAD_MAX (16u << 10)

struct http_target {
    bool tunnel;  // CONNECT
    char host[256];
    uint16_t port;
};

// Where the head (with its blank line) ends; 0: not yet.
size_t http_head_size(const char *data, size_t size);
// Understands a whole head and, unless it asks for a tunnel, appends what the origin is to get. Gives NULL, or what is wrong.
const char *http_understand(const char *head, size_t size, struct http_target *to, struct wr *origin);
// A complete answer with a body of plain text, as a proxy gives it instead of the origin.
void http_refusal(struct wr *out, unsigned status, const char *text, size_t size);

#endif
