#define _GNU_SOURCE
#include "layout.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "copytree.h"
#include "io.h"
#include "kernel.h"
#include "launcher.h"

#define GROUPS_MAX 2

static const char *bases[GROUPS_MAX];

void layout_bases(const char *boxes, const char *layers) { bases[0] = boxes, bases[1] = layers; }
const char *layout_boxes(void) { return bases[0]; }

// ---- reading ----

static size_t text_size(struct span strs, uint32_t count) { return strs.size + count; }

// Copies the strings of a list into `at`, each with a NUL, and points at them.
static char *take(struct span strs, uint32_t count, char *at, const char **out) {
    struct rd r = rd_of(strs.at + 4, strs.size - 4);
    for (uint32_t i = 0; i < count; i++) {
        struct span s = rd_bytes(&r);
        out[i] = at;
        memcpy(at, s.at, s.size);
        at[s.size] = 0;
        at += s.size + 1;
    }
    return at;
}

bool layout_parse(struct layout *l, struct rd *r) {
    const char *views[2 * VIEWS_MAX];
    uint32_t view_strs;
    struct span lowers = rd_strs(r, &l->lower_count), seen = rd_strs(r, &view_strs), cache = rd_name(r), dirs = rd_strs(r, &l->dir_count);
    if (r->bad || !l->lower_count || l->lower_count >= LAYERS_MAX || view_strs % 2 || view_strs / 2 > VIEWS_MAX - 1) return false;
    l->view_count = view_strs / 2;
    l->text = malloc(text_size(lowers, l->lower_count) + text_size(seen, view_strs) + text_size(dirs, l->dir_count) + cache.size + 1);
    l->lowers = calloc(l->lower_count + l->dir_count, sizeof *l->lowers);
    if (!l->text || !l->lowers) return false;
    l->dirs = l->lowers + l->lower_count;
    char *at = take(lowers, l->lower_count, l->text, l->lowers);
    at = take(seen, view_strs, at, views);
    at = take(dirs, l->dir_count, at, l->dirs);
    for (uint32_t i = 0; i < l->view_count; i++) l->sources[i] = views[2 * i], l->places[i] = views[2 * i + 1];
    l->place_count = l->view_count;
    if (cache.size) {
        l->places[l->place_count++] = LAYOUT_CACHE_AT;
        memcpy(at, cache.at, cache.size);
        at[cache.size] = 0;
        l->cache = at;
    }
    return true;
}

bool layout_push(struct layout *l, const char *directory) {
    const char **lowers = calloc(l->lower_count + 1 + l->dir_count, sizeof *lowers), *copy = strdup(directory);
    if (!lowers || !copy) {
        free(lowers), free((char *)(uintptr_t)copy);
        return false;
    }
    lowers[0] = copy;
    memcpy(lowers + 1, l->lowers, (l->lower_count + l->dir_count) * sizeof *lowers);
    free(l->lowers);
    l->lowers = lowers, l->dirs = lowers + ++l->lower_count, l->pushed++;
    return true;
}

void layout_pop(struct layout *l) {
    free((char *)(uintptr_t)l->lowers[0]);
    memmove(l->lowers, l->lowers + 1, (--l->lower_count + l->dir_count) * sizeof *l->lowers);
    l->dirs = l->lowers + l->lower_count, l->pushed--;
}

void layout_free(struct layout *l) {
    while (l->pushed) layout_pop(l);
    free(l->text);
    free(l->lowers);
    *l = (struct layout){0};
}

// ---- the fresh upper directory ----

struct owner {
    uid_t root, user;  // as they are written to the disk
};

// mkdir -p below a fresh upper directory that nobody else has touched; the last part belongs to `uid`.
static int make_path(int upper, const char *path, uid_t root, uid_t uid) {
    char text[4096];
    if (strlen(path) >= sizeof text) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(text, path + strspn(path, "/"));
    for (char *at = text, *slash; *at; at = slash) {
        slash = strchr(at, '/');
        if (slash) *slash = 0;
        bool is_last = !slash || !slash[1];
        if (!strcmp(at, "..")) {
            errno = EINVAL;
            return -1;
        }
        bool is_new = !mkdirat(upper, text, 0755);
        if (!is_new && errno != EEXIST) return -1;
        uid_t owner = is_last ? uid : root;
        if (owner && (is_new || is_last) && fchownat(upper, text, owner, owner, AT_SYMLINK_NOFOLLOW)) return -1;  // made by 0, so it is 0's already
        if (!slash) break;
        *slash++ = '/';
    }
    return 0;
}

// Mount points are made in the upper directory: whatever an image has there, a link for instance, is covered by a plain directory.
static int fill_upper(int upper, const struct layout *l, struct owner owner) {
    static const char *const points[] = {"proc", "dev", "tmp"};
    if (owner.root && fchown(upper, owner.root, owner.root)) return -1;
    for (size_t i = 0; i < 3; i++)
        if ((mkdirat(upper, points[i], 0755) && errno != EEXIST) || (owner.root && fchownat(upper, points[i], owner.root, owner.root, 0))) return -1;
    for (uint32_t i = 0; i < l->dir_count; i++)
        if (make_path(upper, l->dirs[i], owner.root, owner.user)) return -1;
    for (uint32_t i = 0; i < l->place_count; i++)
        if (make_path(upper, l->places[i], owner.root, owner.root)) return -1;
    return 0;
}

static int open_beneath(int dir, const char *path, int flags) {
    struct k_open_how how = {.flags = (uint64_t)(flags | O_DIRECTORY | O_CLOEXEC), .resolve = K_RESOLVE_BENEATH | K_RESOLVE_NO_SYMLINKS};
    return k_openat2(dir, *path ? path : ".", &how);
}

// A directory and all above it, as they are in `like`. With `dressed` they are there already, and get their attributes: later, for making one changes the other.
static int repeat_path(int upper, int like, const char *path, bool dressed) {
    char text[4096];
    strcpy(text, path + strspn(path, "/"));  // it has been made before
    for (char *slash = text; slash; ) {
        slash = strchr(slash, '/');
        if (slash) *slash = 0;
        if (!dressed) {
            if (mkdirat(upper, text, 0700) && errno != EEXIST) return -1;
        } else {
            autoclose int from = open_beneath(like, text, O_RDONLY), to = open_beneath(upper, text, O_RDONLY);
            if (from < 0 || to < 0 || copy_attributes(from, to, false)) return -1;
        }
        if (slash) *slash++ = '/';
    }
    return 0;
}

// Over a frozen upper directory of its own a fresh one is empty, but for where views have their part of it.
static int repeat_upper(int upper, const struct layout *l) {
    autoclose int like = open(l->lowers[0], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (like < 0) return -1;
    for (int dressed = 0; dressed < 2; dressed++)
        for (uint32_t i = 0; i < l->view_count; i++)
            if (repeat_path(upper, like, l->places[i], dressed)) return -1;
    return copy_attributes(like, upper, false);
}

// A place where a view begins looks as it does in the uppermost directory below it.
static int dress(int upper, const char *place, int like, uid_t shift) {
    struct stat st;
    place += strspn(place, "/");
    if (fstat(like, &st)) return -1;
    uid_t uid = st.st_uid - shift, gid = st.st_gid - shift;
    if (!L.in_userns && uid < RANGE_SIZE && gid < RANGE_SIZE && fchownat(upper, place, uid, gid, AT_SYMLINK_NOFOLLOW)) return -1;
    if (fchmodat(upper, place, st.st_mode & 07777, 0)) return -1;
    return utimensat(upper, place, (struct timespec[]){st.st_atim, st.st_mtim}, AT_SYMLINK_NOFOLLOW);
}

// ---- shifting ----

static bool cannot_shift(int error) { return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP || error == EPERM; }

// The shifted views that one sandbox's overlays are made from. They hang below the shifted upper directory, so that letting go of it lets go of all.
struct shifted {
    int userns;          // -1: nothing is shifted
    int raw, dir;        // the directory of the upper one, as it is and as it is seen
    int group[GROUPS_MAX];
    unsigned next;
};

static void shifted_close(struct shifted *s) {
    for (int i = 0; i < GROUPS_MAX; i++) io_close(&s->group[i]);
    if (s->userns >= 0) io_close(&s->dir);
}

void layout_let_go(void) {
    if (L.mounts.is_held) mounts_let_go(&L.mounts);
}

static int shifted_open(struct shifted *s, const struct disk_box *disk, int userns) {
    *s = (struct shifted){.userns = userns, .raw = disk->dir, .dir = disk->dir, .group = {-1, -1}};
    if (userns < 0) return 0;
    s->dir = mounts_shift(&L.mounts, disk->dir, userns);
    return s->dir;
}

// `dir` seen with its owners shifted; a new descriptor.
static int shift(struct shifted *s, int dir) {
    if (s->userns < 0) return fcntl(dir, F_DUPFD_CLOEXEC, 3);
    char name[16];
    snprintf(name, sizeof name, "l%u", s->next++);
    if (mkdirat(s->raw, name, 0700) && errno != EEXIST) return -1;
    int seen = mounts_shift_at(dir, s->userns, s->dir, name);
    // A file system that cannot be shifted (9p, an overlay): its files belong to nobody inside, which takes rights away and gives none.
    return seen < 0 && cannot_shift(errno) ? fcntl(dir, F_DUPFD_CLOEXEC, 3) : seen;
}

static int open_layer(struct shifted *s, const char *path) {
    for (int i = 0; s->userns >= 0 && i < GROUPS_MAX; i++) {
        size_t n = bases[i] ? strlen(bases[i]) : 0;
        if (!n || strncmp(path, bases[i], n) || path[n] != '/') continue;
        if (s->group[i] < 0) {
            autoclose int base = open(bases[i], O_PATH | O_DIRECTORY | O_CLOEXEC);
            if (base < 0 || (s->group[i] = shift(s, base)) < 0) return -1;
        }
        int fd = open_beneath(s->group[i], path + n + 1, O_PATH);
        if (fd >= 0 || errno != ENOENT) return fd;
        break;  // it lies on a file system of its own (a tmpfs)
    }
    autoclose int dir = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    return dir < 0 ? -1 : shift(s, dir);
}

// ---- the overlays ----

struct stack {
    int fd[LAYERS_MAX];
    size_t count;
};

static void stack_close(struct stack *s) {
    int error = errno;
    while (s->count) close(s->fd[--s->count]);
    errno = error;
}

static int open_layers(const struct layout *l, struct shifted *s, struct stack *out) {
    for (uint32_t i = 0; i < l->lower_count; i++) {
        int fd = open_layer(s, l->lowers[i]);
        if (fd < 0) return -1;
        out->fd[out->count++] = fd;
    }
    return 0;
}

static bool is_empty(int dir) {
    _Alignas(struct dirent64) char entries[512];
    for (long size; (size = syscall(SYS_getdents64, dir, entries, sizeof entries)) != 0;) {
        if (size < 0) return false;
        for (long at = 0; at < size;) {
            const struct dirent64 *e = (const struct dirent64 *)(const void *)(entries + at);
            if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) return false;
            at += e->d_reclen;
        }
    }
    return true;
}

// The same place in every layer that has something there, and the host's own below them. *like is the uppermost directory at that place, empty or not.
static int open_view(const struct stack *layers, const char *source, const char *place, struct shifted *s, struct stack *out, int *like) {
    place += strspn(place, "/");
    for (size_t i = 0; i < layers->count; i++) {
        int fd = open_beneath(layers->fd[i], place, O_RDONLY);
        if (fd < 0 && errno != ENOENT && errno != ENOTDIR && errno != ELOOP) return -1;
        if (fd < 0) continue;
        if (!is_empty(fd)) out->fd[out->count++] = fd;
        else if (*like >= 0 || out->count) close(fd);
        else *like = fd;
    }
    autoclose int host = open(source, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int fd = host < 0 ? -1 : shift(s, host);
    if (fd < 0) return -1;
    out->fd[out->count++] = fd;
    return 0;
}

static uint64_t mix(uint64_t h, uint64_t value) { return (h ^ value) * 0x100000001b3u + (h >> 29); }

static uint64_t glance_at(uint64_t h, int dir, const char *path, bool is_place) {
    struct stat st;
    autoclose int fd = open_beneath(dir, path, is_place ? O_RDONLY : O_PATH);
    if (fd < 0 || fstat(fd, &st)) return mix(h, (uint64_t)errno);
    h = mix(mix(mix(mix(h, st.st_mode), st.st_uid), st.st_gid), st.st_ino);
    h = mix(mix(h, (uint64_t)st.st_mtim.tv_sec), (uint64_t)st.st_mtim.tv_nsec);
    h = mix(mix(h, (uint64_t)st.st_ctim.tv_sec), (uint64_t)st.st_ctim.tv_nsec);
    return is_place ? mix(h, is_empty(fd)) : h;  // times are not fine enough to tell of everything
}

uint64_t layout_glance(const struct layout *l, const char *frozen) {
    autoclose int dir = open(frozen, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (dir < 0) return 0;
    uint64_t h = glance_at(0xcbf29ce484222325u, dir, "", false);
    for (uint32_t i = 0; i < l->view_count; i++) {
        char text[4096];
        strcpy(text, l->places[i] + strspn(l->places[i], "/"));  // it has been made before
        for (char *slash = text; slash;) {
            slash = strchr(slash, '/');
            if (slash) *slash = 0;
            h = glance_at(h, dir, text, !slash);
            if (slash) *slash++ = '/';
        }
    }
    return h ? h : 1;
}

static int mount_one(const struct slot *slot, const struct stack *lowers, struct shifted *s, const char *upper, const char *work) {
    if ((mkdirat(s->raw, work, 0755) && errno != EEXIST) || (!L.in_userns && s->userns < 0 && fchownat(s->raw, work, slot->base, slot->base, 0))) return -1;
    autoclose int up = openat(s->dir, upper, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    autoclose int wk = openat(s->dir, work, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (up < 0 || wk < 0) return -1;
    return mounts_overlay(&L.mounts, lowers->fd, lowers->count, up, wk, s->userns >= 0 ? slot->base : 0);
}

static int mount_view(const struct layout *l, uint32_t i, const struct slot *slot, const struct stack *layers, struct shifted *s, int upper) {
    static struct stack below;  // too large for the stack, and there is one thread
    char work[16], path[4096 + 8];
    snprintf(work, sizeof work, "w%u", i);
    snprintf(path, sizeof path, "upper/%s", l->places[i] + strspn(l->places[i], "/"));
    int fd = -1;
    autoclose int empty = -1;
    if (!open_view(layers, l->sources[i], l->places[i], s, &below, &empty) &&
        !dress(upper, l->places[i], empty >= 0 ? empty : below.fd[0], s->userns >= 0 ? slot->base : 0))
        fd = mount_one(slot, &below, s, path, work);
    stack_close(&below);
    return fd;
}

static int mount_cache(const char *cache, struct shifted *s) {
    autoclose int dir = open(cache, O_PATH | O_DIRECTORY | O_CLOEXEC);
    autoclose int seen = dir < 0 ? -1 : shift(s, dir);
    return seen < 0 ? -1 : mounts_writable(seen);
}

static int mount_all(const struct layout *l, bool on_own, const struct slot *slot, struct shifted *s, int *root, struct view *views, size_t *count,
                     const char **step) {
    static struct stack layers;
    autoclose int upper = openat(s->raw, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    uid_t base = s->userns < 0 ? slot->base : 0;
    *step = "upper directory";
    if (upper < 0 || (on_own ? repeat_upper(upper, l) : fill_upper(upper, l, (struct owner){base, L.in_userns ? 0 : base + WORKLOAD_UID}))) return -1;
    *step = "image";
    if (!open_layers(l, s, &layers)) {
        *step = "overlay";
        *root = mount_one(slot, &layers, s, "upper", "work");
    }
    bool well = *root >= 0;
    for (uint32_t i = 0; well && i < l->view_count; i++) {
        *step = "view of a host directory";
        views[*count] = (struct view){mount_view(l, i, slot, &layers, s, upper), l->places[i]};
        well = views[(*count)++].mount >= 0;
    }
    if (well && l->cache) {
        *step = "cache";
        views[*count] = (struct view){mount_cache(l->cache, s), LAYOUT_CACHE_AT};
        well = views[(*count)++].mount >= 0;
    }
    stack_close(&layers);
    return well ? 0 : -1;
}

static int try_mount(const struct layout *l, bool on_own, const struct slot *slot, const struct disk_box *disk, int userns, int *root, struct view *views,
                     size_t *count, const char **step) {
    struct shifted s;
    *step = "upper directory";
    if (shifted_open(&s, disk, userns) < 0) return -1;
    int failed = mount_all(l, on_own, slot, &s, root, views, count, step), error = errno;
    shifted_close(&s);
    if (!failed) return 0;
    layout_let_go();
    io_close(root);
    while (*count) io_close(&views[--*count].mount);
    errno = error;
    return -1;
}

int layout_mount(const struct layout *l, bool on_own, const struct slot *slot, const struct disk_box *disk, int *root, struct view *views, size_t *count,
                 const char **step) {
    *root = -1, *count = 0;
    bool may_shift = !L.in_userns && !L.mounts.cannot_shift;
    int failed = try_mount(l, on_own, slot, disk, may_shift ? slot->userns : -1, root, views, count, step);
    if (failed && may_shift && !L.mounts.shifts && cannot_shift(errno)) {
        // A kernel before 5.19, or a state directory that cannot be shifted: no layer made here can then serve another sandbox.
        failed = try_mount(l, on_own, slot, disk, -1, root, views, count, step);
        L.mounts.cannot_shift = !failed;
    }
    if (!failed && may_shift && !L.mounts.cannot_shift) L.mounts.shifts = true;
    return failed;
}
