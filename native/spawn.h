// Starting and ending programs, done by the worker with the workload's identity.
#ifndef UNTAX_SPAWN_H
#define UNTAX_SPAWN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

// Where a start failed; 0 when it did not.
enum spawn_step { STEP_NONE = 0, STEP_MALFORMED = 1, STEP_PTY = 2, STEP_CLONE = 3, STEP_SETUP = 4, STEP_CHDIR = 5, STEP_EXEC = 6 };

#define EXEC_FALLBACK_SH 0x100u  // beside spawn_options in EXEC: where there is no bash, take sh
#define EXEC_DIE_WITH_PARENT 0x200u

struct birth;

struct spawn {
    uint32_t call;        // number of the EXEC, for the note
    struct birth *birth;  // NULL: no note is left
    uint16_t options;
    uint16_t rows, cols;
    const char *cwd;
    char **argv, **env;
    int fds[6];  // become 0, 1, 2, …; -1 in the first: /dev/null
    int fds_count;
};

struct spawned {
    pid_t pid;
    int error;
    enum spawn_step step;
    uint64_t start_ns;
    int pty;  // master side, or -1
};

// The program is a child of the caller's parent (CLONE_PARENT), leader of its own session.
struct spawned spawn_run(const struct spawn *s);
// Finds out whether this kernel does that; false: it does not (gVisor), and another way is taken. Before any other child.
bool spawn_find_way(void);

// Sends `signal` to the process `root` and, with `tree`, to its session, its group and all its descendants; `spare_root`
// leaves out the process itself. SIGKILL is repeated until nothing is found. Returns how many processes were signalled.
unsigned kill_processes(pid_t root, int signal, bool spare_root, bool tree);

#endif
