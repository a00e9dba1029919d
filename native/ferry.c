// One process for all clients of a node's agent that are on other machines. The agent greets them, inside TLS, and gives the connection
// here together with fresh keys; what goes over it from then on are records of the AEAD in seal.c (docs/protocol.md, "Ferried lanes").
// In Python each action on its way there and back cost two turns of an event loop that had gone cold while the command ran.
//
// A client is known here by its number, and lasts as long as the agent says. Its connection may break: lanes stay, what was sent over
// them and not acknowledged is kept, and the next connection goes on where both ends are.
#define _GNU_SOURCE
#include "ferry.h"

#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "io.h"
#include "loop.h"
#include "seal.h"
#include "wire.h"

// As in src/untax/remote/lanes.py.
enum message_kind { M_GREETING = 0, M_DATA = 1, M_ACK = 2, M_END = 3 };
#define HEAD 5u                       // kind, lane
#define WINDOW (1u << 20)             // bytes of one lane, each way, that may be on their way
#define ACKNOWLEDGE_EVERY (WINDOW / 4)
#define PIECE (256u << 10)            // of a client's data in one message
#define SIZE_FIELD 4u
#define RECORD_MAX (HEAD + PIECE + SEAL_TAG)  // counted behind its size field
#define GREETED 12u                   // of each lane in a greeting: its number, and how much of it has come
#define READ_AT_ONCE (64u << 10)
#define HIGH (256u << 10)             // unsent bytes of a client above which its sandboxes are not read from
#define BUCKETS 64u
#define NOBODY 65534u
#define TURN_NS 100000u               // the shortest that the kernel takes

// From the agent: an operation, the client's number, and what belongs to it.
enum control_op { C_CONNECT = 'C', C_LANE = 'L', C_KEEP = 'K', C_FORGET = 'F' };
// To the agent, with the client's number: whether there is anybody to carry for.
enum told_op { T_GREETED = 'G', T_BROKEN = 'B' };
#define CONTROL_MAX (256u << 10)

struct queue {
    struct wr bytes;
    size_t gone;
};

struct lane {
    struct lane *next;
    struct client *client;
    uint32_t number;
    bool is_listed;       // in the greeting that is being read
    struct source cell;
    struct queue unseen;  // sent, and not yet acknowledged
    uint64_t seen, sent;  // by and to the client
    struct queue inward;  // that the sandbox has not taken yet
    uint64_t received, acknowledged;
};

struct client {
    struct client *next;
    uint32_t number;
    struct source connection;
    struct seal in, out;
    struct queue got, unsent;
    bool is_greeted, is_broken, is_full;
    struct lane *lanes[BUCKETS];
};

static struct source control;
static struct client *clients;
static struct client *reading;  // whose records are about to be read; nobody's once that connection is gone
static bool is_over, has_broken;

static void cell_ready(struct source *s, uint32_t events);
static void connection_ready(struct source *s, uint32_t events);
static void heed_agent(void);

// ---- queues ----

static size_t left(const struct queue *q) { return q->bytes.size - q->gone; }
static uint8_t *front(struct queue *q) { return q->bytes.data + q->gone; }

static void queue_free(struct queue *q) {
    wr_free(&q->bytes);
    *q = (struct queue){0};
}

static void took(struct queue *q, size_t size) {
    q->gone += size;
    if (q->gone == q->bytes.size) {
        q->bytes.size = q->gone = 0;
        if (q->bytes.room > HIGH) queue_free(q);
    } else if (q->gone > q->bytes.size / 2) {
        memmove(q->bytes.data, front(q), left(q));
        q->bytes.size = left(q);
        q->gone = 0;
    }
}

// ---- lanes ----

static struct lane *lane_of(struct client *c, uint32_t number) {
    struct lane *l = c->lanes[number % BUCKETS];
    while (l && l->number != number) l = l->next;
    return l;
}

static bool is_untouched(const struct lane *l) { return !l->received && !l->sent; }

// `hang_up`: for the agent's copy of the socket too, which then knows that the channel is over.
static void lane_free(struct lane *l, bool hang_up) {
    struct lane **at = &l->client->lanes[l->number % BUCKETS];
    while (*at != l) at = &(*at)->next;
    *at = l->next;
    if (hang_up && l->cell.fd >= 0) shutdown(l->cell.fd, SHUT_RDWR);
    source_close(&l->cell);
    queue_free(&l->unseen);
    queue_free(&l->inward);
    free(l);
}

static void rewatch(struct lane *l) {
    const struct client *c = l->client;
    bool reads = c->is_greeted && !c->is_broken && !c->is_full && l->sent - l->seen < WINDOW;
    source_want(&l->cell, (reads ? EPOLLIN : 0u) | (left(&l->inward) ? EPOLLOUT : 0u));
}

static void rewatch_all(struct client *c) {
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct lane *l = c->lanes[i]; l; l = l->next) rewatch(l);
}

// ---- a client's connection ----

// Only noted: whoever is in the middle of something with it goes on, and it is closed before the next wait.
static void broke(struct client *c) {
    c->is_broken = has_broken = true;
}

static void tell_agent(uint8_t op, const struct client *c) {
    uint8_t message[5];
    struct wr w = {.data = message, .room = sizeof message};
    wr_u8(&w, op);
    wr_u32(&w, c->number);
    ssize_t n = send(control.fd, message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)n;  // an agent that does not read is about to end
}

static void disconnect(struct client *c) {
    if (reading == c) reading = NULL;
    if (c->is_greeted) tell_agent(T_BROKEN, c);
    source_close(&c->connection);
    seal_wipe(&c->in);
    seal_wipe(&c->out);
    queue_free(&c->got);
    queue_free(&c->unsent);
    c->is_greeted = c->is_broken = c->is_full = false;
    rewatch_all(c);
}

static void set_full(struct client *c) {
    bool is_full = left(&c->unsent) > HIGH;
    source_want(&c->connection, EPOLLIN | (left(&c->unsent) ? EPOLLOUT : 0u));
    if (is_full == c->is_full) return;
    c->is_full = is_full;
    rewatch_all(c);
}

static size_t sent_now(struct client *c, const uint8_t *data, size_t size) {
    ssize_t n = send(c->connection.fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) return (size_t)n;
    if (errno != EAGAIN && errno != EINTR) broke(c);
    return 0;
}

static void flush(struct client *c) {
    took(&c->unsent, sent_now(c, front(&c->unsent), left(&c->unsent)));
    set_full(c);
}

static void put(struct client *c, uint8_t kind, uint32_t number, const void *data, size_t size) {
    static uint8_t alone[SIZE_FIELD + RECORD_MAX];  // a record that the kernel takes whole, which most are
    if (c->connection.fd < 0 || c->is_broken) return;
    size_t whole = SIZE_FIELD + HEAD + size + SEAL_TAG;
    bool is_first = !left(&c->unsent);
    uint8_t *at = is_first ? alone : wr_reserve(&c->unsent.bytes, whole);
    if (!at) {
        broke(c);
        return;
    }
    struct wr head = {.data = at, .room = SIZE_FIELD + HEAD};
    wr_u32(&head, (uint32_t)(whole - SIZE_FIELD));
    wr_u8(&head, kind);
    wr_u32(&head, number);
    memcpy(at + SIZE_FIELD + HEAD, data, size);
    uint8_t *inside = at + SIZE_FIELD;
    if (!seal_close(&c->out, at, SIZE_FIELD, inside, HEAD + size, inside + HEAD + size)) {
        broke(c);
        return;
    }
    if (!is_first) {
        wr_commit(&c->unsent.bytes, whole);
        set_full(c);
        return;
    }
    size_t n = sent_now(c, alone, whole);
    if (n == whole || c->is_broken) return;
    wr_raw(&c->unsent.bytes, alone + n, whole - n);
    if (c->unsent.bytes.failed) broke(c);
    else set_full(c);
}

// ---- from a sandbox ----

static void say_end(struct lane *l) {
    put(l->client, M_END, l->number, "", 0);
    lane_free(l, true);
}

static void from_cell(struct lane *l) {
    struct client *c = l->client;
    size_t room = WINDOW - (size_t)(l->sent - l->seen);
    uint8_t *at = wr_reserve(&l->unseen.bytes, READ_AT_ONCE);
    if (!at) {
        say_end(l);
        return;
    }
    ssize_t n = recv(l->cell.fd, at, room < READ_AT_ONCE ? room : READ_AT_ONCE, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        say_end(l);
        return;
    }
    wr_commit(&l->unseen.bytes, (size_t)n);
    l->sent += (uint64_t)n;
    put(c, M_DATA, l->number, at, (size_t)n);
    rewatch(l);
}

static void acknowledge(struct lane *l) {
    uint64_t delivered = l->received - left(&l->inward);
    if (delivered - l->acknowledged < ACKNOWLEDGE_EVERY) return;
    l->acknowledged = delivered;
    uint8_t total[8];
    struct wr w = {.data = total, .room = sizeof total};
    wr_u64(&w, delivered);
    put(l->client, M_ACK, l->number, total, sizeof total);
}

static void into_cell(struct lane *l) {
    ssize_t n = send(l->cell.fd, front(&l->inward), left(&l->inward), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) took(&l->inward, (size_t)n);
    else if (errno != EAGAIN && errno != EINTR) took(&l->inward, left(&l->inward));  // it has hung up, and what it said last is read next
    acknowledge(l);
    rewatch(l);
}

static void cell_ready(struct source *s, uint32_t events) {
    struct lane *l = (struct lane *)((char *)s - offsetof(struct lane, cell));
    if (events & EPOLLOUT) into_cell(l);
    if (!(l->cell.wanted & EPOLLIN)) {
        if (events & (EPOLLHUP | EPOLLERR)) source_want(s, 0);  // told again and again otherwise; read when there is room for it
        return;
    }
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) from_cell(l);
}

// ---- from a client ----

static void resume(struct lane *l, uint64_t seen) {
    if (seen < l->seen || seen > l->sent) {
        broke(l->client);
        return;
    }
    took(&l->unseen, (size_t)(seen - l->seen));
    l->seen = seen;
    for (size_t at = 0; at < left(&l->unseen); at += READ_AT_ONCE) {
        size_t rest = left(&l->unseen) - at;
        put(l->client, M_DATA, l->number, front(&l->unseen) + at, rest < READ_AT_ONCE ? rest : READ_AT_ONCE);
    }
}

// What the client has of each lane that it knows; it is told the same, and what it lacks is sent again.
static void greeted(struct client *c, struct rd said) {
    static const uint8_t nothing[1];
    struct wr ours = {0};
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct lane *l = c->lanes[i]; l; l = l->next) {
            // What the sandbox has not taken the client has still: it counts as not received, or both would have another notion of what may be on its way.
            l->received -= left(&l->inward);
            l->acknowledged = l->received;
            queue_free(&l->inward);
            l->is_listed = false;
            wr_u32(&ours, l->number);
            wr_u64(&ours, l->received);
        }
    if (ours.failed || ours.size > PIECE) broke(c);
    else put(c, M_GREETING, (uint32_t)(ours.size / GREETED), ours.size ? ours.data : nothing, ours.size);
    wr_free(&ours);
    while (said.at < said.end && !c->is_broken) {
        uint32_t number = rd_u32(&said);
        uint64_t seen = rd_u64(&said);
        struct lane *l = lane_of(c, number);
        if (said.bad || (l && l->is_listed)) broke(c);
        else if (l) {
            l->is_listed = true;
            resume(l, seen);
        }
    }
    if (c->is_broken) return;
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct lane *l = c->lanes[i], *next; l; l = next) {
            next = l->next;
            if (!l->is_listed && !is_untouched(l)) lane_free(l, true);  // closed over there while there was no connection
        }
    c->is_greeted = true;
    tell_agent(T_GREETED, c);
    rewatch_all(c);
}

static void data_came(struct lane *l, const uint8_t *data, size_t size) {
    if (l->received + size - l->acknowledged > WINDOW + PIECE) {
        broke(l->client);
        return;
    }
    l->received += size;
    size_t taken = 0;
    if (!left(&l->inward)) {
        ssize_t n = send(l->cell.fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR) return;  // it has hung up: its end is told once that is read
        taken = n > 0 ? (size_t)n : 0;
    }
    if (taken < size) {
        wr_raw(&l->inward.bytes, data + taken, size - taken);
        if (l->inward.bytes.failed) {
            say_end(l);
            return;
        }
        rewatch(l);
    }
    acknowledge(l);
}

static void acknowledged(struct lane *l, uint64_t total) {
    if (total < l->seen || total > l->sent) {
        broke(l->client);
        return;
    }
    took(&l->unseen, (size_t)(total - l->seen));
    l->seen = total;
    rewatch(l);
}

void ferry_take(struct client *c, const uint8_t *message, size_t size) {
    struct rd r = rd_of(message, size);
    uint8_t kind = rd_u8(&r);
    uint32_t number = rd_u32(&r);
    if (r.bad || (kind == M_GREETING) == c->is_greeted) {
        broke(c);
        return;
    }
    if (kind == M_GREETING) {
        greeted(c, r);
        return;
    }
    struct lane *l = lane_of(c, number);
    struct span rest = rd_rest(&r);
    if (kind > M_END || (kind == M_ACK && rest.size != 8)) broke(c);
    else if (!l) {
        // It ended a moment ago, or its descriptor was one too many for this process, or it was another ferry's: who speaks over it is told.
        if (kind == M_DATA) put(c, M_END, number, "", 0);
    } else if (kind == M_DATA) data_came(l, rest.at, rest.size);
    else if (kind == M_ACK) {
        r = rd_of(rest.at, rest.size);
        acknowledged(l, rd_u64(&r));
    } else lane_free(l, true);
}

static void records(struct client *c) {
    while (!c->is_broken && left(&c->got) >= SIZE_FIELD) {
        uint8_t *at = front(&c->got);
        struct rd r = rd_of(at, SIZE_FIELD);
        uint32_t size = rd_u32(&r);
        if (size < HEAD + SEAL_TAG || size > RECORD_MAX) {
            broke(c);
            return;
        }
        if (left(&c->got) < SIZE_FIELD + size) return;
        uint8_t *inside = at + SIZE_FIELD;
        size_t plain = size - SEAL_TAG;
        if (!seal_open(&c->in, at, SIZE_FIELD, inside, plain, inside + plain)) {
            broke(c);
            return;
        }
        ferry_take(c, inside, plain);
        took(&c->got, SIZE_FIELD + size);
    }
}

static void connection_ready(struct source *s, uint32_t events) {
    struct client *c = (struct client *)((char *)s - offsetof(struct client, connection));
    if (c->is_broken) return;
    if (events & EPOLLOUT) flush(c);
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR)) || c->is_broken) return;
    uint8_t *at = wr_reserve(&c->got.bytes, READ_AT_ONCE);
    ssize_t n = at ? recv(s->fd, at, READ_AT_ONCE, MSG_DONTWAIT) : 0;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        broke(c);
        return;
    }
    wr_commit(&c->got.bytes, (size_t)n);
    // A client speaks over a lane as soon as it has heard of it from the agent, which has told us before: that may still be unread.
    reading = c;
    heed_agent();
    if (reading) records(c);
    reading = NULL;
}

// ---- from the agent ----

struct client *ferry_client(uint32_t number) {
    struct client *c = clients;
    while (c && c->number != number) c = c->next;
    return c;
}

static struct client *new_client(uint32_t number) {
    struct client *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->number = number;
    source_init(&c->connection, -1, connection_ready);
    c->next = clients;
    clients = c;
    return c;
}

static void forget(struct client *c) {
    for (uint32_t i = 0; i < BUCKETS; i++)
        while (c->lanes[i]) lane_free(c->lanes[i], true);
    disconnect(c);
    struct client **at = &clients;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    free(c);
}

// A connection of a client that may have had another before. False: the descriptor stays the caller's.
static bool connected(uint32_t number, struct rd said, int fd) {
    struct span keys = rd_rest(&said);
    struct client *c = ferry_client(number);
    if (fd < 0 || keys.size != 2 * SEAL_KEY || !io_nonblocking(fd) || (!c && !(c = new_client(number)))) return false;
    disconnect(c);
    memcpy(c->in.key, keys.at, SEAL_KEY);
    memcpy(c->out.key, keys.at + SEAL_KEY, SEAL_KEY);
    source_init(&c->connection, fd, connection_ready);
    c->connection.duplicated = true;  // the agent's own copy may not be closed yet
    source_want(&c->connection, EPOLLIN);
    return true;
}

static bool lane_given(uint32_t client, struct rd said, int fd) {
    uint32_t number = rd_u32(&said);
    struct client *c = ferry_client(client);
    if (!c || !rd_done(&said) || lane_of(c, number)) return false;
    struct lane *l = fd < 0 || !io_nonblocking(fd) ? NULL : calloc(1, sizeof *l);
    if (!l) return false;  // out of descriptors or memory: whoever speaks over it is told
    l->client = c;
    l->number = number;
    source_init(&l->cell, fd, cell_ready);
    l->cell.duplicated = true;  // the agent has one too
    l->next = c->lanes[number % BUCKETS];
    c->lanes[number % BUCKETS] = l;
    rewatch(l);
    return true;
}

// Lanes that the client has never heard of were in an answer that was lost, and their boxes are given to it once more.
static void keep(struct client *c, struct rd known) {
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct lane *l = c->lanes[i], *next; l; l = next) {
            next = l->next;
            bool is_known = false;
            for (struct rd r = known; r.at < r.end && !r.bad && !is_known;) is_known = rd_u32(&r) == l->number;
            if (!is_known) lane_free(l, !is_untouched(l));
        }
}

// Whether there may be more.
static bool heard_agent(void) {
    static uint8_t message[CONTROL_MAX];
    int fds[FDS_MAX];
    size_t count = 0;
    ssize_t n = io_recv_fds(control.fd, message, sizeof message, fds, &count);
    if (n < 0 && errno == EMFILE) return true;
    if (n <= 0) {
        is_over |= n == 0 || errno != EAGAIN;
        return false;
    }
    struct rd r = rd_of(message, (size_t)n);
    uint8_t op = rd_u8(&r);
    uint32_t number = rd_u32(&r);
    struct client *c = ferry_client(number);
    bool is_taken = false;
    if (op == C_CONNECT) is_taken = connected(number, r, count ? fds[0] : -1);
    else if (op == C_LANE) is_taken = lane_given(number, r, count ? fds[0] : -1);
    else if (op == C_KEEP && c) keep(c, r);
    else if (op == C_FORGET && c) forget(c);
    explicit_bzero(message, (size_t)n);
    for (size_t i = is_taken; i < count; i++) close(fds[i]);
    return true;
}

static void heed_agent(void) {
    while (heard_agent()) continue;
}

static void control_ready(struct source *s, uint32_t events) {
    (void)s, (void)events;
    heed_agent();
}

// ---- its life ----

int ferry_begin(int control_fd) {
    is_over = has_broken = false;
    if (!loop_init() || !io_nonblocking(control_fd)) return 1;
    source_init(&control, control_fd, control_ready);
    return !source_want(&control, EPOLLIN);
}

static bool settle(void) {
    while (has_broken) {
        has_broken = false;
        for (struct client *c = clients; c; c = c->next)
            if (c->is_broken) disconnect(c);
    }
    return !is_over;
}

void ferry_turn(void) {
    loop_once(false);
    settle();
}

void ferry_end(void) {
    while (clients) forget(clients);
    source_close(&control);
    loop_free();
}

// Nothing here needs any right of root's, nor a user's files, nor may a core of it lie about: it has keys. In a user namespace without that id it stays who it is.
static bool give_up_rights(void) {
    if (!geteuid() && !setgroups(0, NULL) && !setresgid(NOBODY, NOBODY, NOBODY)) {
        int unmapped = setresuid(NOBODY, NOBODY, NOBODY);
        (void)unmapped;
    }
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {0};
    return !syscall(SYS_capset, &header, none) && !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_DUMPABLE, 0);
}

static void allow_many_files(void) {
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

// Whoever asks for short turns on a processor is run sooner when something comes (Linux 6.12; before that nobody listens). Everybody waits for what is carried here, and it takes microseconds.
static void ask_for_short_turns(void) {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } wanted = {.size = sizeof wanted, .nice = getpriority(PRIO_PROCESS, 0), .runtime = TURN_NS};
    syscall(SYS_sched_setattr, 0, &wanted, 0);
}

int ferry_main(int control_fd) {
    signal(SIGPIPE, SIG_IGN);
    ask_for_short_turns();
    allow_many_files();
    if (!give_up_rights() || ferry_begin(control_fd)) {
        perror("cell ferry");
        return 1;
    }
    loop_run(settle);
    ferry_end();
    return 0;
}
