// The proxy on the sandbox's loopback: programs ask it for a destination, the host dials.
#ifndef UNTAX_PROXY_H
#define UNTAX_PROXY_H

#include "wire.h"

// Listens on 127.0.0.1:port from now on; 0 stops. Gives an errno, or 0.
int proxy_listen(uint16_t port);
// A frame from the host whose id has the top bit set.
void proxy_handle(const struct frame *f);
void proxy_free(void);

#endif
