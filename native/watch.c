// Reporting changes below a path, by inotify.
//
// A directory that appears is watched too, and what is already in it is reported as created; something made there in that very moment may
// then be reported twice. A move is one event when both ends lie below the path.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "io.h"
#include "job.h"
#include "walk.h"

#define MASK (IN_CREATE | IN_DELETE | IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF | IN_EXCL_UNLINK)
// The second half of a move follows in the same call of the kernel's; one that has not come by then goes elsewhere. That call may be held up in
// the middle: an emulated machine on a busy host took more than 2 ms, and a move then looked like a deletion.
#define PAIR_NS 20000000u

enum event_type { EV_CREATED = 1, EV_MODIFIED = 2, EV_DELETED = 3, EV_MOVED = 4, EV_ATTRIBUTES = 5, EV_OVERFLOW = 6 };

struct watched {
    int wd;
    char *path;             // below the root; "" is the root
};

struct watch {
    struct job job;
    int fd;
    bool recursive, armed;
    struct walk walk;       // while it is being armed
    bool walking;
    struct watched *dirs;   // sorted by wd
    size_t count, room;
    // the first half of a move
    uint32_t cookie;
    char *moved;
    uint64_t moved_ns;
    // what is to be sent
    struct wr items;
    uint32_t pending;
    size_t last;            // where the last event begins in `items`
    char root[];
};

static void watch_dispose(struct job *j) {
    struct watch *w = (struct watch *)j;
    io_close(&w->fd);
    if (w->walking) walk_close(&w->walk);
    for (size_t i = 0; i < w->count; i++) free(w->dirs[i].path);
    free(w->dirs);
    free(w->moved);
    wr_free(&w->items);
    free(w);
}

// ---- events ----

static void flush(struct watch *w) {
    if (!w->pending) return;
    struct wr *out = w->job.a->out;
    size_t begun = frame_begin(out, w->job.id, K_ITEMS);
    wr_u32(out, w->pending);
    wr_raw(out, w->items.data, w->items.size);
    frame_end(out, begun);
    w->pending = 0;
    w->items.size = w->last = 0;
}

static void event(struct watch *w, uint8_t type, const char *path, const char *to) {
    size_t begun = w->items.size;
    wr_u8(&w->items, type);
    wr_bytes(&w->items, path, strlen(path));
    wr_bytes(&w->items, to, strlen(to));
    if (w->items.failed) return;
    size_t size = w->items.size - begun;
    // Writing a file in many pieces is one change to whoever looks at it now.
    if (w->pending && type == EV_MODIFIED && begun - w->last == size && memcmp(w->items.data + w->last, w->items.data + begun, size) == 0) {
        w->items.size = begun;
        return;
    }
    w->last = begun;
    w->pending++;
    if (w->items.size >= ITEMS_FRAME) flush(w);
}

// ---- directories ----

static size_t slot_of(const struct watch *w, int wd) {
    size_t low = 0, high = w->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (w->dirs[middle].wd < wd) low = middle + 1;
        else high = middle;
    }
    return low;
}

static struct watched *watched_of(const struct watch *w, int wd) {
    size_t at = slot_of(w, wd);
    return at < w->count && w->dirs[at].wd == wd ? &w->dirs[at] : NULL;
}

static char *joined(const char *base, const char *name) {
    char *path = malloc(strlen(base) + strlen(name) + 2);
    if (path) sprintf(path, "%s%s%s", base, *base && *name ? "/" : "", name);
    return path;
}

static void forget(struct watch *w, size_t at) {
    free(w->dirs[at].path);
    memmove(w->dirs + at, w->dirs + at + 1, (w->count - at - 1) * sizeof *w->dirs);
    w->count--;
}

// Watches the directory `path` below the root; takes over `path`. 0 or errno.
static int watch_dir(struct watch *w, char *path, uint32_t flags) {
    char *full = path ? joined(w->root, path) : NULL;
    int wd = full ? inotify_add_watch(w->fd, full, MASK | flags) : (errno = ENOMEM, -1), error = errno;
    free(full);
    if (wd < 0) {
        free(path);
        return error;
    }
    size_t at = slot_of(w, wd);
    if (at < w->count && w->dirs[at].wd == wd) {
        free(w->dirs[at].path);
        w->dirs[at].path = path;
        return 0;
    }
    if (w->count == w->room) {
        size_t room = w->room ? w->room * 2 : 16;
        struct watched *dirs = realloc(w->dirs, room * sizeof *dirs);
        if (!dirs) {
            free(path);
            return ENOMEM;
        }
        w->dirs = dirs, w->room = room;
    }
    memmove(w->dirs + at + 1, w->dirs + at, (w->count - at) * sizeof *w->dirs);
    w->dirs[at] = (struct watched){wd, path};
    w->count++;
    return 0;
}

static int watch_below(struct watch *w, char *path) { return watch_dir(w, path, IN_ONLYDIR | IN_DONT_FOLLOW); }

// A directory that has appeared: it and everything in it. What cannot be watched any more is gone, or the limit is reached; then the
// host is told that events are missing.
static void adopt(struct watch *w, const char *path) {
    int error = watch_below(w, strdup(path));
    if (error == ENOSPC || error == ENOMEM) event(w, EV_OVERFLOW, "", "");
    if (error) return;
    char *full = joined(w->root, path);
    int fd = full ? open(full, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    free(full);
    struct walk walk;
    if (fd < 0 || walk_open(&walk, fd)) return;
    for (enum walk_event e; (e = walk_next(&walk)) != WALK_END;) {
        if (e != WALK_ENTRY) continue;
        char *below = joined(path, walk.path);
        if (!below) break;
        event(w, EV_CREATED, below, "");
        if (walk.type != DT_DIR) free(below);
        else if (watch_below(w, below) == 0) walk_enter(&walk);
    }
    walk_close(&walk);
}

static bool is_below(const char *path, const char *dir) {
    size_t size = strlen(dir);
    return strncmp(path, dir, size) == 0 && (path[size] == 0 || path[size] == '/');
}

// A directory went out of sight: nothing in it is watched any longer.
static void abandon(struct watch *w, const char *path) {
    for (size_t i = w->count; i-- > 0;)
        if (*w->dirs[i].path && is_below(w->dirs[i].path, path)) {
            inotify_rm_watch(w->fd, w->dirs[i].wd);
            forget(w, i);
        }
}

static void rename_below(struct watch *w, const char *from, const char *to) {
    for (size_t i = 0; i < w->count; i++) {
        if (!*w->dirs[i].path || !is_below(w->dirs[i].path, from)) continue;
        const char *rest = w->dirs[i].path + strlen(from);
        char *path = joined(to, *rest == '/' ? rest + 1 : rest);
        if (!path) continue;
        free(w->dirs[i].path);
        w->dirs[i].path = path;
    }
}

// The first half of a move whose second half will not come: to us it is a deletion.
static void settle_move(struct watch *w) {
    if (!w->moved) return;
    event(w, EV_DELETED, w->moved, "");
    abandon(w, w->moved);
    free(w->moved);
    w->moved = NULL;
}

static void moved_to(struct watch *w, const struct inotify_event *e, const char *path) {
    if (w->moved && w->cookie == e->cookie) {
        event(w, EV_MOVED, w->moved, path);
        if (e->mask & IN_ISDIR) rename_below(w, w->moved, path);
        free(w->moved);
        w->moved = NULL;
        return;
    }
    settle_move(w);
    event(w, EV_CREATED, path, "");
    if (e->mask & IN_ISDIR && w->recursive) adopt(w, path);
}

static void on_event(struct watch *w, const struct inotify_event *e) {
    if (e->mask & IN_Q_OVERFLOW) {
        settle_move(w);
        event(w, EV_OVERFLOW, "", "");
        return;
    }
    struct watched *d = watched_of(w, e->wd);
    if (!d) return;
    if (e->mask & IN_IGNORED) {
        forget(w, (size_t)(d - w->dirs));
        return;
    }
    if (!e->len && *d->path) return;  // the parent's watch has told it already
    char *path = joined(d->path, e->len ? e->name : "");
    if (!path) return;
    if (!(e->mask & IN_MOVED_TO)) settle_move(w);
    if (e->mask & IN_MOVED_TO) moved_to(w, e, path);
    else if (e->mask & IN_MOVED_FROM) w->cookie = e->cookie, w->moved = path, w->moved_ns = io_now_ns(), path = NULL;
    else if (e->mask & IN_CREATE) {
        event(w, EV_CREATED, path, "");
        if (e->mask & IN_ISDIR && w->recursive) adopt(w, path);
    } else if (e->mask & (IN_DELETE | IN_DELETE_SELF)) event(w, EV_DELETED, path, "");
    else if (e->mask & IN_MODIFY) event(w, EV_MODIFIED, path, "");
    else if (e->mask & IN_ATTRIB) event(w, EV_ATTRIBUTES, path, "");
    free(path);
}

// ---- the job ----

static void started(struct watch *w) {
    w->armed = true;
    size_t begun = frame_begin(w->job.a->out, w->job.id, K_STARTED);
    wr_u32(w->job.a->out, 0);
    frame_end(w->job.a->out, begun);
}

// Goes through the tree once; a directory is watched before it is read, so that nothing falls between.
static enum step arm(struct watch *w, uint64_t until) {
    for (uint32_t n = 1; w->walking; n++) {
        enum walk_event e = walk_next(&w->walk);
        if (e == WALK_END) {
            walk_close(&w->walk);
            w->walking = false;
        } else if (e == WALK_ENTRY && w->walk.type == DT_DIR) {
            int error = watch_below(w, strdup(w->walk.path));
            if (error == ENOSPC || error == ENOMEM) {
                fail(w->job.a, w->job.id, E_OS, error, "watch: %s", error == ENOSPC ? "fs.inotify.max_user_watches is used up" : "out of memory");
                return STEP_END;
            }
            if (!error) walk_enter(&w->walk);
        }
        if (n % 32 == 0 && io_now_ns() >= until) return STEP_MORE;
    }
    started(w);
    return STEP_MORE;
}

static enum step watch_step(struct job *j, uint64_t until) {
    struct watch *w = (struct watch *)j;
    if (!w->armed) return arm(w, until);
    _Alignas(struct inotify_event) char buffer[16 << 10];
    for (;;) {
        ssize_t n = read(w->fd, buffer, sizeof buffer);
        if (n <= 0) break;
        for (ssize_t at = 0; at < n;) {
            const struct inotify_event *e = (const struct inotify_event *)(const void *)(buffer + at);
            at += (ssize_t)(sizeof *e + e->len);
            on_event(w, e);
        }
        if (io_now_ns() >= until || j->a->out->size >= OUT_FULL) {
            flush(w);
            return STEP_MORE;
        }
    }
    if (w->moved && io_now_ns() - w->moved_ns >= PAIR_NS) settle_move(w);
    if (w->moved) job_wake(j, w->moved_ns + PAIR_NS);
    flush(w);
    return STEP_WAIT;
}

void action_watch(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct span path = rd_name(&g.payload);
    uint8_t recursive = rd_u8(&g.payload);
    if (malformed(a, &g)) return;
    char room[PATH_ROOM];
    size_t size = strlen(path_of(a, path, room)) + 1;
    struct watch *w = job_new(a, f, sizeof *w + size);
    if (!w) return;
    memcpy(w->root, room, size);
    w->recursive = recursive;
    w->job.step = watch_step, w->job.dispose = watch_dispose, w->job.ends_well = true;
    w->fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    int error = w->fd < 0 ? errno : watch_dir(w, strdup(""), 0);
    int dir = -1;
    if (!error && recursive && (dir = open(room, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0 && errno != ENOTDIR) error = errno;
    if (dir >= 0 && !error) error = walk_open(&w->walk, dir);
    w->walking = dir >= 0 && !error;
    if (!error) error = job_poll(&w->job, w->fd);
    if (error) {
        fail_os(a, f->id, error, "watch", room);
        watch_dispose(&w->job);
        return;
    }
    job_start(&w->job);
}
