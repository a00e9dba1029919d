#define _GNU_SOURCE
#include "result.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define EARLY_MAX 65536u  // more than there are pids

static struct ending *early;
static uint32_t early_count, early_room;
static int pending;

void exec_pending(int change) {
    pending += change;
    if (!pending) early_count = 0;
}

void exec_remember(const struct ending *e) {
    if (!pending || early_count == EARLY_MAX) return;
    if (early_count == early_room) {
        uint32_t room = early_room ? early_room * 2 : 64;
        struct ending *grown = realloc(early, room * sizeof *grown);
        if (!grown) return;
        early = grown;
        early_room = room;
    }
    early[early_count++] = *e;
}

bool exec_early(uint32_t pid, struct ending *out) {
    for (uint32_t i = early_count; i--;)  // the latest first: a pid may have been used again
        if (early[i].pid == pid) {
            *out = early[i];
            early[i] = early[--early_count];
            return true;
        }
    return false;
}

void outcome_status(struct outcome_fields *o, int status) {
    o->outcome = WIFSIGNALED(status) ? OUTCOME_SIGNALED : OUTCOME_EXITED;
    o->code = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

void outcome_write(const struct outcome_fields *o, struct output *out, struct output *err) {
    wr_u8(&host, o->outcome);
    wr_u32(&host, (uint32_t)o->code);
    wr_u64(&host, o->wall_ns);
    wr_u64(&host, o->user_ns);
    wr_u64(&host, o->system_ns);
    wr_u64(&host, o->peak_kib);
    wr_u32(&host, o->oom_kills);
    wr_u32(&host, o->pids_refused);
    wr_u8(&host, o->disk_full);
    wr_u64(&host, out->dropped);
    wr_u64(&host, err->dropped);
    if (out->streamed) {  // all of it went out in OUT frames; what a stop left unsent does not count as output
        wr_u32(&host, 0);
        wr_u32(&host, 0);
        return;
    }
    output_field(out);
    output_field(err);
}

int exec_exit_status(int error) {
    switch (error) {
    case ENOENT: case ENOTDIR: case ENAMETOOLONG: case ELOOP: return 127;
    case EACCES: case EPERM: case ENOEXEC: case EISDIR: case ETXTBSY: case ELIBBAD: case EINVAL: return 126;
    default: return 0;
    }
}

const char *spawn_step_words(enum spawn_step step) {
    switch (step) {
    case STEP_PTY: return "opening a terminal";
    case STEP_CLONE: return "starting a process";
    case STEP_SETUP: return "preparing the process";
    case STEP_CHDIR: return "entering the working directory";
    case STEP_EXEC: return "executing the program";
    default: return "asking the worker";
    }
}

// ---- counters ----

static int memory_fd = -1, pids_fd = -1;
static struct counters cached;

// The number behind `name` at the beginning of a line.
static uint32_t number_of(int fd, const char *name, uint32_t before) {
    char text[512];
    ssize_t n = fd >= 0 ? pread(fd, text, sizeof text - 1, 0) : -1;
    if (n <= 0) return before;
    text[n] = 0;
    size_t size = strlen(name);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        if (!strncmp(line, name, size) && line[size] == ' ') return (uint32_t)strtoul(line + size, NULL, 10);
    }
    return before;
}

void counters_open(int memory_events_fd, int pids_events_fd) {
    memory_fd = memory_events_fd;
    pids_fd = pids_events_fd;
    counters_read();
}
struct counters counters_cached(void) { return cached; }
void counters_oom(void) { cached.oom_kills++; }
struct counters counters_read(void) {
    if (memory_fd >= 0) cached.oom_kills = number_of(memory_fd, "oom_kill", cached.oom_kills);
    if (pids_fd >= 0) cached.pids_refused = number_of(pids_fd, "max", cached.pids_refused);
    return cached;
}

void kill_group(uint32_t pid) {
#ifndef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    if (pid > 1) kill(-(pid_t)pid, SIGKILL);
#else
    (void)pid;
#endif
}
