#define _GNU_SOURCE
#include "link.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RECEIVE_AT_ONCE (64u << 10)
#define KEEP_ROOM (256u << 10)  // an emptied buffer larger than this is given back

void link_init(struct link *l, int fd) { *l = (struct link){.fd = fd}; }

void link_free(struct link *l) {
    for (size_t i = 0; i < l->marks_count; i++)
        for (size_t k = 0; k < l->marks[i].count; k++) close(l->marks[i].fds[k]);
    for (size_t i = 0; i < l->fds_count; i++) close(l->fds[i]);
    free(l->marks);
    wr_free(&l->out);
    wr_free(&l->in);
    io_close(&l->fd);
    *l = (struct link){.fd = -1, .broken = true};
}

bool link_attach(struct link *l, const int *fds, size_t count) {
    if (l->marks_count == l->marks_room) {
        size_t room = l->marks_room ? l->marks_room * 2 : 8;
        struct link_mark *grown = realloc(l->marks, room * sizeof *grown);
        if (!grown) return false;
        l->marks = grown;
        l->marks_room = room;
    }
    struct link_mark *m = &l->marks[l->marks_count++];
    m->at = l->out.size;
    m->count = count;
    memcpy(m->fds, fds, count * sizeof *fds);
    return true;
}

static void emptied(struct wr *w) {
    w->size = 0;
    if (w->room > KEEP_ROOM) wr_free(w);
}

static ssize_t send_once(struct link *l, size_t size, const struct link_mark *m) {
    struct iovec iov = {l->out.data + l->sent, size};
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(int) * FDS_MAX)];
    } control;
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (m) {
        memset(&control, 0, sizeof control);
        msg.msg_control = control.room;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * m->count);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * m->count);
        memcpy(CMSG_DATA(c), m->fds, sizeof(int) * m->count);
    }
    ssize_t n;
    do n = sendmsg(l->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n;
}

bool link_flush(struct link *l) {
    if (l->broken || l->out.failed) return false;
    size_t next = 0;  // marks that went out
    bool ok = true;
    while (l->sent < l->out.size) {
        struct link_mark *m = next < l->marks_count ? &l->marks[next] : NULL;
        bool here = m && m->at == l->sent;
        size_t after = next + here;
        size_t end = after < l->marks_count ? l->marks[after].at : l->out.size;
        ssize_t n = send_once(l, end - l->sent, here ? m : NULL);
        if (n < 0) {
            ok = errno == EAGAIN || errno == ETOOMANYREFS || errno == ENOBUFS || errno == ENOMEM;
            break;
        }
        l->sent += (size_t)n;
        if (here) {
            for (size_t k = 0; k < m->count; k++) close(m->fds[k]);
            next++;
        }
    }
    if (next) {
        l->marks_count -= next;
        memmove(l->marks, l->marks + next, l->marks_count * sizeof *l->marks);
    }
    if (l->sent == l->out.size) {
        l->sent = 0;
        emptied(&l->out);
    } else if (l->sent > l->out.size / 2) {
        memmove(l->out.data, l->out.data + l->sent, l->out.size - l->sent);
        l->out.size -= l->sent;
        for (size_t i = 0; i < l->marks_count; i++) l->marks[i].at -= l->sent;
        l->sent = 0;
    }
    if (!ok) l->broken = true;
    return ok;
}

int link_recv(struct link *l, bool wait) {
    if (l->broken) return -1;
    if (l->taken) {
        memmove(l->in.data, l->in.data + l->taken, l->in.size - l->taken);
        l->in.size -= l->taken;
        l->taken = 0;
        if (!l->in.size) emptied(&l->in);
    }
    uint8_t *at = wr_reserve(&l->in, RECEIVE_AT_ONCE);
    if (!at) return -1;
    struct iovec iov = {at, l->in.room - l->in.size};
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(int) * FDS_MAX)];
    } control;
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
    ssize_t n;
    do n = recvmsg(l->fd, &msg, MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT));
    while (n < 0 && errno == EINTR);
    if (n < 0) return errno == EAGAIN ? 0 : -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        size_t got = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < got; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
            if (l->fds_count < LINK_FDS_HELD) l->fds[l->fds_count++] = fd;
            else close(fd);
        }
    }
    if (!n) return -1;
    wr_commit(&l->in, (size_t)n);
    return 1;
}

uint8_t *link_next(struct link *l, struct frame *f, size_t *size) {
    if (!l->in.data) return NULL;
    uint8_t *at = l->in.data + l->taken;
    // EXEC repeats the configured environment beside a request of at most FRAME_MAX_IN.
    int64_t n = frame_size(at, l->in.size - l->taken, 2 * FRAME_MAX_IN);
    if (n < 0 || (n && !frame_open(at, (size_t)n, f))) l->broken = true;
    if (n <= 0 || l->broken) return NULL;
    l->taken += (size_t)n;
    *size = (size_t)n;
    return at;
}

bool link_take_fds(struct link *l, int *fds, size_t count) {
    if (l->fds_count < count) return false;
    memcpy(fds, l->fds, count * sizeof *fds);
    l->fds_count -= count;
    memmove(l->fds, l->fds + count, l->fds_count * sizeof *fds);
    return true;
}
