#define _GNU_SOURCE
#include "next.h"

#include <stdio.h>
#include <string.h>

#include "disk.h"
#include "io.h"
#include "launcher.h"
#include "layout.h"
#include "maker.h"

#define NEXT_MAX 2
#define IN_USE 4  // how many sandboxes in a row may go without a snapshot before none is expected any more
#define UNUSED_NS 60000000000u  // as of spares

static struct next {
    uint32_t handle;        // 0: not in use
    enum { WANTED, ASKED, READY } state;
    bool is_unwanted;       // it is asked for, and given up when it comes
    char name[ID_MAX];
    char over[ID_MAX];      // the upper directory below it
    uint64_t disk_bytes, glance;
    struct furniture furniture;
} nexts[NEXT_MAX];
static unsigned expected;
static uint64_t last_ns;  // when a snapshot was taken

static struct next *of(const struct box *b) {
    for (struct next *n = nexts; n < nexts + NEXT_MAX; n++)
        if (n->handle == b->handle && !n->is_unwanted) return n;
    return NULL;
}

static void give_up(struct next *n) {
    if (n->state == ASKED) {
        n->is_unwanted = true;
        return;
    }
    if (n->state == READY) {
        maker_discard(&n->furniture);
        disk_drop(n->name);
    }
    n->handle = 0;
}

static void want(const struct box *b) {
    if (b->in_memory || b->layout.cache || b->layout.lower_count + 2 >= LAYERS_MAX || L.mounts.cannot_shift || of(b)) return;
    struct next *place = NULL;
    for (struct next *n = nexts; n < nexts + NEXT_MAX; n++) {
        if (!n->handle) place = n;
        else if (!place && n->state != ASKED) place = n;
    }
    if (!place) return;
    if (place->handle) give_up(place);
    *place = (struct next){.handle = b->handle, .state = WANTED};
}

void next_created(const struct box *b) {
    if (!expected) return;
    expected--;
    want(b);
    next_prepare();
}

void next_snapshotted(struct box *b) {
    expected = IN_USE;
    last_ns = io_now_ns();
    if (b->snapshots++) want(b);
}

static void write_strings(struct wr *w, const char *const *strings, uint32_t count) {
    wr_u32(w, count);
    for (uint32_t i = 0; i < count; i++) wr_bytes(w, strings[i], strlen(strings[i]));
}

static void write_layout(struct wr *w, const struct layout *l) {
    write_strings(w, l->lowers, l->lower_count);
    wr_u32(w, 2 * l->view_count);
    for (uint32_t i = 0; i < l->view_count; i++) {
        wr_bytes(w, l->sources[i], strlen(l->sources[i]));
        wr_bytes(w, l->places[i], strlen(l->places[i]));
    }
    wr_bytes(w, "", 0);
    write_strings(w, l->dirs, l->dir_count);
}

static bool ask(struct next *n, struct box *b) {
    static unsigned made;
    char above[4200 + ID_MAX];
    snprintf(n->name, sizeof n->name, "spare-%u-next", made++);
    snprintf(above, sizeof above, "%s/%s/upper", layout_boxes(), b->disk);
    strcpy(n->over, b->disk);
    n->disk_bytes = b->disk_bytes;
    n->glance = layout_glance(&b->layout, above);
    if (!layout_push(&b->layout, above)) return false;
    struct wr w = {0};
    write_layout(&w, &b->layout);
    layout_pop(&b->layout);
    bool asked = !w.failed && maker_ask(n->name, (struct span){w.data, (uint32_t)w.size}, &b->slot, b->disk_bytes, NULL);
    wr_free(&w);
    return asked;
}

bool next_prepare(void) {
    for (struct next *n = nexts; maker_is_free() && n < nexts + NEXT_MAX; n++) {
        if (!n->handle || n->state != WANTED) continue;
        struct box *b = launcher_find(n->handle);
        if (b && ask(n, b)) n->state = ASKED;
        else n->handle = 0;
    }
    return !maker_is_free();
}

void next_made(enum maker_says said, struct furniture *f) {
    for (struct next *n = nexts; n < nexts + NEXT_MAX; n++) {
        if (!n->handle || n->state != ASKED) continue;
        if (said == MAKER_DONE) n->furniture = *f, n->state = READY;
        else n->handle = 0;
        if (said == MAKER_GONE) disk_drop(n->name);
        if (n->handle && n->is_unwanted) give_up(n);
    }
}

bool next_take(const struct box *b, const char *fresh, struct furniture *out, uint64_t *glance) {
    struct next *n = of(b);
    if (!n) return false;
    if (n->state != READY || n->disk_bytes != b->disk_bytes || strcmp(n->over, b->disk) || disk_rename(n->name, fresh)) {
        give_up(n);
        return false;
    }
    *out = n->furniture, *glance = n->glance;
    n->handle = 0;
    return true;
}

void next_drop(const struct box *b) {
    for (struct next *n = nexts; n < nexts + NEXT_MAX; n++)
        if (n->handle && !n->is_unwanted && (!b || n->handle == b->handle)) give_up(n);
    if (!b) expected = 0;
}

int next_expire(void) {
    bool any = false;
    for (const struct next *n = nexts; n < nexts + NEXT_MAX; n++) any |= n->handle && n->state == READY;
    if (!any) return -1;
    uint64_t unused = io_now_ns() - last_ns;
    if (unused < UNUSED_NS) return (int)((UNUSED_NS - unused) / 1000000u) + 1;
    next_drop(NULL);
    return -1;
}
