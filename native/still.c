#define _GNU_SOURCE
#include "still.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cgroup.h"
#include "io.h"

#define FREEZE_PATIENCE_NS 5000000000u  // a process that waits for its disk holds the freezer up
#define HOLD_PATIENCE_NS 1000000000u    // for all together
#define STOP_USUAL_NS 2000000u          // stopping a thread takes 10 µs; after this it is asked what holds it up
#define TRACED_PATIENCE_NS 500000000u   // for the exit of a process; on a busy machine it waits for its turn
#define SPIN_NS 300000u                 // waiting for cgroup.events by poll costs milliseconds, reading it in a spin 60 µs
#define STANDERS_MAX 16384
#define KCMP_FILES_TYPE 2
#define KCMP_FS_TYPE 3

// ---- reading /proc ----

// All of a file, NUL-terminated; the caller frees. NULL on failure.
static char *read_whole(int dir, const char *path) {
    autoclose int fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
    size_t room = 16384, have = 0;
    char *text = fd < 0 ? NULL : malloc(room);
    while (text) {
        ssize_t n = read(fd, text + have, room - have - 1);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            text[have] = 0;
            if (n == 0) return text;
            break;
        }
        have += (size_t)n;
        if (room - have > 4096) continue;
        char *more = realloc(text, room *= 2);
        if (!more) break;
        text = more;
    }
    free(text);
    return NULL;
}

static DIR *open_dir(int dir, const char *path) {
    int fd = openat(dir, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d) io_close(&fd);
    return d;
}

// As `ps` shows it; X also when there is no such thread.
static char state_of(const struct still *s, pid_t tid) {
    char path[32], text[256];
    snprintf(path, sizeof path, "%d/stat", tid);
    if (io_read_file(s->proc, path, text, sizeof text) <= 0) return 'X';
    const char *name_end = strrchr(text, ')');
    return name_end && name_end[1] == ' ' ? name_end[2] : 'X';
}

static bool is_dead(const struct still *s, pid_t tid) {
    char state = state_of(s, tid);
    return state == 'Z' || state == 'X';
}

// How many system-call filters it has; -1: unknown.
static int filters(const struct still *s, pid_t tid) {
    char path[32], text[4096];
    snprintf(path, sizeof path, "%d/status", tid);
    if (io_read_file(s->proc, path, text, sizeof text) <= 0) return -1;
    const char *at = strstr(text, "\nSeccomp_filters:");
    return at ? atoi(at + 17) : -1;
}

bool still_ground(int dir, const char *path, struct ground *out, bool *is_root) {
    struct statx st;
    if (statx(dir, path, AT_EMPTY_PATH | AT_NO_AUTOMOUNT, STATX_TYPE | STATX_MNT_ID, &st) || !(st.stx_mask & STATX_MNT_ID)) return false;
    *out = (struct ground){.mount = st.stx_mnt_id, .major = st.stx_dev_major, .minor = st.stx_dev_minor, .fd = -1};
    *is_root = st.stx_attributes & STATX_ATTR_MOUNT_ROOT;
    return true;
}

// ---- who there is ----

static bool is_known(const struct still *s, pid_t tid) {
    for (size_t i = 0; i < s->count; i++)
        if (s->standers[i].tid == tid) return true;
    return false;
}

static int add(struct still *s, pid_t tgid, pid_t tid) {
    if (is_known(s, tid)) return 0;
    if (s->count == s->room) {
        struct stander *more = s->room >= STANDERS_MAX ? NULL : realloc(s->standers, (s->room * 2 + 32) * sizeof *more);
        if (!more) {
            errno = E2BIG;
            return -1;
        }
        s->standers = more, s->room = s->room * 2 + 32;
    }
    s->standers[s->count++] = (struct stander){.tgid = tgid, .tid = tid};
    return 0;
}

static int add_threads(struct still *s, pid_t tgid) {
    char path[32];
    snprintf(path, sizeof path, "%d/task", tgid);
    DIR *d = open_dir(s->proc, path);
    int failed = 0;
    for (struct dirent *e; !failed && d && (e = readdir(d));)
        if (e->d_name[0] != '.') failed = add(s, tgid, atoi(e->d_name));
    if (d) closedir(d);
    return failed;
}

static int add_listed(struct still *s, char *text) {
    int failed = text ? 0 : -1;
    for (char *at = text, *end; text && !failed; at = end) {
        pid_t pid = (pid_t)strtol(at, &end, 10);
        if (end == at) break;
        if (pid > 0) failed = add_threads(s, pid);
    }
    free(text);
    return failed;
}

// Everybody is a child of somebody, and of the agent in the end: the kernel gives it whoever lost its parent.
static int add_children(struct still *s) {
    char path[64];
    snprintf(path, sizeof path, "%d/task/%d/children", s->agent, s->agent);
    if (add_listed(s, read_whole(s->proc, path))) return -1;
    for (size_t i = 0; i < s->count; i++) {
        snprintf(path, sizeof path, "%d/task/%d/children", s->standers[i].tgid, s->standers[i].tid);
        char *text = read_whole(s->proc, path);
        if (text && add_listed(s, text)) return -1;
    }
    return 0;
}

static int find_all(struct still *s) { return s->group >= 0 ? add_listed(s, read_whole(s->group, "cgroup.procs")) : add_children(s); }

// ---- stopping ----

static int freeze(struct still *s) {
    char text[128];
    uint64_t start = io_now_ns();
    if (io_read_file(s->group, "cgroup.freeze", text, sizeof text) > 0) s->was_frozen = text[0] == '1';
    s->is_frozen = true;
    if (!s->was_frozen && cg_box_freeze(s->id, true)) return -1;
    for (;;) {
        if (io_read_file(s->group, "cgroup.events", text, sizeof text) <= 0) return -1;
        if (strstr(text, "frozen 1") || strstr(text, "populated 0")) return 0;
        uint64_t took = io_now_ns() - start;
        if (took > FREEZE_PATIENCE_NS) {
            errno = ETIMEDOUT;
            return -1;
        }
        if (took > SPIN_NS) usleep(200);
        else sched_yield();
    }
}

// Whoever waits for the child of its vfork cannot be stopped before that child goes on. It stands still all the same, for the child does.
static bool waits_for_vfork(const struct still *s, pid_t tid) {
    char path[32], text[256];
    snprintf(path, sizeof path, "%d/syscall", tid);
    if (state_of(s, tid) != 'D' || io_read_file(s->proc, path, text, sizeof text) <= 0) return false;
    long number = strtol(text, NULL, 10);
#ifdef SYS_vfork
    if (number == SYS_vfork) return true;
#endif
    return number == SYS_clone || number == 435 /* clone3 */;
}

static int wait_for(struct still *s, struct stander *t, uint64_t until_ns) {
    inject_deadline(io_now_ns() + STOP_USUAL_NS);
    while (inject_wait(&t->held)) {
        if (errno == ETIMEDOUT && waits_for_vfork(s, t->tid)) return 0;
        if (errno != ETIMEDOUT || io_now_ns() > until_ns) return -1;
        inject_deadline(io_now_ns() + STOP_USUAL_NS);
    }
    return 0;
}

static int hold(struct still *s, struct stander *t) {
    uint64_t until_ns = io_now_ns() + TRACED_PATIENCE_NS;
    while (inject_hold(&t->held, t->tgid, t->tid)) {
        int error = errno;
        if (is_dead(s, t->tid)) return 0;
        // The child that took the last snapshot may still be on its way out, and lets go of whom it could not stop only then.
        if (error != EPERM || io_now_ns() > until_ns) {
            errno = error;
            return -1;
        }
        usleep(300);
    }
    t->is_held = true;
    return 0;
}

// Those not yet held, until they stand.
static int hold_new(struct still *s, size_t from, uint64_t until_ns) {
    for (size_t i = from; i < s->count; i++)
        if (hold(s, &s->standers[i])) return -1;
    for (size_t i = from; i < s->count; i++)
        if (s->standers[i].is_held && wait_for(s, &s->standers[i], until_ns)) return -1;
    return 0;
}

int still_hold(struct still *s) {
    if (s->is_held) return 0;
    uint64_t until_ns = io_now_ns() + HOLD_PATIENCE_NS;
    s->is_held = true;
    size_t before = 0;
    // In a frozen group nobody is born; otherwise until a whole round finds nobody new.
    do {
        if (hold_new(s, before, until_ns)) return -1;
        before = s->count;
        if (!s->freezes && find_all(s)) return -1;
    } while (s->count > before);
    if (s->is_frozen && cg_box_freeze(s->id, false)) return -1;
    s->is_frozen = false;
    return 0;
}

int still_begin(struct still *s) {
    s->since_ns = io_now_ns();
    if (s->freezes && freeze(s)) return -1;
    if (find_all(s)) return -1;
    return s->freezes ? 0 : still_hold(s);
}

// ---- what they hold ----

static const struct ground *ground_of(const struct still *s, uint64_t mount) {
    for (size_t i = 0; i < s->ground_count; i++)
        if (s->grounds[i].mount == mount) return &s->grounds[i];
    return NULL;
}

// inotify wd:1 ino:2 sdev:2d …: a watch stays with the old overlay, and would never report again.
static bool watches_ground(const struct still *s, const char *text) {
    for (const char *at = text; (at = strstr(at, "sdev:")); at += 5) {
        unsigned long dev = strtoul(at + 5, NULL, 16);
        for (size_t i = 0; i < s->ground_count; i++)
            if (dev == ((unsigned long)s->grounds[i].major << 20 | s->grounds[i].minor)) return true;
    }
    return false;
}

// A plain file that is open for reading goes on showing what it held. Anything else that is open would be cut off: a directory from what is made in
// it later, a pipe or a lock from whoever comes by its name, a watch from what happens.
static bool may_stay_open(const struct still *s, int fds, pid_t tid, const char *name) {
    struct statx st;
    char path[64], link[32];
    if (statx(fds, name, AT_NO_AUTOMOUNT, STATX_TYPE | STATX_MNT_ID, &st)) return errno == ENOENT;
    bool on_ground = ground_of(s, st.stx_mnt_id);
    if (on_ground && !S_ISREG(st.stx_mode)) return false;
    if (!on_ground) {
        if (st.stx_mode & S_IFMT) return true;
        ssize_t n = readlinkat(fds, name, link, sizeof link);
        if (n != 18 || memcmp(link, "anon_inode:inotify", 18)) return true;
    }
    snprintf(path, sizeof path, "%d/fdinfo/%d", tid, atoi(name));
    char *text = read_whole(s->proc, path);
    bool may = text && (on_ground ? !strstr(text, "\nlock:") : !watches_ground(s, text));
    free(text);
    return may;
}

static bool may_keep_files(const struct still *s, pid_t tid) {
    char path[32];
    snprintf(path, sizeof path, "%d/fd", tid);
    DIR *d = open_dir(s->proc, path);
    if (!d) return errno == ENOENT || is_dead(s, tid);
    bool may = true;
    for (struct dirent *e; may && (e = readdir(d));)
        if (e->d_name[0] != '.') may = may_stay_open(s, dirfd(d), tid, e->d_name);
    closedir(d);
    return may;
}

// Where it stands; *cwd is set when that lies on one of the overlays, and not at the root, which the change of root moves by itself.
static bool may_keep_place(const struct still *s, pid_t tid, char **cwd) {
    char path[32], text[PATH_MAX + 1];
    struct ground g;
    bool is_root;
    snprintf(path, sizeof path, "%d/root", tid);
    if (!still_ground(s->proc, path, &g, &is_root)) return is_dead(s, tid);
    if (g.mount != s->grounds[0].mount || !is_root) return false;
    snprintf(path, sizeof path, "%d/cwd", tid);
    if (!still_ground(s->proc, path, &g, &is_root)) return false;
    if (!ground_of(s, g.mount) || (g.mount == s->grounds[0].mount && is_root)) return true;
    ssize_t n = readlinkat(s->proc, path, text, sizeof text - 1);
    if (n <= 0 || n >= PATH_MAX || text[0] != '/') return false;
    text[n] = 0;
    if (n > 10 && !strcmp(text + n - 10, " (deleted)")) return false;
    *cwd = strdup(text);
    return *cwd;
}

static bool shares(pid_t a, pid_t b, int type) { return a != b && syscall(SYS_kcmp, a, b, type, 0, 0) == 0; }

// Sockets bound to a name are found by the file they made, which in a new overlay is another.
static bool has_named_sockets(const struct still *s) {
    char path[32];
    snprintf(path, sizeof path, "%d/net/unix", s->agent);
    char *text = read_whole(s->proc, path), *save;
    if (!text) return true;
    bool found = false;
    for (char *line = strtok_r(text, "\n", &save); line && !found; line = strtok_r(NULL, "\n", &save)) {
        const char *at = line;
        for (int field = 0; field < 7 && at; field++) {
            at = strchr(at, ' ');
            while (at && *at == ' ') at++;
        }
        if (!at || !*at || *at == '@' || !strcmp(at, "Path")) continue;
        found = strncmp(at, "/tmp/", 5) && strncmp(at, "/dev/shm/", 9);
    }
    free(text);
    return found;
}

bool still_is_movable(struct still *s) {
    char *cwd = NULL;
    bool may = !has_named_sockets(s) && may_keep_files(s, s->agent) && may_keep_place(s, s->agent, &cwd) && !cwd;
    free(cwd);
    int usual = filters(s, s->agent);
    for (size_t i = 0; may && i < s->count; i++) {
        struct stander *t = &s->standers[i];
        if (!shares(t->tid, t->tgid, KCMP_FILES_TYPE)) may = may_keep_files(s, t->tid);
        if (!may || shares(t->tid, t->tgid, KCMP_FS_TYPE)) continue;
        may = may_keep_place(s, t->tid, &t->cwd);
        // A filter of its own might end it for a call it never made.
        if (may && t->cwd) may = usual >= 0 && filters(s, t->tid) == usual;
    }
    return may;
}

bool still_is_in_place(struct still *s, uint64_t root) {
    for (size_t i = 0; i <= s->count; i++) {
        pid_t tid = i < s->count ? s->standers[i].tid : s->agent;
        struct ground g;
        bool is_root;
        char path[32];
        snprintf(path, sizeof path, "%d/root", tid);
        if (still_ground(s->proc, path, &g, &is_root) ? g.mount != root || !is_root : !is_dead(s, tid)) return false;
    }
    return true;
}

// ---- sending, and letting go ----

int still_send(struct still *s) {
    if (s->is_held) inject_deadline(io_now_ns() + HOLD_PATIENCE_NS);
    for (size_t i = 0; i < s->count; i++) {
        struct stander *t = &s->standers[i];
        if (t->cwd && t->is_held && !t->held.stopped && !t->held.gone) {
            errno = EBUSY;
            return -1;
        }
        if (t->cwd && t->is_held && inject_chdir(&t->held, s->proc, t->cwd) && !t->held.gone) return -1;
    }
    return 0;
}

bool still_end(struct still *s) {
    bool well = true;
    if (s->is_held) inject_deadline(io_now_ns() + HOLD_PATIENCE_NS);
    if (s->is_held && s->was_frozen && !s->is_frozen) well = !cg_box_freeze(s->id, true);
    for (size_t i = 0; i < s->count; i++) {
        struct stander *t = &s->standers[i];
        if (t->is_held) well &= inject_release(&t->held);
        free(t->cwd);
    }
    inject_deadline(0);
    if (s->is_frozen && !s->was_frozen && cg_box_freeze(s->id, false)) well = false;
    free(s->standers);
    s->standers = NULL;
    s->count = s->room = 0;
    s->is_held = s->is_frozen = false;
    return well;
}
