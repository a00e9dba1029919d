// A socket inside joined to a stream of frames: OUT and DATA with credits both ways, until both directions have ended.
#ifndef UNTAX_RELAY_H
#define UNTAX_RELAY_H

#include "wire.h"

void connect_handle(const struct frame *f);
void relays_free(void);

#endif
