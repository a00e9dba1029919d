// Persistent shells: one bash that runs one command text after another and says on its own descriptor how each ended.
#ifndef UNTAX_SESSION_H
#define UNTAX_SESSION_H

#include "result.h"
#include "workers.h"

void sessions_open(const struct agent_opts *opts);
void sessions_free(void);
bool sessions_exited(const struct ending *e);

void session_open_handle(const struct frame *f);
void session_run_handle(const struct frame *f);
void session_close_handle(const struct frame *f);

#endif
