// A note that a worker leaves where the agent can read it after the worker's death: which start it was about, and the child that came of it.
//
// The kernel writes the child's pid before the child runs. So a command that kills the worker at once is still known to have started:
// it gets its own outcome, and cannot pass for a failure of the infrastructure.
#ifndef UNTAX_BIRTH_H
#define UNTAX_BIRTH_H

#include <stdint.h>

struct birth {
    uint32_t call;  // number of the EXEC; 0: none, or it has failed
    int32_t pid;
    uint64_t start_ns;
};

// Memory shared with every child forked from now on; NULL without memory.
struct birth *birth_new(void);
// The same by descriptor, for a worker that is no child of the agent's: a page that can neither shrink nor grow. -1 on failure.
int birth_file(void);
struct birth *birth_map(int fd);
void birth_free(struct birth *b);

#endif
