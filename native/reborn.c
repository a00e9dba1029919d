#define _GNU_SOURCE
#include "reborn.h"

#include <fcntl.h>
#include <unistd.h>

#include "contained.h"
#include "keys.h"
#include "process.h"
#include "proxy.h"

#define NAME_MAX_HERE 64u

static void no_stop(struct request *r, enum stop_reason why) { (void)r, (void)why; }
static const struct request_ops at_once = {.stop = no_stop};

static bool streams(const struct process *p) { return p->request && p->pid && p->options & SPAWN_STREAM; }

void quiesce_handle(const struct frame *f) {
    if (!rd_done(&f->payload)) {
        reject(f, "a malformed QUIESCE");
        return;
    }
    struct request *q = request_new(f, &at_once, NULL);
    if (!q) return;
    uint32_t streamed = 1;  // this one itself
    for (struct process *p = processes_newest; p; p = p->older) streamed += streams(p);
    if (requests_count() > streamed) {
        request_fail(q, E_BUSY, 0, "other actions are under way");
        return;
    }
    request_done(q);
    channel_fall_silent();
}

// As when whoever watched a process leaves: it goes on, and another may take its stream.
static void leave(struct process *p) {
    struct request *r = p->request;
    if (r->kind == K_SPAWN && r->deadline.slot) timer_set(&p->deadline, r->deadline.at_ns, process_deadline);
    p->request = NULL;
    p->in.id = 0;
    request_drop(r);
    if (p->exited) processes_kept++;
    output_rewatch(&p->out);
    output_rewatch(&p->err);
}

bool reborn_handle(const struct frame *f) {
    struct rd r = f->payload;
    struct span name = rd_bytes(&r), machine = rd_bytes(&r);
    if (!rd_done(&r) || !channel_silent() || name.size > NAME_MAX_HERE) return false;
    for (struct process *p = processes_newest; p; p = p->older)
        if (streams(p)) leave(p);
    proxy_free();  // whatever a program inside was connected to is not there any more
    keys_free();
    channel_speak(true);
    contained_rename(name, machine);
    return true;
}
