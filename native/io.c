#define _GNU_SOURCE
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

void io_close(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}
void io_autoclose(int *fd) { io_close(fd); }

uint64_t io_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

bool io_nonblocking(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

void io_roomy(int sock) { setsockopt(sock, SOL_SOCKET, SO_SNDBUF, &(int){1 << 20}, sizeof(int)); }

ssize_t io_send_fds(int sock, const void *data, size_t size, const int *fds, size_t count) {
    struct iovec iov = {(void *)(uintptr_t)data, size};
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(int) * FDS_MAX)];
    } control = {0};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (count > FDS_MAX) {
        errno = EINVAL;
        return -1;
    }
    if (count) {
        msg.msg_control = control.room;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * count);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * count);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * count);
    }
    ssize_t n;
    do n = sendmsg(sock, &msg, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n;
}

ssize_t io_recv_fds(int sock, void *data, size_t size, int *fds, size_t *count) {
    struct iovec iov = {data, size};
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(int) * FDS_MAX)];
    } control;
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
    *count = 0;
    ssize_t n;
    do n = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0) return n;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        size_t got = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < got; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
            if (*count < FDS_MAX) fds[(*count)++] = fd;
            else close(fd);
        }
    }
    if (!(msg.msg_flags & MSG_CTRUNC)) return n;
    while (*count) close(fds[--*count]);
    errno = EMFILE;
    return -1;
}

bool io_write_all(int fd, const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t n = write(fd, at, size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n, size -= (size_t)n;
    }
    return true;
}

ssize_t io_read_file(int dir, const char *path, char *out, size_t size) {
    autoclose int fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || !size) return -1;
    size_t have = 0;
    while (have < size - 1) {
        ssize_t n = read(fd, out + have, size - 1 - have);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -1;
        if (!n) break;
        have += (size_t)n;
    }
    out[have] = 0;
    return (ssize_t)have;
}

int io_write_file(int dir, const char *path, const char *text) {
    autoclose int fd = openat(dir, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    size_t size = strlen(text);
    return write(fd, text, size) == (ssize_t)size ? 0 : -1;
}
