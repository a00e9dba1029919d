// File actions, done by the worker with the workload's own identity: no process is spawned for any of them.
//
// Short actions are answered at once. Long ones (a tree, a search, a watch) become jobs that are carried on in slices,
// so that a spawn never waits behind a search.
#ifndef UNTAX_ACTIONS_H
#define UNTAX_ACTIONS_H

#include <stdbool.h>

#include "wire.h"

struct actions;

// Reply frames are appended to `out`, which the caller sends; when it holds more than it can send the caller stops calling actions_step.
struct actions *actions_new(struct wr *out);
void actions_free(struct actions *a);
// The directory that relative paths start from; takes a copy. A directory that does not exist yet is looked up again at each use.
void actions_workdir(struct actions *a, const char *path);
// True when the frame was a file action, or CANCEL, CREDIT or DATA for a running one; it has been answered or became a job.
bool actions_handle(struct actions *a, const struct frame *f);
// One slice (about a millisecond) of one job, in turn. False: no job can go on now.
bool actions_step(struct actions *a);
// A descriptor to wait on for jobs that wait for the kernel (watches), or -1; when readable call actions_ready.
int actions_fd(const struct actions *a);
void actions_ready(struct actions *a);

#endif
