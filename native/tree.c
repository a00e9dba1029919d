// Trees as tar streams. Reading takes ustar, pax and GNU long names, writing gives ustar and pax.
//
// What arrives is hostile: it may only make files, directories and links below its destination, never writes through a link, and is
// stopped by the numbers it declares before anything is written for them.
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

#define BLOCK 512u
#define META_MAX (1u << 20)     // one pax header or long name
#define DIRS 32                 // directories kept open while a tree is unpacked

// Offsets of the fields in a header.
enum { AT_NAME = 0, AT_MODE = 100, AT_UID = 108, AT_GID = 116, AT_SIZE = 124, AT_MTIME = 136, AT_SUM = 148, AT_TYPE = 156, AT_LINK = 157, AT_MAGIC = 257, AT_PREFIX = 345 };

static void tree_done(struct actions *a, uint32_t id, uint64_t entries, uint64_t bytes) {
    size_t begun = frame_begin(a->out, id, K_DONE);
    wr_u64(a->out, entries);
    wr_u64(a->out, bytes);
    frame_end(a->out, begun);
}

// ---- upload ----

struct open_dir {
    char *path;
    int fd;
    uint64_t used;
};

struct late_mode {  // of a directory that could not be filled if it had its mode from the start
    struct late_mode *next;
    mode_t mode;
    char path[];
};

enum upload_state { IN_HEADER, IN_META, IN_BODY, IN_PADDING, AT_END };

struct upload {
    struct job job;
    int root, fd;                       // destination; the file being written
    uint64_t max_bytes, max_entries, entries, bytes;
    enum upload_state state;
    uint8_t block[BLOCK];
    uint32_t have;                      // of the block
    uint64_t left;                      // of body or meta
    uint32_t padding;
    char meta_type;
    struct wr meta;
    // what a pax header or long name said about the next entry
    struct wr path, link;
    bool has_size, has_mtime;
    uint64_t size;
    struct timespec mtime;
    struct open_dir dirs[DIRS];
    uint64_t clock;
    struct late_mode *late;
};

static void upload_dispose(struct job *j) {
    struct upload *u = (struct upload *)j;
    io_close(&u->fd);
    io_close(&u->root);
    for (size_t i = 0; i < DIRS; i++)
        if (u->dirs[i].path) close(u->dirs[i].fd), free(u->dirs[i].path);
    for (struct late_mode *l = u->late, *next; l; l = next) next = l->next, free(l);
    wr_free(&u->meta);
    wr_free(&u->path);
    wr_free(&u->link);
    free(u);
}

static enum step reject(struct upload *u, const char *why, const char *name) {
    fail(u->job.a, u->job.id, E_REJECTED, 0, "archive entry %.300s: %s", name, why);
    return STEP_END;
}

static enum step unpack_failed(struct upload *u, int error, const char *step, const char *name) {
    if (error == ELOOP) return reject(u, "leads through a link", name);
    fail_os(u->job.a, u->job.id, error, step, name);
    return STEP_END;
}

// Octal, or base 256 when the top bit is set; false when it is neither or does not fit 63 bits.
static bool number(const uint8_t *field, size_t size, uint64_t *out) {
    uint64_t v = 0;
    if (field[0] & 0x80) {
        if (field[0] != 0x80) return false;  // negative, or more than 63 bits
        for (size_t i = 1; i < size; i++) {
            if (v >> 55) return false;
            v = v << 8 | field[i];
        }
        *out = v;
        return true;
    }
    size_t i = 0;
    while (i < size && field[i] == ' ') i++;
    for (; i < size && field[i] >= '0' && field[i] <= '7'; i++) {
        if (v >> 60) return false;
        v = v << 3 | (uint64_t)(field[i] - '0');
    }
    *out = v;
    return i == size || field[i] == 0 || field[i] == ' ';
}

static bool sum_matches(const uint8_t *block) {
    uint64_t told, sum = 0, signed_sum = 0;
    if (!number(block + AT_SUM, 8, &told)) return false;
    for (size_t i = 0; i < BLOCK; i++) {
        uint8_t b = i >= AT_SUM && i < AT_SUM + 8 ? ' ' : block[i];
        sum += b;
        signed_sum += (uint64_t)(int64_t)(int8_t)b;
    }
    return told == sum || told == signed_sum;
}

// A decimal number with an optional fraction, as pax writes times; false when it is not one.
static bool decimal_time(const char *at, const char *end, struct timespec *out) {
    bool minus = at < end && *at == '-';
    if (minus) at++;
    int64_t s = 0;
    long ns = 0, unit = 100000000;
    if (at == end) return false;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        if (s > INT64_MAX / 20) return false;
        s = s * 10 + (*at - '0');
    }
    if (at < end && *at == '.')
        for (at++; at < end && *at >= '0' && *at <= '9'; at++) ns += unit * (*at - '0'), unit /= 10;
    if (at != end) return false;
    *out = minus ? (struct timespec){-s - (ns != 0), ns ? 1000000000 - ns : 0} : (struct timespec){s, ns};
    return true;
}

static bool keyword(const char *at, const char *end, const char *word) {
    size_t size = strlen(word);
    return (size_t)(end - at) == size && memcmp(at, word, size) == 0;
}

// Takes over what a pax header says; false when it is malformed or asks for what we do not have (sparse files).
static bool pax_records(struct upload *u) {
    const char *at = (const char *)u->meta.data, *end = at + u->meta.size;
    while (at < end && *at) {
        uint64_t length = 0;
        const char *p = at;
        for (; p < end && *p >= '0' && *p <= '9' && length <= META_MAX; p++) length = length * 10 + (uint64_t)(*p - '0');
        if (p == end || *p != ' ' || length > (uint64_t)(end - at) || length < (uint64_t)(p - at) + 3) return false;
        const char *stop = at + length - 1, *key = p + 1, *eq = memchr(key, '=', (size_t)(stop - key));
        if (*stop != '\n' || !eq) return false;
        const char *value = eq + 1;
        if (keyword(key, eq, "path")) {
            u->path.size = 0;
            wr_raw(&u->path, value, (size_t)(stop - value));
        } else if (keyword(key, eq, "linkpath")) {
            u->link.size = 0;
            wr_raw(&u->link, value, (size_t)(stop - value));
        } else if (keyword(key, eq, "size")) {
            u->size = 0;
            if (value == stop) return false;
            for (; value < stop; value++) {
                if (*value < '0' || *value > '9' || u->size > INT64_MAX / 20) return false;
                u->size = u->size * 10 + (uint64_t)(*value - '0');
            }
            u->has_size = true;
        } else if (keyword(key, eq, "mtime")) {
            if (!decimal_time(value, stop, &u->mtime)) return false;
            u->has_mtime = true;
        } else if (eq - key > 11 && memcmp(key, "GNU.sparse.", 11) == 0) {
            return false;
        }
        at = stop + 1;
    }
    return true;
}

// The directory `path` (cleaned) below the destination, made where missing. It stays open for the entries to come; -1 with errno.
static int upload_dir(struct upload *u, const char *path) {
    if (!*path) return u->root;
    struct open_dir *oldest = &u->dirs[0];
    for (size_t i = 0; i < DIRS; i++) {
        struct open_dir *d = &u->dirs[i];
        if (d->path && strcmp(d->path, path) == 0) {
            d->used = ++u->clock;
            return d->fd;
        }
        if (!d->path) d->used = 0;
        if (d->used < oldest->used) oldest = d;
    }
    int fd = beneath_dir(u->root, path, true);
    if (fd < 0) return -1;
    char *copy = strdup(path);
    if (!copy) {
        close(fd);
        errno = ENOMEM;
        return -1;
    }
    if (oldest->path) close(oldest->fd), free(oldest->path);
    *oldest = (struct open_dir){copy, fd, ++u->clock};
    return fd;
}

// The directory that the cleaned `path` is in, and its last component.
static int upload_parent(struct upload *u, char *path, const char **name) {
    char *slash = strrchr(path, '/');
    *name = slash ? slash + 1 : path;
    if (!slash) return u->root;
    *slash = 0;
    int fd = upload_dir(u, path);
    *slash = '/';
    return fd;
}

static enum step unpack_file(struct upload *u, char *path, mode_t mode, uint64_t size) {
    const char *name;
    int dir = upload_parent(u, path, &name);
    if (dir < 0) return unpack_failed(u, errno, "make directories for", path);
    int how = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;  // O_EXCL: whatever is there, a link above all, is not written through
    u->fd = openat(dir, name, how, mode);
    if (u->fd < 0 && errno == EEXIST && unlinkat(dir, name, 0) == 0) u->fd = openat(dir, name, how, mode);
    if (u->fd < 0) return unpack_failed(u, errno, "create", path);
    if (mode & u->job.a->umask && fchmod(u->fd, mode)) return unpack_failed(u, errno, "chmod", path);
    u->bytes += size;
    return STEP_MORE;
}

static enum step unpack_directory(struct upload *u, char *path, mode_t mode) {
    const char *name;
    bool awkward = (mode & 0700) != 0700;
    mode_t now = mode | 0700;
    if (*path) {
        int dir = upload_parent(u, path, &name);
        if (dir < 0) return unpack_failed(u, errno, "make directories for", path);
        if (mkdirat(dir, name, now) == 0) {
            if (now & u->job.a->umask && fchmodat(dir, name, now, 0)) return unpack_failed(u, errno, "chmod", path);
        } else if (errno == EEXIST) {
            struct stat st;
            if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW)) return unpack_failed(u, errno, "look at", path);
            if (!S_ISDIR(st.st_mode)) return unpack_failed(u, S_ISLNK(st.st_mode) ? ELOOP : ENOTDIR, "mkdir", path);
            if ((st.st_mode & 0777) != now && fchmodat(dir, name, now, 0)) return unpack_failed(u, errno, "chmod", path);
        } else {
            return unpack_failed(u, errno, "mkdir", path);
        }
    }
    if (!awkward && *path) return STEP_MORE;
    size_t size = strlen(path) + 1;
    struct late_mode *late = malloc(sizeof *late + size);
    if (!late) return unpack_failed(u, ENOMEM, "remember", path);
    late->mode = mode, late->next = u->late;
    memcpy(late->path, path, size);
    u->late = late;
    return STEP_MORE;
}

static enum step unpack_symlink(struct upload *u, char *path, const char *target) {
    const char *name;
    int dir = upload_parent(u, path, &name);
    if (dir < 0) return unpack_failed(u, errno, "make directories for", path);
    int failed = symlinkat(target, dir, name);
    if (failed && errno == EEXIST && unlinkat(dir, name, 0) == 0) failed = symlinkat(target, dir, name);
    if (failed) return unpack_failed(u, errno, "link", path);
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, u->mtime};
    if (u->has_mtime) utimensat(dir, name, times, AT_SYMLINK_NOFOLLOW);  // a time that cannot be set harms nobody
    return STEP_MORE;
}

static enum step unpack_hard_link(struct upload *u, char *path, char *target) {
    const char *name, *old;
    int dir = upload_parent(u, path, &name);
    if (dir < 0) return unpack_failed(u, errno, "make directories for", path);
    // A descriptor of its own: looking up the target may push `dir` out of the cache.
    autoclose int held = fcntl(dir, F_DUPFD_CLOEXEC, 3);
    if (held < 0) return unpack_failed(u, errno, "keep the directory of", path);
    int from = upload_parent(u, target, &old);
    if (from < 0) return unpack_failed(u, errno, "find", target);
    int failed = linkat(from, old, held, name, 0);
    if (failed && errno == EEXIST && unlinkat(held, name, 0) == 0) failed = linkat(from, old, held, name, 0);
    return failed ? unpack_failed(u, errno, "link", path) : STEP_MORE;
}

// Name or link target: from pax or a long name when there was one, else from the header. NULL: no memory.
static char *header_text(struct wr *w, const uint8_t *field, size_t size, const uint8_t *prefix) {
    if (!w->size) {
        size_t before = prefix ? strnlen((const char *)prefix, 155) : 0;
        if (before) wr_raw(w, prefix, before), wr_u8(w, '/');
        wr_raw(w, field, strnlen((const char *)field, size));
    }
    wr_u8(w, 0);
    return w->failed ? NULL : (char *)w->data;
}

static void forget_meta(struct upload *u) {
    u->path.size = u->link.size = 0;
    u->has_size = u->has_mtime = false;
}

static enum step begin_meta(struct upload *u, char type, uint64_t size) {
    if (size > META_MAX) return reject(u, "its extended header is too large", "(header)");
    u->meta.size = 0;
    u->meta_type = type;
    u->left = size;
    u->padding = (uint32_t)(-size & (BLOCK - 1));
    u->state = size ? IN_META : IN_HEADER;
    return STEP_MORE;
}

static enum step end_meta(struct upload *u) {
    u->state = u->padding ? IN_PADDING : IN_HEADER;
    if (u->meta.failed) return unpack_failed(u, ENOMEM, "read", "(header)");
    if (u->meta_type == 'x') return pax_records(u) ? STEP_MORE : reject(u, "its pax header is malformed or describes a sparse file", "(header)");
    if (u->meta_type == 'g') return STEP_MORE;
    struct wr *to = u->meta_type == 'L' ? &u->path : &u->link;
    to->size = 0;
    wr_raw(to, u->meta.data, strnlen((const char *)u->meta.data, u->meta.size));
    return STEP_MORE;
}

static enum step entry_limits(struct upload *u, uint64_t size) {
    if (u->max_entries && u->entries >= u->max_entries) {
        fail(u->job.a, u->job.id, E_TOO_LARGE, EFBIG, "the archive has more than %llu entries", (unsigned long long)u->max_entries);
        return STEP_END;
    }
    if (size > INT64_MAX / 2 || (u->max_bytes && size > u->max_bytes - u->bytes)) {
        fail(u->job.a, u->job.id, E_TOO_LARGE, EFBIG, "the archive holds more than %llu bytes", (unsigned long long)u->max_bytes);
        return STEP_END;
    }
    u->entries++;
    return STEP_MORE;
}

static enum step on_header(struct upload *u) {
    const uint8_t *h = u->block;
    u->have = 0;
    bool zero = true;
    for (size_t i = 0; i < BLOCK && zero; i++) zero = h[i] == 0;
    if (zero) {
        u->state = AT_END;
        return STEP_MORE;
    }
    uint64_t size, mode, mtime;
    if (!sum_matches(h)) return reject(u, "its checksum is wrong; this is no tar stream", "(header)");
    if (!number(h + AT_SIZE, 12, &size) || !number(h + AT_MODE, 8, &mode)) return reject(u, "a number in its header is malformed", "(header)");
    char type = (char)h[AT_TYPE];
    if (type == 'x' || type == 'g' || type == 'L' || type == 'K') return begin_meta(u, type, size);

    if (u->has_size) size = u->size;
    if (!u->has_mtime && number(h + AT_MTIME, 12, &mtime)) u->mtime = (struct timespec){(time_t)mtime, 0}, u->has_mtime = true;
    bool posix = memcmp(h + AT_MAGIC, "ustar\0", 6) == 0;
    char *name = header_text(&u->path, h + AT_NAME, 100, posix && h[AT_PREFIX] ? h + AT_PREFIX : NULL);
    char *link = header_text(&u->link, h + AT_LINK, 100, NULL);
    if (!name || !link) return unpack_failed(u, ENOMEM, "read", "(header)");
    size_t name_size = u->path.size - 1;
    if ((type == '0' || type == 0) && name_size && name[name_size - 1] == '/') type = '5';
    if (!beneath_clean(name, name_size)) return reject(u, "its name leads out of the destination", name);
    bool file = type == '0' || type == 0 || type == '7';
    if (!file) size = 0;
    if (!*name && type != '5') return reject(u, "it has no name", name);

    enum step how = entry_limits(u, size);
    if (how == STEP_END) return how;
    mode &= 0777;
    if (file) how = unpack_file(u, name, (mode_t)mode, size);
    else if (type == '5') how = unpack_directory(u, name, (mode_t)mode);
    else if (type == '2') how = unpack_symlink(u, name, link);
    else if (type == '1' && !beneath_clean(link, u->link.size - 1)) how = reject(u, "it links to something outside of the destination", name);
    else if (type == '1') how = unpack_hard_link(u, name, link);
    else how = reject(u, type == '3' || type == '4' || type == '6' ? "devices and FIFOs are not taken" : "its type is unknown", name);
    if (how == STEP_END) return how;

    u->left = size;
    u->padding = (uint32_t)(-size & (BLOCK - 1));
    if (file) u->state = IN_BODY;
    if (!file) forget_meta(u);
    return how;
}

static enum step end_body(struct upload *u) {
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, u->mtime};
    if (u->has_mtime) futimens(u->fd, times);
    int fd = u->fd;
    u->fd = -1;
    if (close(fd)) return unpack_failed(u, errno, "write", (const char *)u->path.data);
    forget_meta(u);
    u->state = u->padding ? IN_PADDING : IN_HEADER;
    return STEP_MORE;
}

static enum step upload_end(struct upload *u) {
    if (u->state != AT_END && (u->state != IN_HEADER || u->have)) {
        // Only a file being written has its name whole: what a long name left there may lack its end.
        return reject(u, "the archive ends inside it", u->state == IN_BODY ? (const char *)u->path.data : "(header)");
    }
    for (struct late_mode *l = u->late; l; l = l->next) {
        autoclose int fd = *l->path ? beneath_dir(u->root, l->path, false) : -1;
        if (*l->path && fd < 0) continue;  // removed meanwhile
        char proc[32];
        snprintf(proc, sizeof proc, "/proc/self/fd/%d", *l->path ? fd : u->root);
        if (chmod(proc, l->mode)) {  // no /proc, or not ours to look at: by name, which the parent's descriptor keeps inside
            const char *name;
            int dir = *l->path ? upload_parent(u, l->path, &name) : u->root;
            if (dir >= 0 && fchmodat(dir, *l->path ? name : ".", l->mode, 0)) continue;  // removed meanwhile
        }
    }
    tree_done(u->job.a, u->job.id, u->entries, u->bytes);
    return STEP_END;
}

static enum step upload_data(struct job *j, struct span data, bool eof) {
    struct upload *u = (struct upload *)j;
    enum step how = STEP_MORE;
    while (how == STEP_MORE) {
        if (u->state == IN_BODY && !u->left) {
            how = end_body(u);
            continue;
        }
        if (!data.size) break;
        uint32_t take = data.size;
        switch (u->state) {
            case IN_HEADER:
                if (take > BLOCK - u->have) take = BLOCK - u->have;
                memcpy(u->block + u->have, data.at, take);
                u->have += take;
                if (u->have == BLOCK) how = on_header(u);
                break;
            case IN_META:
                if (take > u->left) take = (uint32_t)u->left;
                wr_raw(&u->meta, data.at, take);
                if (!(u->left -= take)) how = end_meta(u);
                break;
            case IN_BODY: {
                if (take > u->left) take = (uint32_t)u->left;
                int error = write_full(u->fd, data.at, take);
                if (error) return unpack_failed(u, error, "write", (const char *)u->path.data);
                u->left -= take;
                break;
            }
            case IN_PADDING:
                if (take > u->padding) take = u->padding;
                if (!(u->padding -= take)) u->state = IN_HEADER;
                break;
            case AT_END: break;
        }
        data.at += take, data.size -= take;
    }
    if (how == STEP_END) return how;
    return eof ? upload_end(u) : STEP_WAIT;
}

static enum step upload_wait(struct job *j, uint64_t until) {
    (void)j, (void)until;
    return STEP_WAIT;
}

void action_upload(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct span path = rd_name(&g.payload);
    uint64_t max_bytes = rd_u64(&g.payload), max_entries = rd_u64(&g.payload);
    if (malformed(a, &g)) return;
    char room[PATH_ROOM];
    path_of(a, path, room);
    int error = mkdir(room, 0777) ? errno : 0;
    if (error == ENOENT && !(error = make_parents(room, 0777))) error = mkdir(room, 0777) ? errno : 0;
    int root = error && error != EEXIST ? -1 : open(room, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) {
        fail_os(a, f->id, error && error != EEXIST ? error : errno, "upload to", room);
        return;
    }
    struct upload *u = job_new(a, f, sizeof *u);
    if (!u) {
        close(root);
        return;
    }
    u->root = root, u->fd = -1, u->max_bytes = max_bytes, u->max_entries = max_entries;
    u->job.step = upload_wait, u->job.data = upload_data, u->job.dispose = upload_dispose;
    job_start(&u->job);
}

// ---- download ----

struct download {
    struct job job;
    struct walk walk;
    bool walking, ended;
    uint64_t max_bytes, entries, bytes;
    struct wr head;                     // headers not yet sent
    size_t head_sent;
    int fd;                             // the file being sent
    uint64_t left;                      // of it
    uint64_t zeros;                     // padding, or what a file that shrank still owes
    int error;                          // why it ends early
    char failed[256];
};

static void download_dispose(struct job *j) {
    struct download *d = (struct download *)j;
    if (d->walking) walk_close(&d->walk);
    wr_free(&d->head);
    io_close(&d->fd);
    free(d);
}

static void octal(uint8_t *field, size_t size, uint64_t v) {
    for (size_t i = size - 1; i-- > 0; v >>= 3) field[i] = (uint8_t)('0' + (v & 7));
    field[size - 1] = 0;
}

static void put_block(struct wr *w, const char *name, size_t name_size, char type, const struct stat *st, uint64_t size, const char *link, size_t link_size) {
    uint8_t h[BLOCK] = {0};
    memcpy(h + AT_NAME, name, name_size < 100 ? name_size : 100);
    octal(h + AT_MODE, 8, st->st_mode & 07777);
    octal(h + AT_UID, 8, st->st_uid < 1u << 21 ? st->st_uid : 0);
    octal(h + AT_GID, 8, st->st_gid < 1u << 21 ? st->st_gid : 0);
    octal(h + AT_SIZE, 12, size >> 33 ? 0 : size);
    octal(h + AT_MTIME, 12, st->st_mtim.tv_sec < 0 ? 0 : (uint64_t)st->st_mtim.tv_sec & ((UINT64_C(1) << 33) - 1));
    h[AT_TYPE] = (uint8_t)type;
    memcpy(h + AT_LINK, link, link_size < 100 ? link_size : 100);
    memcpy(h + AT_MAGIC, "ustar\0" "00", 8);
    memset(h + AT_SUM, ' ', 8);
    unsigned sum = 0;
    for (size_t i = 0; i < BLOCK; i++) sum += h[i];
    octal(h + AT_SUM, 7, sum);
    wr_raw(w, h, BLOCK);
}

static void pax_record(struct wr *w, const char *key, const char *value, size_t size) {
    size_t rest = 1 + strlen(key) + 1 + size + 1, total = rest + 1;
    char digits[24];
    // The length counts its own digits.
    for (;;) {
        int n = snprintf(digits, sizeof digits, "%zu", total);
        if (rest + (size_t)n == total) break;
        total = rest + (size_t)n;
    }
    wr_raw(w, digits, strlen(digits));
    wr_u8(w, ' ');
    wr_raw(w, key, strlen(key));
    wr_u8(w, '=');
    wr_raw(w, value, size);
    wr_u8(w, '\n');
}

static void put_header(struct download *d, const char *name, size_t name_size, char type, const struct stat *st, uint64_t size, const char *link, size_t link_size) {
    if (name_size > 100 || link_size > 100 || size >> 33) {
        struct wr pax = {0};
        char digits[24];
        if (name_size > 100) pax_record(&pax, "path", name, name_size);
        if (link_size > 100) pax_record(&pax, "linkpath", link, link_size);
        snprintf(digits, sizeof digits, "%llu", (unsigned long long)size);
        if (size >> 33) pax_record(&pax, "size", digits, strlen(digits));
        struct stat plain = {.st_mode = 0644};
        put_block(&d->head, "pax", 3, 'x', &plain, pax.size, "", 0);
        wr_raw(&d->head, pax.data, pax.size);
        static const uint8_t zeros[BLOCK];
        wr_raw(&d->head, zeros, -pax.size & (BLOCK - 1));
        if (pax.failed) d->head.failed = true;
        wr_free(&pax);
    }
    put_block(&d->head, name, name_size, type, st, size, link, link_size);
    d->entries++;
}

static int begin_file(struct download *d, int dir, const char *name, const char *path, size_t path_size, int flags) {
    struct stat st;
    d->fd = open_regular(dir, name, flags, &st);
    if (d->fd < 0) return errno;
    uint64_t size = (uint64_t)st.st_size;
    if (d->max_bytes && size > d->max_bytes - d->bytes) return EFBIG;
    put_header(d, path, path_size, '0', &st, size, "", 0);
    d->bytes += size;
    d->left = size;
    d->zeros = -size & (BLOCK - 1);
    return 0;
}

// Readies the next entry; 0 or errno.
static int next_entry(struct download *d) {
    struct walk *w = &d->walk;
    struct stat st;
    char target[PATH_MAX];
    enum walk_event event = d->walking ? walk_next(w) : WALK_END;
    if (event == WALK_ERROR) return w->error;
    if (event == WALK_LEAVE) return 0;
    if (event == WALK_END) {
        d->ended = true;
        d->zeros = 2 * BLOCK;
        return 0;
    }
    if (w->type == DT_REG) return begin_file(d, w->dir, w->name, w->path, w->path_size, O_NOFOLLOW);
    if (w->type != DT_DIR && w->type != DT_LNK) return 0;
    if (fstatat(w->dir, w->name, &st, AT_SYMLINK_NOFOLLOW)) return errno;
    if (w->type == DT_LNK) {
        ssize_t n = readlinkat(w->dir, w->name, target, sizeof target);
        if (n < 0) return errno;
        put_header(d, w->path, w->path_size, '2', &st, 0, target, (size_t)n);
        return 0;
    }
    char *name = malloc(w->path_size + 2);
    if (!name) return ENOMEM;
    memcpy(name, w->path, w->path_size);
    name[w->path_size] = '/';
    put_header(d, name, w->path_size + 1, '5', &st, 0, "", 0);
    free(name);
    return walk_enter(w);
}

// Fills `to` with the next bytes of the archive; fewer than `room` at its end, on failure, or when time is up.
static size_t produce(struct download *d, uint8_t *to, size_t room, uint64_t until) {
    size_t have = 0;
    uint32_t entries = 0;
    while (have < room && !d->error) {
        size_t rest = room - have;
        if (d->head.size > d->head_sent) {
            size_t n = d->head.size - d->head_sent;
            if (n > rest) n = rest;
            memcpy(to + have, d->head.data + d->head_sent, n);
            d->head_sent += n, have += n;
            if (d->head_sent == d->head.size) d->head_sent = d->head.size = 0;
        } else if (d->left) {
            size_t want = d->left < rest ? (size_t)d->left : rest;
            ssize_t n = read_full(d->fd, to + have, want);
            if (n < 0) {
                d->error = errno;
                return have;
            }
            have += (size_t)n, d->left -= (uint64_t)n;
            if ((size_t)n < want) d->zeros += d->left, d->left = 0;  // it shrank; the header has promised the rest
        } else if (d->zeros) {
            size_t n = d->zeros < rest ? (size_t)d->zeros : rest;
            memset(to + have, 0, n);
            have += n, d->zeros -= n;
        } else if (d->ended) {
            break;
        } else {
            io_close(&d->fd);
            int error = next_entry(d);
            if (!error && d->head.failed) error = ENOMEM;
            if (error == ENOENT) error = 0;  // it went while we looked
            if (error) {
                d->error = error;
                if (d->walking && d->walk.path) strncpy(d->failed, d->walk.path, sizeof d->failed - 1);
            }
            if (++entries % 16 == 0 && io_now_ns() >= until) break;
        }
    }
    return have;
}

static enum step download_step(struct job *j, uint64_t until) {
    struct download *d = (struct download *)j;
    struct wr *out = j->a->out;
    while (j->window) {
        size_t begun = frame_begin(out, j->id, K_OUT);
        wr_u8(out, 1);
        size_t room = j->window < OUT_PIECE ? j->window : OUT_PIECE;
        uint8_t *to = wr_reserve(out, room);
        size_t n = to ? produce(d, to, room, until) : 0;
        if (n) {
            wr_commit(out, n);
            frame_end(out, begun);
            j->window -= (uint32_t)n;
        } else {
            out->size = begun;
        }
        if (!to) d->error = ENOMEM;
        if (d->error == EFBIG && d->max_bytes) {
            fail(j->a, j->id, E_TOO_LARGE, EFBIG, "the tree holds more than %llu bytes", (unsigned long long)d->max_bytes);
            return STEP_END;
        }
        if (d->error) {
            fail_os(j->a, j->id, d->error, "download", *d->failed ? d->failed : NULL);
            return STEP_END;
        }
        if (d->ended && !d->zeros && d->head.size == d->head_sent) {
            tree_done(j->a, j->id, d->entries, d->bytes);
            return STEP_END;
        }
        if (out->size >= OUT_FULL || io_now_ns() >= until) return STEP_MORE;
    }
    return STEP_WAIT;
}

void action_download(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct span path = rd_name(&g.payload);
    uint64_t max_bytes = rd_u64(&g.payload);
    if (malformed(a, &g)) return;
    char room[PATH_ROOM];
    path_of(a, path, room);

    struct download *d = job_new(a, f, sizeof *d);
    if (!d) return;
    d->fd = -1, d->max_bytes = max_bytes;
    d->job.step = download_step, d->job.dispose = download_dispose;
    int error = 0, dir = open(room, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct stat st;
    if (dir >= 0) {
        if (fstat(dir, &st)) error = errno;
        put_header(d, "./", 2, '5', &st, 0, "", 0);
        int failed = walk_open(&d->walk, dir);
        d->walking = !failed;
        if (failed) error = failed;
    } else if (errno == ENOTDIR) {
        size_t size = strlen(room);
        while (size > 1 && room[size - 1] == '/') size--;
        const char *name = memrchr(room, '/', size);
        name = name ? name + 1 : room;
        error = begin_file(d, AT_FDCWD, room, name, (size_t)(room + size - name), 0);
    } else {
        error = errno;
    }
    if (error == EFBIG && max_bytes) fail(a, f->id, E_TOO_LARGE, EFBIG, "the file holds more than %llu bytes", (unsigned long long)max_bytes);
    else if (error) fail_os(a, f->id, error, "download", room);
    if (error) download_dispose(&d->job);
    else job_start(&d->job);
}
