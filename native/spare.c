#define _GNU_SOURCE
#include "spare.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cgroup.h"
#include "disk.h"
#include "io.h"
#include "launcher.h"
#include "layout.h"

#define SPARES_MAX 2             // each holds a dozen descriptors and some 100 KiB of the kernel's memory
#define RECENT_MAX 8
#define WORTH_KEEPING 4          // layouts: with more than two in turn some find a spare each time, instead of none ever
#define UNUSED_NS 60000000000u   // an image's file system shall not stay busy for long after its last sandbox

// A layout that was asked for, latest first.
static struct wish {
    uint8_t *layout;
    uint32_t size;
    unsigned times;
    uint64_t disk_bytes;
    struct cg_limits limits;
} recent[RECENT_MAX];
static unsigned recent_count;
static uint64_t last_wish_ns;

// Which directory it was, not only what its name was: a layer may have been removed and made again.
struct identity {
    dev_t device;
    ino_t number;
};

static struct spare {
    bool is_begun;
    uint8_t *key;
    uint32_t key_size;
    struct layout layout;
    struct identity *below;
    struct furniture furniture;
    char name[ID_MAX];
    uint64_t disk_bytes;
    struct cg_limits limits;
} spares[SPARES_MAX];

void furniture_close(struct furniture *f) {
    io_close(&f->root);
    cg_box_close(&f->cg);
    while (f->count) io_close(&f->views[--f->count].mount);
}

// ---- what is wished for ----

static void forget_wish(unsigned i) {
    free(recent[i].layout);
    memmove(recent + i, recent + i + 1, (--recent_count - i) * sizeof *recent);
}

void spares_note(struct span layout, uint64_t disk_bytes, const struct cg_limits *limits) {
    struct wish wish = {.size = layout.size, .times = 1, .disk_bytes = disk_bytes, .limits = *limits};
    last_wish_ns = io_now_ns();
    for (unsigned i = 0; i < recent_count && !wish.layout; i++) {
        if (recent[i].size != layout.size || memcmp(recent[i].layout, layout.at, layout.size)) continue;
        wish.layout = recent[i].layout;
        wish.times += recent[i].times;
        memmove(recent + i, recent + i + 1, (--recent_count - i) * sizeof *recent);
    }
    if (!wish.layout && recent_count == RECENT_MAX) forget_wish(RECENT_MAX - 1);
    if (!wish.layout && (wish.layout = malloc(layout.size))) memcpy(wish.layout, layout.at, layout.size);
    if (!wish.layout) return;
    memmove(recent + 1, recent, recent_count++ * sizeof *recent);
    recent[0] = wish;
}

// How long ago a layout was asked for, in wishes.
static unsigned age(const struct spare *s) {
    for (unsigned i = 0; i < recent_count; i++)
        if (recent[i].size == s->key_size && !memcmp(recent[i].layout, s->key, s->key_size)) return i;
    return RECENT_MAX;
}

// ---- making and giving up ----

static size_t directory_count(const struct layout *l) { return l->lower_count + l->view_count; }
static const char *directory(const struct layout *l, size_t i) { return i < l->lower_count ? l->lowers[i] : l->sources[i - l->lower_count]; }

static bool look(const char *path, struct identity *out) {
    struct stat st;
    if (fstatat(AT_FDCWD, path, &st, 0)) return false;
    *out = (struct identity){st.st_dev, st.st_ino};
    return true;
}

// Its memory; `furniture` is somebody else's by now, or was never made.
static void clear(struct spare *s) {
    layout_free(&s->layout);
    free(s->key), free(s->below);
    *s = (struct spare){.is_begun = false};
}

static bool is_furnished(const struct spare *s) { return s->furniture.root >= 0; }

static void give_up(struct spare *s) {
    if (is_furnished(s)) disk_drop(s->name);
    furniture_close(&s->furniture);
    cg_box_remove(s->furniture.group);
    slot_give(&s->furniture.slot);
    clear(s);
}

// In two steps, the shorter one first, so that a request need not wait for both; what is still missing when a spare is taken its new holder makes.
static bool begin(struct spare *s, const struct wish *w) {
    static unsigned begun;
    const char *step;
    struct rd r = rd_of(w->layout, w->size);
    struct furniture *f = &s->furniture;
    *s = (struct spare){.key = malloc(w->size), .key_size = w->size, .disk_bytes = w->disk_bytes, .limits = w->limits, .furniture = FURNITURE_NONE};
    snprintf(s->name, sizeof s->name, "spare-%u", begun++);
    if (s->key) memcpy(s->key, w->layout, w->size);
    bool well = s->key && layout_parse(&s->layout, &r) && (s->below = calloc(directory_count(&s->layout), sizeof *s->below));
    for (size_t i = 0; well && i < directory_count(&s->layout); i++) well = look(directory(&s->layout, i), &s->below[i]);
    bool has_slot = well && !slot_take(&f->slot, &step);
    s->is_begun = has_slot && !cg_box_make(s->name, &s->limits, &f->cg, &step);
    strcpy(f->group, s->name);
    if (has_slot && !s->is_begun) slot_give(&f->slot);
    if (!s->is_begun) clear(s);
    return s->is_begun;
}

static bool furnish(struct spare *s) {
    struct furniture *f = &s->furniture;
    struct disk_box disk;
    const char *step;
    if (disk_make(s->name, (uint16_t)(f->slot.base / RANGE_SIZE), s->disk_bytes, false, &disk)) return false;
    int failed = layout_mount(&s->layout, false, &f->slot, &disk, &f->root, f->views, &f->count, &step);
    if (!failed) f->print = launcher_print(&s->layout, disk.dir);
    layout_let_go();
    disk_box_close(&disk);
    if (failed) disk_drop(s->name);
    return !failed;
}

static bool has_twin(const struct spare *s) {
    for (const struct spare *other = spares; other < spares + SPARES_MAX; other++)
        if (other != s && other->is_begun && other->key_size == s->key_size && !memcmp(other->key, s->key, s->key_size)) return true;
    return false;
}

bool spares_prepare(void) {
    struct spare *free_place = NULL, *begun = NULL, *oldest = NULL;
    unsigned latest = 0;
    for (struct spare *s = spares; s < spares + SPARES_MAX; s++) {
        if (!s->is_begun) free_place = s;
        else if (!is_furnished(s)) begun = s;
        else if (age(s) == 0) latest++;
        else if (!oldest || age(s) > age(oldest)) oldest = s;
    }
    unsigned impossible = 0;  // what cannot be made is forgotten; whoever asks for it is told why
    if (begun) {
        if (furnish(begun)) return true;
        impossible = age(begun);
        give_up(begun);
    } else if (recent_count && free_place) {
        if (begin(free_place, &recent[0])) return true;
    } else {
        // What was asked for once takes nobody's place: snapshots are often restored once and not again.
        if (!recent_count || latest || !oldest || recent[0].times < 2 || (age(oldest) < WORTH_KEEPING && !has_twin(oldest))) return false;
        give_up(oldest);
        return true;
    }
    if (impossible < recent_count) forget_wish(impossible);
    return false;
}

void spares_drop(const char *path) {
    for (struct spare *s = spares; s < spares + SPARES_MAX; s++) {
        bool stands = s->is_begun && !path;
        for (size_t i = 0; s->is_begun && path && i < directory_count(&s->layout); i++) stands |= !strcmp(directory(&s->layout, i), path);
        if (stands) give_up(s);
    }
    for (unsigned i = 0; !path && recent_count;) forget_wish(i);
}

int spares_expire(void) {
    bool any = false;
    for (size_t i = 0; i < SPARES_MAX; i++) any |= spares[i].is_begun;
    if (!any) return -1;
    uint64_t unused = io_now_ns() - last_wish_ns;
    if (unused < UNUSED_NS) return (int)((UNUSED_NS - unused) / 1000000u) + 1;
    spares_drop(NULL);
    return -1;
}

// ---- handing over ----

static bool is_current(const struct spare *s) {
    for (size_t i = 0; i < directory_count(&s->layout); i++) {
        struct identity now;
        if (!look(directory(&s->layout, i), &now) || now.device != s->below[i].device || now.number != s->below[i].number) return false;
    }
    return true;
}

// Held to what the next sandbox may use.
static bool bind(const struct spare *s, uint64_t disk_bytes, const struct cg_limits *limits) {
    const unsigned all = cg_abilities() & (CG_MEMORY | CG_PIDS | CG_CPU);
    bool same = s->limits.memory_bytes == limits->memory_bytes && s->limits.pids == limits->pids && s->limits.cpu_permille == limits->cpu_permille;
    if (!same && (cg_box_limit(s->name, limits) & all) != all) return false;
    return !is_furnished(s) || s->disk_bytes == disk_bytes || !disk_limit(s->name, disk_bytes, false) || errno == EOPNOTSUPP;
}

bool spares_take(struct span layout, const char *id, uint64_t disk_bytes, const struct cg_limits *limits, struct furniture *out) {
    for (struct spare *s = spares; s < spares + SPARES_MAX; s++) {
        if (!s->is_begun || s->key_size != layout.size || memcmp(s->key, layout.at, layout.size)) continue;
        if (!is_current(s) || !bind(s, disk_bytes, limits) || (is_furnished(s) && disk_rename(s->name, id))) {
            give_up(s);
            continue;
        }
        *out = s->furniture;
        clear(s);
        return true;
    }
    return false;
}
