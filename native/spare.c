#define _GNU_SOURCE
#include "spare.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cgroup.h"
#include "disk.h"
#include "io.h"
#include "launcher.h"
#include "layout.h"
#include "maker.h"
#include "next.h"

#define SPARES_MAX 2             // each costs what an idle sandbox costs
#define RECENT_MAX 8
#define STILL_WANTED 8           // wishes: who asks for two things in turn finds one of each
#define WORTH_KEEPING 4          // layouts: with more than two in turn some find a spare each time, instead of none ever
#define UNUSED_NS 60000000000u   // an image's file system shall not stay busy for long after its last sandbox
#define END_PATIENCE_MS 1000

// What was asked for, latest first.
static struct wish {
    uint8_t *order;      // as it came
    uint32_t size;
    uint32_t stands_on;  // how much of it is the layout
    unsigned times;
    unsigned last;       // when: as the how manieth wish of all
    unsigned served;     // and when a spare was last begun for it
} recent[RECENT_MAX];
static unsigned recent_count, wishes;
static uint64_t last_wish_ns;

// Which directory it was, not only what its name was: a layer may have been removed and made again.
struct identity {
    dev_t device;
    ino_t number;
};

static struct spare {
    bool is_asked;         // the maker is about it, or it is there
    bool is_unwanted;      // and is given up when it comes
    char name[ID_MAX];     // of its groups, and of its upper directory until it is taken
    uint8_t *key;          // the order it was made by
    uint32_t key_size, stands_on;
    struct order order;
    struct slot slot;      // until it is there
    struct identity *below;
    struct box *box;
    int channel;
} spares[SPARES_MAX];

void furniture_close(struct furniture *f) {
    io_close(&f->root);
    cg_box_close(&f->cg);
    while (f->count) io_close(&f->views[--f->count].mount);
}

// ---- what is wished for ----

static void forget_wish(unsigned i) {
    free(recent[i].order);
    memmove(recent + i, recent + i + 1, (--recent_count - i) * sizeof *recent);
}

static void note(const uint8_t *order, uint32_t size, uint32_t stands_on) {
    struct wish wish = {.size = size, .stands_on = stands_on, .times = 1, .last = ++wishes};
    last_wish_ns = io_now_ns();
    for (unsigned i = 0; i < recent_count && !wish.order; i++) {
        if (recent[i].size != size || memcmp(recent[i].order, order, size)) continue;
        wish.order = recent[i].order;
        wish.times += recent[i].times, wish.served = recent[i].served;
        memmove(recent + i, recent + i + 1, (--recent_count - i) * sizeof *recent);
    }
    if (!wish.order && recent_count == RECENT_MAX) forget_wish(RECENT_MAX - 1);
    if (!wish.order && (wish.order = malloc(size))) memcpy(wish.order, order, size);
    if (!wish.order) return;
    memmove(recent + 1, recent, recent_count++ * sizeof *recent);
    recent[0] = wish;
}

// How long ago it was asked for, in wishes.
static unsigned age(const struct spare *s) {
    for (unsigned i = 0; i < recent_count; i++)
        if (recent[i].size == s->key_size && !memcmp(recent[i].order, s->key, s->key_size)) return i;
    return RECENT_MAX;
}

// ---- what it stands on ----

static size_t directory_count(const struct layout *l) { return l->lower_count + l->view_count; }
static const char *directory(const struct layout *l, size_t i) { return i < l->lower_count ? l->lowers[i] : l->sources[i - l->lower_count]; }

static bool look(const char *path, struct identity *out) {
    struct stat st;
    if (fstatat(AT_FDCWD, path, &st, 0)) return false;
    *out = (struct identity){st.st_dev, st.st_ino};
    return true;
}

static const struct layout *layout_of(const struct spare *s) { return s->box ? &s->box->layout : &s->order.layout; }

static bool is_current(const struct spare *s) {
    const struct layout *l = layout_of(s);
    for (size_t i = 0; i < directory_count(l); i++) {
        struct identity now;
        if (!look(directory(l, i), &now) || now.device != s->below[i].device || now.number != s->below[i].number) return false;
    }
    return true;
}

// ---- making and giving up ----

// Its place is free again; a box is somebody else's by now, or dead.
static void clear(struct spare *s) {
    order_free(&s->order);
    free(s->key), free(s->below);
    *s = (struct spare){.is_asked = false};
}

static void give_up(struct spare *s) {
    if (!s->box) {
        s->is_unwanted = true;  // the maker cannot be held up
        return;
    }
    struct box *b = s->box;
    io_close(&s->channel);
    clear(s);
    launcher_end(b);  // it is buried like any other, and nobody is told
}

static bool begin(struct spare *s, const struct wish *w) {
    static unsigned begun;
    struct rd r = rd_of(w->order, w->size);
    *s = (struct spare){.key = malloc(w->size), .key_size = w->size, .stands_on = w->stands_on, .channel = -1};
    snprintf(s->name, sizeof s->name, "spare-%u", begun++);
    if (s->key) memcpy(s->key, w->order, w->size);
    bool well = s->key && order_parse(&s->order, &r) && (s->below = calloc(directory_count(&s->order.layout), sizeof *s->below));
    for (size_t i = 0; well && i < directory_count(&s->order.layout); i++) well = look(directory(&s->order.layout, i), &s->below[i]);
    s->is_asked = well && slot_take_bare(&s->slot);
    if (s->is_asked && maker_ask(s->name, (struct span){s->key, s->stands_on}, &s->slot, s->order.disk, &s->order.limits)) return true;
    if (s->is_asked) slot_give(&s->slot);
    clear(s);
    return false;
}

static bool has_spare(const struct wish *w) {
    for (const struct spare *s = spares; s < spares + SPARES_MAX; s++)
        if (s->is_asked && s->key_size == w->size && !memcmp(s->key, w->order, w->size)) return true;
    return false;
}

// Of what is asked for now and has no spare, what has gone without for longest: otherwise one of two that take turns could always find one, and the other never.
// If all have one, what was asked for last.
static unsigned most_wanted(void) {
    unsigned found = recent_count;
    for (unsigned i = 0; i < recent_count; i++) {
        bool is_wanted = !i || (recent[i].times > 1 && wishes - recent[i].last < STILL_WANTED);
        if (is_wanted && !has_spare(&recent[i]) && (found == recent_count || recent[i].served < recent[found].served)) found = i;
    }
    return found == recent_count ? 0 : found;
}

static bool has_twin(const struct spare *s) {
    for (const struct spare *other = spares; other < spares + SPARES_MAX; other++)
        if (other != s && other->is_asked && other->key_size == s->key_size && !memcmp(other->key, s->key, s->key_size)) return true;
    return false;
}

// The one that the maker is about, or was.
static struct spare *in_making(void) {
    for (struct spare *s = spares; s < spares + SPARES_MAX; s++)
        if (s->is_asked && !s->box) return s;
    return NULL;
}

bool spares_prepare(void) {
    struct spare *free_place = NULL, *oldest = NULL;
    unsigned latest = 0;
    if (!recent_count || !maker_is_free()) return false;
    for (struct spare *s = spares; s < spares + SPARES_MAX; s++) {
        if (!s->is_asked) free_place = s;
        else if (age(s) == 0) latest++;
        else if (!oldest || age(s) > age(oldest)) oldest = s;
    }
    if (free_place) {
        unsigned wanted = most_wanted();
        recent[wanted].served = wishes;
        if (begin(free_place, &recent[wanted])) return true;
        forget_wish(wanted);  // what cannot be made; whoever asks for it is told why
        return false;
    }
    // What was asked for once takes nobody's place: snapshots are often restored once and not again.
    if (latest || !oldest || recent[0].times < 2 || (age(oldest) < WORTH_KEEPING && !has_twin(oldest))) return false;
    give_up(oldest);
    return true;
}

// What cannot be made is forgotten; whoever asks for it is told why.
static void fail(struct spare *s) {
    unsigned i = age(s);
    if (i < recent_count) forget_wish(i);
    clear(s);
}

static void start(struct spare *s, struct furniture *f) {
    const char *step;
    f->slot.userns = s->slot.userns, f->slot.base = s->slot.base, f->slot.range = s->slot.range;
    if (s->is_unwanted) {
        cg_box_close(&f->cg);
        maker_discard(f);
        slot_give(&f->slot);
        cg_box_remove(f->group);
        disk_drop(f->group);
        clear(s);
        return;
    }
    s->box = launcher_build("", f->group, &s->order, f, &s->channel, &step);
    if (s->box) s->box->is_spare = true;
    else fail(s);
}

static void lose(struct spare *s, bool is_cleared_away) {
    if (!is_cleared_away) cg_box_remove(s->name), disk_drop(s->name);
    slot_give(&s->slot);
    fail(s);
}

bool spares_made(enum maker_says said, struct furniture *f) {
    struct spare *s = in_making();
    if (!s) return false;
    if (said == MAKER_DONE) start(s, f);
    else lose(s, said == MAKER_FAILED);
    return true;
}

void spares_close(void) {
    maker_close();
    struct spare *s = in_making();
    if (s) lose(s, false);
    else next_made(MAKER_GONE, NULL);
    spares_drop(NULL);
    next_drop(NULL);
}

void spares_lost(const struct box *b) {
    for (struct spare *s = spares; s < spares + SPARES_MAX; s++) {
        if (s->box != b) continue;
        io_close(&s->channel);
        fail(s);
    }
}

void spares_drop(const char *path) {
    for (struct spare *s = spares; s < spares + SPARES_MAX; s++) {
        bool stands = s->is_asked && !path;
        for (size_t i = 0; s->is_asked && path && i < directory_count(layout_of(s)); i++) stands |= !strcmp(directory(layout_of(s), i), path);
        if (stands) give_up(s);
    }
    for (unsigned i = 0; !path && recent_count;) forget_wish(i);
}

bool spares_empty(void) {
    struct box *boxes[SPARES_MAX];
    size_t count = 0;
    for (const struct spare *s = spares; s < spares + SPARES_MAX; s++)
        if (s->box) boxes[count++] = s->box;
    spares_drop(NULL);
    for (size_t i = 0; i < count; i++)
        if (poll(&(struct pollfd){.fd = boxes[i]->pidfd, .events = POLLIN}, 1, END_PATIENCE_MS) == 1) launcher_bury(boxes[i]);
    return count;
}

int spares_expire(void) {
    bool any = false;
    for (size_t i = 0; i < SPARES_MAX; i++) any |= spares[i].is_asked;
    if (!any) return -1;
    uint64_t unused = io_now_ns() - last_wish_ns;
    if (unused < UNUSED_NS) return (int)((UNUSED_NS - unused) / 1000000u) + 1;
    spares_drop(NULL);
    return -1;
}

// ---- handing over ----

// Nobody inside has the right to change it, not even the agent. The launcher has a name of its own, to which it comes back.
static bool name_it(const struct box *b) {
    if (setns(b->pidfd, CLONE_NEWUTS)) return false;
    bool well = !sethostname(b->id, strlen(b->id));
    if (setns(L.home_uts, CLONE_NEWUTS)) _exit(70);  // in the wrong namespace nothing can be trusted any more
    return well;
}

static bool is_alive(const struct box *b) { return !b->failed && poll(&(struct pollfd){.fd = b->pidfd, .events = POLLIN}, 1, 0) == 0; }

static bool fits(const struct spare *s, const struct order *o) {
    const struct box *b = s->box;
    return b && s->stands_on == o->stands_on.size && !memcmp(s->key, o->stands_on.at, o->stands_on.size) && s->order.shm == o->shm && !strcmp(b->workdir, o->workdir);
}

static bool is_held_to(const struct spare *s, const struct order *o) {
    const struct order *made = &s->order;
    bool same = made->limits.memory_bytes == o->limits.memory_bytes && made->limits.pids == o->limits.pids && made->limits.cpu_permille == o->limits.cpu_permille;
    return (same && made->disk == o->disk && made->tmp == o->tmp) || launcher_rebind(s->box, o);
}

struct box *spares_take(const struct order *o, const char *id, int *channel) {
    struct box *found = NULL;
    for (struct spare *s = spares; s < spares + SPARES_MAX && !found; s++) {
        if (!fits(s, o)) continue;
        struct box *b = s->box;
        strcpy(b->id, id);
        // Under the name that was asked for it lies last of all: if anything fails, that is another's.
        if (!is_alive(b) || !is_current(s) || !is_held_to(s, o) || !name_it(b) || disk_rename(b->disk, id)) {
            give_up(s);
            continue;
        }
        strcpy(b->disk, id);
        *channel = s->channel;
        b->is_spare = false;
        clear(s);
        found = b;
    }
    // The order begins with the layout and is all that the engine wrote after the name.
    note(o->stands_on.at, (uint32_t)(o->end - o->stands_on.at), o->stands_on.size);
    return found;
}
