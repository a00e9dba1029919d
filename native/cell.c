// The cell: one program that makes sandboxes (`launcher`) and is the agent inside any of them (`agent`).
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"
#include "confined.h"
#include "contained.h"
#include "dispatch.h"
#include "init.h"
#include "io.h"
#include "launch.h"
#include "seccomp.h"

static int usage(FILE *to, int status) {
    fputs("cell launcher                   make sandboxes for the engine on the socket given\n"
          "cell agent --stdio [--dir DIR]  serve one channel on standard input and output\n"
          "  --contained [--user USER [--own DIR]…]  as the first process of a container, for a user of it\n"
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

static int agent(int argc, char **argv) {
    const char *dir = NULL;
    bool stdio = false, is_contained = false;
    struct contained contained = {0};
    for (int i = 0; i < argc; i++) {
        if (!strcmp(argv[i], "--stdio")) stdio = true;
        else if (!strcmp(argv[i], "--contained")) is_contained = true;
        else if (!strcmp(argv[i], "--dir") && i + 1 < argc) dir = argv[++i];
        else if (!strcmp(argv[i], "--user") && i + 1 < argc) contained.user = argv[++i];
        else if (!strcmp(argv[i], "--own") && i + 1 < argc && contained.own_count < OWN_MAX) contained.own[contained.own_count++] = argv[++i];
        else return usage(stderr, 2);
    }
    if (!stdio) return usage(stderr, 2);
    char workdir[PATH_MAX];
    if ((dir && chdir(dir) < 0) || !getcwd(workdir, sizeof workdir)) {
        perror(dir ? dir : "cell agent: working directory");
        return 1;
    }
    struct agent_opts opts = {.worker_fd = -1, .control_fd = -1, .memory_events_fd = -1, .pids_events_fd = -1, .workdir = workdir, .is_init = getpid() == 1};
    if (is_contained && !contained_prepare(&contained, &opts)) return 1;
    opts.channel_in = move_away(0);
    opts.channel_out = move_away(1);
    if (opts.channel_in < 0 || opts.channel_out < 0) {
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
