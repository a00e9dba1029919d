// The agent's side of its workers: who acts for which user, calls to them, and file actions passed through.
#ifndef UNTAX_WORKERS_H
#define UNTAX_WORKERS_H

#include "agent.h"
#include "link.h"
#include "loop.h"
#include "request.h"

struct worker;

// One exchange with a worker. `reply` gets every frame for it (descriptors with link_take_fds); `lost` says that the worker
// died first. A call ends itself with call_end, from within either.
struct call {
    uint32_t id, epoch;
    struct worker *worker;
    void (*reply)(struct call *, const struct frame *, const uint8_t *raw, size_t size);
    void (*lost)(struct call *);
    struct call *next;
};

bool workers_open(const struct agent_opts *opts);
void workers_free(void);
void workers_flush(void);
// SIGKILL for those that are our children; false when there is none. What they had started is ours then.
bool workers_kill(void);

// The worker for this user. NULL: the request has been answered with the reason.
struct worker *worker_for(struct request *r, struct span user);
struct link *worker_link(struct worker *w);
bool worker_live(const struct worker *w);  // a pointer stays good; whether somebody is there changes

// Numbers the call and begins its frame in the link's `out`; the caller fills and ends it (frame_end).
size_t call_begin(struct call *c, struct worker *w, uint8_t kind, void (*reply)(struct call *, const struct frame *, const uint8_t *, size_t),
                  void (*lost)(struct call *));
void call_end(struct call *c);
// In `lost`, of an EXEC: the worker had made the child already. Its word, to be checked: the pid may be anybody's.
bool call_gave_birth(const struct call *c, uint32_t *pid, uint64_t *start_ns);
// A KILL whose answer nobody waits for.
void worker_kill(struct worker *w, uint32_t pid, int signal, bool spare_root, bool tree);
void kill_fields(struct worker *w, uint32_t pid, int signal, bool spare_root, bool tree);

// Passes a file action to the default worker and its answers back.
void forward(const struct frame *f, const uint8_t *raw, size_t size);
// CONFIGURE, for the workers that are there and those to come.
void workers_configure(const char *workdir);
// A child was reaped; true when it was a worker.
bool workers_reaped(int pid);

#endif
