// Sealed records: the vectors of RFC 8439, what another implementation makes of the same bytes, and what must be refused.
#define _GNU_SOURCE
#include "seal.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"

// The parts that a record does not show by itself. Their seal_* get other names here, so that the linked ones are those under test.
#define seal_close inner_close
#define seal_open inner_open
#define seal_wipe inner_wipe
#include "seal.c"
#undef seal_close
#undef seal_open
#undef seal_wipe

#define LARGEST (65536u + 64)

static uint8_t plain[LARGEST], buffer[LARGEST + 16];

static size_t unhex(const char *hex, uint8_t *out) {
    size_t size = strlen(hex) / 2;
    for (size_t i = 0; i < size; i++) out[i] = (uint8_t)strtoul((char[]){hex[2 * i], hex[2 * i + 1], 0}, NULL, 16);
    return size;
}
static bool same(const uint8_t *data, const char *hex) {
    uint8_t expected[512];
    return !memcmp(data, expected, unhex(hex, expected));
}
static void fill(uint8_t *out, size_t size, size_t step, size_t from) {
    for (size_t i = 0; i < size; i++) out[i] = (uint8_t)(i * step + from);
}

static const char sunscreen[] =
    "Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would be it.";
#define SUNSCREEN (sizeof sunscreen - 1)

static void key_stream(void) {
    uint8_t key[SEAL_KEY], nonce[NONCE], out[RUN], next[RUN];
    uint32_t state[16];
    fill(key, sizeof key, 1, 0);
    unhex("000000090000004a00000000", nonce);
    const char *block_1 =  // 2.3.2
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2b5129cd1de164eb9"
        "cbd083e8a2503c4e";
    chacha_start(state, key, nonce, 1);
    chacha_run(state, out);
    CHECK(same(out, block_1) && state[12] == 5);
    chacha_run(state, next);
    // In every lane, whichever block a run begins with.
    for (uint32_t first = 0; first < 5; first++) {
        uint8_t run[RUN];
        chacha_start(state, key, nonce, first);
        chacha_run(state, run);
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t block = first + i;
            if (block) CHECK(!memcmp(run + i * BLOCK, block < 5 ? out + (block - 1) * BLOCK : next + (block - 5) * BLOCK, BLOCK));
        }
    }

    uint8_t text[SUNSCREEN];
    unhex("000000000000004a00000000", nonce);
    memcpy(text, sunscreen, SUNSCREEN);
    chacha_start(state, key, nonce, 1);
    chacha_apply(state, out, RUN, text, SUNSCREEN);
    CHECK(same(text,  // 2.4.2
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b3571639d624e65152ab"
        "8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab77937365af90bbf74a35be6b40b8eedf2785e42"
        "874d"));
}

// Poly1305 by itself, where a last block may be short: an AEAD has only whole ones.
static bool poly_gives(const char *key, const uint8_t *data, size_t size, const char *tag) {
    uint8_t bytes[32], out[SEAL_TAG], last[16] = {0};
    struct poly p;
    unhex(key, bytes);
    poly_start(&p, bytes);
    poly_padded(&p, data, size & ~(size_t)15);
    if (size & 15) {
        memcpy(last, data + (size & ~(size_t)15), size & 15);
        last[size & 15] = 1;
        poly_block(&p, last, 0);
    }
    poly_finish(&p, out);
    return same(out, tag);
}
static bool poly_of_text(const char *key, const char *text, const char *tag) {
    return poly_gives(key, (const uint8_t *)text, strlen(text), tag);
}
static bool poly_of_hex(const char *key, const char *hex, const char *tag) {
    uint8_t data[64];
    return poly_gives(key, data, unhex(hex, data), tag);
}

#define ZERO "00000000000000000000000000000000"
#define ONE "01000000000000000000000000000000"
#define TWO "02000000000000000000000000000000"
#define THREE "03000000000000000000000000000000"
#define FULL "ffffffffffffffffffffffffffffffff"

static void authenticator(void) {
    CHECK(poly_of_text("85d6be7857556d337f4452fe42d506a80103808afb0db2fd4abff6af4149f51b", "Cryptographic Forum Research Group",
                       "a8061dc1305136c6c22b8baf0c0127a9"));  // 2.5.2
    // A.3, from 1 to 11: the second half are sums next to 2^128 and 2^130 - 5, where carries go wrong.
    const char *ietf =
        "Any submission to the IETF intended by the Contributor for publication as all or part of an IETF Internet-Draft or "
        "RFC and any statement made within the context of an IETF activity is considered an \"IETF Contribution\". Such "
        "statements include oral statements in IETF sessions, as well as written and electronic communications made at any "
        "time or place, which are addressed to";
    CHECK(poly_of_hex(ZERO ZERO, ZERO ZERO ZERO ZERO, ZERO));
    CHECK(poly_of_text(ZERO "36e5f6b5c5e06070f0efca96227a863e", ietf, "36e5f6b5c5e06070f0efca96227a863e"));
    CHECK(poly_of_text("36e5f6b5c5e06070f0efca96227a863e" ZERO, ietf, "f3477e7cd95417af89a6b8794c310cf0"));
    CHECK(poly_of_text("1c9240a5eb55d38af333888604f6b5f0473917c1402b80099dca5cbc207075c0",
                       "'Twas brillig, and the slithy toves\nDid gyre and gimble in the wabe:\nAll mimsy were the borogoves,\n"
                       "And the mome raths outgrabe.",
                       "4541669a7eaaee61e708dc7cbcc5eb62"));
    CHECK(poly_of_hex(TWO ZERO, FULL, THREE));
    CHECK(poly_of_hex(TWO FULL, TWO, THREE));
    CHECK(poly_of_hex(ONE ZERO, FULL "f0ffffffffffffffffffffffffffffff" "11000000000000000000000000000000",
                      "05000000000000000000000000000000"));
    CHECK(poly_of_hex(ONE ZERO, FULL "fbfefefefefefefefefefefefefefefe" "01010101010101010101010101010101", ZERO));
    CHECK(poly_of_hex(TWO ZERO, "fdffffffffffffffffffffffffffffff", "faffffffffffffffffffffffffffffff"));
    const char *r = "01000000000000000400000000000000" ZERO;
    CHECK(poly_of_hex(r, "e33594d7505e43b90000000000000000" "3394d7505e4379cd0100000000000000" ZERO ONE,
                      "14000000000000005500000000000000"));
    CHECK(poly_of_hex(r, "e33594d7505e43b90000000000000000" "3394d7505e4379cd0100000000000000" ZERO,
                      "13000000000000000000000000000000"));
}

static void aead(void) {
    uint8_t key[SEAL_KEY], nonce[NONCE], head[12], data[512], tag[SEAL_TAG];
    // 2.8.2, whose nonce no count can have.
    fill(key, sizeof key, 1, 0x80);
    unhex("070000004041424344454647", nonce);
    unhex("50515253c0c1c2c3c4c5c6c7", head);
    memcpy(data, sunscreen, SUNSCREEN);
    aead_close(key, nonce, head, sizeof head, data, SUNSCREEN, tag);
    CHECK(same(data,
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b1a71de0a9e060b29"
        "05d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc3ff4def08e4b7a9de576d26586cec64b"
        "6116"));
    CHECK(same(tag, "1ae10b594f09e26a7e902ecbd0600691"));
    CHECK(aead_open(key, nonce, head, sizeof head, data, SUNSCREEN, tag) && !memcmp(data, sunscreen, SUNSCREEN));

    // A.5, whose nonce is a count.
    const char *sealed =
        "64a0861575861af460f062c79be643bd5e805cfd345cf389f108670ac76c8cb24c6cfc18755d43eea09ee94e382d26b0bdb7b73c321b0100"
        "d4f03b7f355894cf332f830e710b97ce98c8a84abd0b948114ad176e008d33bd60f982b1ff37c8559797a06ef4f0ef61c186324e2b350638"
        "3606907b6a7c02b0f9f6157b53c867e4b9166c767b804d46a59b5216cde7a4e99040c5a40433225ee282a1b0a06c523eaf4534d7f83fa115"
        "5b0047718cbc546a0d072b04b3564eea1b422273f548271a0bb2316053fa76991955ebd63159434ecebb4e466dae5a1073a6727627097a10"
        "49e617d91d361094fa68f0ff77987130305beaba2eda04df997b714d6c6f2c29a6ad5cb4022b02709b";
    const char *text =
        "Internet-Drafts are draft documents valid for a maximum of six months and may be updated, replaced, or obsoleted by "
        "other documents at any time. It is inappropriate to use Internet-Drafts as reference material or to cite them other "
        "than as /\xe2\x80\x9cwork in progress./\xe2\x80\x9d";
    struct seal s = {.count = 0x0807060504030201};
    unhex("1c9240a5eb55d38af333888604f6b5f0473917c1402b80099dca5cbc207075c0", s.key);
    unhex("f33388860000000000004e91", head);
    unhex("eead9d67890cbb22392336fea1851f38", tag);
    size_t size = unhex(sealed, data);
    CHECK(seal_open(&s, head, sizeof head, data, size, tag) && s.count == 0x0807060504030202);
    CHECK(size == strlen(text) && !memcmp(data, text, size));
    s.count--;
    memset(tag, 0, sizeof tag);
    CHECK(seal_close(&s, head, sizeof head, data, size, tag));
    CHECK(same(data, sealed) && same(tag, "eead9d67890cbb22392336fea1851f38"));
}

// The tags that OpenSSL gives, through Python's cryptography 50.0.2; a tag covers every byte before it.
//   from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
//   some = lambda n, step, size: bytes((i * step + size) & 255 for i in range(n))
//   for size in sizes:
//       nonce = bytes(4) + (size * 0x0123456789abcd % 2**64).to_bytes(8, "little")
//       sealed = ChaCha20Poly1305(some(32, 13, size)).encrypt(nonce, some(size, 7, size), some(size % 40, 11, size))
//       print(f'    {{{size}, "{sealed[-16:].hex()}"}},')
static const struct {
    size_t size;
    const char *tag;
} others[] = {
    {0, "b93235a4de67d5dd5ce3cec0a2d71044"},
    {1, "c55b94fcf5a2df3e9f20d336375e22cf"},
    {15, "4e51b0b6b78c496368edf3d764a61759"},
    {16, "9015f8f412aa207889ac0e2c9f583906"},
    {17, "95d1296985dd0f5af0ebe625d076048b"},
    {63, "d5e2b942b9571194718710c612322dad"},
    {64, "c863700ee3251b913dcf5e7329df9fa4"},
    {65, "4a77866e696f31d0881c818e2b706097"},
    {191, "5d924f86e9c9ac99064830de09ed8821"},
    {192, "aec94d473859cb10e1c1315f2852aeda"},
    {193, "5db9193f137dac5440636d8335918796"},
    {255, "7759dbb81111190d7a1ead247238dccf"},
    {256, "c22e15eab747760fe57d2cb63e033f24"},
    {257, "5bbc4b64526767e7615d02150531e392"},
    {447, "e2af1777832c6b5c18bf9c1b2246f618"},
    {448, "293093934cbb5208ca2d21384a063a91"},
    {449, "0cbbff67688640e042ef84935e3a742b"},
    {1000, "96f06572b434e9678f836a10b37c1e86"},
    {4095, "89eb76b9b919c9abb78ad232b0c8d91e"},
    {4096, "f9de1f99b9df6071f9cde1e81bfd5d62"},
    {4097, "cb816c174d20a45cda0d444193149e8c"},
    {16384, "407e430bda062b0ff039e83d97e30dc3"},
    {65535, "0c541698fd807832c1da130d58487ee3"},
    {65536, "aacdb4f9518a657ad891b76ae8a3ffe5"},
    {65537, "7c0cf08d07b6ff9e35f9b99cd9e8e324"},
};

static void as_others_do(void) {
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        size_t size = others[i].size;
        uint8_t head[40], tag[SEAL_TAG];
        struct seal s = {.count = size * 0x0123456789abcd};
        fill(s.key, sizeof s.key, 13, size);
        fill(buffer, size, 7, size);
        fill(head, size % 40, 11, size);
        CHECK(seal_close(&s, head, size % 40, buffer, size, tag));
        CHECK(same(tag, others[i].tag));
    }
}

// There and back at an address of this alignment, with what lies around it as it was.
static bool returns(size_t size, size_t shift) {
    struct seal out = {.count = size}, in = {.count = size};
    uint8_t tag[SEAL_TAG], head[3] = {1, 2, 3};
    fill(out.key, sizeof out.key, 5, size);
    memcpy(in.key, out.key, sizeof in.key);
    memset(buffer, 0xa5, shift + size + 1);
    uint8_t *data = buffer + shift;
    memcpy(data, plain, size);
    if (!seal_close(&out, head, sizeof head, data, size, tag) || out.count != size + 1) return false;
    if (size >= 16 && !memcmp(data, plain, size)) return false;
    if (!seal_open(&in, head, sizeof head, data, size, tag) || in.count != size + 1) return false;
    for (size_t i = 0; i < shift; i++)
        if (buffer[i] != 0xa5) return false;
    return !memcmp(data, plain, size) && data[size] == 0xa5;
}

static void round_trips(void) {
    for (size_t size = 0; size <= 300; size++)
        for (size_t shift = 0; shift < 16; shift += 5) CHECK(returns(size, shift));
    const size_t edges[] = {448, 512, 4096, 65536};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++)
        for (size_t size = edges[i] - 17; size <= edges[i] + 17; size++) CHECK(returns(size, size % 16));
    // In memory of exactly that size, so that ASan sees a byte too many.
    for (size_t size = 1; size < 300; size += 7) {
        struct seal s = {.count = 0};
        uint8_t *data = calloc(1, size), *tag = malloc(SEAL_TAG), *head = calloc(1, size);
        CHECK(seal_close(&s, head, size, data, size, tag));
        s.count = 0;
        CHECK(seal_open(&s, head, size, data, size, tag) && !data[0] && !data[size - 1]);
        free(data), free(tag), free(head);
    }
}

static void nothing_at_all(void) {
    struct seal out = {.count = 0}, in = {.count = 0};
    uint8_t tag[SEAL_TAG];
    CHECK(seal_close(&out, NULL, 0, NULL, 0, tag));
    CHECK(seal_open(&in, NULL, 0, NULL, 0, tag));
}

// A record as it arrives, of which one thing is wrong.
static bool refused(const struct seal *key, const uint8_t *head, size_t head_size, const uint8_t *data, size_t size, const uint8_t *tag) {
    struct seal s = *key;
    memcpy(buffer, data, size);
    return !seal_open(&s, head, head_size, buffer, size, tag) && !memcmp(buffer, data, size) && s.count == key->count;
}

static void tampered(size_t size) {
    const struct seal key = {.key = {1, 2, 3}, .count = 7};
    struct seal s = key, other = key;
    uint8_t head[9] = "the head", data[600], tag[SEAL_TAG], zero[SEAL_TAG] = {0};
    memcpy(data, plain, size);
    data[size] = 0;  // what the padding would have been
    CHECK(seal_close(&s, head, 8, data, size, tag));

    for (size_t bit = 0; bit < 8 * SEAL_TAG; bit++) {
        tag[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK(refused(&key, head, 8, data, size, tag));
        tag[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (size_t bit = 0; bit < 8 * size; bit++) {
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK(refused(&key, head, 8, data, size, tag));
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (size_t bit = 0; bit < 8 * 8; bit++) {
        head[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK(refused(&key, head, 8, data, size, tag));
        head[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    CHECK(refused(&key, head, 7, data, size, tag));
    CHECK(refused(&key, head, 9, data, size, tag));
    CHECK(refused(&key, head, 0, data, size, tag));
    CHECK(refused(&key, head, 8, data, size + 1, tag));
    if (size) CHECK(refused(&key, head, 8, data, size - 1, tag));
    if (size) CHECK(refused(&key, head, 8, data, 0, tag));
    CHECK(refused(&key, head, 8, data, size, zero));
    other.count++;
    CHECK(refused(&other, head, 8, data, size, tag));
    other.count = key.count | 1ull << 63;
    CHECK(refused(&other, head, 8, data, size, tag));
    other = key;
    other.key[31] ^= 0x80;
    CHECK(refused(&other, head, 8, data, size, tag));

    s = key;
    CHECK(seal_open(&s, head, 8, data, size, tag) && !memcmp(data, plain, size));  // as it was, it fits
}

static void in_order(void) {
    struct seal out = {.key = {9}}, in = {.key = {9}};
    uint8_t records[3][20], tags[3][SEAL_TAG];
    for (size_t i = 0; i < 3; i++) {
        memset(records[i], 0, sizeof records[i]);
        CHECK(seal_close(&out, NULL, 0, records[i], sizeof records[i], tags[i]) && out.count == i + 1);
    }
    CHECK(memcmp(records[0], records[1], sizeof records[0]) && memcmp(tags[0], tags[1], SEAL_TAG));
    CHECK(refused(&in, NULL, 0, records[1], sizeof records[1], tags[1]));  // one is missing
    for (size_t i = 0; i < 3; i++) {
        uint8_t again[sizeof records[i]];
        memcpy(again, records[i], sizeof again);
        CHECK(seal_open(&in, NULL, 0, records[i], sizeof records[i], tags[i]) && in.count == i + 1);
        CHECK(refused(&in, NULL, 0, again, sizeof again, tags[i]));  // and once only
    }
}

static void used_up(void) {
    struct seal s = {.key = {4}, .count = UINT64_MAX - 1};
    uint8_t data[32] = {5}, tag[SEAL_TAG], before[32], before_tag[SEAL_TAG];
    CHECK(seal_close(&s, NULL, 0, data, sizeof data, tag) && s.count == UINT64_MAX);
    memcpy(before, data, sizeof data);
    memcpy(before_tag, tag, sizeof tag);
    CHECK(!seal_close(&s, NULL, 0, data, sizeof data, tag) && s.count == UINT64_MAX);
    CHECK(!memcmp(data, before, sizeof data) && !memcmp(tag, before_tag, sizeof tag));
    CHECK(refused(&s, NULL, 0, data, sizeof data, tag));
    s.count--;
    CHECK(seal_open(&s, NULL, 0, data, sizeof data, tag) && data[0] == 5 && s.count == UINT64_MAX);

    // More than the block counter can tell apart; no byte of it is looked at.
    s.count = 0;
    CHECK(!seal_close(&s, NULL, 0, data, (size_t)UINT32_MAX * BLOCK + 1, tag) && s.count == 0);
    CHECK(!seal_open(&s, NULL, 0, data, (size_t)UINT32_MAX * BLOCK + 1, tag) && s.count == 0);
}

static void wiped(void) {
    struct seal s, zero;
    memset(&s, 0x5a, sizeof s);
    memset(&zero, 0, sizeof zero);
    seal_wipe(&s);
    CHECK(!memcmp(&s, &zero, sizeof s));
}

int main(void) {
    fill(plain, sizeof plain, 7, 1);
    key_stream();
    authenticator();
    aead();
    as_others_do();
    round_trips();
    nothing_at_all();
    const size_t sizes[] = {0, 1, 16, 64, 100, 193, 257, 449};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) tampered(sizes[i]);
    in_order();
    used_up();
    wiped();
    return check_report();
}
