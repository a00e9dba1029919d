// Moving what rename cannot: to another file system, and directories of an overlay's lower layers, where the kernel answers EXDEV.
//
// The tree is copied beside its new place under a name of its own, renamed into place when it is whole, and only then removed from
// the old one: whoever looks sees it whole in one place or in both, and a move that fails leaves the old one as it was.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "beneath.h"
#include "io.h"
#include "job.h"
#include "walk.h"

#define COPY_PIECE (1u << 20)

struct moving {
    struct job job;
    char *from, *to, *beside;   // `beside`: the copy until it is whole
    bool overwrite, walking, removing, placed;
    struct walk walk;
    int root;                   // of the copy, when it is a directory
    int dir;                    // the directory in it that entries go to now
    char *dir_path;
    int in, out;                // the file being copied
    struct stat st;
};

// Removes a tree at once: what is left of a copy that failed.
static void discard(const char *path) {
    if (unlink(path) == 0) return;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct walk w;
    if (fd < 0 || walk_open(&w, fd)) return;
    for (enum walk_event e; (e = walk_next(&w)) != WALK_END;) {
        if (e == WALK_LEAVE) unlinkat(w.dir, w.name, AT_REMOVEDIR);
        else if (e == WALK_ENTRY && w.type == DT_DIR) walk_enter(&w);
        else if (e == WALK_ENTRY) unlinkat(w.dir, w.name, 0);
    }
    walk_close(&w);
    rmdir(path);
}

static void move_dispose(struct job *j) {
    struct moving *m = (struct moving *)j;
    if (m->walking) walk_close(&m->walk);
    io_close(&m->root);
    io_close(&m->dir);
    io_close(&m->in);
    io_close(&m->out);
    if (m->beside && !m->placed) discard(m->beside);
    free(m->from);
    free(m->to);
    free(m->beside);
    free(m->dir_path);
    free(m);
}

// Gives the copy the owner (where allowed), mode and times of the original.
static void take_after(int fd, const struct stat *st) {
    struct timespec times[2] = {st->st_atim, st->st_mtim};
    if (fchown(fd, st->st_uid, st->st_gid) == 0 || fchmod(fd, st->st_mode & 0777) == 0) fchmod(fd, st->st_mode & 07777);
    futimens(fd, times);
}

static int begin_copy(struct moving *m, int from_dir, const char *from, int to_dir, const char *to) {
    m->in = open_regular(from_dir, from, O_NOFOLLOW, &m->st);
    if (m->in < 0) return errno;
    m->out = openat(to_dir, to, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, m->st.st_mode & 0700);
    return m->out < 0 ? errno : 0;
}

// One piece of the file; 0 or errno.
static int copy_piece(struct moving *m) {
    static char buffer[COPY_PIECE];
    ssize_t n = read_full(m->in, buffer, sizeof buffer);
    int error = n < 0 ? errno : write_full(m->out, buffer, (size_t)n);
    if (error || n == (ssize_t)sizeof buffer) return error;
    take_after(m->out, &m->st);
    error = close(m->out) ? errno : 0;
    m->out = -1;
    io_close(&m->in);
    return error;
}

static int copy_link(int from_dir, const char *from, int to_dir, const char *to) {
    char target[PATH_MAX];
    ssize_t n = readlinkat(from_dir, from, target, sizeof target - 1);
    if (n < 0) return errno;
    target[n] = 0;
    return symlinkat(target, to_dir, to) ? errno : 0;
}

static int copy_special(int from_dir, const char *from, int to_dir, const char *to) {
    struct stat st;
    if (fstatat(from_dir, from, &st, AT_SYMLINK_NOFOLLOW)) return errno;
    return mknodat(to_dir, to, st.st_mode, st.st_rdev) ? errno : 0;
}

static int copy_other(uint8_t type, int from_dir, const char *from, int to_dir, const char *to) {
    return type == DT_LNK ? copy_link(from_dir, from, to_dir, to) : copy_special(from_dir, from, to_dir, to);
}

// Opens the directory of the copy that the walk's entry belongs into; 0 or errno.
static int enter_target(struct moving *m) {
    const char *slash = memrchr(m->walk.path, '/', m->walk.path_size);
    size_t size = slash ? (size_t)(slash - m->walk.path) : 0;
    if (m->dir_path && strlen(m->dir_path) == size && memcmp(m->dir_path, m->walk.path, size) == 0) return 0;
    free(m->dir_path);
    io_close(&m->dir);
    m->dir_path = strndup(m->walk.path, size);
    if (!m->dir_path) return ENOMEM;
    m->dir = size ? beneath_dir(m->root, m->dir_path, false) : fcntl(m->root, F_DUPFD_CLOEXEC, 3);
    return m->dir < 0 ? errno : 0;
}

static int copy_entry(struct moving *m, enum walk_event event) {
    struct walk *w = &m->walk;
    if (event == WALK_ERROR) return w->error;
    int error = enter_target(m);
    if (error) return error;
    if (event == WALK_LEAVE) {  // its mode last: it may forbid what went before
        struct stat st;
        if (fstatat(w->dir, w->name, &st, AT_SYMLINK_NOFOLLOW)) return errno;
        autoclose int fd = openat(m->dir, w->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0) return errno;
        take_after(fd, &st);
        return 0;
    }
    if (w->type == DT_REG) return begin_copy(m, w->dir, w->name, m->dir, w->name);
    if (w->type != DT_DIR) return copy_other(w->type, w->dir, w->name, m->dir, w->name);
    return mkdirat(m->dir, w->name, 0700) ? errno : walk_enter(w);
}

static int remove_entry(struct moving *m, enum walk_event event) {
    struct walk *w = &m->walk;
    if (event == WALK_ERROR) return w->error;
    if (event == WALK_ENTRY && w->type == DT_DIR) return walk_enter(w);
    return unlinkat(w->dir, w->name, event == WALK_LEAVE ? AT_REMOVEDIR : 0) && errno != ENOENT ? errno : 0;
}

static int walk_source(struct moving *m) {
    int fd = open(m->from, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno;
    if (!m->removing && fstat(fd, &m->st)) {
        close(fd);
        return errno;
    }
    int error = walk_open(&m->walk, fd);
    m->walking = !error;
    return error;
}

// The copy is whole: into its place, and on to removing the original.
static int place(struct moving *m) {
    if (m->root >= 0) {
        struct stat st;
        if (lstat(m->from, &st) == 0) take_after(m->root, &st);
    }
    if (renameat2(AT_FDCWD, m->beside, AT_FDCWD, m->to, m->overwrite ? 0 : RENAME_NOREPLACE)) return errno;
    m->placed = m->removing = true;
    return m->root >= 0 ? walk_source(m) : 0;
}

static enum step move_failed(struct moving *m, int error) {
    fail(m->job.a, m->job.id, E_OS, error, "%s %.200s to %.200s: %s", m->placed ? "copied, but cannot remove the original," : "move", m->from, m->to, strerrordesc_np(error));
    return STEP_END;
}

static enum step move_end(struct moving *m) {
    if (unlink(m->from) && (errno != EISDIR || rmdir(m->from))) return move_failed(m, errno);
    done_empty(m->job.a, m->job.id);
    return STEP_END;
}

static enum step move_step(struct job *j, uint64_t until) {
    struct moving *m = (struct moving *)j;
    for (uint32_t n = 1;; n++) {
        int error = 0;
        if (m->in >= 0) {
            error = copy_piece(m);
        } else {
            enum walk_event event = m->walking ? walk_next(&m->walk) : WALK_END;
            if (event != WALK_END) error = m->removing ? remove_entry(m, event) : copy_entry(m, event);
            else if (m->removing) return move_end(m);
            else {
                if (m->walking) walk_close(&m->walk), m->walking = false;
                error = place(m);
            }
        }
        if (error) return move_failed(m, error);
        if ((m->in >= 0 || n % 16 == 0) && io_now_ns() >= until) return STEP_MORE;
    }
}

static char *beside_of(const char *to) {
    size_t size = strlen(to);
    while (size > 1 && to[size - 1] == '/') size--;
    const char *slash = memrchr(to, '/', size);
    static unsigned counter;
    char *path;
    return asprintf(&path, "%.*s.untax-move-%d-%u", slash ? (int)(slash - to) + 1 : 0, to, (int)getpid(), counter++) < 0 ? NULL : path;
}

void move_by_copy(struct actions *a, const struct frame *f, const char *from, const char *to, bool overwrite) {
    struct moving *m = job_new(a, f, sizeof *m);
    if (!m) return;
    m->root = m->dir = m->in = m->out = -1;
    m->overwrite = overwrite;
    m->job.step = move_step, m->job.dispose = move_dispose;
    m->from = strdup(from), m->to = strdup(to), m->beside = beside_of(to);
    struct stat st;
    int error = !m->from || !m->to || !m->beside ? ENOMEM : lstat(from, &st) ? errno : 0;
    if (!error && !overwrite && faccessat(AT_FDCWD, to, F_OK, AT_SYMLINK_NOFOLLOW) == 0) error = EEXIST;
    if (!error && S_ISREG(st.st_mode)) {
        error = begin_copy(m, AT_FDCWD, from, AT_FDCWD, m->beside);
    } else if (!error && !S_ISDIR(st.st_mode)) {
        error = copy_other(IFTODT(st.st_mode), AT_FDCWD, from, AT_FDCWD, m->beside);
    } else if (!error) {
        if (mkdir(m->beside, 0700) || (m->root = open(m->beside, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) < 0) error = errno;
        if (!error) error = walk_source(m);
    }
    if (error) {
        move_failed(m, error);
        move_dispose(&m->job);
        return;
    }
    job_start(&m->job);
}
