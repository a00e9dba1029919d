#define _GNU_SOURCE
#include "usage.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "io.h"

#define FIRST_LOOK_NS 4000000u    // a command shorter than this costs no look
#define LONGEST_PAUSE_NS 1000000000u
#define LOOKED_AT_MAX 256         // processes in one look, some 20 µs each

// ---- processor time ----

// utime, stime, cutime, cstime of /proc/PID/stat, in nanoseconds. Not by scanf, which is a tenth of the program.
static bool stat_times(int fd, uint64_t out[4]) {
    char text[512];
    ssize_t n = fd >= 0 ? pread(fd, text, sizeof text - 1, 0) : -1;
    if (n <= 0) return false;
    text[n] = 0;
    const char *at = strrchr(text, ')');  // the name may hold anything
    for (int field = 2; at && field < 14; field++) {
        at = strchr(at, ' ');
        if (at) at++;
    }
    if (!at) return false;
    uint64_t tick = 1000000000u / (uint64_t)sysconf(_SC_CLK_TCK);
    char *end = (char *)(uintptr_t)at;
    for (int i = 0; i < 4; i++) out[i] = strtoull(end, &end, 10) * tick;
    return true;
}

static struct cpu cpu_now(const struct usage *u) {
    uint64_t times[4];
    clockid_t clock;
    struct timespec t;
    if (!stat_times(u->stat, times)) return u->before;
    uint64_t shell = times[0] + times[1];
    if (!clock_getcpuclockid((pid_t)u->pid, &clock) && !clock_gettime(clock, &t)) shell = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    return (struct cpu){.all_ns = shell + times[2] + times[3], .system_ns = times[1] + times[3]};
}

static uint64_t since(uint64_t now, uint64_t before) { return now > before ? now - before : 0; }

// ---- memory ----

static uint64_t kib_of(const char *text, const char *name) {
    const char *line = strstr(text, name);
    return line ? strtoull(line + strlen(name), NULL, 10) : 0;
}

// What the shell held at most: since the command began when its mark has risen, else what it holds now.
static void look_at_shell(struct usage *u) {
    char text[2048];
    ssize_t n = u->status >= 0 ? pread(u->status, text, sizeof text - 1, 0) : -1;
    if (n <= 0) return;
    text[n] = 0;
    uint64_t high = kib_of(text, "VmHWM:"), held = high > u->shell_high_kib ? high : kib_of(text, "VmRSS:");
    u->shell_high_kib = high;
    if (held > u->peak_kib) u->peak_kib = held;
}

// The children of every thread of a process, and theirs.
static void look_below(struct usage *u, const char *pid, int *left) {
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%.10s/task", pid);
    DIR *threads = opendir(path);
    if (!threads) return;
    for (struct dirent *e; (e = readdir(threads)) && *left > 0;) {
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%.10s/children", e->d_name);
        if (io_read_file(dirfd(threads), path, text, sizeof text) <= 0) continue;
        char *save;
        for (const char *child = strtok_r(text, " ", &save); child && --*left >= 0; child = strtok_r(NULL, " ", &save)) {
            char status[2048];
            snprintf(path, sizeof path, "/proc/%.10s/status", child);
            if (io_read_file(AT_FDCWD, path, status, sizeof status) <= 0) continue;
            uint64_t high = kib_of(status, "VmHWM:");
            if (!high) high = kib_of(status, "VmRSS:");  // gVisor keeps no high-water mark
            if (high > u->peak_kib) u->peak_kib = high;
            look_below(u, child, left);
        }
    }
    closedir(threads);
}

static void on_look(struct timer *t) {
    struct usage *u = (struct usage *)((char *)t - offsetof(struct usage, look));
    char pid[12];
    int left = LOOKED_AT_MAX;
    snprintf(pid, sizeof pid, "%u", u->pid);
    look_at_shell(u);  // which may have become another program by `exec`
    look_below(u, pid, &left);
    u->pause_ns = u->pause_ns * 2 < LONGEST_PAUSE_NS ? u->pause_ns * 2 : LONGEST_PAUSE_NS;
    timer_set(t, io_now_ns() + u->pause_ns, on_look);
}

// ---- one command ----

void usage_open(struct usage *u, uint32_t pid) {
    char path[32];
    *u = (struct usage){.pid = pid};
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    u->stat = open(path, O_RDONLY | O_CLOEXEC);
    snprintf(path, sizeof path, "/proc/%u/status", pid);
    u->status = open(path, O_RDONLY | O_CLOEXEC);
}

void usage_close(struct usage *u) {
    timer_stop(&u->look);
    io_close(&u->stat);
    io_close(&u->status);
}

void usage_begin(struct usage *u) {
    u->peak_kib = 0;
    u->pause_ns = FIRST_LOOK_NS;
    timer_set(&u->look, io_now_ns() + u->pause_ns, on_look);
    u->before = cpu_now(u);
}

void usage_end(struct usage *u, const struct ending *e, struct outcome_fields *o) {
    timer_stop(&u->look);
    struct cpu now = e ? (struct cpu){.all_ns = e->user_ns + e->system_ns, .system_ns = e->system_ns} : cpu_now(u);
    uint64_t all = since(now.all_ns, u->before.all_ns), system = since(now.system_ns, u->before.system_ns);
    o->system_ns = system < all ? system : all;  // a whole tick may fall on a command that used less
    o->user_ns = all - o->system_ns;
    if (!e) look_at_shell(u);
    o->peak_kib = e && !u->peak_kib ? e->peak_kib : u->peak_kib;
}
