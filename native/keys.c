#include "keys.h"

#include <stdlib.h>
#include <string.h>

#define KEYS_MAX 256u
#define KEPT_MAX (4u << 20)  // bytes of final frames; the oldest go first

struct key {
    uint8_t name[KEY_SIZE];
    bool used, running;
    uint64_t age;
    uint8_t *final;  // the whole frame
    size_t size;
    struct request *waiting;
};

static struct key keys[KEYS_MAX];
static uint64_t clock_of_keys;
static size_t kept;

static void drop(struct key *k) {
    kept -= k->size;
    free(k->final);
    *k = (struct key){0};
}

// The key longest known whose request has ended.
static struct key *oldest(void) {
    struct key *found = NULL;
    for (uint32_t i = 0; i < KEYS_MAX; i++)
        if (keys[i].used && !keys[i].running && (!found || keys[i].age < found->age)) found = &keys[i];
    return found;
}

static struct key *free_slot(void) {
    for (uint32_t i = 0; i < KEYS_MAX; i++)
        if (!keys[i].used) return &keys[i];
    struct key *k = oldest();
    if (k) drop(k);
    return k;
}

static void wait_stop(struct request *r, enum stop_reason why) {
    struct key *k = r->owner;
    for (struct request **p = &k->waiting; *p; p = &(*p)->next_waiting)
        if (*p == r) {
            *p = r->next_waiting;
            break;
        }
    request_fail(r, why == STOP_CANCEL ? E_CANCELLED : E_DEADLINE, 0, "stopped waiting for the first request with this key");
}
static const struct request_ops wait_ops = {.stop = wait_stop};

static void replay(struct request *r, const uint8_t *final, size_t size) {
    size_t begun = host.size;
    wr_raw(&host, final, size);
    if (!host.failed) memcpy(host.data + begun + 4, (uint8_t[]){(uint8_t)r->id, (uint8_t)(r->id >> 8), (uint8_t)(r->id >> 16), (uint8_t)(r->id >> 24)}, 4);
    request_finish(r, begun, final[8] == K_DONE);
}

bool keys_admit(struct request *r, const uint8_t *name) {
    for (uint32_t i = 0; i < KEYS_MAX; i++) {
        struct key *k = &keys[i];
        if (!k->used || memcmp(k->name, name, KEY_SIZE) != 0) continue;
        if (k->running) {
            r->ops = &wait_ops;
            r->owner = k;
            r->next_waiting = k->waiting;
            k->waiting = r;
        } else {
            replay(r, k->final, k->size);
        }
        return false;
    }
    struct key *k = free_slot();
    if (!k) {
        request_fail(r, E_BUSY, 0, "too many requests with keys in flight");
        return false;
    }
    *k = (struct key){.used = true, .running = true, .age = ++clock_of_keys};
    memcpy(k->name, name, KEY_SIZE);
    r->key = k;
    return true;
}

// Errors that say "nothing was started" leave the key free for another try.
static bool never_ran(const uint8_t *frame, size_t size) {
    if (size < 14 || frame[8] != K_ERROR) return false;
    uint8_t code = frame[12];
    return code == E_REJECTED || code == E_SPAWN_FAILED || code == E_BUSY || code == E_NO_WORKER;
}

void keys_finish(struct key *k, size_t begun) {
    size_t size = host.failed ? 0 : host.size - begun;
    uint8_t *copy = size ? malloc(size) : NULL;
    if (copy) memcpy(copy, host.data + begun, size);
    // An answer may set off the next step of a batch, which may use this very key: it counts as running until all have theirs.
    while (copy && k->waiting) {
        struct request *r = k->waiting;
        k->waiting = r->next_waiting;
        replay(r, copy, size);
    }
    k->running = false;
    if (!copy || never_ran(copy, size)) {
        free(copy);
        drop(k);
        return;
    }
    k->final = copy;
    k->size = size;
    kept += size;
    while (kept > KEPT_MAX) drop(oldest());
}

void keys_free(void) {
    for (uint32_t i = 0; i < KEYS_MAX; i++) drop(&keys[i]);
}
