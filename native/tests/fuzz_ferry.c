// Feeds the ferry messages of a client whose records were opened, what sandboxes say and close in between, and its agent's words.
//
// The input is a list of steps: u8 what, u8 size, that many bytes. Everything is of one client, whose other end is read by nobody: so queues fill up.
#define _GNU_SOURCE
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ferry.h"
#include "frames.h"
#include "io.h"
#include "wire.h"

#define LANES 4

static int agent = -1, client_end = -1, cells[LANES];

static void tell(char op, const void *body, size_t size, int fd) {
    struct wr w = {0};
    wr_u8(&w, (uint8_t)op);
    wr_u32(&w, 1);
    wr_raw(&w, body, size);
    io_send_fds(agent, w.data, w.size, &fd, fd >= 0);
    wr_free(&w);
    ferry_turn();
}

static void connect_again(void) {
    int pair[2];
    static const uint8_t keys[64];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) abort();
    io_close(&client_end);
    client_end = pair[0];
    tell('C', keys, sizeof keys, pair[1]);
    close(pair[1]);
}

static void lane_again(uint8_t number) {
    int pair[2];
    uint8_t body[4] = {number};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) abort();
    io_close(&cells[number]);
    cells[number] = pair[0];
    tell('L', body, sizeof body, pair[1]);
    close(pair[1]);
}

static void step(uint8_t what, const uint8_t *data, size_t size) {
    struct client *c = ferry_client(1);
    uint8_t which = size ? data[0] % LANES : 0;
    switch (what % 8) {
    case 0: case 1: case 2: case 3:
        frames_count(1);
        if (c) ferry_take(c, data, size);
        break;
    case 4: {
        ssize_t n = send(cells[which], data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
        (void)n;
        break;
    }
    case 5: lane_again(which); break;
    case 6: connect_again(); break;
    case 7: tell(size > 1 && data[1] % 4 == 0 ? 'F' : 'K', data, size, -1); break;
    }
    ferry_turn();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) abort();
    agent = pair[0];
    if (ferry_begin(pair[1])) abort();
    connect_again();
    for (uint8_t i = 0; i < LANES; i++) {
        cells[i] = -1;
        lane_again(i);
    }
    for (const uint8_t *at = data, *end = data + size; end - at >= 2;) {
        size_t length = at[1];
        if (length > (size_t)(end - at - 2)) length = (size_t)(end - at - 2);
        step(at[0], at + 2, length);
        at += 2 + length;
    }
    for (uint8_t i = 0; i < LANES; i++) io_close(&cells[i]);
    io_close(&client_end);
    io_close(&agent);
    ferry_end();
    return 0;
}
