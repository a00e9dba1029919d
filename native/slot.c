#define _GNU_SOURCE
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "io.h"
#include "kernel.h"

#define AHEAD 4          // of each kind; a burst beyond it pays for its own
#define RANGES_MAX 4096

static struct {
    unsigned first, count;
    bool in_userns;
    int home_net;              // the launcher's own network namespace
    int nets[AHEAD];
    int net_count;
    int userns[RANGES_MAX];    // -1: not made
    unsigned idle[RANGES_MAX]; // ranges nobody holds; those with a namespace made are at the end
    unsigned idle_count;
} slots;

int slots_open(unsigned first, unsigned count, bool in_userns) {
    slots.first = first;
    slots.in_userns = in_userns;
    slots.count = in_userns || count > RANGES_MAX ? RANGES_MAX : count;
    for (unsigned i = 0; i < slots.count; i++) {
        slots.userns[i] = -1;
        slots.idle[i] = slots.count - 1 - i;
    }
    slots.idle_count = slots.count;
    // Its own empty one: the launcher needs no network, and an ordinary user's could not return to the host's.
    if (unshare(CLONE_NEWNET)) return -1;
    slots.home_net = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    return slots.home_net < 0 ? -1 : 0;
}

// ---- network namespaces ----

static int bring_loopback_up(void) {
    autoclose int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq ifr = {.ifr_flags = IFF_UP | IFF_RUNNING};
    strcpy(ifr.ifr_name, "lo");
    return sock < 0 ? -1 : ioctl(sock, SIOCSIFFLAGS, &ifr);
}

int slot_make_net(void) {
    if (unshare(CLONE_NEWNET)) return -1;
    int ns = -1;
    if (!bring_loopback_up()) {
        // Servers under test bind low ports as they do in a container.
        io_write_file(AT_FDCWD, "/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
        ns = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    }
    int error = errno;
    if (setns(slots.home_net, CLONE_NEWNET)) _exit(70);  // in the wrong namespace nothing can be trusted any more
    errno = error;
    return ns;
}

// ---- user namespaces ----

static int write_map(pid_t pid, const char *file, const char *text) {
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    return io_write_file(AT_FDCWD, path, text);
}

// The namespace belongs to the range's own first id, so that the kernel's per-user limits (inotify instances, keys) are
// counted for each sandbox alone, and it may have no namespaces below it.
static int enter_new_userns(uid_t base) {
    if (!slots.in_userns && (setresgid(base, base, base) || setresuid(base, base, base))) return -1;
    if (unshare(CLONE_NEWUSER)) return -1;
    return io_write_file(AT_FDCWD, "/proc/sys/user/max_user_namespaces", "0");
}

static int map_ids(pid_t pid, uid_t base) {
    char map[64];
    if (slots.in_userns) {
        snprintf(map, sizeof map, "%d 0 1", WORKLOAD_UID);
        if (write_map(pid, "setgroups", "deny")) return -1;
    } else {
        snprintf(map, sizeof map, "0 %u %u", base, RANGE_SIZE);
    }
    return write_map(pid, "uid_map", map) || write_map(pid, "gid_map", map) ? -1 : 0;
}

static int make_userns(uid_t base) {
    int ready[2], done[2];
    if (pipe2(ready, O_CLOEXEC)) return -1;
    if (pipe2(done, O_CLOEXEC)) {
        close(ready[0]), close(ready[1]);
        return -1;
    }
    pid_t pid = fork();
    if (!pid) {
        unsigned char c = enter_new_userns(base) ? (unsigned char)errno : 0;
        close(done[1]);
        if (write(ready[1], &c, 1) == 1 && read(done[0], &c, 1) < 0) _exit(1);
        _exit(0);
    }
    close(ready[1]), close(done[0]);
    unsigned char c = EIO;
    int ns = -1, error = errno;
    if (pid > 0 && read(ready[0], &c, 1) == 1) {
        error = c;
        if (!c && !map_ids(pid, base)) {
            char path[48];
            snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
            ns = open(path, O_RDONLY | O_CLOEXEC);
        }
        if (!c) error = errno;
    }
    close(ready[0]), close(done[1]);
    if (pid > 0) waitpid(pid, NULL, 0);
    errno = error;
    return ns;
}

static uid_t base_of(unsigned range) { return slots.in_userns ? 0 : (uid_t)((slots.first + range) * RANGE_SIZE); }

// ---- taking and giving ----

static int take_range(struct slot *out, const char **step) {
    *step = "user id range";
    if (!slots.idle_count) {
        errno = EUSERS;
        return -1;
    }
    unsigned range = slots.idle[slots.idle_count - 1];
    *step = "user namespace";
    if (slots.userns[range] < 0 && (slots.userns[range] = make_userns(base_of(range))) < 0) return -1;
    slots.idle_count--;
    *out = (struct slot){.userns = slots.userns[range], .netns = -1, .base = base_of(range), .range = range};
    return 0;
}

bool slot_take_bare(struct slot *out) {
    const char *step;
    return slots.idle_count > AHEAD && !take_range(out, &step);
}

int slot_take(struct slot *out, const char **step) {
    if (take_range(out, step)) return -1;
    *step = "network namespace";
    out->netns = slots.net_count ? slots.nets[--slots.net_count] : slot_make_net();
    if (out->netns >= 0) return 0;
    int error = errno;
    slot_give(out);
    errno = error;
    return -1;
}

void slot_give(struct slot *slot) {
    io_close(&slot->netns);
    slots.idle[slots.idle_count++] = slot->range;
}

bool slots_prepare(void) {
    if (slots.net_count < AHEAD) {
        int net = slot_make_net();
        if (net < 0) return false;  // whoever needs one is told why
        slots.nets[slots.net_count++] = net;
        return true;
    }
    for (unsigned i = 0; i < AHEAD && i < slots.idle_count; i++) {
        unsigned range = slots.idle[slots.idle_count - 1 - i];
        if (slots.userns[range] >= 0) continue;
        slots.userns[range] = make_userns(base_of(range));
        return slots.userns[range] >= 0;
    }
    return false;
}
