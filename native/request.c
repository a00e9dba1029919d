#define _GNU_SOURCE
#include "request.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"
#include "keys.h"

#define BUCKETS 256u

static struct request *table[BUCKETS];
static uint32_t count;

static struct request **slot_of(uint32_t id) {
    struct request **p = &table[id % BUCKETS];
    while (*p && (*p)->id != id) p = &(*p)->next;
    return p;
}
struct request *request_find(uint32_t id) { return *slot_of(id); }
uint32_t requests_count(void) { return count; }

const char *words(int error) {
    const char *text = strerrordesc_np(error);
    return text ? text : "unknown error";
}

void reject(const struct frame *f, const char *why) {
    frame_error(&host, f->id, E_REJECTED, 0, why);
}

static void on_deadline(struct timer *t) {
    struct request *r = (struct request *)((char *)t - offsetof(struct request, deadline));
    r->ops->stop(r, STOP_DEADLINE);
}

struct request *request_new(const struct frame *f, const struct request_ops *ops, void *owner) {
    struct request **slot = slot_of(f->id);
    if (!f->id || f->id & EGRESS_BIT || *slot) {
        reject(f, *slot ? "this id is in use" : "an id that a host may not use");
        return NULL;
    }
    struct request *r = count < REQUESTS_MAX ? calloc(1, sizeof *r) : NULL;
    if (!r) {
        frame_error(&host, f->id, E_BUSY, 0, "too many requests in flight");
        return NULL;
    }
    *r = (struct request){.id = f->id, .kind = f->kind, .ops = ops, .owner = owner};
    r->batch = f->kind == K_BATCH ? NULL : batch_starting();
    *slot = r;
    count++;
    if (f->deadline_ms && !timer_set(&r->deadline, io_now_ns() + (uint64_t)f->deadline_ms * 1000000u, on_deadline)) {
        request_fail(r, E_BUSY, 0, "out of memory");
        return NULL;
    }
    if (f->key && !keys_admit(r, f->key)) return NULL;
    return r;
}

size_t request_frame(struct request *r, uint8_t kind) { return frame_begin(&host, r->id, kind); }

static void forget(struct request *r) {
    timer_stop(&r->deadline);
    *slot_of(r->id) = r->next;
    count--;
    free(r);
}

void request_drop(struct request *r) { forget(r); }

void request_finish(struct request *r, size_t begun, bool success) {
    frame_end(&host, begun);
    struct key *key = r->key;
    struct batch *batch = r->batch;
    forget(r);
    if (key) keys_finish(key, begun);
    if (batch) batch_step_ended(batch, success);
}

void request_done(struct request *r) { request_finish(r, request_frame(r, K_DONE), true); }

void request_fail(struct request *r, uint16_t code, int error, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    size_t begun = request_frame(r, K_ERROR);
    wr_u16(&host, code);
    wr_u32(&host, (uint32_t)error);
    wr_bytes(&host, text, strlen(text));
    request_finish(r, begun, false);
}

void requests_free(void) {
    for (uint32_t i = 0; i < BUCKETS; i++)
        while (table[i]) {
            if (table[i]->kind == K_BATCH && table[i]->owner) batch_free(table[i]->owner);
            forget(table[i]);
        }
    keys_free();
}
