// The whole agent with a worker of its own, over a socket pair: what it answers, and what is left when the channel ends.
#define _GNU_SOURCE
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"
#include "check.h"
#include "io.h"
#include "wire.h"

static int channel;
static struct wr out;
static uint8_t reply[FRAME_MAX_OUT + 64];
static struct frame got;

static void send_all(void) {
    CHECK(io_write_all(channel, out.data, out.size));
    out.size = 0;
}

static bool read_exactly(uint8_t *at, size_t size) {
    while (size) {
        ssize_t n = read(channel, at, size);
        if (n <= 0) return false;
        at += n, size -= (size_t)n;
    }
    return true;
}

// The next frame for this id; others are passed over.
static bool next(uint32_t id) {
    do {
        if (!read_exactly(reply, 4)) return false;
        uint32_t length = (uint32_t)reply[0] | (uint32_t)reply[1] << 8 | (uint32_t)reply[2] << 16 | (uint32_t)reply[3] << 24;
        if (length < 8 || length > FRAME_MAX_OUT || !read_exactly(reply + 4, length) || !frame_open(reply, length + 4, &got)) return false;
    } while (got.id != id);
    return true;
}

static void begin_hello(void) {
    size_t begun = frame_begin(&out, 0, K_HELLO);
    wr_u32(&out, WIRE_MAGIC);
    wr_u16(&out, WIRE_MAJOR);
    wr_u16(&out, WIRE_MINOR);
    wr_bytes(&out, "t", 1);
    frame_end(&out, begun);
}

static void put_spawn(uint32_t id, const char *text) {
    size_t begun = frame_begin(&out, id, K_SPAWN);
    wr_u16(&out, SPAWN_SHELL);
    wr_u32(&out, 1 << 20);
    wr_u32(&out, 0);
    wr_bytes(&out, "", 0);
    wr_bytes(&out, "", 0);
    wr_u32(&out, 1);
    wr_bytes(&out, text, strlen(text));
    wr_u32(&out, 0);
    wr_bytes(&out, "", 0);
    frame_end(&out, begun);
}

static bool result_is(uint32_t id, uint8_t outcome, int code, const char *text) {
    if (!next(id) || got.kind != K_DONE) return false;
    struct rd r = got.payload;
    bool ok = rd_u8(&r) == outcome && rd_i32(&r) == code;
    for (int i = 0; i < 4; i++) rd_u64(&r);
    rd_u64(&r);
    rd_u8(&r);
    ok = ok && rd_u64(&r) == 0 && rd_u64(&r) == 0;
    struct span printed = rd_bytes(&r);
    return ok && printed.size == strlen(text) && !memcmp(printed.at, text, printed.size);
}

static void session(uint32_t open_id, uint32_t run_id, const char *text) {
    size_t begun = frame_begin(&out, open_id, K_SESSION_OPEN);
    wr_bytes(&out, "", 0);
    wr_bytes(&out, "", 0);
    wr_u32(&out, 0);
    frame_end(&out, begun);
    send_all();
    CHECK(next(open_id) && got.kind == K_DONE);
    struct rd r = got.payload;
    uint32_t id = rd_u32(&r);
    begun = frame_begin(&out, run_id, K_SESSION_RUN);
    wr_u32(&out, id);
    wr_u32(&out, 1 << 20);
    wr_bytes(&out, text, strlen(text));
    frame_end(&out, begun);
    send_all();
}

int main(void) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    pid_t agent = fork();
    if (!agent) {
        close(pair[0]);
        struct agent_opts opts = {.channel_in = pair[1], .channel_out = pair[1], .worker_fd = -1, .control_fd = -1,
                                  .memory_events_fd = -1, .pids_events_fd = -1, .workdir = "/", .is_init = false};
        int status = agent_main(&opts);
        wr_free(&out);
        _exit(status);  // no leak check at exit: a process that is not dumpable cannot be traced for it
    }
    close(pair[1]);
    channel = pair[0];
    setsockopt(channel, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){.tv_sec = 20}, sizeof(struct timeval));

    begin_hello();
    put_spawn(1, "echo hi; exit 3");
    send_all();
    CHECK(next(0) && got.kind == K_HELLO);
    CHECK(result_is(1, OUTCOME_EXITED, 3, "hi\n"));
    put_spawn(3, "sleep 100 & echo back");
    send_all();
    CHECK(result_is(3, OUTCOME_EXITED, 0, "back\n"));
    put_spawn(5, "kill -11 $$");
    send_all();
    CHECK(result_is(5, OUTCOME_SIGNALED, 11, ""));
    put_spawn(6, "(setsid sleep 100 &) ; echo started");
    send_all();
    CHECK(result_is(6, OUTCOME_EXITED, 0, "started\n"));

    session(10, 11, "x=5; cd /usr; break; echo $x $PWD");
    CHECK(result_is(11, OUTCOME_EXITED, 0, "5 /usr\n"));
    session(12, 13, "exit 7");
    CHECK(result_is(13, OUTCOME_EXITED, 7, ""));
    session(14, 15, "echo \"unterminated");
    CHECK(next(15) && got.kind == K_DONE);

    // Silence is not to be had while somebody waits; then nothing comes behind the answer until it may, and a copy greets anew with what it has.
    put_spawn(30, "sleep 0.2; echo late");
    frame_end(&out, frame_begin(&out, 31, K_QUIESCE));
    send_all();
    CHECK(next(31) && got.kind == K_ERROR);
    CHECK(result_is(30, OUTCOME_EXITED, 0, "late\n"));
    frame_end(&out, frame_begin(&out, 32, K_QUIESCE));
    put_spawn(33, "echo quiet");
    send_all();
    CHECK(next(32) && got.kind == K_DONE);
    CHECK(poll(&(struct pollfd){.fd = channel, .events = POLLIN}, 1, 200) == 0);
    frame_end(&out, frame_begin(&out, 0, K_GO_ON));
    send_all();
    CHECK(result_is(33, OUTCOME_EXITED, 0, "quiet\n"));
    frame_end(&out, frame_begin(&out, 34, K_QUIESCE));
    send_all();
    CHECK(next(34) && got.kind == K_DONE);
    size_t reborn = frame_begin(&out, 0, K_REBORN);
    wr_bytes(&out, "another", 7);
    wr_bytes(&out, "", 0);
    frame_end(&out, reborn);
    begin_hello();
    reborn = frame_begin(&out, 35, K_SESSION_RUN);
    wr_u32(&out, 1);
    wr_u32(&out, 1 << 20);
    wr_bytes(&out, "echo $x", 7);
    frame_end(&out, reborn);
    send_all();
    CHECK(next(0) && got.kind == K_HELLO);
    CHECK(result_is(35, OUTCOME_EXITED, 0, "5\n"));

    // Malformed requests are answered and start nothing; an impossible length ends the connection, and the agent with it.
    size_t begun = frame_begin(&out, 20, K_SPAWN);
    wr_u16(&out, 0xffff);
    frame_end(&out, begun);
    frame_end(&out, frame_begin(&out, 21, 0x6f));
    frame_end(&out, frame_begin(&out, 22, K_PING));
    send_all();
    CHECK(next(20) && got.kind == K_ERROR);
    CHECK(next(21) && got.kind == K_ERROR);
    CHECK(next(22) && got.kind == K_DONE);
    wr_u32(&out, 0xffffffffu);
    send_all();
    CHECK(next(0) && got.kind == K_ERROR);
    int status = -1;
    CHECK(waitpid(agent, &status, 0) == agent && status == 0);
    wr_free(&out);
    return check_report();
}
