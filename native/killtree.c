// Ending a command with everything it started, by reading /proc: the worker may signal, the agent may not.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io.h"
#include "spawn.h"

#define ROUNDS_MAX 64  // of looking again; each finds only what was started since the one before

struct seen {
    pid_t pid, parent, group, session;
    bool ours, dead;
};
struct table {
    struct seen *rows;
    size_t count, room;
};
struct pids {
    pid_t *at;
    size_t count, room;
};

static bool pids_has(const struct pids *p, pid_t pid) {
    for (size_t i = 0; i < p->count; i++)
        if (p->at[i] == pid) return true;
    return false;
}
static void pids_add(struct pids *p, pid_t pid) {
    if (pid <= 1 || pids_has(p, pid)) return;
    if (p->count == p->room) {
        size_t room = p->room ? p->room * 2 : 32;
        pid_t *grown = realloc(p->at, room * sizeof *grown);
        if (!grown) return;
        p->at = grown;
        p->room = room;
    }
    p->at[p->count++] = pid;
}

static bool read_one(int proc, const char *name, struct seen *out) {
    char path[32], text[512];
    snprintf(path, sizeof path, "%.20s/stat", name);
    if (io_read_file(proc, path, text, sizeof text) <= 0) return false;
    const char *end = strrchr(text, ')');  // the name may hold anything, also parentheses
    if (!end || end[1] != ' ' || !end[2]) return false;
    char state = end[2], *at;
    int parent = (int)strtol(end + 3, &at, 10), group = (int)strtol(at, &at, 10), session = (int)strtol(at, &at, 10);
    if (*at != ' ') return false;
    *out = (struct seen){.pid = atoi(name), .parent = parent, .group = group, .session = session, .dead = state == 'Z' || state == 'X'};
    return true;
}

static bool table_add(struct table *t, int proc, const char *name) {
    if (t->count == t->room) {
        size_t room = t->room ? t->room * 2 : 128;
        struct seen *grown = realloc(t->rows, room * sizeof *grown);
        if (!grown) return false;
        t->rows = grown;
        t->room = room;
    }
    if (read_one(proc, name, &t->rows[t->count])) t->count++;
    return true;
}

static bool read_all(struct table *t) {
    t->count = 0;
    DIR *dir = opendir("/proc");
    if (!dir) return false;
    for (struct dirent *e; (e = readdir(dir));)
        if (e->d_name[0] >= '1' && e->d_name[0] <= '9' && !table_add(t, dirfd(dir), e->d_name)) break;
    closedir(dir);
    return true;
}

// The numbers in such a file, which may be long.
static bool read_children(int tasks, const char *thread, struct pids *out) {
    char path[32], text[4096];
    snprintf(path, sizeof path, "%.20s/children", thread);
    int fd = openat(tasks, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    pid_t pid = 0;
    for (ssize_t n; (n = read(fd, text, sizeof text)) > 0;) {
        for (ssize_t i = 0; i < n; i++) {
            if (text[i] >= '0' && text[i] <= '9') pid = pid * 10 + (text[i] - '0');
            else pids_add(out, pid), pid = 0;
        }
    }
    close(fd);
    return true;
}

// Only what descends from the root: a few files instead of one for each process of the machine. False: this kernel does not tell.
static bool read_below(struct table *t, pid_t root) {
    struct pids found = {0};
    bool is_told = false;
    t->count = 0;
    int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    pids_add(&found, root);
    for (size_t i = 0; proc >= 0 && i < found.count; i++) {
        char name[32];
        snprintf(name, sizeof name, "%d/task", found.at[i]);
        int fd = openat(proc, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        DIR *tasks = fd < 0 ? NULL : fdopendir(fd);
        if (fd >= 0 && !tasks) close(fd);
        for (struct dirent *e; tasks && (e = readdir(tasks));)
            if (e->d_name[0] != '.') is_told |= read_children(fd, e->d_name, &found);
        if (tasks) closedir(tasks);
        *strchr(name, '/') = 0;
        if (!table_add(t, proc, name)) break;
    }
    io_close(&proc);
    free(found.at);
    return is_told;
}

// Marks the root, its session and group, and whatever descends from something marked; remembers them in `known`, since a
// child whose parent has died belongs to the reaper from then on.
static void mark(struct table *t, pid_t root, struct pids *known, struct pids *sessions) {
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < t->count; i++) {
            struct seen *p = &t->rows[i];
            if (p->ours || p->pid <= 1) continue;
            if (p->pid != root && p->group != root && !pids_has(sessions, p->session) && !pids_has(known, p->pid) && !pids_has(known, p->parent))
                continue;
            p->ours = more = true;
            if (p->dead) continue;
            pids_add(known, p->pid);
            if (p->session == root || pids_has(known, p->session)) pids_add(sessions, p->session);
        }
    }
}

unsigned kill_processes(pid_t root, int signal, bool spare_root, bool tree) {
    if (root <= 1) return 0;
    if (!tree) return !spare_root && kill(root, signal) == 0;
    struct table t = {0};
    struct pids known = {0}, sessions = {0}, stopped = {0};
    unsigned total = 0;
    pid_t self = getpid();
    pids_add(&known, root);
    // A session's shell is the leader of its session; a spared root that is not one (the agent) must not lend its own.
    if (!spare_root || getsid(root) == root) pids_add(&sessions, root);
    // Stopped processes cannot fork: stop until nobody new turns up, then kill all of them.
    bool lasting = signal == SIGKILL;
    // Nobody leaves its reaper: below that are all of them.
    bool is_reaper = root == self;
    for (int round = 0; round < ROUNDS_MAX && ((is_reaper && read_below(&t, root)) || read_all(&t)); round++) {
        mark(&t, root, &known, &sessions);
        unsigned fresh = 0, alive = 0;
        for (size_t i = 0; i < t.count; i++) {
            struct seen *p = &t.rows[i];
            if (!p->ours || p->dead || p->pid == self || (spare_root && p->pid == root)) continue;
            alive++;
            if (pids_has(&stopped, p->pid)) continue;
            if (kill(p->pid, lasting ? SIGSTOP : signal) == 0) {
                pids_add(&stopped, p->pid);
                fresh++, total++;
            }
        }
        if (!lasting || !alive) break;
        if (fresh && round < ROUNDS_MAX / 2) continue;
        for (size_t i = 0; i < stopped.count; i++) kill(stopped.at[i], SIGKILL);
        stopped.count = 0;
        if (round >= ROUNDS_MAX / 2) continue;
        break;
    }
    for (size_t i = 0; lasting && i < stopped.count; i++) kill(stopped.at[i], SIGKILL);
    free(t.rows);
    free(known.at);
    free(sessions.at);
    free(stopped.at);
    return total;
}
