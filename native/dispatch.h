// The agent's parts that tests and fuzzers drive without its loop.
#ifndef UNTAX_DISPATCH_H
#define UNTAX_DISPATCH_H

#include "agent.h"
#include "wire.h"

#ifndef UNTAX_VERSION
#define UNTAX_VERSION "unknown"
#endif

bool agent_open(const struct agent_opts *opts);
void agent_close(void);
// One frame from the host. False: hang up.
bool agent_dispatch(const struct frame *f, const uint8_t *raw, size_t size);

#endif
