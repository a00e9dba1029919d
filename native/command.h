// From a request to an EXEC: the configured environment and working directory, and what a request changes of them.
#ifndef UNTAX_COMMAND_H
#define UNTAX_COMMAND_H

#include "workers.h"

struct command {
    uint16_t options, rows, cols;
    bool null_input;
    uint8_t fds;  // how many are attached
    struct span cwd;
    struct span argv, env;  // `strs` as they came
    uint32_t argc, env_count;
};

bool config_open(const char *workdir);
void config_handle(const struct frame *f);
uint16_t config_proxy_port(void);
void config_free(void);

// Says what is wrong with the variables, or NULL.
const char *env_fault(struct span env);
// The payload of an EXEC behind its header, into the link's `out`.
bool command_write(struct wr *out, const struct command *c, bool die_with_parent);
// The first argument, for messages.
struct span first_of(struct span strs);

#endif
