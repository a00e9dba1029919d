#define _GNU_SOURCE
#include "held.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "io.h"
#include "loop.h"
#include "wire.h"

#define MAGIC "utxheld1"
#define MAGIC_SIZE 8u
#define TOKEN_SIZE 16u
#define OPENING (MAGIC_SIZE + TOKEN_SIZE + 8u)
#define RECORD_HEADER 12u          // u32 size, u64 received
#define RECORD_MAX (1u << 20)
#define PIECE (256u << 10)         // of our own records
#define READ_AT_ONCE (64u << 10)
#define KEPT_MAX (2u << 20)        // not acknowledged yet; beyond it the agent waits, as for a slow host
#define PASSING_MAX (1u << 20)     // taken from the host, not yet by the agent
#define ACKNOWLEDGE_EVERY (256u << 10)
#define JOINTS_MAX 4
#define ENVIRONMENT_MAX (128u << 10)

// One stream: the descriptors of a `cell join`, from its arrival until it breaks or another one takes its place.
struct joint {
    struct source control, in, out;
    struct wr got, put;
    size_t got_taken, put_sent;
    uint32_t left;  // of the record that is being read
};

static struct source listener, inner, terminate;
static struct joint joints[JOINTS_MAX];
static struct joint *current;
static struct timer alone;
static uint64_t patience_ns;
static uint8_t token[TOKEN_SIZE];
static bool has_token;

// From the agent: kept.data[front…] are the bytes from `acknowledged` on; of them `offered` went into the current stream.
static struct wr kept;
static size_t front, offered;
static uint64_t acknowledged;
// To the agent.
static struct wr passing;
static size_t passed;
static uint64_t received, told;

extern char **environ;

static void pump(void);

static void forget_front(struct wr *w, size_t *gone) {
    if (*gone == w->size) {
        w->size = *gone = 0;
        if (w->room > KEPT_MAX / 4) wr_free(w);
    } else if (*gone > w->size / 2) {
        memmove(w->data, w->data + *gone, w->size - *gone);
        w->size -= *gone;
        *gone = 0;
    }
}

// ---- the agent's side ----

static void want_inner(void) {
    bool room = kept.size - front < KEPT_MAX;
    bool writing = passed < passing.size;
    source_want(&inner, (room ? EPOLLIN : 0) | (writing ? EPOLLOUT : 0));
}

static void end_agent(void) { source_close(&inner); }  // its channel reads the end of file

static void pass_on(void) {
    while (passed < passing.size) {
        ssize_t n = send(inner.fd, passing.data + passed, passing.size - passed, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        passed += (size_t)n;
    }
    forget_front(&passing, &passed);
    want_inner();
}

// ---- streams ----

static void joint_end(struct joint *j) {
    source_close(&j->in);
    source_close(&j->out);
    source_close(&j->control);  // `cell join` ends, and the substrate's exec with it
    wr_free(&j->got);
    wr_free(&j->put);
    j->got_taken = j->put_sent = j->left = 0;
    if (current != j) return;
    current = NULL;
    offered = 0;
    timer_set(&alone, io_now_ns() + patience_ns, alone.fired);
}

static size_t unread(const struct joint *j) { return j->got.size - j->got_taken; }

static bool acknowledge(uint64_t upto) {
    if (upto < acknowledged || upto > acknowledged + offered) return false;
    size_t n = (size_t)(upto - acknowledged);
    acknowledged = upto;
    front += n;
    offered -= n;
    forget_front(&kept, &front);
    want_inner();
    return true;
}

// For which processor the image's own programs are, as ELF numbers them; 0: there is none that says.
static uint16_t machine(void) {
    static const char *const programs[] = {"/bin/sh", "/usr/bin/env", "/bin/true", "/bin/ls", "/usr/local/bin/python3", "/usr/bin/python3"};
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        uint8_t head[20];
        autoclose int fd = open(programs[i], O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (fd >= 0 && read(fd, head, sizeof head) == (ssize_t)sizeof head && !memcmp(head, "\177ELF", 4))
            return (uint16_t)(head[5] == 2 ? head[18] << 8 | head[19] : head[19] << 8 | head[18]);
    }
    return 0;
}

static void write_facts(struct wr *w) {
    char cwd[4096];
    wr_u16(w, machine());
    wr_u32(w, (uint32_t)geteuid());
    wr_u32(w, (uint32_t)getegid());
    if (!getcwd(cwd, sizeof cwd)) cwd[0] = 0;
    wr_bytes(w, cwd, strlen(cwd));
    uint32_t count = 0;
    size_t total = 0;
    for (char **e = environ; *e && (total += strlen(*e)) <= ENVIRONMENT_MAX; e++) count++;
    wr_u32(w, count);
    for (uint32_t i = 0; i < count; i++) wr_bytes(w, environ[i], strlen(environ[i]));
}

// The first stream's token is the one that counts: it comes before anything else has run inside.
static bool greet(struct joint *j) {
    const uint8_t *at = j->got.data + j->got_taken;
    struct rd r = rd_of(at + MAGIC_SIZE + TOKEN_SIZE, 8);
    uint64_t theirs = rd_u64(&r);
    if (memcmp(at, MAGIC, MAGIC_SIZE)) return false;
    uint8_t differs = 0;
    for (size_t i = 0; i < TOKEN_SIZE; i++) differs |= at[MAGIC_SIZE + i] ^ token[i];
    if (has_token && differs) return false;
    if (theirs < acknowledged || theirs > acknowledged + (kept.size - front)) return false;
    memcpy(token, at + MAGIC_SIZE, TOKEN_SIZE);
    has_token = true;
    j->got_taken += OPENING;
    if (current) joint_end(current);
    timer_stop(&alone);
    current = j;
    offered = (size_t)(theirs - acknowledged);  // arrived, though nobody could say so
    acknowledge(theirs);
    struct wr facts = {0};
    write_facts(&facts);
    wr_raw(&j->put, MAGIC, MAGIC_SIZE);
    wr_u64(&j->put, told = received);
    wr_bytes(&j->put, facts.data, facts.size);
    bool ok = !facts.failed && !j->put.failed;
    wr_free(&facts);
    return ok;
}

static bool take_records(struct joint *j) {
    while (unread(j) && passing.size - passed < PASSING_MAX) {
        if (!j->left) {
            if (unread(j) < RECORD_HEADER) break;
            struct rd r = rd_of(j->got.data + j->got_taken, RECORD_HEADER);
            j->left = rd_u32(&r);
            if (j->left > RECORD_MAX || !acknowledge(rd_u64(&r))) return false;
            j->got_taken += RECORD_HEADER;
            continue;
        }
        size_t n = unread(j) < j->left ? unread(j) : j->left;
        wr_raw(&passing, j->got.data + j->got_taken, n);
        if (passing.failed) return false;
        j->got_taken += n;
        j->left -= (uint32_t)n;
        received += n;
    }
    forget_front(&j->got, &j->got_taken);
    pass_on();
    return true;
}

static bool take(struct joint *j) {
    if (j != current && unread(j) >= OPENING && !greet(j)) return false;
    if (j == current && !take_records(j)) return false;
    source_want(&j->in, passing.size - passed < PASSING_MAX ? EPOLLIN : 0);
    return true;
}

static void on_in(struct source *s, uint32_t events) {
    (void)events;
    struct joint *j = (struct joint *)((char *)s - offsetof(struct joint, in));
    uint8_t *at = wr_reserve(&j->got, READ_AT_ONCE);
    ssize_t n = at ? read(s->fd, at, READ_AT_ONCE) : -1;
    if (at && n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n > 0) wr_commit(&j->got, (size_t)n);
    if (n <= 0 || !take(j)) joint_end(j);
    pump();
}

static void on_out(struct source *s, uint32_t events) {
    struct joint *j = (struct joint *)((char *)s - offsetof(struct joint, out));
    if (!(events & EPOLLOUT)) joint_end(j);
    pump();
}

// Puts what is not offered yet, and what is to be acknowledged, into records, and those into the stream.
static void pump(void) {
    struct joint *j = current;
    while (j) {
        size_t more = kept.size - front - offered;
        if (!j->put.size && (more || received - told >= ACKNOWLEDGE_EVERY)) {
            size_t n = more < PIECE ? more : PIECE;
            wr_u32(&j->put, (uint32_t)n);
            wr_u64(&j->put, told = received);
            if (n) wr_raw(&j->put, kept.data + front + offered, n);
            offered += n;
        }
        if (!j->put.size || j->put.failed) break;
        ssize_t n = write(j->out.fd, j->put.data + j->put_sent, j->put.size - j->put_sent);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            source_want(&j->out, EPOLLOUT);
            return;
        }
        if (n <= 0) {
            joint_end(j);
            return;
        }
        j->put_sent += (size_t)n;
        forget_front(&j->put, &j->put_sent);
    }
    if (!j) return;
    if (j->put.failed) joint_end(j);
    else source_want(&j->out, 0);
}

static void on_inner(struct source *s, uint32_t events) {
    if (events & EPOLLOUT) {
        pass_on();
        if (current && !take(current)) joint_end(current);
    }
    if (events & ~(uint32_t)EPOLLOUT) {
        uint8_t *at = wr_reserve(&kept, READ_AT_ONCE);
        ssize_t n = at ? recv(s->fd, at, kept.room - kept.size, MSG_DONTWAIT) : -1;
        if (n > 0) wr_commit(&kept, (size_t)n);
        else if (!at || n == 0 || (errno != EAGAIN && errno != EINTR)) end_agent();
        else return;
        want_inner();
    }
    pump();
}

// ---- joining ----

static void on_control(struct source *s, uint32_t events) {
    (void)events;
    struct joint *j = (struct joint *)((char *)s - offsetof(struct joint, control));
    int fds[FDS_MAX];
    size_t count = 0;
    char byte;
    ssize_t n = io_recv_fds(s->fd, &byte, 1, fds, &count);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0 || count != 2 || j->in.fd >= 0 || !io_nonblocking(fds[0]) || !io_nonblocking(fds[1])) {
        for (size_t i = 0; i < count; i++) close(fds[i]);
        joint_end(j);
        return;
    }
    source_init(&j->in, fds[0], on_in);
    source_init(&j->out, fds[1], on_out);
    // Another process holds copies of them, so that closing ours would not take them out of the set.
    j->in.duplicated = j->out.duplicated = true;
    if (!source_want(&j->in, EPOLLIN)) joint_end(j);
}

static void on_listener(struct source *s, uint32_t events) {
    (void)events;
    static unsigned turn;
    int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    struct joint *j = NULL;
    for (int i = 0; i < JOINTS_MAX && !j; i++)
        if (joints[i].control.fd < 0) j = &joints[i];
    while (!j) {  // those who joined and say nothing make room
        j = &joints[turn++ % JOINTS_MAX];
        if (j == current) j = NULL;
        else joint_end(j);
    }
    source_init(&j->control, fd, on_control);
    source_want(&j->control, EPOLLIN);
}

// ---- its life ----

static void on_alone(struct timer *t) {
    (void)t;
    end_agent();
}

static void on_terminate(struct source *s, uint32_t events) {
    (void)events;
    struct signalfd_siginfo info;
    // From outside the sandbox the sender has no number here. The workload's own are of no effect.
    while (read(s->fd, &info, sizeof info) == (ssize_t)sizeof info)
        if (info.ssi_pid == 0 || getpid() != 1) end_agent();
}

static socklen_t address(const char *name, struct sockaddr_un *a) {
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    size_t size = strnlen(name, sizeof a->sun_path - 1);
    memcpy(a->sun_path + 1, name, size);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + size);
}

bool held_open(const char *name, int fd, uint32_t patience_s) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0) return false;
    for (int i = 0; i < JOINTS_MAX; i++) joints[i] = (struct joint){.control.fd = -1, .in.fd = -1, .out.fd = -1};
    source_init(&inner, fd, on_inner);
    source_init(&terminate, signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK), on_terminate);
    source_init(&listener, socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on_listener);
    patience_ns = (uint64_t)patience_s * 1000000000u;
    struct sockaddr_un a;
    socklen_t size = address(name, &a);
    if (bind(listener.fd, (struct sockaddr *)&a, size) < 0 || listen(listener.fd, JOINTS_MAX) < 0) return false;
    return terminate.fd >= 0 && source_want(&terminate, EPOLLIN) && source_want(&listener, EPOLLIN) && source_want(&inner, EPOLLIN) &&
           timer_set(&alone, io_now_ns() + patience_ns, on_alone);
}

void held_close(void) {
    for (int i = 0; i < JOINTS_MAX; i++) joint_end(&joints[i]);
    timer_stop(&alone);
    source_close(&inner);
    source_close(&terminate);
    source_close(&listener);
    wr_free(&kept);
    wr_free(&passing);
    front = offered = passed = 0;
    acknowledged = received = told = 0;
    has_token = false;
}
