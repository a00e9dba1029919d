#define _GNU_SOURCE
#include "channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"

#define READ_AT_ONCE (64u << 10)
#define CONGESTED (1u << 20)
#define ROOM_AGAIN (512u << 10)
#define KEEP_ROOM (256u << 10)  // an emptied buffer larger than this is given back

struct wr host;

static struct source input, output;
static bool input_is_socket, output_is_socket, same, ended, held, silent;
static bool (*handler)(const struct frame *, const uint8_t *, size_t);
static struct wr in;
static size_t taken, sent, silent_from;  // of `host`, while silent

static struct waiting {
    struct source *source;
    uint32_t events;
} *waiting;
static size_t waiting_count, waiting_room;

static void take_frames(void);
static void on_input(struct source *s, uint32_t events);
static void on_output(struct source *s, uint32_t events);

static bool is_socket(int fd) {
    struct stat s;
    return fstat(fd, &s) == 0 && S_ISSOCK(s.st_mode);
}

bool channel_open(int in_fd, int out_fd, bool (*handle)(const struct frame *, const uint8_t *, size_t)) {
    handler = handle;
    same = in_fd == out_fd;
    input_is_socket = is_socket(in_fd);
    output_is_socket = is_socket(out_fd);
    if (!input_is_socket && !io_nonblocking(in_fd)) return false;
    if (!output_is_socket && !io_nonblocking(out_fd)) return false;
    source_init(&input, in_fd, on_input);
    source_init(&output, same ? -1 : out_fd, on_output);
    ended = held = silent = false;
    return source_want(&input, EPOLLIN);
}

void channel_close(void) {
    source_close(&input);
    source_close(&output);
    wr_free(&in);
    wr_free(&host);
    free(waiting);
    waiting = NULL;
    waiting_count = waiting_room = taken = sent = 0;
    ended = true;
}

bool channel_ended(void) { return ended; }

void channel_hang_up(void) {
    channel_flush();
    ended = true;
}

static size_t queued(void) { return (silent ? silent_from : host.size) - sent; }
bool channel_congested(void) { return queued() > CONGESTED; }
bool channel_silent(void) { return silent; }

void channel_resume_later(struct source *s, uint32_t events) {
    source_want(s, 0);
    channel_forget(s);
    if (waiting_count == waiting_room) {
        size_t room = waiting_room ? waiting_room * 2 : 16;
        struct waiting *grown = realloc(waiting, room * sizeof *grown);
        if (!grown) {
            source_want(s, events);
            return;
        }
        waiting = grown;
        waiting_room = room;
    }
    waiting[waiting_count++] = (struct waiting){s, events};
}

void channel_forget(struct source *s) {
    for (size_t i = 0; i < waiting_count; i++)
        if (waiting[i].source == s) waiting[i--] = waiting[--waiting_count];
}

static void want(void) {
    bool reading = !held && !channel_congested();
    bool writing = queued() > 0;
    source_want(&input, (reading ? EPOLLIN : 0) | (same && writing ? EPOLLOUT : 0));
    if (!same) source_want(&output, writing ? EPOLLOUT : 0);
}

void channel_fall_silent(void) {
    silent = true;
    silent_from = host.size;
}

void channel_speak(bool anew) {
    silent = false;
    if (anew) sent = host.size = 0;
}

void channel_hold(bool hold) {
    if (held == hold) return;
    held = hold;
    want();
    if (!held) take_frames();
}

void channel_flush(void) {
    if (ended) return;
    if (host.failed) {  // an answer is lost: the host must not go on as if it were on its way
        ended = true;
        return;
    }
    int fd = same ? input.fd : output.fd;
    bool was_congested = channel_congested();
    while (queued()) {
        ssize_t n = output_is_socket ? send(fd, host.data + sent, queued(), MSG_NOSIGNAL | MSG_DONTWAIT) : write(fd, host.data + sent, queued());
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN) ended = true;
        if (n <= 0) break;
        sent += (size_t)n;
    }
    if (sent == host.size) {
        sent = host.size = silent_from = 0;
        if (host.room > KEEP_ROOM) wr_free(&host);
    } else if (sent > host.size / 2) {
        memmove(host.data, host.data + sent, host.size - sent);
        host.size -= sent;
        silent_from -= silent ? sent : 0;
        sent = 0;
    }
    want();
    if (queued() > ROOM_AGAIN) return;
    while (waiting_count) {
        struct waiting w = waiting[--waiting_count];
        source_want(w.source, w.events);
    }
    if (was_congested || taken < in.size) take_frames();
}

static void take_frames(void) {
    static bool busy;
    if (busy) return;
    busy = true;
    while (!ended && !held && !channel_congested() && in.data) {
        const uint8_t *at = in.data + taken;
        int64_t size = frame_size(at, in.size - taken, FRAME_MAX_IN);
        if (!size) break;
        struct frame f;
        if (size < 0) {
            frame_error(&host, 0, E_REJECTED, 0, "a frame with an impossible length");
            channel_hang_up();
            break;
        }
        taken += (size_t)size;
        if (!frame_open(at, (size_t)size, &f)) frame_error(&host, f.id, E_REJECTED, 0, "a malformed frame header");
        else if (!handler(&f, at, (size_t)size)) channel_hang_up();
    }
    busy = false;
    if (taken == in.size) {
        taken = in.size = 0;
        if (in.room > KEEP_ROOM) wr_free(&in);
    }
}

static void on_input(struct source *s, uint32_t events) {
    if (events & EPOLLOUT) channel_flush();
    if (!(events & ~(uint32_t)EPOLLOUT) || ended) return;
    if (taken) {
        memmove(in.data, in.data + taken, in.size - taken);
        in.size -= taken;
        taken = 0;
    }
    uint8_t *at = wr_reserve(&in, READ_AT_ONCE);
    if (!at) {
        ended = true;
        return;
    }
    size_t room = in.room - in.size;
    ssize_t n = input_is_socket ? recv(s->fd, at, room, MSG_DONTWAIT) : read(s->fd, at, room);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        ended = true;
        return;
    }
    wr_commit(&in, (size_t)n);
    take_frames();
}

static void on_output(struct source *s, uint32_t events) {
    (void)s;
    if (events & EPOLLOUT) channel_flush();
    else ended = true;
}
