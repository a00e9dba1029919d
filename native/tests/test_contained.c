// The agent as a container's first process: directories for its user, and a worker that has become somebody for good.
#define _GNU_SOURCE
#include "../contained.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static struct span span_of(const char *text) { return (struct span){(const uint8_t *)text, (uint32_t)strlen(text)}; }

static bool has_line(const char *wanted) {
    char line[256];
    bool found = false;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) found |= !strncmp(line, wanted, strlen(wanted));
    if (status) fclose(status);
    return found;
}

// In a child each: what is given up stays given up.
static int in_child(int (*what)(void)) {
    fflush(stdout);
    pid_t pid = fork();
    if (!pid) _exit(what());
    int status = -1;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

static int becomes_an_ordinary_user(void) {
    struct identity who = {4321, 4322};
    if (!identity_take(&who)) return 1;
    if (getuid() != 4321 || geteuid() != 4321 || getgid() != 4322 || getgroups(0, NULL) != 0) return 2;
    if (!has_line("CapEff:\t0000000000000000") || !has_line("CapPrm:\t0000000000000000") || !has_line("CapBnd:\t0000000000000000")) return 3;
    return setresuid(0, 0, 0) == 0 ? 4 : 0;
}

static int becomes_root_inside(void) {
    struct identity who = {0, 0};
    if (!identity_take(&who)) return 1;
    if (!has_line("CapEff:\t00000000000000db") || !has_line("CapBnd:\t00000000000000db")) return 2;  // chown dac_override fowner fsetid setgid setuid
    return sethostname("x", 1) == 0 ? 3 : 0;
}

static char place[] = "/tmp/untax-test-contained-XXXXXX";

static int makes_what_the_user_owns(void) {
    char deep[128], link[128], target[128];
    snprintf(deep, sizeof deep, "%s/a/b/", place);
    snprintf(link, sizeof link, "%s/link", place);
    snprintf(target, sizeof target, "%s/target", place);
    if (mkdir(target, 0700) || symlink(target, link)) return 1;
    struct contained c = {.user = "4321:4322", .own = {deep, link}, .own_count = 2};
    struct agent_opts opts = {.memory_events_fd = -1, .pids_events_fd = -1};
    if (!contained_prepare(&c, &opts) || opts.identity != &c.identity) return 2;
    struct stat st;
    if (stat(deep, &st) || st.st_uid != 4321 || st.st_gid != 4322) return 3;
    deep[strlen(deep) - 3] = 0;  // the directory on the way
    if (stat(deep, &st) || st.st_uid != 0 || (st.st_mode & 0777) != 0755) return 4;
    if (stat(target, &st) || st.st_uid != 0) return 5;  // a link of the image's leads nowhere
    if (!has_line("CapEff:\t0000000000000000") || !has_line("NoNewPrivs:\t1")) return 6;
    return 0;
}

static int refuses_an_unknown_user(void) {
    struct contained c = {.user = "nobody-of-that-name"};
    struct agent_opts opts = {0};
    if (!freopen("/dev/null", "w", stderr)) return 1;
    return contained_prepare(&c, &opts) ? 2 : 0;
}

int main(void) {
    struct identity who;
    CHECK(user_known(span_of("root"), &who) && who.uid == 0);
    CHECK(user_known(span_of("7:8"), &who) && who.uid == 7 && who.gid == 8);
    CHECK(!user_known(span_of("nobody-of-that-name"), &who) && !user_known(span_of("roo"), &who));
    CHECK(in_child(refuses_an_unknown_user) == 0);
    if (geteuid() == 0) {
        CHECK(mkdtemp(place) != NULL);
        CHECK(in_child(becomes_an_ordinary_user) == 0);
        CHECK(in_child(becomes_root_inside) == 0);
        CHECK(in_child(makes_what_the_user_owns) == 0);
        char command[128];
        snprintf(command, sizeof command, "rm -rf %s", place);
        CHECK(system(command) == 0);
    }
    return check_report();
}
