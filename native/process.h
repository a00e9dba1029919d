// Commands: their pipes, deadlines and results, and the table of those that run.
#ifndef UNTAX_PROCESS_H
#define UNTAX_PROCESS_H

#include "command.h"
#include "input.h"
#include "output.h"
#include "result.h"
#include "workers.h"

struct process {
    uint32_t pid;  // 0: not started yet
    struct worker *worker;
    struct request *request;  // who hears of it; NULL: nobody at the moment
    struct call exec, kill, probe;
    struct output out, err;
    struct input in;
    int pty;  // only to know and resize it; belongs to `out`
    uint16_t options;
    bool running, exited, stopping, killing, probing, probed, disk_full, answered;
    enum stop_reason why;
    struct timer grace, deadline;
    uint64_t start_ns;
    struct counters before;
    struct ending ending;
    uint8_t *argv;  // `strs`
    uint32_t argv_size;
    struct process *next;  // in its bucket
    struct process *newer, *older;
};


extern struct process *processes_newest;  // the list of all
extern unsigned processes_kept;           // streamed, ended, not claimed

void processes_open(const struct agent_opts *opts);
void processes_free(void);
// What the reaper saw; true when it was a command's.
bool processes_exited(const struct ending *e);

void spawn_handle(const struct frame *f);

// For attach.c, which lists processes and hands them to other requests.
struct process *process_find(uint32_t pid);
void process_free(struct process *p);
void finish_if_over(struct process *p);
void process_started(struct process *p);
void process_deadline(struct timer *t);
void process_data(struct request *r, bool eof, struct span data);
void process_credit(struct request *r, uint8_t stream, uint32_t bytes);

#endif
