// The worker: the agent's hands. Opens files and executes programs with the workload's identity.
#ifndef UNTAX_WORKER_H
#define UNTAX_WORKER_H

struct birth;

struct worker_opts {
    const char *workdir;
    struct birth *birth;  // shared with the agent; NULL: none
};

// Serves frames on `sock` (a stream socket to the agent) until it ends. Returns the exit status for the process.
int worker_main(int sock, const struct worker_opts *opts);

#endif
