// Rings, caps and the count of what was dropped.
#include "output.h"

#include <string.h>

#include "check.h"

static struct request *nobody;

static struct output capped(uint32_t cap) {
    struct output o;
    output_init(&o, -1, 1, &nobody);
    output_cap(&o, cap);
    return o;
}

// Prints in pieces of `piece` and compares what a DONE would hold.
static bool gives(uint32_t cap, const char *text, size_t piece, const char *expected, uint64_t dropped) {
    struct output o = capped(cap);
    for (size_t at = 0, size = strlen(text); at < size; at += piece) output_say(&o, text + at, size - at < piece ? size - at : piece);
    host.size = 0;
    output_settle(&o);
    output_field(&o);
    struct rd r = rd_of(host.data, host.size);
    struct span got = rd_bytes(&r);
    bool ok = rd_done(&r) && got.size == strlen(expected) && !memcmp(got.at, expected, got.size) && o.dropped == dropped;
    output_free(&o);
    return ok;
}

int main(void) {
    for (size_t piece = 1; piece < 12; piece++) {
        CHECK(gives(10, "0123456789", piece, "0123456789", 0));
        CHECK(gives(10, "0123456789a", piece, "012346789a", 1));
        CHECK(gives(9, "abcdefghijklmnop", piece, "abcdemnop", 7));
        CHECK(gives(1, "abc", piece, "a", 2));
        CHECK(gives(0, "abc", piece, "", 3));
    }

    struct ring r = {0};
    CHECK(ring_put(&r, (const uint8_t *)"abcdef", 6, 4) == 2 && r.have == 4);
    CHECK(ring_put(&r, (const uint8_t *)"gh", 2, 4) == 2);
    char all[8] = {0};
    for (size_t n = 0; r.have;) {
        struct span s = ring_front(&r);
        memcpy(all + n, s.at, s.size);
        n += s.size;
        ring_take(&r, s.size);
    }
    CHECK(!strcmp(all, "efgh"));
    CHECK(ring_put(&r, (const uint8_t *)"", 0, 4) == 0 && ring_put(&r, (const uint8_t *)"xy", 2, 0) == 2);
    ring_free(&r);

    // All tails together are bounded: the ring stays as it is, and what does not fit is counted.
    struct ring large = {0};
    static uint8_t block[1 << 20];
    uint64_t dropped = 0;
    for (int i = 0; i < 64; i++) dropped += ring_put(&large, block, sizeof block, 1u << 30);
    CHECK(large.have + dropped == 64u << 20 && large.have <= 16u << 20);
    ring_free(&large);
    wr_free(&host);
    return check_report();
}
