// The cell: one program that makes sandboxes (`launcher`) and is the agent inside any of them (`agent`).
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"
#include "confined.h"
#include "contained.h"
#include "dispatch.h"
#include "ferry.h"
#include "held.h"
#include "init.h"
#include "io.h"
#include "launch.h"
#include "output.h"
#include "seccomp.h"
#include "spawn.h"

#define CUT_PATIENCE_MS 30000  // for another container of the pod, which is started first
#define HELD_PATIENCE_S 600u  // for an engine that is restarted, or cut off, to come back

static int usage(FILE *to, int status) {
    fputs("cell launcher                   make sandboxes for the engine on the socket given\n"
          "cell agent --stdio [--dir DIR]  serve one channel on standard input and output\n"
          "  --contained [--user USER [--own DIR]…]  as the first process of a container, for a user of it\n"
          "  --told   memory is counted outside: SIGUSR1 from there says that it ran out\n"
          "cell agent --held NAME [--patience SECONDS] [--cut] [--dir DIR]  the same on streams that `cell join NAME` brings\n"
          "cell join NAME                  bring standard input and output to such an agent\n"
          "cell ferry                      carry channels between clients elsewhere and sandboxes here, for the agent on standard input\n"
          "cell cut                        take all network interfaces down but the loopback\n"
          "cell init                       the first process of a virtual machine\n"
          "cell confined … -- PROGRAM …    start a program that ends with its engine and gains nothing\n"
          "cell tsc-khz                    print the rate of this processor's counter\n"
          "cell seccomp-table [--names]    print the verdict for each system call\n"
          "cell version\n",
          to);
    return status;
}

// The channel moves away from 0 and 1, so that nothing that is started, or prints by mistake, can reach it.
static int move_away(int fd) {
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (moved < 0 || null < 0 || dup2(null, fd) < 0) return -1;
    if (null > 2) close(null);
    return moved;
}

// In a container the kernel's counters are those of its own group, seen at its root.
static int open_counter(const char *unified, const char *legacy) {
    int fd = open(unified, O_RDONLY | O_CLOEXEC);
    return fd >= 0 ? fd : open(legacy, O_RDONLY | O_CLOEXEC);
}

// As in a sandbox of the launcher (THREATS 6.1), as far as the runtime left more than that.
static void lower_limits(void) {
    static const struct {
        int what;
        rlim_t most;
    } limits[] = {{RLIMIT_CORE, 0}, {RLIMIT_NOFILE, 4096}, {RLIMIT_MEMLOCK, 64 << 10}, {RLIMIT_MSGQUEUE, 800 << 10}, {RLIMIT_RTPRIO, 0}};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        struct rlimit have;
        if (getrlimit(limits[i].what, &have) < 0) continue;
        if (have.rlim_max > limits[i].most) have.rlim_max = limits[i].most;
        if (have.rlim_cur > have.rlim_max) have.rlim_cur = have.rlim_max;
        setrlimit(limits[i].what, &have);
    }
}

static bool open_channel(struct agent_opts *opts) {
    if (!opts->held_name) {
        opts->channel_in = move_away(0);
        opts->channel_out = move_away(1);
        return opts->channel_in >= 0 && opts->channel_out >= 0;
    }
    lower_limits();
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0) return false;
    io_roomy(pair[0]), io_roomy(pair[1]);
    opts->channel_in = opts->channel_out = pair[0];
    opts->held_fd = pair[1];
    opts->memory_events_fd = open_counter("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control");
    opts->pids_events_fd = open_counter("/sys/fs/cgroup/pids.events", "/sys/fs/cgroup/pids/pids.events");
    return true;
}

static int agent(int argc, char **argv) {
    const char *dir = NULL;
    bool stdio = false, cut = false, is_contained = false;
    struct contained contained = {0};
    struct agent_opts opts = {.worker_fd = -1, .control_fd = -1, .memory_events_fd = -1, .pids_events_fd = -1, .is_init = getpid() == 1,
                              .held_patience_s = HELD_PATIENCE_S};
    for (int i = 0; i < argc; i++) {
        if (!strcmp(argv[i], "--stdio")) stdio = true;
        else if (!strcmp(argv[i], "--contained")) is_contained = true;
        else if (!strcmp(argv[i], "--told")) opts.is_told = true;
        else if (!strcmp(argv[i], "--held") && i + 1 < argc) opts.held_name = argv[++i];
        else if (!strcmp(argv[i], "--patience") && i + 1 < argc) opts.held_patience_s = (uint32_t)strtoul(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "--cut")) cut = true;
        else if (!strcmp(argv[i], "--dir") && i + 1 < argc) dir = argv[++i];
        else if (!strcmp(argv[i], "--user") && i + 1 < argc) contained.user = argv[++i];
        else if (!strcmp(argv[i], "--own") && i + 1 < argc && contained.own_count < OWN_MAX) contained.own[contained.own_count++] = argv[++i];
        else return usage(stderr, 2);
    }
    if (stdio == !!opts.held_name) return usage(stderr, 2);
    char workdir[PATH_MAX];
    if ((dir && chdir(dir) < 0) || !getcwd(workdir, sizeof workdir)) {
        perror(dir ? dir : "cell agent: working directory");
        return 1;
    }
    opts.workdir = workdir;
    // Before anything is started, so that all who start programs know the way.
    if ((opts.is_init || opts.held_name) && !spawn_find_way()) outputs_distrust_nowait();
    if (is_contained && !contained_prepare(&contained, &opts)) return 1;
    if (cut && !wait_cut(CUT_PATIENCE_MS)) {
        fputs("cell agent: the sandbox still has a network, and nobody took it down\n", stderr);
        return 3;
    }
    if (!open_channel(&opts)) {
        perror("cell agent: standard input and output");
        return 1;
    }
    return agent_main(&opts);
}

// The rate of the processor's own counter, which an emulated machine without another clock is told.
static int tsc_khz(void) {
#if defined(__x86_64__)
    struct timespec pause = {.tv_nsec = 50000000};
    uint64_t from = io_now_ns(), began = __builtin_ia32_rdtsc();
    nanosleep(&pause, NULL);
    uint64_t ticks = __builtin_ia32_rdtsc() - began, ns = io_now_ns() - from;
    printf("%llu\n", (unsigned long long)(ticks * 1000000u / ns));
    return 0;
#else
    return 1;
#endif
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "agent")) return agent(argc - 2, argv + 2);
    if (!strcmp(what, "join") && argc == 3) return join_main(argv[2]);
    if (!strcmp(what, "ferry") && argc == 2) return ferry_main(0);
    if (!strcmp(what, "cut") && argc == 2) return cut_main();
    if (!strcmp(what, "confined")) return confined_main(argc - 2, argv + 2);
    if (!strcmp(what, "tsc-khz")) return tsc_khz();
    if (!strcmp(what, "init")) return init_main();
    if (!strcmp(what, "launcher")) return launcher_main(argc, argv);
    if (!strcmp(what, "seccomp-table")) return seccomp_table_main(argc > 2 && !strcmp(argv[2], "--names"));
    if (!strcmp(what, "version")) {
        puts(UNTAX_VERSION);
        return 0;
    }
    if (!strcmp(what, "--help") || !strcmp(what, "-h")) return usage(stdout, 0);
    return usage(stderr, 2);
}
