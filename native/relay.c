#define _GNU_SOURCE
#include "relay.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "request.h"

#define READ_AT_ONCE (64u << 10)

// ---- the relay ----

static void out(struct relay *r, const void *data, size_t size) {
    size_t begun = frame_begin(&host, r->id, K_OUT);
    wr_u8(&host, 1);
    wr_raw(&host, data, size);
    frame_end(&host, begun);
}

static void check_over(struct relay *r) {
    if (!r->read_over || !r->write_over || r->over_told) return;
    r->over_told = true;
    r->over(r);
}

static void rewatch(struct relay *r) {
    if (r->read_over || !r->window) source_want(&r->read, 0);
    else if (channel_congested()) channel_resume_later(&r->read, EPOLLIN);
    else source_want(&r->read, EPOLLIN);
}

static void on_readable(struct source *s, uint32_t events) {
    (void)events;
    static uint8_t buffer[READ_AT_ONCE];
    struct relay *r = (struct relay *)((char *)s - offsetof(struct relay, read));
    ssize_t n = read(s->fd, buffer, r->window < sizeof buffer ? r->window : sizeof buffer);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n > 0) {
        relay_send(r, buffer, (size_t)n);
        rewatch(r);
        return;
    }
    if (n < 0) {  // reset: nothing can be written either
        r->in.discard = true;
        r->write_over = true;
    }
    r->read_over = true;
    source_want(s, 0);
    out(r, "", 0);
    check_over(r);
}

static void write_ended(struct input *in) {
    struct relay *r = (struct relay *)((char *)in - offsetof(struct relay, in));
    if (r->write_over) return;
    if (in->discard || in->eof) {
        shutdown(in->source.fd, SHUT_WR);
        r->write_over = true;
    }
    check_over(r);
}

bool relay_init(struct relay *r, uint32_t id, int fd, void (*over)(struct relay *)) {
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (copy < 0) {
        close(fd);
        return false;
    }
    *r = (struct relay){.id = id, .window = STREAM_WINDOW, .over = over};
    source_init(&r->read, fd, on_readable);
    input_init(&r->in, copy, id, write_ended);
    r->read.duplicated = r->in.source.duplicated = true;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    return true;
}

void relay_start(struct relay *r) { rewatch(r); }

void relay_send(struct relay *r, const void *data, size_t size) {
    out(r, data, size);
    r->window -= (uint32_t)size;
}

bool relay_data(struct relay *r, bool eof, struct span data) { return input_data(&r->in, data, eof, true); }

void relay_credit(struct relay *r, uint32_t bytes) {
    r->window = bytes > STREAM_WINDOW - r->window ? STREAM_WINDOW : r->window + bytes;
    rewatch(r);
}

void relay_free(struct relay *r) {
    channel_forget(&r->read);
    source_close(&r->read);
    input_free(&r->in);
}

// ---- CONNECT ----

struct connection {
    struct relay relay;
    struct source connecting;
    struct request *request;
    uint16_t port;
    bool sixth;  // trying ::1
    struct connection *next;
};
static struct connection *connections;

static void connection_free(struct connection *c) {
    for (struct connection **p = &connections; *p; p = &(*p)->next)
        if (*p == c) {
            *p = c->next;
            break;
        }
    source_close(&c->connecting);
    relay_free(&c->relay);
    free(c);
}

static void over(struct relay *r) {
    struct connection *c = (struct connection *)r;
    struct request *q = c->request;
    connection_free(c);
    request_done(q);
}

static void connect_stop(struct request *q, enum stop_reason why) {
    connection_free(q->owner);
    request_fail(q, why == STOP_CANCEL ? E_CANCELLED : E_DEADLINE, 0, "the connection was ended");
}
static void connect_data(struct request *q, bool eof, struct span data) {
    struct connection *c = q->owner;
    if (c->relay.id && relay_data(&c->relay, eof, data)) return;
    connection_free(c);
    request_fail(q, E_REJECTED, 0, "data before the connection stood, or more than the window allows");
}
static void connect_credit(struct request *q, uint8_t stream, uint32_t bytes) {
    struct connection *c = q->owner;
    if (stream == 1 && c->relay.id) relay_credit(&c->relay, bytes);
}
static const struct request_ops connect_ops = {.stop = connect_stop, .data = connect_data, .credit = connect_credit};

static void connected(struct connection *c) {
    int fd = c->connecting.fd;
    struct request *q = c->request;
    source_want(&c->connecting, 0);
    c->connecting.fd = -1;
    if (!relay_init(&c->relay, q->id, fd, over)) {
        connection_free(c);
        request_fail(q, E_OS, errno, "connecting: %s", words(errno));
        return;
    }
    size_t begun = request_frame(q, K_STARTED);
    wr_u32(&host, 0);
    frame_end(&host, begun);
    relay_start(&c->relay);
}

static void attempt(struct connection *c);

static void attempt_failed(struct connection *c, int error) {
    struct request *q = c->request;
    source_close(&c->connecting);
    if (!c->sixth) {
        c->sixth = true;
        attempt(c);
        return;
    }
    uint16_t port = c->port;
    connection_free(c);
    request_fail(q, E_OS, error, "nothing listens on port %u inside: %s", port, words(error));
}

static void on_connecting(struct source *s, uint32_t events) {
    (void)events;
    struct connection *c = (struct connection *)((char *)s - offsetof(struct connection, connecting));
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(s->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) attempt_failed(c, error);
    else connected(c);
}

static void attempt(struct connection *c) {
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(c->port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(c->port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    const struct sockaddr *to = c->sixth ? (struct sockaddr *)&v6 : (struct sockaddr *)&v4;
    int fd = socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    source_init(&c->connecting, fd, on_connecting);
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    errno = ECONNREFUSED;
    (void)v4, (void)v6;
    int failed = 1;
#else
    int failed = fd < 0 || connect(fd, to, c->sixth ? sizeof v6 : sizeof v4) < 0;
#endif
    if (!failed) connected(c);
    else if (fd < 0 || errno != EINPROGRESS) attempt_failed(c, c->sixth && (errno == EAFNOSUPPORT || errno == EADDRNOTAVAIL) ? ECONNREFUSED : errno);  // a sandbox without IPv6
    else source_want(&c->connecting, EPOLLOUT);
}

void connect_handle(const struct frame *f) {
    struct rd r = f->payload;
    uint16_t port = rd_u16(&r);
    if (!rd_done(&r) || !port) {
        reject(f, "a malformed CONNECT");
        return;
    }
    struct request *q = request_new(f, &connect_ops, NULL);
    struct connection *c = q ? calloc(1, sizeof *c) : NULL;
    if (!c) {
        if (q) request_fail(q, E_BUSY, 0, "out of memory");
        return;
    }
    *c = (struct connection){.request = q, .port = port, .next = connections};
    connections = c;
    source_init(&c->relay.read, -1, on_readable);
    input_init(&c->relay.in, -1, 0, NULL);
    q->owner = c;
    attempt(c);
}

void relays_free(void) {
    while (connections) connection_free(connections);
}
