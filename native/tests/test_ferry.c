// The ferry in this process: its agent, clients and sandboxes are the other ends of socket pairs.
#define _GNU_SOURCE
#include "ferry.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "io.h"
#include "seal.h"
#include "wire.h"

enum { GREETING = 0, DATA = 1, ACK = 2, END = 3 };
#define WINDOW (1u << 20)
#define PIECE (256u << 10)
#define MESSAGE_MAX (5u + PIECE)

static int agent;

struct peer {  // a client's end
    int sock;
    struct seal out, in;
    uint8_t got[8 << 20];
    size_t have;
};

static void turns(int count) {
    while (count--) ferry_turn();
}

static void tell(char op, uint32_t client, const void *body, size_t size, int fd) {
    struct wr w = {0};
    wr_u8(&w, (uint8_t)op);
    wr_u32(&w, client);
    wr_raw(&w, body, size);
    CHECK(io_send_fds(agent, w.data, w.size, &fd, fd >= 0) == (ssize_t)w.size);
    wr_free(&w);
    turns(2);
}

static struct peer *connected(uint32_t number) {
    int pair[2];
    uint8_t keys[2 * SEAL_KEY];
    struct peer *p = calloc(1, sizeof *p);
    CHECK(p && !socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
    for (size_t i = 0; i < sizeof keys; i++) keys[i] = (uint8_t)(i * 3 + number);
    memcpy(p->out.key, keys, SEAL_KEY);
    memcpy(p->in.key, keys + SEAL_KEY, SEAL_KEY);
    p->sock = pair[0];
    CHECK(io_nonblocking(p->sock));
    tell('C', number, keys, sizeof keys, pair[1]);
    close(pair[1]);
    return p;
}

static void leave(struct peer *p) {
    close(p->sock);
    free(p);
    turns(3);
}

static int lane(uint32_t client, uint32_t number) {
    int pair[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
    uint8_t body[4] = {(uint8_t)number, (uint8_t)(number >> 8), 0, 0};
    tell('L', client, body, sizeof body, pair[1]);
    close(pair[1]);
    CHECK(io_nonblocking(pair[0]));
    return pair[0];
}

static void say(struct peer *p, uint8_t kind, uint32_t number, const void *data, size_t size) {
    static uint8_t record[4 + MESSAGE_MAX + 64 + SEAL_TAG];
    struct wr w = {.data = record, .room = sizeof record};
    wr_u32(&w, (uint32_t)(5 + size + SEAL_TAG));
    wr_u8(&w, kind);
    wr_u32(&w, number);
    wr_raw(&w, data, size);
    CHECK(seal_close(&p->out, record, 4, record + 4, 5 + size, record + 9 + size));
    size_t whole = 9 + size + SEAL_TAG;
    for (size_t at = 0; at < whole;) {
        ssize_t n = send(p->sock, record + at, whole - at, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) return;  // it hung up, which is the test's to see
        at += n > 0 ? (size_t)n : 0;
        ferry_turn();
    }
    turns(2);
}

static void say_count(struct peer *p, uint8_t kind, uint32_t number, uint64_t total) {
    uint8_t body[8];
    struct wr w = {.data = body, .room = sizeof body};
    wr_u64(&w, total);
    say(p, kind, number, body, sizeof body);
}

// The next message; its size behind the head, or -1 when there is none. `closed` when the connection is over.
static ssize_t hear(struct peer *p, uint8_t *kind, uint32_t *number, uint8_t *data, bool *closed) {
    for (int tries = 0; tries < 4; tries++) {
        ferry_turn();
        ssize_t n = recv(p->sock, p->got + p->have, sizeof p->got - p->have, MSG_DONTWAIT);
        if (n > 0) p->have += (size_t)n;
        *closed = n == 0 || (n < 0 && errno == ECONNRESET);
        struct rd r = rd_of(p->got, p->have);
        uint32_t size = rd_u32(&r);
        if (r.bad || p->have < 4 + size) continue;
        size_t plain = size - SEAL_TAG;
        CHECK(seal_open(&p->in, p->got, 4, p->got + 4, plain, p->got + 4 + plain));
        r = rd_of(p->got + 4, plain);
        *kind = rd_u8(&r);
        *number = rd_u32(&r);
        struct span rest = rd_rest(&r);
        if (rest.size) memcpy(data, rest.at, rest.size);
        memmove(p->got, p->got + 4 + size, p->have - 4 - size);
        p->have -= 4 + size;
        return rest.size;
    }
    return -1;
}

static bool hears(struct peer *p, uint8_t kind, uint32_t number, const void *data, size_t size) {
    static uint8_t got[MESSAGE_MAX];
    uint8_t its_kind = 255;
    uint32_t its_number = 0;
    bool closed;
    return hear(p, &its_kind, &its_number, got, &closed) == (ssize_t)size && its_kind == kind && its_number == number && (!size || !memcmp(got, data, size));
}

static bool is_closed(struct peer *p) {
    static uint8_t got[MESSAGE_MAX];
    uint8_t kind;
    uint32_t number;
    bool closed = false;
    while (!closed && hear(p, &kind, &number, got, &closed) >= 0) continue;
    return closed;
}

static bool takes(int cell, const char *expected) {
    char got[64];
    turns(2);
    ssize_t n = recv(cell, got, sizeof got, MSG_DONTWAIT);
    return n == (ssize_t)strlen(expected) && !memcmp(got, expected, (size_t)n);
}

static bool has_ended(int cell) {
    char byte;
    turns(2);
    return recv(cell, &byte, 1, MSG_DONTWAIT) == 0;
}

static const uint8_t NONE[1];

static void test_bytes_there_and_back(void) {
    struct peer *p = connected(1);
    int one = lane(1, 7), other = lane(1, 71);  // in one bucket
    say(p, GREETING, 0, NONE, 0);
    uint8_t known[24] = {71, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7};
    CHECK(hears(p, GREETING, 2, known, sizeof known));
    say(p, DATA, 7, "to one", 6);
    say(p, DATA, 71, "to other", 8);
    CHECK(takes(one, "to one") && takes(other, "to other"));
    say(p, DATA, 9, "to nobody", 9);
    CHECK(hears(p, END, 9, NONE, 0));  // or whoever waits there would do so for ever
    say(p, END, 9, NONE, 0);
    CHECK(send(one, "from one", 8, 0) == 8);
    CHECK(hears(p, DATA, 7, "from one", 8));
    CHECK(send(other, "last", 4, 0) == 4 && !close(other));
    CHECK(hears(p, DATA, 71, "last", 4) && hears(p, END, 71, NONE, 0));
    say(p, END, 7, NONE, 0);
    CHECK(has_ended(one));
    close(one);
    leave(p);
    tell('F', 1, NONE, 0, -1);
    CHECK(!ferry_client(1));
}

static void test_a_connection_that_breaks_is_gone_on_with(void) {
    struct peer *p = connected(2);
    int cell = lane(2, 1);
    say(p, GREETING, 0, NONE, 0);
    CHECK(hears(p, GREETING, 1, "\1\0\0\0\0\0\0\0\0\0\0\0", 12));
    say(p, DATA, 1, "abc", 3);
    CHECK(send(cell, "0123456789", 10, 0) == 10);
    CHECK(hears(p, DATA, 1, "0123456789", 10));
    leave(p);
    CHECK(send(cell, "more", 4, 0) == 4);  // while there is nobody
    turns(3);
    p = connected(2);
    uint8_t seen[12] = {1, 0, 0, 0, 4};  // of ten
    say(p, GREETING, 1, seen, sizeof seen);
    uint8_t received[12] = {1, 0, 0, 0, 3};
    CHECK(hears(p, GREETING, 1, received, sizeof received));
    CHECK(hears(p, DATA, 1, "456789", 6));
    CHECK(hears(p, DATA, 1, "more", 4));
    CHECK(takes(cell, "abc"));
    say_count(p, ACK, 1, 14);
    say_count(p, ACK, 1, 15);  // never sent
    CHECK(is_closed(p));
    leave(p);
    p = connected(2);
    seen[4] = 3;  // less than was acknowledged
    say(p, GREETING, 1, seen, sizeof seen);
    CHECK(is_closed(p));
    leave(p);
    p = connected(2);
    say(p, GREETING, 0, NONE, 0);  // it was closed over there meanwhile
    CHECK(hears(p, GREETING, 1, received, sizeof received));
    CHECK(has_ended(cell));
    close(cell);
    leave(p);
    tell('F', 2, NONE, 0, -1);
}

static void test_another_connection_takes_the_place_of_one_that_lives(void) {
    struct peer *before = connected(3);
    int cell = lane(3, 5);
    say(before, GREETING, 0, NONE, 0);
    struct peer *p = connected(3);
    CHECK(is_closed(before));
    say(p, GREETING, 1, "\5\0\0\0\0\0\0\0\0\0\0\0", 12);
    CHECK(hears(p, GREETING, 1, "\5\0\0\0\0\0\0\0\0\0\0\0", 12));
    say(p, DATA, 5, "x", 1);
    CHECK(takes(cell, "x"));
    tell('F', 3, NONE, 0, -1);
    CHECK(has_ended(cell) && is_closed(p));
    close(cell);
    leave(p);
    leave(before);
}

static void test_what_is_said_over_a_lane_comes_behind_the_agent_s_word_of_it(void) {
    struct peer *p = connected(10);
    say(p, GREETING, 0, NONE, 0);
    CHECK(hears(p, GREETING, 0, NONE, 0));
    // The connection has something to read, then the agent's word comes, then the rest of the record: the connection is looked at first.
    uint8_t record[4 + 5 + 2 + SEAL_TAG] = {23, 0, 0, 0, DATA, 1, 0, 0, 0, 'h', 'i'};
    CHECK(seal_close(&p->out, record, 4, record + 4, 7, record + 11));
    CHECK(send(p->sock, record, 9, 0) == 9);
    int pair[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
    uint8_t word[9] = {'L', 10, 0, 0, 0, 1};
    CHECK(io_send_fds(agent, word, sizeof word, &pair[1], 1) == sizeof word);
    CHECK(send(p->sock, record + 9, sizeof record - 9, 0) == (ssize_t)sizeof record - 9);
    close(pair[1]);
    CHECK(takes(pair[0], "hi"));
    // The same with the agent's word that the client is gone.
    uint8_t last[9] = {'F', 10};
    CHECK(send(p->sock, record, 9, 0) == 9 && io_send_fds(agent, last, 5, NULL, 0) == 5);
    turns(2);
    CHECK(!ferry_client(10) && has_ended(pair[0]) && is_closed(p));
    close(pair[0]);
    leave(p);
}

static void test_lanes_of_answers_that_were_lost_are_let_go(void) {
    struct peer *p = connected(4);
    int used = lane(4, 1), known = lane(4, 3), pair[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
    tell('L', 4, "\2\0\0\0", 4, pair[1]);  // the agent keeps its copy, to give it out once more
    say(p, GREETING, 0, NONE, 0);
    say(p, DATA, 1, "x", 1);
    tell('K', 4, "\3\0\0\0", 4, -1);
    CHECK(takes(used, "x") && has_ended(used));  // it was spoken over, and is over
    char byte = 0;
    CHECK(send(pair[0], "y", 1, MSG_NOSIGNAL) == 1);
    turns(2);
    CHECK(recv(pair[1], &byte, 1, MSG_DONTWAIT) == 1 && byte == 'y');  // nothing was shut, and nobody else reads
    say(p, DATA, 3, "z", 1);
    CHECK(takes(known, "z"));
    close(used), close(pair[0]), close(pair[1]), close(known);
    tell('F', 4, NONE, 0, -1);
    leave(p);
}

static void test_a_sandbox_that_floods_is_held_up(void) {
    static uint8_t flood[64 << 10], got[MESSAGE_MAX];
    struct peer *p = connected(5);
    int cell = lane(5, 1);
    say(p, GREETING, 0, NONE, 0);
    size_t sent = 0, heard = 0;
    for (int i = 0; i < 400; i++) {
        ssize_t n = send(cell, flood, sizeof flood, MSG_DONTWAIT);
        if (n > 0) sent += (size_t)n;
        ferry_turn();
    }
    CHECK(sent < 2 * WINDOW);  // while nobody reads: what may lie unsent, and what sockets hold
    uint8_t kind;
    uint32_t number;
    bool closed;
    for (uint64_t windows = 1; windows <= 3; windows++) {
        for (int i = 0; i < 400; i++) {
            ssize_t n = send(cell, flood, sizeof flood, MSG_DONTWAIT);
            if (n > 0) sent += (size_t)n;
            n = hear(p, &kind, &number, got, &closed);
            if (n >= 0 && kind == DATA) heard += (size_t)n;
        }
        CHECK(heard == windows * WINDOW && !closed);  // and no more, before it says that it has them
        say_count(p, ACK, 1, heard);
    }
    close(cell);
    tell('F', 5, NONE, 0, -1);
    leave(p);
}

static void test_a_client_that_floods_is_dropped_and_its_lane_stays(void) {
    static uint8_t flood[PIECE];
    struct peer *p = connected(6);
    int cell = lane(6, 1);  // which reads nothing
    say(p, GREETING, 0, NONE, 0);
    for (int i = 0; i < 12; i++) say(p, DATA, 1, flood, sizeof flood);
    CHECK(is_closed(p));
    turns(2);
    CHECK(!has_ended(cell));
    close(cell);
    leave(p);
    tell('F', 6, NONE, 0, -1);
}

static void test_what_the_sandbox_had_not_taken_when_the_connection_broke_is_sent_again(void) {
    static uint8_t data[PIECE], got[4 * WINDOW];
    struct peer *p = connected(11);
    int cell = lane(11, 1);  // which reads nothing for now
    say(p, GREETING, 0, NONE, 0);
    for (uint8_t i = 0; i < 4; i++) {  // a window
        memset(data, i, sizeof data);
        say(p, DATA, 1, data, sizeof data);
    }
    leave(p);
    p = connected(11);
    uint8_t seen[12] = {1}, answer[MESSAGE_MAX], kind;
    say(p, GREETING, 1, seen, sizeof seen);
    uint32_t number;
    bool closed;
    CHECK(hear(p, &kind, &number, answer, &closed) == 12 && kind == GREETING);
    struct rd r = rd_of(answer + 4, 8);
    uint64_t received = rd_u64(&r);
    CHECK(received < WINDOW);
    // From there on, a whole window: as a client of ours does that was told so.
    uint64_t at = received, taken = 0;
    for (; at - received < WINDOW; at += sizeof data / 2) {
        for (size_t i = 0; i < sizeof data / 2; i++) data[i] = (uint8_t)((at + i) / PIECE);
        say(p, DATA, 1, data, sizeof data / 2);
    }
    for (ssize_t n; turns(2), (n = recv(cell, got + taken, sizeof got - taken, MSG_DONTWAIT)) > 0;) taken += (uint64_t)n;
    CHECK(taken == at && !is_closed(p));
    bool is_right = true;
    for (uint64_t i = 0; i < taken; i++) is_right &= got[i] == (uint8_t)(i / PIECE);
    CHECK(is_right);
    uint8_t twice[24] = {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    struct peer *other = connected(11);
    say(other, GREETING, 2, twice, sizeof twice);  // a lane named twice would be sent again twice
    CHECK(is_closed(other));
    close(cell);
    tell('F', 11, NONE, 0, -1);
    leave(p), leave(other);
}

static void test_the_agent_is_told_whether_there_is_anybody_to_carry_for(void) {
    uint8_t told[8];
    while (recv(agent, told, sizeof told, MSG_DONTWAIT) > 0) continue;
    struct peer *p = connected(12);
    CHECK(recv(agent, told, sizeof told, MSG_DONTWAIT) < 0);
    say(p, GREETING, 0, NONE, 0);
    CHECK(recv(agent, told, sizeof told, MSG_DONTWAIT) == 5 && !memcmp(told, "G\14\0\0\0", 5));
    leave(p);
    CHECK(recv(agent, told, sizeof told, MSG_DONTWAIT) == 5 && !memcmp(told, "B\14\0\0\0", 5));
    tell('F', 12, NONE, 0, -1);
    CHECK(recv(agent, told, sizeof told, MSG_DONTWAIT) < 0);
}

static void test_acknowledgements_follow_what_the_sandbox_took(void) {
    static uint8_t data[PIECE], got[MESSAGE_MAX];
    struct peer *p = connected(7);
    int cell = lane(7, 1);
    say(p, GREETING, 0, NONE, 0);
    uint64_t sent = 0, taken = 0, told = 0;
    uint8_t kind;
    uint32_t number;
    bool closed = false;
    for (int i = 0; i < 40; i++) {
        if (sent - told + sizeof data <= WINDOW) {
            say(p, DATA, 1, data, sizeof data);
            sent += sizeof data;
        }
        ssize_t n = recv(cell, got, sizeof got, MSG_DONTWAIT);
        if (n > 0) taken += (size_t)n;
        while ((n = hear(p, &kind, &number, got, &closed)) >= 0)
            if (kind == ACK) {
                struct rd r = rd_of(got, (size_t)n);
                told = rd_u64(&r);
                CHECK(told <= sent);
            }
    }
    CHECK(!closed && sent > 3 * WINDOW && taken <= sent);
    close(cell);
    tell('F', 7, NONE, 0, -1);
    leave(p);
}

static void test_nonsense_ends_the_connection(void) {
    struct {
        uint8_t kind;
        size_t size;
        bool is_greeted;
    } nonsense[] = {{DATA, 1, false}, {GREETING, 5, false}, {GREETING, 0, true}, {ACK, 7, true}, {4, 0, true}, {255, 0, true}};
    uint8_t zeros[16] = {0};
    for (size_t i = 0; i < sizeof nonsense / sizeof *nonsense; i++) {
        struct peer *p = connected(8);
        if (nonsense[i].is_greeted) say(p, GREETING, 0, NONE, 0);
        say(p, nonsense[i].kind, 1, zeros, nonsense[i].size);
        CHECK(is_closed(p));
        leave(p);
    }
    uint8_t wild[][8] = {{0}, {20}, {0xff, 0xff, 0xff, 0xff}, {22, 0, 4, 0}};  // sizes: too small, too large
    for (size_t i = 0; i < sizeof wild / sizeof *wild; i++) {
        struct peer *p = connected(8);
        CHECK(send(p->sock, wild[i], sizeof wild[i], 0) == sizeof wild[i]);
        CHECK(is_closed(p));
        leave(p);
    }
    tell('F', 8, NONE, 0, -1);
}

static void test_what_the_agent_says_wrong_does_no_harm(void) {
    int pair[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    tell('C', 9, "short", 5, pair[1]);
    CHECK(!ferry_client(9));
    tell('L', 9, "\1\0\0\0", 4, pair[1]);  // nobody's
    tell('F', 9, NONE, 0, -1);
    tell('K', 9, NONE, 0, -1);
    tell('?', 9, NONE, 0, pair[1]);
    struct peer *p = connected(9);
    say(p, GREETING, 0, NONE, 0);
    CHECK(hears(p, GREETING, 0, NONE, 0));
    tell('L', 9, "\1\0\0\0", 4, -1);  // its descriptor was one too many
    say(p, DATA, 1, "x", 1);
    CHECK(hears(p, END, 1, NONE, 0));
    close(pair[0]), close(pair[1]);
    leave(p);
}

int main(void) {
    int pair[2];
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
    agent = pair[0];
    CHECK(!ferry_begin(pair[1]));
    test_bytes_there_and_back();
    test_a_connection_that_breaks_is_gone_on_with();
    test_another_connection_takes_the_place_of_one_that_lives();
    test_what_is_said_over_a_lane_comes_behind_the_agent_s_word_of_it();
    test_lanes_of_answers_that_were_lost_are_let_go();
    test_a_sandbox_that_floods_is_held_up();
    test_a_client_that_floods_is_dropped_and_its_lane_stays();
    test_what_the_sandbox_had_not_taken_when_the_connection_broke_is_sent_again();
    test_the_agent_is_told_whether_there_is_anybody_to_carry_for();
    test_acknowledgements_follow_what_the_sandbox_took();
    test_nonsense_ends_the_connection();
    test_what_the_agent_says_wrong_does_no_harm();
    close(agent);
    ferry_end();  // with a client and its lanes still there
    return check_report();
}
