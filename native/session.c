#include "session.h"

void sessions_open(const struct agent_opts *opts) { (void)opts; }
void sessions_free(void) {}
bool sessions_exited(const struct ending *e) { return (void)e, false; }
static void not_yet(const struct frame *f) { frame_error(&host, f->id, E_UNSUPPORTED, 0, "no sessions in this build"); }
void session_open_handle(const struct frame *f) { not_yet(f); }
void session_run_handle(const struct frame *f) { not_yet(f); }
void session_close_handle(const struct frame *f) { not_yet(f); }
