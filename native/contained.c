#define _GNU_SOURCE
#include "contained.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "io.h"

// As in a namespace sandbox: enough to install packages.
#define ROOT_INSIDE (1u << CAP_CHOWN | 1u << CAP_DAC_OVERRIDE | 1u << CAP_FOWNER | 1u << CAP_FSETID | 1u << CAP_SETGID | 1u << CAP_SETUID)
#define FIRST_TO_DIE "500"  // of 1000: when memory ends, the kernel takes the workload before the agent

// ---- rights ----

static uint32_t permitted(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {0};
    return syscall(SYS_capget, &header, data) ? 0 : data[0].permitted;
}

static bool set_rights(uint32_t effective, uint32_t kept) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{.effective = effective, .permitted = kept}};
    return !syscall(SYS_capset, &header, data);
}

bool identity_take(const struct identity *who) {
    uint32_t have = permitted(), keep = who->uid ? 0 : have & ROOT_INSIDE;
    io_write_file(AT_FDCWD, "/proc/self/oom_score_adj", FIRST_TO_DIE);  // while it is still ours to write
    if (!set_rights(have, have)) return false;
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    for (int cap = 0; cap < 64; cap++)  // without the right to, it stays as the engine set it; nothing in it can be gained again
        if (cap >= 32 || !(keep >> cap & 1)) prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
    if (setgroups(0, NULL) < 0 || setresgid(who->gid, who->gid, who->gid) < 0 || setresuid(who->uid, who->uid, who->uid) < 0) return false;
    return set_rights(keep, keep);
}

// ---- the user's own directories ----

// mkdir -p; the last part belongs to the user, whoever the image gave it to. Nothing of the workload runs yet.
static bool make_own(const char *path, const struct identity *who) {
    char text[4096];
    if (strlen(path) >= sizeof text) {
        errno = ENAMETOOLONG;
        return false;
    }
    strcpy(text, path);
    for (char *at = text + strspn(text, "/"); *at;) {
        char *slash = strchr(at, '/');
        if (slash) *slash = 0;
        if (mkdir(text, 0755) && errno != EEXIST) return false;
        if (!slash) return !lchown(text, who->uid, who->gid);
        *slash = '/';
        at = slash + strspn(slash, "/");
        if (!*at) {
            *slash = 0;
            return !lchown(text, who->uid, who->gid);
        }
    }
    return true;
}

// ---- a copy ----

void contained_rename(struct span name, struct span machine) {
    uint32_t have = permitted();
    if (getpid() != 1 || !set_rights(have, have)) return;  // as a plain program, or in a test, it would be the machine's own name
    if (name.size) (void)!sethostname((const char *)name.at, name.size);
    set_rights(0, have);
    autoclose int fd = machine.size ? open("/etc/machine-id", O_WRONLY | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC) : -1;
    if (fd >= 0) (void)!write(fd, machine.at, machine.size);  // where the image has one; owned by root, as everything that an image brings
}

// ---- memory ----

// In pages; 0 for what has ended, and for one that is spared.
static unsigned long resident(int proc, const char *name, bool (*spared)(int pid)) {
    char path[32], text[128];
    snprintf(path, sizeof path, "%.20s/statm", name);
    if (spared(atoi(name)) || io_read_file(proc, path, text, sizeof text) <= 0) return 0;
    const char *second = strchr(text, ' ');
    return second ? strtoul(second, NULL, 10) : 0;
}

bool contained_shed(bool (*spared)(int pid)) {
    DIR *dir = getpid() == 1 ? opendir("/proc") : NULL;
    if (!dir) return false;
    unsigned long most = 0;
    int largest = 0;
    for (struct dirent *e; (e = readdir(dir));) {
        if (e->d_name[0] < '1' || e->d_name[0] > '9') continue;
        unsigned long pages = resident(dirfd(dir), e->d_name, spared);
        if (pages > most) most = pages, largest = atoi(e->d_name);
    }
    closedir(dir);
    if (largest <= 1) return false;
    uint32_t have = permitted();
    bool killed = set_rights(have, have) && !kill(largest, SIGKILL);
    set_rights(0, have);
    return killed;
}

// ---- before the first frame ----

bool user_known(struct span user, struct identity *out) {
    if (user_lookup("/etc/passwd", user, out)) return true;
    *out = (struct identity){0, 0};
    return user.size == 4 && !memcmp(user.at, "root", 4);
}

// Of this container alone: engines show it its own group there, read-only. Version 2 first.
static int open_counter(const char *unified, const char *older) {
    int fd = open(unified, O_RDONLY | O_CLOEXEC);
    return fd >= 0 ? fd : open(older, O_RDONLY | O_CLOEXEC);
}

bool contained_prepare(struct contained *c, struct agent_opts *opts) {
    opts->memory_events_fd = open_counter("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control");
    opts->pids_events_fd = open_counter("/sys/fs/cgroup/pids.events", "/sys/fs/cgroup/pids/pids.events");
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (!c->user) return true;
    if (!user_known((struct span){(const uint8_t *)c->user, (uint32_t)strlen(c->user)}, &c->identity)) {
        fprintf(stderr, "no such user: %s\n", c->user);
        return false;
    }
    for (size_t i = 0; i < c->own_count; i++)
        if (!make_own(c->own[i], &c->identity)) {
            fprintf(stderr, "%s cannot be made: %s\n", c->own[i], strerror(errno));
            return false;
        }
    // runc gives a tmpfs the mode of the directory that it covers, which in an image may be anything.
    struct stat tmp;
    if (!lstat("/tmp", &tmp) && S_ISDIR(tmp.st_mode)) (void)!chmod("/tmp", 01777);
    opts->identity = &c->identity;
    return set_rights(0, permitted());
}
