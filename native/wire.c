#include "wire.h"

#include <stdlib.h>
#include <string.h>

static uint16_t get16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static uint32_t get32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static void put32(uint8_t *p, uint32_t v) {
    p[0] = (uint8_t)v, p[1] = (uint8_t)(v >> 8), p[2] = (uint8_t)(v >> 16), p[3] = (uint8_t)(v >> 24);
}

struct rd rd_of(const void *data, size_t size) {
    const uint8_t *at = data;
    return (struct rd){.at = at, .end = at ? at + size : at, .bad = false};
}

// The next `size` bytes, or NULL once anything was missing.
static const uint8_t *take(struct rd *r, size_t size) {
    if (r->bad || (size_t)(r->end - r->at) < size) {
        r->bad = true;
        return NULL;
    }
    const uint8_t *at = r->at;
    r->at += size;
    return at;
}

uint8_t rd_u8(struct rd *r) {
    const uint8_t *p = take(r, 1);
    return p ? *p : 0;
}
uint16_t rd_u16(struct rd *r) {
    const uint8_t *p = take(r, 2);
    return p ? get16(p) : 0;
}
uint32_t rd_u32(struct rd *r) {
    const uint8_t *p = take(r, 4);
    return p ? get32(p) : 0;
}
uint64_t rd_u64(struct rd *r) {
    const uint8_t *p = take(r, 8);
    return p ? get32(p) | (uint64_t)get32(p + 4) << 32 : 0;
}
int32_t rd_i32(struct rd *r) { return (int32_t)rd_u32(r); }

struct span rd_bytes(struct rd *r) {
    uint32_t size = rd_u32(r);
    const uint8_t *at = take(r, size);
    return at ? (struct span){at, size} : (struct span){(const uint8_t *)"", 0};
}
struct span rd_rest(struct rd *r) {
    size_t size = r->bad ? 0 : (size_t)(r->end - r->at);
    const uint8_t *at = take(r, size);
    return at && size ? (struct span){at, (uint32_t)size} : (struct span){(const uint8_t *)"", 0};
}
bool rd_done(const struct rd *r) { return !r->bad && r->at == r->end; }

struct span rd_name(struct rd *r) {
    struct span s = rd_bytes(r);
    if (s.size && memchr(s.at, 0, s.size)) {
        r->bad = true;
        return (struct span){(const uint8_t *)"", 0};
    }
    return s;
}
struct span rd_strs(struct rd *r, uint32_t *count) {
    const uint8_t *start = r->at;
    uint32_t n = rd_u32(r);
    for (uint32_t i = 0; i < n && !r->bad; i++) rd_name(r);
    *count = r->bad ? 0 : n;
    return r->bad ? (struct span){(const uint8_t *)"", 0} : (struct span){start, (uint32_t)(r->at - start)};
}

int64_t frame_size(const uint8_t *data, size_t size, uint32_t max) {
    if (size < 4) return 0;
    uint32_t length = get32(data);
    if (length < FRAME_HEADER - 4 || length > max) return -1;
    return size - 4 < length ? 0 : (int64_t)length + 4;
}

bool frame_open(const uint8_t *data, size_t size, struct frame *out) {
    struct rd r = rd_of(data, size);
    rd_u32(&r);
    out->id = rd_u32(&r);
    out->kind = rd_u8(&r);
    out->flags = rd_u8(&r);
    uint16_t zero = rd_u16(&r);
    out->deadline_ms = out->flags & FLAG_DEADLINE ? rd_u32(&r) : 0;
    out->key = out->flags & FLAG_KEY ? take(&r, KEY_SIZE) : NULL;
    out->payload = r;
    return !r.bad && zero == 0 && (out->flags & ~(FLAG_DEADLINE | FLAG_KEY)) == 0;
}

void wr_free(struct wr *w) {
    free(w->data);
    *w = (struct wr){0};
}

uint8_t *wr_reserve(struct wr *w, size_t size) {
    if (w->failed) return NULL;
    if (!w->data || w->room - w->size < size) {
        size_t room = w->room ? w->room : 256;
        while (room - w->size < size) {
            if (room > SIZE_MAX / 2) {
                w->failed = true;
                return NULL;
            }
            room *= 2;
        }
        uint8_t *data = realloc(w->data, room);
        if (!data) {
            w->failed = true;
            return NULL;
        }
        w->data = data;
        w->room = room;
    }
    return w->data + w->size;
}
void wr_commit(struct wr *w, size_t size) { w->size += size; }

void wr_raw(struct wr *w, const void *data, size_t size) {
    uint8_t *at = size ? wr_reserve(w, size) : NULL;  // nothing added to nothing would be NULL + 0
    if (!at) return;
    memcpy(at, data, size);
    w->size += size;
}
void wr_u8(struct wr *w, uint8_t v) { wr_raw(w, &v, 1); }
void wr_u16(struct wr *w, uint16_t v) { wr_raw(w, (uint8_t[]){(uint8_t)v, (uint8_t)(v >> 8)}, 2); }
void wr_u32(struct wr *w, uint32_t v) {
    uint8_t p[4];
    put32(p, v);
    wr_raw(w, p, 4);
}
void wr_u64(struct wr *w, uint64_t v) {
    wr_u32(w, (uint32_t)v);
    wr_u32(w, (uint32_t)(v >> 32));
}
void wr_bytes(struct wr *w, const void *data, size_t size) {
    wr_u32(w, (uint32_t)size);
    wr_raw(w, data, size);
}

size_t frame_begin(struct wr *w, uint32_t id, uint8_t kind) {
    size_t begun = w->size;
    wr_u32(w, 0);
    wr_u32(w, id);
    wr_u8(w, kind);
    wr_u8(w, 0);
    wr_u16(w, 0);
    return begun;
}
void frame_end(struct wr *w, size_t begun) {
    if (!w->failed) put32(w->data + begun, (uint32_t)(w->size - begun - 4));
}
void frame_error(struct wr *w, uint32_t id, uint16_t code, int error, const char *message) {
    size_t begun = frame_begin(w, id, K_ERROR);
    wr_u16(w, code);
    wr_u32(w, (uint32_t)error);
    wr_bytes(w, message, strlen(message));
    frame_end(w, begun);
}
