// A channel that outlives its streams: for sandboxes that are reached through somebody else's connection, which may break.
// See docs/protocol.md, "Held streams".
#ifndef UNTAX_HELD_H
#define UNTAX_HELD_H

#include <stdbool.h>
#include <stdint.h>

// Listens on the abstract socket `name`; what comes over the stream that joined last passes through `inner`, the other end of the
// agent's channel. Without a stream for `patience_s` the channel ends, and with it the agent. The loop must be there.
bool held_open(const char *name, int inner, uint32_t patience_s);
void held_close(void);

// `cell join`: hands its standard input and output to the agent that listens on `name`, and stays until they are done with.
int join_main(const char *name);
// `cell cut`: takes every network interface but the loopback down. Needs CAP_NET_ADMIN.
int cut_main(void);
// Returns once somebody has done that; false when nobody does in time.
bool wait_cut(int patience_ms);

#endif
