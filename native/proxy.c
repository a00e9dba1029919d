#define _GNU_SOURCE
#include "proxy.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "channel.h"
#include "http.h"
#include "io.h"
#include "relay.h"

#define CLIENTS_MAX 256u
#define HEAD_TIME_NS 60000000000u  // for a client to say what it wants
#define MESSAGE_MAX 4096u          // of the host's refusal
#define BREATHER_NS 100000000u     // before another try when there is no descriptor for a client

enum state { HEAD, ASKED, JOINED };

struct client {
    struct relay relay;
    struct source source;  // until it is joined
    enum state state;
    uint32_t id;  // of its egress frames; 0: not asked yet
    struct timer patience;
    struct wr head;     // as received; then what goes to the origin first
    bool tunnel;
    struct client *next;
};

static struct source listener;
static struct timer breather;
static uint16_t listening;
static struct client *clients;
static unsigned clients_count;
static uint32_t last_id;

static void client_free(struct client *c) {
    for (struct client **p = &clients; *p; p = &(*p)->next)
        if (*p == c) {
            *p = c->next;
            break;
        }
    clients_count--;
    timer_stop(&c->patience);
    source_close(&c->source);
    relay_free(&c->relay);
    wr_free(&c->head);
    free(c);
}

// Best effort, as the connection ends anyway; reading what is there keeps the kernel from resetting it under the answer.
static void refuse_socket(int fd, unsigned status, const char *text, size_t size) {
    struct wr answer = {0};
    char ignored[4096];
    http_refusal(&answer, status, text, size);
    if (answer.data && send(fd, answer.data, answer.size, MSG_NOSIGNAL | MSG_DONTWAIT) > 0) shutdown(fd, SHUT_WR);
    for (int i = 0; i < 16 && recv(fd, ignored, sizeof ignored, MSG_DONTWAIT) > 0; i++) continue;
    wr_free(&answer);
}
static void refuse(struct client *c, unsigned status, const char *text) {
    refuse_socket(c->source.fd, status, text, strlen(text));
    client_free(c);
}

static void on_patience(struct timer *t) { refuse((struct client *)((char *)t - offsetof(struct client, patience)), 408, "no request came"); }

static struct client *find(uint32_t id) {
    struct client *c = clients;
    while (c && c->id != id) c = c->next;
    return c;
}

static void ask(struct client *c, const struct http_target *to) {
    do last_id = (last_id + 1) & ~EGRESS_BIT;
    while (!last_id || find(last_id | EGRESS_BIT));
    c->id = last_id | EGRESS_BIT;
    c->state = ASKED;
    timer_stop(&c->patience);
    source_want(&c->source, 0);
    size_t begun = frame_begin(&host, c->id, K_EGRESS);
    wr_bytes(&host, to->host, strlen(to->host));
    wr_u16(&host, to->port);
    frame_end(&host, begun);
}

static void on_head(struct source *s, uint32_t events) {
    (void)events;
    struct client *c = (struct client *)((char *)s - offsetof(struct client, source));
    uint8_t *at = wr_reserve(&c->head, HTTP_HEAD_MAX);
    ssize_t n = at ? recv(s->fd, at, HTTP_HEAD_MAX, MSG_DONTWAIT) : -1;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        client_free(c);
        return;
    }
    wr_commit(&c->head, (size_t)n);
    size_t size = http_head_size((const char *)c->head.data, c->head.size);
    if (size > HTTP_HEAD_MAX || (!size && c->head.size >= HTTP_HEAD_MAX)) {
        refuse(c, 431, "the head of the request is too large");
        return;
    }
    if (!size) return;
    struct http_target to = {0};
    struct wr origin = {0};
    const char *fault = http_understand((const char *)c->head.data, size, &to, &origin);
    wr_raw(&origin, c->head.data + size, c->head.size - size);
    wr_free(&c->head);
    c->head = origin;
    c->tunnel = to.tunnel;
    if (fault || origin.failed) refuse(c, 400, fault ? fault : "out of memory");
    else ask(c, &to);
}

static void over(struct relay *r) {
    struct client *c = (struct client *)r;
    frame_end(&host, frame_begin(&host, c->id, K_DONE));
    client_free(c);
}

static void join(struct client *c) {
    int fd = c->source.fd;
    source_want(&c->source, 0);
    c->source.fd = -1;
    if (!relay_init(&c->relay, c->id, fd, over)) {
        frame_error(&host, c->id, E_OS, errno, "joining the connection");
        client_free(c);
        return;
    }
    c->state = JOINED;
    static const char established[] = "HTTP/1.1 200 Connection established\r\n\r\n";
    if (c->tunnel) {
        ssize_t n = send(fd, established, sizeof established - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        (void)n;  // a client that is gone shows when it is read
    }
    if (c->head.size) relay_send(&c->relay, c->head.data, c->head.size);
    wr_free(&c->head);
    relay_start(&c->relay);
}

void proxy_handle(const struct frame *f) {
    struct client *c = find(f->id);
    struct rd r = f->payload;
    if (!c || c->state == HEAD) return;
    if (f->kind == K_EGRESS_OK && c->state == ASKED && rd_done(&r)) {
        join(c);
    } else if (f->kind == K_EGRESS_DENY && c->state == ASKED) {
        unsigned status = rd_u16(&r);
        struct span message = rd_bytes(&r);
        if (r.bad || status < 400 || status > 599) status = 403;
        refuse_socket(c->source.fd, status, (const char *)message.at, message.size < MESSAGE_MAX ? message.size : MESSAGE_MAX);
        client_free(c);
    } else if (f->kind == K_DATA && c->state == JOINED) {
        bool eof = rd_u8(&r);
        struct span data = rd_rest(&r);
        if (relay_data(&c->relay, eof, data)) return;
        frame_error(&host, f->id, E_REJECTED, 0, "more than the window allows");
        client_free(c);
    } else if (f->kind == K_CREDIT && c->state == JOINED) {
        uint8_t stream = rd_u8(&r);
        uint32_t bytes = rd_u32(&r);
        if (rd_done(&r) && stream == 1) relay_credit(&c->relay, bytes);
    } else if (f->kind == K_CANCEL) {
        frame_end(&host, frame_begin(&host, f->id, K_DONE));
        client_free(c);
    }
}

static void on_breather(struct timer *t) {
    (void)t;
    source_want(&listener, EPOLLIN);
}

static void on_client(struct source *s, uint32_t events) {
    (void)events;
    int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        // The connection stays in the queue and would be reported again at once, for as long as there is no descriptor for it.
        bool short_of = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
        if (short_of && timer_set(&breather, io_now_ns() + BREATHER_NS, on_breather)) source_want(s, 0);
        return;
    }
    struct client *c = clients_count < CLIENTS_MAX ? calloc(1, sizeof *c) : NULL;
    if (!c) {
        static const char many[] = "too many connections through the proxy";
        refuse_socket(fd, 503, many, sizeof many - 1);
        close(fd);
        return;
    }
    source_init(&c->source, fd, on_head);
    source_init(&c->relay.read, -1, NULL);
    input_init(&c->relay.in, -1, 0, NULL);
    c->next = clients;
    clients = c;
    clients_count++;
    if (!source_want(&c->source, EPOLLIN) || !timer_set(&c->patience, io_now_ns() + HEAD_TIME_NS, on_patience)) client_free(c);
}

int proxy_listen(uint16_t port) {
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
    (void)on_client, (void)port;
    return 0;
#else
    if (port == listening) return 0;
    if (listening) source_close(&listener);
    listening = 0;
    if (!port) return 0;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    source_init(&listener, fd, on_client);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 128) == 0 && source_want(&listener, EPOLLIN)) {
        listening = port;
        return 0;
    }
    int error = errno;
    source_close(&listener);
    return error;
#endif
}

void proxy_free(void) {
    while (clients) client_free(clients);
    timer_stop(&breather);
    if (listening) source_close(&listener);
    listening = 0;
}
