// What the substrate starts beside a held agent: `cell join`, which brings it a stream, and `cell cut`, which takes the network away.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "held.h"
#include "io.h"

#define TRIES 200  // of 10 ms: a stream may be opened before the agent listens, and an abstract name announces nothing

int join_main(const char *name) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t size = strnlen(name, sizeof a.sun_path - 1);
    memcpy(a.sun_path + 1, name, size);
    autoclose int sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int failed = -1;
    for (int i = 0; sock >= 0 && i < TRIES; i++) {
        failed = connect(sock, (struct sockaddr *)&a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + size));
        if (!failed || errno != ECONNREFUSED) break;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    if (failed || io_send_fds(sock, "j", 1, (int[]){0, 1}, 2) != 1) {
        perror("cell join: the agent");
        return 3;
    }
    char byte;
    while (read(sock, &byte, 1) < 0 && errno == EINTR) continue;
    return 0;
}

// Calls `each` for every interface but the loopback; false from it, or no list, ends it.
static bool interfaces(int sock, bool (*each)(int sock, struct ifreq *r)) {
    char text[16384];
    if (io_read_file(-1, "/proc/self/net/dev", text, sizeof text) < 0) return false;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        struct ifreq r = {0};
        char *end = strchr(line, ':');
        line += strspn(line, " ");
        if (!end || end == line || (size_t)(end - line) >= sizeof r.ifr_name) continue;
        memcpy(r.ifr_name, line, (size_t)(end - line));
        if (!strcmp(r.ifr_name, "lo")) continue;
        if (ioctl(sock, SIOCGIFFLAGS, &r) < 0 || !each(sock, &r)) return false;
    }
    return true;
}

static bool take_down(int sock, struct ifreq *r) {
    r->ifr_flags = (short)(r->ifr_flags & ~IFF_UP);
    return ioctl(sock, SIOCSIFFLAGS, r) == 0;
}

static bool is_down(int sock, struct ifreq *r) {
    (void)sock;
    errno = ENETRESET;  // up, and not a failure of its own
    return !(r->ifr_flags & IFF_UP);
}

int cut_main(void) {
    autoclose int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (sock >= 0 && interfaces(sock, take_down)) return 0;
    perror("cell cut: taking the network down");
    return 3;
}

bool wait_cut(int patience_ms) {
    autoclose int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    autoclose int news = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_ROUTE);
    struct sockaddr_nl links = {.nl_family = AF_NETLINK, .nl_groups = RTMGRP_LINK};
    if (sock < 0 || news < 0 || bind(news, (struct sockaddr *)&links, sizeof links) < 0) return false;
    for (uint64_t end = io_now_ns() + (uint64_t)patience_ms * 1000000u; !interfaces(sock, is_down);) {
        uint64_t now = io_now_ns();
        char change[4096];
        if (now >= end) return false;
        if (poll(&(struct pollfd){.fd = news, .events = POLLIN}, 1, (int)((end - now) / 1000000u) + 1) < 0 && errno != EINTR) return false;
        while (recv(news, change, sizeof change, 0) > 0) continue;
    }
    return true;
}
