// Feeds the agent whatever comes: bytes and frames from a host, bytes and frames from its worker, and exits of commands.
//
// The input is a list of steps: u8 what, u8 size, that many bytes. Nothing is started: the worker's end of the socket is
// held here, and connecting, listening, forking and killing are left out of a build for fuzzing. Whole frames that reached
// the agent are counted (frames.h).
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dispatch.h"
#include "frames.h"
#include "io.h"
#include "loop.h"
#include "process.h"
#include "session.h"

#define CALLS 16

static int host_end, worker_end;
static uint32_t calls[CALLS];  // ids of the last requests to the worker
static unsigned calls_count;

static void give(int fd, const void *data, size_t size) {
    ssize_t n = send(fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)n;
}

static void give_frame(int fd, uint32_t id, uint8_t kind, uint8_t flags, const uint8_t *payload, size_t size) {
    struct wr w = {0};
    size_t begun = frame_begin(&w, id, kind);
    wr_raw(&w, payload, size);
    frame_end(&w, begun);
    w.data[9] = flags & 3;
    give(fd, w.data, w.size);
    wr_free(&w);
    frames_count(1);
}

// Reads what the agent says, remembers its calls, closes what it passes.
static void take(void) {
    static uint8_t buffer[1 << 16];
    while (recv(host_end, buffer, sizeof buffer, MSG_DONTWAIT) > 0) continue;
    int fds[FDS_MAX];
    size_t count;
    for (;;) {
        ssize_t n = io_recv_fds(worker_end, buffer, sizeof buffer, fds, &count);
        for (size_t i = 0; i < count; i++) close(fds[i]);
        if (n <= 0) return;
        for (size_t at = 0;;) {
            int64_t size = frame_size(buffer + at, (size_t)n - at, 2 * FRAME_MAX_IN);
            struct frame f;
            if (size <= 0 || !frame_open(buffer + at, (size_t)size, &f)) break;
            if (f.id) calls[calls_count++ % CALLS] = f.id;
            at += (size_t)size;
        }
    }
}

static void turn(void) {
    workers_flush();
    channel_flush();
    take();
    if (!channel_ended()) loop_once(false);
}

static void step(uint8_t what, const uint8_t *data, size_t size) {
    switch (what % 8) {
    case 0: give(host_end, data, size); break;
    case 1: give(worker_end, data, size); break;
    case 2: case 3: case 4: case 5:  // a frame from the host: kind, id, flags, payload
        if (size >= 3) give_frame(host_end, data[1] & 0x80 ? EGRESS_BIT | (data[1] & 0x7fu) : data[1], data[0], data[2], data + 3, size - 3);
        break;
    case 6:  // an answer of the worker: kind, which call, payload
        if (size >= 2) give_frame(worker_end, calls[data[1] % CALLS], data[0], 0, data + 2, size - 2);
        break;
    case 7:
        if (size >= 2) {
            struct ending e = {.pid = data[0], .status = data[1] << 8, .at_ns = io_now_ns()};
            if (!processes_exited(&e) && !sessions_exited(&e)) exec_remember(&e);
        }
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int channel[2], worker[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel) < 0) return 0;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, worker) < 0) {
        close(channel[0]), close(channel[1]);
        return 0;
    }
    host_end = channel[0];
    worker_end = worker[0];
    io_nonblocking(worker_end);
    calls_count = 0;
    struct agent_opts opts = {.channel_in = channel[1], .channel_out = channel[1], .worker_fd = worker[1], .control_fd = -1,
                              .memory_events_fd = -1, .pids_events_fd = -1, .workdir = "/", .is_init = true};
    if (agent_open(&opts)) {
        struct wr hello = {0};
        size_t begun = frame_begin(&hello, 0, K_HELLO);
        wr_u32(&hello, WIRE_MAGIC);
        wr_u16(&hello, WIRE_MAJOR);
        wr_u16(&hello, WIRE_MINOR);
        wr_bytes(&hello, "", 0);
        frame_end(&hello, begun);
        give(host_end, hello.data, hello.size);
        wr_free(&hello);
        for (size_t at = 0; at + 2 <= size && !channel_ended();) {
            size_t n = data[at + 1] < size - at - 2 ? data[at + 1] : size - at - 2;
            step(data[at], data + at + 2, n);
            at += 2 + n;
            turn();
        }
        turn();
    }
    agent_close();
    close(host_end);
    close(worker_end);
    return 0;
}
