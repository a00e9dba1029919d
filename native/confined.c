#define _GNU_SOURCE
#include "confined.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "io.h"

#define GROUPS_MAX 4
#define JOINS_MAX 4

static int failed(const char *step) {
    fprintf(stderr, "%s: %s\n", step, strerror(errno));
    return 126;
}

static int become(uid_t uid, const gid_t *groups, size_t count) {
    // Nobody else's network, queues or shared memory are in sight of it. Without the right to, it has those of its caller.
    if (!geteuid() && unshare(CLONE_NEWNET | CLONE_NEWIPC) && errno != EPERM) return -1;
    return setgroups(count, groups) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid) ? -1 : 0;
}

// In a user namespace of its own, where it may do as root does and gains nothing outside.
static int as_root(void) {
    char map[48];
    uid_t uid = geteuid();
    gid_t gid = getegid();
    if (unshare(CLONE_NEWUSER) || io_write_file(AT_FDCWD, "/proc/self/setgroups", "deny")) return -1;
    snprintf(map, sizeof map, "0 %u 1", gid);
    if (io_write_file(AT_FDCWD, "/proc/self/gid_map", map)) return -1;
    snprintf(map, sizeof map, "0 %u 1", uid);
    return io_write_file(AT_FDCWD, "/proc/self/uid_map", map);
}

int confined_main(int argc, char **argv) {
    pid_t parent = 0;
    uid_t uid = 0;
    gid_t groups[GROUPS_MAX];
    size_t count = 0;
    const char *joins[JOINS_MAX];
    size_t joined = 0;
    bool is_root = false;
    int i = 0;
    for (; i < argc && strcmp(argv[i], "--"); i++) {
        if (i + 1 == argc) break;
        if (!strcmp(argv[i], "--as-root")) is_root = true;
        else if (!strcmp(argv[i], "--parent")) parent = (pid_t)atoi(argv[++i]);
        else if (!strcmp(argv[i], "--uid")) uid = (uid_t)strtoul(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "--group") && count < GROUPS_MAX) groups[count++] = (gid_t)strtoul(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "--join") && joined < JOINS_MAX) joins[joined++] = argv[++i];
        else break;
    }
    if (i + 1 >= argc || strcmp(argv[i], "--")) {
        fputs("cell confined --parent PID [--uid ID] [--group ID]… [--join CGROUP.PROCS]… [--as-root] -- PROGRAM ARGUMENT…\n", stderr);
        return 126;
    }
    setsid();
    for (size_t j = 0; j < joined; j++)  // before it has any child, which would be counted elsewhere
        if (io_write_file(AT_FDCWD, joins[j], "0")) return failed("control group");
    struct rlimit none = {0, 0};
    if (setrlimit(RLIMIT_CORE, &none)) return failed("limits");
    io_write_file(AT_FDCWD, "/proc/self/oom_score_adj", "300");  // before its engine
    if (uid && become(uid, groups, count)) return failed("user id");
    if (is_root && as_root()) return failed("user namespace");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return failed("no_new_privs");
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) return failed("parent");  // after the change of credentials, which clears it
    if (parent && getppid() != parent) return 0;  // it has died before that
    sigset_t empty;
    sigemptyset(&empty);
    sigprocmask(SIG_SETMASK, &empty, NULL);
    execv(argv[i + 1], argv + i + 1);
    return failed(argv[i + 1]);
}
