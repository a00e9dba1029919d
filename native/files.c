// Single files and directories: read, write, list, stat, mkdir, move. Links are followed as by any program: the kernel's root is the limit.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io.h"
#include "job.h"

int open_regular(int dir, const char *path, int flags, struct stat *st) {
    // O_NONBLOCK: a FIFO without a writer must not hold us up. It means nothing for regular files.
    int fd = openat(dir, path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | flags);
    if (fd < 0) return -1;
    int error = fstat(fd, st) ? errno : S_ISREG(st->st_mode) ? 0 : S_ISDIR(st->st_mode) ? EISDIR : ENXIO;
    if (!error) return fd;
    close(fd);
    errno = error;
    return -1;
}

ssize_t read_full(int fd, void *to, size_t size) {
    size_t have = 0;
    while (have < size) {
        ssize_t n = read(fd, (char *)to + have, size - have);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -1;
        if (!n) break;
        have += (size_t)n;
    }
    return (ssize_t)have;
}

int write_full(int fd, const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t n = write(fd, at, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno;
        at += n, size -= (size_t)n;
    }
    return 0;
}

int make_parents(const char *path, mode_t mode) {
    char part[PATH_ROOM];
    size_t size = strlen(path);
    if (size >= sizeof part) return ENAMETOOLONG;
    memcpy(part, path, size + 1);
    // Upwards to what exists, then down again: most often only the last is missing.
    size_t end = size;
    for (;;) {
        while (end && part[end - 1] == '/') end--;
        while (end && part[end - 1] != '/') end--;
        while (end > 1 && part[end - 1] == '/') end--;
        if (!end) return 0;
        part[end] = 0;
        if (mkdir(part, mode) == 0) break;
        if (errno == EEXIST) break;
        if (errno != ENOENT) return errno;
    }
    for (;;) {
        part[end] = path[end];
        size_t next = end;
        while (path[next] == '/') next++;
        while (path[next] && path[next] != '/') next++;
        size_t after = next;
        while (path[after] == '/') after++;
        if (!path[after]) return 0;  // the last component is the caller's
        memcpy(part, path, next);
        part[next] = 0;
        if (mkdir(part, mode) && errno != EEXIST) return errno;
        end = next;
    }
}

// ---- read ----

struct reading {
    struct job job;
    int fd;
    bool all;               // more than the limit is an error
    uint64_t limit, left;   // what may come at most; what of it has not come yet
    uint64_t expect;        // what fstat promised and has not come yet
    struct stat st;
};

static void read_too_large(struct actions *a, uint32_t id, uint64_t limit) {
    fail(a, id, E_TOO_LARGE, EFBIG, "more than %llu bytes remain to be read", (unsigned long long)limit);
}

static void read_dispose(struct job *j) {
    io_close(&((struct reading *)j)->fd);
    free(j);
}

// One frame's worth: an OUT, or the DONE when the file, the limit or the promised size has been reached.
static enum step read_piece(struct reading *r) {
    struct actions *a = r->job.a;
    struct wr *out = a->out;
    // A file that states its size is read in one call; one that states none (procfs) until it ends.
    uint64_t want = r->expect ? r->expect : 4096;
    if (want > r->left) want = r->left;
    if (want > DATA_MAX) want = DATA_MAX;
    size_t begun = frame_begin(out, r->job.id, K_DONE), head = 8 + 4 + 8 + 4;
    uint8_t *to = wr_reserve(out, head + want);
    ssize_t n = to ? read_full(r->fd, to + head, want) : (errno = ENOMEM, -1);
    if (n < 0) {
        int error = errno;
        out->size = begun;
        fail_os(a, r->job.id, error, "read", NULL);
        return STEP_END;
    }
    r->left -= (uint64_t)n;
    bool promised = r->expect != 0;
    r->expect -= (uint64_t)n < r->expect ? (uint64_t)n : r->expect;
    bool end = (uint64_t)n < want || !r->left || (promised && !r->expect);
    if (end && r->all && !r->left && (uint64_t)n == want && !promised) {
        char more;
        if (read_full(r->fd, &more, 1) == 1) {
            out->size = begun;
            read_too_large(a, r->job.id, r->limit);
            return STEP_END;
        }
    }
    if (end) {
        wr_u64(out, (uint64_t)r->st.st_size);
        wr_u32(out, r->st.st_mode & 07777);
        wr_u64(out, (uint64_t)mtime_ns(&r->st));
        wr_u32(out, (uint32_t)n);
        wr_commit(out, (size_t)n);
    } else {
        to[-4] = K_OUT;  // the kind, in the header just written
        to[0] = 1;
        memmove(to + 1, to + head, (size_t)n);
        wr_commit(out, 1 + (size_t)n);
    }
    frame_end(out, begun);
    return end ? STEP_END : STEP_MORE;
}

static enum step read_step(struct job *j, uint64_t until) {
    enum step how;
    do how = read_piece((struct reading *)j);
    while (how == STEP_MORE && j->a->out->size < OUT_FULL && io_now_ns() < until);
    return how;
}

void action_read(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct rd *r = &g.payload;
    struct span path = rd_name(r);
    uint64_t offset = rd_u64(r), limit = rd_u64(r);
    uint8_t flags = rd_u8(r);
    if (malformed(a, &g)) return;

    char room[PATH_ROOM];
    struct reading now = {.job = {.a = a, .id = f->id}, .limit = limit, .left = limit, .all = flags & 1};
    now.fd = open_regular(AT_FDCWD, path_of(a, path, room), 0, &now.st);
    if (now.fd < 0) {
        fail_os(a, f->id, errno, "read", room);
        return;
    }
    uint64_t size = (uint64_t)now.st.st_size;
    now.expect = size > offset ? size - offset : 0;
    if (now.all && now.expect > limit) {
        close(now.fd);
        read_too_large(a, f->id, limit);
        return;
    }
    bool past = size && !now.expect;  // beyond the end of a file that states its size
    if (past) now.left = 0;
    if (offset && !past && (offset > INT64_MAX || lseek(now.fd, (off_t)offset, SEEK_SET) < 0)) {
        fail_os(a, f->id, offset > INT64_MAX ? EINVAL : errno, "seek", room);
        close(now.fd);
        return;
    }
    if ((now.expect <= DATA_MAX && now.expect) || past) {  // the common case: no job, nothing allocated
        enum step how = read_piece(&now);
        if (how == STEP_END) {
            close(now.fd);
            return;
        }
    }
    struct reading *job = job_new(a, f, sizeof *job);
    if (!job) {
        close(now.fd);
        return;
    }
    now.job = job->job;
    *job = now;
    job->job.step = read_step;
    job->job.dispose = read_dispose;
    job_start(&job->job);
}

// ---- write ----

enum write_flags { WRITE_APPEND = 1, WRITE_NEW = 2, WRITE_PARENTS = 4, WRITE_MORE = 8 };

struct writing {
    struct job job;
    int fd;
    uint64_t written;
};

static void write_done(struct actions *a, uint32_t id, uint64_t written) {
    size_t begun = frame_begin(a->out, id, K_DONE);
    wr_u64(a->out, written);
    frame_end(a->out, begun);
}

static void write_dispose(struct job *j) {
    io_close(&((struct writing *)j)->fd);
    free(j);
}

static enum step write_wait(struct job *j, uint64_t until) {
    (void)j, (void)until;
    return STEP_WAIT;
}

static enum step write_data(struct job *j, struct span data, bool eof) {
    struct writing *w = (struct writing *)j;
    int error = write_full(w->fd, data.at, data.size);
    w->written += data.size;
    if (!error && !eof) return STEP_WAIT;
    int fd = w->fd;
    w->fd = -1;
    if (close(fd) && !error) error = errno;  // network and quota file systems report here
    if (error) fail_os(j->a, j->id, error, "write", NULL);
    else write_done(j->a, j->id, w->written);
    return STEP_END;
}

// Opens for writing what is, or becomes, a regular file; -1 with errno.
static int open_writable(const char *path, uint32_t mode, uint8_t flags) {
    int how = O_WRONLY | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
    how |= flags & WRITE_APPEND ? O_APPEND : O_TRUNC;
    if (flags & WRITE_NEW) how |= O_EXCL;
    mode_t create = mode ? mode & 07777 : 0666;
    int fd = open(path, how, create);
    if (fd < 0 && errno == ENOENT && flags & WRITE_PARENTS) {
        int error = make_parents(path, 0777);
        if (error) {
            errno = error;
            return -1;
        }
        fd = open(path, how, create);
    }
    if (fd < 0) return -1;
    struct stat st;
    int error = fstat(fd, &st) ? errno : S_ISREG(st.st_mode) ? 0 : ENXIO;
    if (!error && mode && (st.st_mode & 07777) != create && fchmod(fd, create)) error = errno;
    if (!error) return fd;
    close(fd);
    errno = error;
    return -1;
}

void action_write(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct rd *r = &g.payload;
    struct span path = rd_name(r);
    uint32_t mode = rd_u32(r);
    uint8_t flags = rd_u8(r);
    struct span data = rd_bytes(r);
    if (malformed(a, &g)) return;

    char room[PATH_ROOM];
    int fd = open_writable(path_of(a, path, room), mode, flags);
    if (fd < 0) {
        fail_os(a, f->id, errno, "write", room);
        return;
    }
    int error = write_full(fd, data.at, data.size);
    if (!error && flags & WRITE_MORE) {
        struct writing *job = job_new(a, f, sizeof *job);
        if (job) {
            job->fd = fd, job->written = data.size;
            job->job.step = write_wait, job->job.data = write_data, job->job.dispose = write_dispose;
            job_start(&job->job);
            return;
        }
        close(fd);
        return;
    }
    if (close(fd) && !error) error = errno;
    if (error) fail_os(a, f->id, error, "write", room);
    else write_done(a, f->id, data.size);
}

// ---- list and stat ----

static char type_letter(mode_t mode) {
    switch (mode & S_IFMT) {
        case S_IFREG: return 'f';
        case S_IFDIR: return 'd';
        case S_IFLNK: return 'l';
        case S_IFIFO: return 'p';
        case S_IFSOCK: return 's';
        case S_IFCHR: return 'c';
        case S_IFBLK: return 'b';
        default: return '?';
    }
}

void wr_entry(struct wr *w, const char *name, const struct stat *st, const char *target, size_t target_size) {
    wr_bytes(w, name, strlen(name));
    wr_u8(w, (uint8_t)type_letter(st->st_mode));
    wr_u32(w, st->st_mode & 07777);
    wr_u32(w, st->st_uid);
    wr_u32(w, st->st_gid);
    wr_u64(w, (uint64_t)st->st_size);
    wr_u64(w, (uint64_t)mtime_ns(st));
    wr_bytes(w, target, target_size);
}

// Appends the entry for `path` under `name`; 0 or errno.
static int add_entry(struct wr *w, int dir, const char *path, const char *name, int flags) {
    struct stat st;
    char target[PATH_MAX];
    ssize_t size = 0;
    if (fstatat(dir, path, &st, flags)) return errno;
    if (S_ISLNK(st.st_mode) && (size = readlinkat(dir, path, target, sizeof target)) < 0) return errno;
    wr_entry(w, name, &st, target, (size_t)size);
    return 0;
}

struct listing {
    struct job job;
    DIR *dir;
    uint32_t left;      // entries that may still be given
    bool bounded;
    uint32_t count;     // in `items`
    struct wr items;
};

static void list_dispose(struct job *j) {
    struct listing *l = (struct listing *)j;
    closedir(l->dir);
    wr_free(&l->items);
    free(l);
}

static void list_flush(struct listing *l, uint8_t kind, uint8_t more) {
    struct wr *out = l->job.a->out;
    size_t begun = frame_begin(out, l->job.id, kind);
    if (kind == K_DONE) wr_u8(out, more);
    wr_u32(out, l->count);
    wr_raw(out, l->items.data, l->items.size);
    frame_end(out, begun);
    l->count = 0;
    l->items.size = 0;
}

static enum step list_step(struct job *j, uint64_t until) {
    struct listing *l = (struct listing *)j;
    for (uint32_t n = 1;; n++) {
        errno = 0;
        const struct dirent *e = readdir(l->dir);
        if (!e && errno) {
            fail_os(j->a, j->id, errno, "list", NULL);
            return STEP_END;
        }
        if (e && (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)) continue;
        if (!e || (l->bounded && !l->left)) {
            list_flush(l, K_DONE, e != NULL);
            return STEP_END;
        }
        if (add_entry(&l->items, dirfd(l->dir), e->d_name, e->d_name, AT_SYMLINK_NOFOLLOW)) continue;  // it went while we looked
        if (l->items.failed) {
            fail_os(j->a, j->id, ENOMEM, "list", NULL);
            return STEP_END;
        }
        l->count++, l->left--;
        if (l->items.size >= ITEMS_FRAME) list_flush(l, K_ITEMS, 0);
        if (n % 64 == 0 && (io_now_ns() >= until || j->a->out->size >= OUT_FULL)) return STEP_MORE;
    }
}

void action_list(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct span path = rd_name(&g.payload);
    uint32_t most = rd_u32(&g.payload);
    if (malformed(a, &g)) return;
    char room[PATH_ROOM];
    int fd = open(path_of(a, path, room), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir) {
        fail_os(a, f->id, errno, "list", room);
        io_close(&fd);
        return;
    }
    struct listing *l = job_new(a, f, sizeof *l);
    if (!l) {
        closedir(dir);
        return;
    }
    l->dir = dir, l->left = most, l->bounded = most != 0;
    l->job.step = list_step, l->job.dispose = list_dispose;
    job_start(&l->job);
}

void action_stat(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct span path = rd_name(&g.payload);
    uint8_t follow = rd_u8(&g.payload);
    if (malformed(a, &g)) return;
    char room[PATH_ROOM];
    path_of(a, path, room);
    const char *slash = strrchr(room, '/');
    size_t begun = frame_begin(a->out, f->id, K_DONE);
    int error = add_entry(a->out, AT_FDCWD, room, slash && slash[1] ? slash + 1 : room, follow ? 0 : AT_SYMLINK_NOFOLLOW);
    if (error) {
        a->out->size = begun;
        fail_os(a, f->id, error, "stat", room);
    } else {
        frame_end(a->out, begun);
    }
}

// ---- mkdir and move ----

void action_mkdir(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct span path = rd_name(&g.payload);
    uint32_t mode = rd_u32(&g.payload);
    uint8_t parents = rd_u8(&g.payload);
    if (malformed(a, &g)) return;
    char room[PATH_ROOM];
    path_of(a, path, room);
    mode_t create = mode ? mode & 07777 : 0777;
    int error = mkdir(room, create) ? errno : 0;
    if (error == ENOENT && parents && !(error = make_parents(room, 0777))) error = mkdir(room, create) ? errno : 0;
    bool made = !error;
    struct stat st;
    if (error == EEXIST && parents && stat(room, &st) == 0 && S_ISDIR(st.st_mode)) error = 0;
    if (made && mode && (mode & (a->umask | 07000)) && chmod(room, create)) error = errno;
    if (error) fail_os(a, f->id, error, "mkdir", room);
    else done_empty(a, f->id);
}

void action_move(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct span from = rd_name(&g.payload), to = rd_name(&g.payload);
    uint8_t overwrite = rd_u8(&g.payload);
    if (malformed(a, &g)) return;
    char old[PATH_ROOM], new[PATH_ROOM];
    path_of(a, from, old);
    path_of(a, to, new);
    int error = renameat2(AT_FDCWD, old, AT_FDCWD, new, overwrite ? 0 : RENAME_NOREPLACE) ? errno : 0;
    if (error == EINVAL && !overwrite) {  // a file system without RENAME_NOREPLACE, or a directory into itself
        struct stat st;
        if (lstat(new, &st) == 0) error = EEXIST;
        else error = rename(old, new) ? errno : 0;
    }
    if (error == EXDEV) move_by_copy(a, f, old, new, overwrite);
    else if (error) fail(a, f->id, E_OS, error, "move %.200s to %.200s: %s", old, new, strerrordesc_np(error));
    else done_empty(a, f->id);
}
