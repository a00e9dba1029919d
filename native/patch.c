// Applying a unified diff, plain or as git writes it: all of it or nothing.
//
// Everything is worked out in memory first. Hunks may lie elsewhere than their numbers say but must match exactly. When writing fails half-way
// what was written is put back.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "beneath.h"
#include "edit.h"
#include "io.h"
#include "job.h"

#define TARGETS_MAX 4096
#define PATHS_MAX (200u << 10)      // bytes of names in the answer, which must fit one frame
#define HELD_MAX (256u << 20)       // bytes of content held for one patch
#define LINES_MAX 100000000
#define COMPARED_MAX 30000000u      // a patch made to match almost everywhere takes no longer than about a second

struct line {
    const uint8_t *at;
    size_t size;            // with its newline, if it has one
};

// A file that the patch concerns, as it was and as it is to be.
struct target {
    char *path;
    bool was, is;           // whether it exists
    bool written;
    uint8_t *old, *new;
    size_t old_size, new_size;
    mode_t old_mode, mode;  // permission bits
};

// One file's part of the diff.
struct section {
    char *from, *to;        // NULL: not said, or /dev/null where created or deleted
    bool open, git, created, deleted, renamed, copied;
    mode_t mode;            // 0: unchanged
    struct target *target;  // once a hunk, or the end, has asked for it
    size_t line;            // lines of the target's old content already copied into `out`
    long drift;             // how far off the last hunk was
    struct line *lines;
    size_t line_count;
    struct wr out;
    unsigned hunks;
    uint64_t compared;      // lines, for the places of all hunks together
};

struct patch {
    struct actions *a;
    uint32_t id;
    int root;
    unsigned strip;
    const uint8_t *at, *end;
    struct target *targets;
    size_t count;
    uint64_t held;
    struct section s;
    // why it ends
    uint16_t code;
    int error;
    char why[400];
};

static bool stop(struct patch *p, uint16_t code, int error, const char *format, ...) __attribute__((format(printf, 4, 5)));
static bool stop(struct patch *p, uint16_t code, int error, const char *format, ...) {
    if (p->code) return false;
    va_list args;
    va_start(args, format);
    vsnprintf(p->why, sizeof p->why, format, args);
    va_end(args);
    p->code = code;
    p->error = error;
    return false;
}
static bool stop_memory(struct patch *p) { return stop(p, E_OS, ENOMEM, "patch: out of memory"); }

// ---- lines and names ----

// The next line of the diff, with its newline; size 0 at the end.
static struct line peek_line(const struct patch *p) {
    const uint8_t *newline = p->at < p->end ? memchr(p->at, '\n', (size_t)(p->end - p->at)) : NULL;
    return (struct line){p->at, (size_t)((newline ? newline + 1 : p->end) - p->at)};
}

static bool starts(struct line l, const char *with) {
    size_t size = strlen(with);
    return l.size >= size && memcmp(l.at, with, size) == 0;
}

static struct line trimmed(struct line l) {
    if (l.size && l.at[l.size - 1] == '\n') l.size--;
    if (l.size && l.at[l.size - 1] == '\r') l.size--;
    return l;
}

static struct line without(struct line l, const char *prefix) {
    size_t size = strlen(prefix);
    return trimmed((struct line){l.at + size, l.size - size});
}

// A name in git's quotes, at the opening one: the plain name, and how much of `l` it took. NULL: malformed.
static char *unquoted(struct line l, size_t *taken) {
    char *out = malloc(l.size + 1);
    size_t to = 0, i = 1;
    if (!out) return NULL;
    for (; i < l.size && l.at[i] != '"'; i++) {
        uint8_t c = l.at[i];
        if (c == '\\' && i + 1 < l.size) {
            c = l.at[++i];
            static const char from[] = "abtnvfr", into[] = "\a\b\t\n\v\f\r";
            const char *known = c ? strchr(from, c) : NULL;
            if (known) c = (uint8_t)into[known - from];
            else if (c >= '0' && c <= '3' && i + 2 < l.size) {
                c = (uint8_t)((c - '0') << 6 | (l.at[i + 1] & 7) << 3 | (l.at[i + 2] & 7));
                i += 2;
            }
        }
        out[to++] = (char)c;
    }
    if (i >= l.size || memchr(out, 0, to)) {
        free(out);
        return NULL;
    }
    out[to] = 0;
    *taken = i + 1;
    return out;
}

// The name in a header: unquoted, without a time stamp, stripped and clean. `strip`: 0 for rename lines, which have no a/ or b/.
static char *header_path(struct patch *p, struct line l, unsigned strip, bool *null) {
    size_t taken;
    char *path;
    if (l.size && l.at[0] == '"') {
        path = unquoted(l, &taken);
    } else {
        const uint8_t *tab = memchr(l.at, '\t', l.size);
        if (tab) l.size = (size_t)(tab - l.at);
        path = memchr(l.at, 0, l.size) ? NULL : strndup((const char *)l.at, l.size);
    }
    if (!path) {
        stop(p, E_REJECTED, 0, "a file name in the patch is malformed");
        return NULL;
    }
    if (null && strcmp(path, "/dev/null") == 0) {
        *null = true;
        free(path);
        return NULL;
    }
    char *rest = path;
    for (; strip; strip--) {
        char *slash = strchr(rest, '/');
        if (!slash) break;
        rest = slash + 1;
    }
    memmove(path, rest, strlen(rest) + 1);
    if (strip || !beneath_clean(path, strlen(path)) || !*path) {
        stop(p, E_REJECTED, 0, strip ? "%.200s has fewer components than are to be stripped" : "%.200s leads out of the directory", path);
        free(path);
        return NULL;
    }
    return path;
}

// ---- targets ----

// The descriptor of the directory that `path` is in, and its last component; -1 with errno. To be closed by the caller.
static int open_parent(const struct patch *p, const char *path, bool make, const char **name) {
    const char *slash = strrchr(path, '/');
    *name = slash ? slash + 1 : path;
    if (!slash) return fcntl(p->root, F_DUPFD_CLOEXEC, 3);
    char *parent = strndup(path, (size_t)(slash - path));
    if (!parent) {
        errno = ENOMEM;
        return -1;
    }
    int fd = beneath_dir(p->root, parent, make), error = errno;
    free(parent);
    errno = error;
    return fd;
}

static int target_load(struct patch *p, struct target *t) {
    const char *name;
    struct stat st;
    autoclose int dir = open_parent(p, t->path, false, &name);
    if (dir < 0) return errno == ENOENT ? 0 : errno;
    autoclose int fd = open_regular(dir, name, O_NOFOLLOW, &st);
    if (fd < 0) return errno == ENOENT ? 0 : errno;
    int error = load_file(fd, &st, &t->old, &t->old_size);
    if (error) return error;
    t->was = t->is = true;
    t->old_mode = t->mode = st.st_mode & 07777;
    return 0;
}

// What is known of a file, read on the first call for it; the answer stays valid until the next call. NULL: the patch has been stopped.
static struct target *target_of(struct patch *p, const char *path) {
    for (size_t i = 0; i < p->count; i++)
        if (strcmp(p->targets[i].path, path) == 0) return &p->targets[i];
    if (p->count == TARGETS_MAX) {
        stop(p, E_TOO_LARGE, EFBIG, "the patch concerns more than %d files", TARGETS_MAX);
        return NULL;
    }
    if (!p->targets && !(p->targets = calloc(TARGETS_MAX, sizeof *p->targets))) {
        stop_memory(p);
        return NULL;
    }
    struct target *t = &p->targets[p->count];
    *t = (struct target){.path = strdup(path), .mode = 0644};
    if (!t->path) {
        stop_memory(p);
        return NULL;
    }
    p->count++;
    int error = target_load(p, t);
    p->held += t->old_size;
    if (error == EFBIG || p->held > HELD_MAX) stop(p, E_TOO_LARGE, EFBIG, "%.200s is too large to be patched", path);
    else if (error == ELOOP) stop(p, E_REJECTED, error, "%.200s is, or leads through, a link", path);
    else if (error) stop(p, E_OS, error, "patch %.200s: %s", path, strerrordesc_np(error));
    return p->code ? NULL : t;
}

// Content as it stands after earlier parts of the same patch.
static const uint8_t *content(const struct target *t, size_t *size) {
    *size = t->new ? t->new_size : t->old_size;
    return t->new ? t->new : t->old;
}

// ---- hunks ----

static bool split_lines(struct patch *p, struct section *s, const uint8_t *text, size_t size) {
    size_t count = 0, room = 0;
    for (const uint8_t *at = text, *end = text + size; at < end;) {
        const uint8_t *newline = memchr(at, '\n', (size_t)(end - at)), *next = newline ? newline + 1 : end;
        if (count == room) {
            room = room ? room * 2 : 256;
            struct line *lines = realloc(s->lines, room * sizeof *lines);
            if (!lines) return stop_memory(p);
            s->lines = lines;
        }
        s->lines[count++] = (struct line){at, (size_t)(next - at)};
        at = next;
    }
    s->line_count = count;
    return true;
}

// The file that a section changes, ready to be changed: its lines split, or empty for one that is to be created.
static bool section_ready(struct patch *p) {
    struct section *s = &p->s;
    if (s->target) return true;
    struct target *t = NULL, *source;
    if (!s->from && !s->to) return stop(p, E_REJECTED, 0, "a hunk without a file name before it");
    if (s->created + s->deleted + s->renamed + s->copied > 1) return stop(p, E_REJECTED, 0, "a file in the patch is to be more than one of created, deleted, renamed and copied");
    if (s->created || s->renamed || s->copied) {
        if (!s->to || (!s->created && !s->from)) return stop(p, E_REJECTED, 0, "a part of the patch does not name its files");
        if (!(t = target_of(p, s->to))) return false;
        if (t->is) return stop(p, E_CONFLICT, EEXIST, "%.200s exists already", s->to);
        source = s->created ? NULL : target_of(p, s->from);
        if (p->code) return false;
    } else {
        const char *path = s->to ? s->to : s->from;
        if (!(t = target_of(p, path))) return false;
        if (!t->is && s->from && s->to && strcmp(s->from, s->to) != 0 && !(t = target_of(p, path = s->from))) return false;  // "x.orig" and "x"
        source = t;
    }
    if (source && !source->is) return stop(p, E_CONFLICT, ENOENT, "%.200s does not exist", source->path);
    if (source && source != t) t->mode = source->mode;
    s->target = t;
    size_t size = 0;
    const uint8_t *text = source ? content(source, &size) : (const uint8_t *)"";
    return split_lines(p, s, text, size);
}

static bool hunk_number(const uint8_t **at, const uint8_t *end, long *out) {
    if (*at >= end || **at < '0' || **at > '9') return false;
    for (*out = 0; *at < end && **at >= '0' && **at <= '9'; ++*at)
        if ((*out = *out * 10 + (**at - '0')) > LINES_MAX) return false;
    return true;
}

struct hunk {
    long old_start, old_count, new_start, new_count;
    const uint8_t *body, *body_end;
};

static bool hunk_range(const uint8_t **at, const uint8_t *end, char sign, long *start, long *count) {
    if (*at >= end || **at != sign) return false;
    ++*at;
    *count = 1;
    if (!hunk_number(at, end, start)) return false;
    if (*at < end && **at == ',') {
        ++*at;
        return hunk_number(at, end, count);
    }
    return true;
}

static bool hunk_header(struct line l, struct hunk *h) {
    const uint8_t *at = l.at + 3, *end = l.at + l.size;
    if (!starts(l, "@@ ") || !hunk_range(&at, end, '-', &h->old_start, &h->old_count)) return false;
    if (at >= end || *at++ != ' ' || !hunk_range(&at, end, '+', &h->new_start, &h->new_count)) return false;
    return end - at >= 3 && memcmp(at, " @@", 3) == 0;
}

// Steps through a hunk's body: the kind of line (' ', '-', '+') and its text with or without a newline. 0 at the end.
static char body_line(const uint8_t **at, const uint8_t *end, struct line *text) {
    if (*at >= end) return 0;
    const uint8_t *newline = memchr(*at, '\n', (size_t)(end - *at)), *next = newline ? newline + 1 : end;
    char kind = (char)**at;
    *text = (struct line){*at + 1, (size_t)(next - *at) - 1};
    if (kind == '\n') kind = ' ', *text = (struct line){*at, 1};  // an empty line that lost its blank
    if (kind == '\r' && text->size == 1) kind = ' ', *text = (struct line){*at, 2};
    *at = next;
    if (*at < end && **at == '\\') {
        if (text->size && text->at[text->size - 1] == '\n') text->size--;
        newline = memchr(*at, '\n', (size_t)(end - *at));
        *at = newline ? newline + 1 : end;
    }
    return kind;
}

// Takes the body off the diff, as long as its header says.
static bool hunk_body(struct patch *p, struct hunk *h) {
    long old = h->old_count, new = h->new_count;
    h->body = p->at;
    while (old > 0 || new > 0) {
        struct line l = peek_line(p);
        char kind = l.size ? (char)l.at[0] : 0;
        if (kind == '\n' || kind == '\r') kind = ' ';
        if (kind == ' ') old--, new--;
        else if (kind == '-') old--;
        else if (kind == '+') new--;
        else if (kind != '\\') return stop(p, E_REJECTED, 0, "a hunk of %.200s is shorter than its header says", p->s.target->path);
        if (old < 0 || new < 0) return stop(p, E_REJECTED, 0, "a hunk of %.200s does not have the lines its header says", p->s.target->path);
        p->at += l.size;
    }
    if (starts(peek_line(p), "\\")) p->at += peek_line(p).size;
    h->body_end = p->at;
    return true;
}

static bool hunk_fits(struct section *s, const struct hunk *h, size_t where) {
    const uint8_t *at = h->body;
    struct line text;
    for (char kind; (kind = body_line(&at, h->body_end, &text));) {
        if (kind == '+') continue;
        s->compared++;
        if (where >= s->line_count) return false;
        struct line have = s->lines[where++];
        if (have.size != text.size || memcmp(have.at, text.at, text.size) != 0) return false;
    }
    return true;
}

// The place nearest to where the header says that the hunk fits; false when there is none.
static bool hunk_place(struct section *s, const struct hunk *h, size_t *where) {
    long want = (h->old_count ? h->old_start - 1 : h->old_start) + s->drift;
    if (want < (long)s->line) want = (long)s->line;
    if (!h->old_count) {  // nothing to recognise it by: only its number counts
        *where = (size_t)want;
        return (size_t)want <= s->line_count;
    }
    long last = (long)s->line_count - h->old_count;
    for (long off = 0; want - off >= (long)s->line || want + off <= last; off++) {
        if (s->compared > COMPARED_MAX) return false;
        if (want + off <= last && hunk_fits(s, h, *where = (size_t)(want + off))) return true;
        if (off && want - off >= (long)s->line && want - off <= last && hunk_fits(s, h, *where = (size_t)(want - off))) return true;
    }
    return false;
}

static bool apply_hunk(struct patch *p, struct hunk *h) {
    struct section *s = &p->s;
    if (!section_ready(p) || !hunk_body(p, h)) return false;
    s->hunks++;
    size_t where;
    if (!hunk_place(s, h, &where)) return stop(p, E_CONFLICT, 0, "hunk %u of %.200s (line %ld) does not apply", s->hunks, s->target->path, h->old_start);
    s->drift = (long)where - (h->old_count ? h->old_start - 1 : h->old_start);
    while (s->line < where) wr_raw(&s->out, s->lines[s->line].at, s->lines[s->line].size), s->line++;
    const uint8_t *at = h->body;
    struct line text;
    for (char kind; (kind = body_line(&at, h->body_end, &text));) {
        if (kind != '-') wr_raw(&s->out, text.at, text.size);
        if (kind != '+') s->line++;
    }
    if (p->held + s->out.size > HELD_MAX) return stop(p, E_TOO_LARGE, EFBIG, "the patch makes more than %u MiB", HELD_MAX >> 20);
    return !s->out.failed || stop_memory(p);
}

// ---- sections ----

static void section_clear(struct section *s) {
    free(s->from);
    free(s->to);
    free(s->lines);
    wr_free(&s->out);
    *s = (struct section){0};
}

// Puts what the section made of its file into the target.
static bool section_close(struct patch *p) {
    struct section *s = &p->s;
    if (!s->open) return true;
    bool does = s->hunks || s->created || s->deleted || s->renamed || s->copied || s->mode;
    if (does && section_ready(p)) {
        while (s->line < s->line_count) wr_raw(&s->out, s->lines[s->line].at, s->lines[s->line].size), s->line++;
        struct target *t = s->target;
        if (s->out.failed) stop_memory(p);
        else if (s->deleted && s->out.size && s->hunks) stop(p, E_CONFLICT, 0, "%.200s is to be deleted but has other content", t->path);
        wr_reserve(&s->out, 1);  // an empty file still needs a pointer
        free(t->new);
        t->new = s->out.data, t->new_size = s->out.size;
        s->out = (struct wr){0};
        p->held += t->new_size;
        t->is = !s->deleted;
        if (s->mode) t->mode = s->mode;
        struct target *old = s->renamed && !p->code ? target_of(p, s->from) : NULL;
        if (old) old->is = false;
    }
    section_clear(s);
    return !p->code;
}

static bool set_path(struct patch *p, char **field, struct line l, unsigned strip, bool *null) {
    char *path = header_path(p, l, strip, null);
    if (p->code) return false;
    free(*field);
    *field = path;
    return true;
}

// "diff --git a/x b/x": the names are only needed when no other line has them, and then both are the same.
static bool git_names(struct patch *p, struct line l) {
    struct section *s = &p->s;
    if (!l.size) return true;
    if (l.at[0] == '"') {
        size_t taken;
        char *path = unquoted(l, &taken);
        free(path);
        if (!path || !set_path(p, &s->from, (struct line){l.at, taken}, p->strip, NULL)) return stop(p, E_REJECTED, 0, "a file name in the patch is malformed");
        return (s->to = strdup(s->from)) || stop_memory(p);
    }
    size_t half = l.size / 2;
    if (l.size % 2 == 0 || l.at[half] != ' ') return true;  // a rename: its own lines have the names
    const uint8_t *a = memchr(l.at, '/', half), *b = memchr(l.at + half + 1, '/', half);
    if (!a || !b || (size_t)(l.at + half - a) != (size_t)(l.at + l.size - b) || memcmp(a, b, (size_t)(l.at + half - a)) != 0) return true;
    if (!set_path(p, &s->from, (struct line){l.at, half}, p->strip, NULL)) return false;
    return (s->to = strdup(s->from)) || stop_memory(p);
}

static bool git_mode(struct patch *p, struct line l) {
    unsigned long mode = 0;
    for (size_t i = 0; i < l.size && i < 8 && l.at[i] >= '0' && l.at[i] <= '7'; i++) mode = mode * 8 + (unsigned long)(l.at[i] - '0');
    if ((mode & S_IFMT) != S_IFREG) return stop(p, E_REJECTED, 0, "links and submodules in a patch are not supported");
    p->s.mode = mode & 0111 ? 0755 : 0644;
    return true;
}

// A header line of git's; false only when the patch has been stopped.
static bool git_line(struct patch *p, struct line l) {
    struct section *s = &p->s;
    if (starts(l, "new file mode ")) s->created = true;
    if (starts(l, "deleted file mode ")) s->deleted = true;
    if (starts(l, "new file mode ")) return git_mode(p, without(l, "new file mode "));
    if (starts(l, "new mode ")) return git_mode(p, without(l, "new mode "));
    unsigned strip = p->strip ? p->strip - 1 : 0;  // these names come without a/ and b/
    if (starts(l, "rename from ")) return s->renamed = true, set_path(p, &s->from, without(l, "rename from "), strip, NULL);
    if (starts(l, "rename to ")) return s->renamed = true, set_path(p, &s->to, without(l, "rename to "), strip, NULL);
    if (starts(l, "copy from ")) return s->copied = true, set_path(p, &s->from, without(l, "copy from "), strip, NULL);
    if (starts(l, "copy to ")) return s->copied = true, set_path(p, &s->to, without(l, "copy to "), strip, NULL);
    if (starts(l, "GIT binary patch") || starts(l, "Binary files ")) return stop(p, E_REJECTED, 0, "binary patches are not supported");
    return true;
}

// "--- old" with "+++ new" behind it.
static bool plain_header(struct patch *p, struct line minus, struct line plus) {
    struct section *s = &p->s;
    if (!s->open || !s->git || s->hunks) {
        if (!section_close(p)) return false;
        s->open = true;
    }
    bool no_old = false, no_new = false, keep = s->renamed || s->copied;
    if (!keep && (!set_path(p, &s->from, without(minus, "--- "), p->strip, &no_old) || !set_path(p, &s->to, without(plus, "+++ "), p->strip, &no_new))) return false;
    s->created |= no_old;
    s->deleted |= no_new;
    p->at += minus.size + plus.size;
    return true;
}

static bool parse_patch(struct patch *p) {
    while (p->at < p->end && !p->code) {
        struct line l = peek_line(p);
        struct hunk h;
        if (starts(l, "diff --git ")) {
            if (!section_close(p)) return false;
            p->s.open = p->s.git = true;
            p->at += l.size;
            git_names(p, without(l, "diff --git "));
        } else if (starts(l, "--- ")) {
            p->at += l.size;
            struct line next = peek_line(p);
            p->at -= l.size;
            if (starts(next, "+++ ")) plain_header(p, l, next);
            else p->at += l.size;
        } else if (p->s.open && starts(l, "@@ ")) {
            p->at += l.size;
            if (!hunk_header(l, &h)) stop(p, E_REJECTED, 0, "a hunk header is malformed");
            else apply_hunk(p, &h);
        } else {
            p->at += l.size;
            if (p->s.open && p->s.git && !p->s.hunks) git_line(p, l);
        }
    }
    if (!p->code) section_close(p);
    if (!p->code && !p->count) stop(p, E_REJECTED, 0, "there is no unified diff in the patch");
    return !p->code;
}

// ---- writing ----

static int create_file(struct patch *p, const char *path, const uint8_t *data, size_t size, mode_t mode) {
    const char *name;
    autoclose int dir = open_parent(p, path, true, &name);
    if (dir < 0) return errno;
    autoclose int fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    if (fd < 0) return errno;
    int error = write_full(fd, data, size);
    if (!error && mode & p->a->umask && fchmod(fd, mode)) error = errno;
    if (error) unlinkat(dir, name, 0);
    return error;
}

static int change_file(struct patch *p, const struct target *t, const uint8_t *from, size_t from_size, const uint8_t *to, size_t to_size, mode_t old_mode, mode_t mode) {
    const char *name;
    struct stat st;
    autoclose int dir = open_parent(p, t->path, false, &name);
    if (dir < 0) return errno;
    autoclose int fd = open_regular(dir, name, O_RDWR | O_NOFOLLOW, &st);
    if (fd < 0) return errno;
    int error = replace_content(fd, from, from_size, to, to_size);
    if (!error && mode != old_mode && fchmod(fd, mode)) error = errno;
    return error;
}

static int delete_file(struct patch *p, const char *path) {
    const char *name;
    autoclose int dir = open_parent(p, path, false, &name);
    return dir < 0 || unlinkat(dir, name, 0) ? errno : 0;
}

static bool unchanged(const struct target *t) {
    if (!t->was && !t->is) return true;
    return t->was && t->is && t->mode == t->old_mode && (!t->new || (t->new_size == t->old_size && memcmp(t->new, t->old, t->old_size) == 0));
}

static int write_target(struct patch *p, struct target *t) {
    if (!t->is) return delete_file(p, t->path);
    if (!t->was) return create_file(p, t->path, t->new, t->new_size, t->mode);
    return change_file(p, t, t->old, t->old_size, t->new ? t->new : t->old, t->new ? t->new_size : t->old_size, t->old_mode, t->mode);
}

static void unwrite_target(struct patch *p, struct target *t) {
    if (!t->is) create_file(p, t->path, t->old, t->old_size, t->old_mode);
    else if (!t->was) delete_file(p, t->path);
    else change_file(p, t, t->new ? t->new : t->old, t->new ? t->new_size : t->old_size, t->old, t->old_size, t->mode, t->old_mode);
}

// Deletions come last: until then nothing is lost that memory does not hold.
static bool write_all(struct patch *p) {
    for (int deleting = 0; deleting < 2; deleting++)
        for (size_t i = 0; i < p->count; i++) {
            struct target *t = &p->targets[i];
            if (t->is == (bool)deleting || unchanged(t)) continue;
            int error = write_target(p, t);
            t->written = !error;
            if (!error) continue;
            for (size_t k = 0; k < p->count; k++)
                if (p->targets[k].written) unwrite_target(p, &p->targets[k]);
            return stop(p, E_OS, error, "patch %.200s: %s", t->path, strerrordesc_np(error));
        }
    return true;
}

static bool names_fit(struct patch *p) {
    size_t bytes = 0;
    for (size_t i = 0; i < p->count; i++)
        if (!unchanged(&p->targets[i])) bytes += 4 + strlen(p->targets[i].path);
    if (bytes > PATHS_MAX) return stop(p, E_TOO_LARGE, EFBIG, "the names in the patch are too long for one answer");
    return true;
}

void action_patch(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct span dir = rd_name(&g.payload), diff = rd_bytes(&g.payload);
    uint8_t flags = rd_u8(&g.payload), strip = rd_u8(&g.payload);
    if (malformed(a, &g)) return;
    char room[PATH_ROOM];
    autoclose int root = open(path_of(a, dir, room), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) {
        fail_os(a, f->id, errno, "patch in", room);
        return;
    }
    struct patch p = {.a = a, .id = f->id, .root = root, .strip = strip, .at = diff.at, .end = diff.at + diff.size};
    if (parse_patch(&p) && names_fit(&p) && (flags & 1 || write_all(&p))) {
        size_t begun = frame_begin(a->out, f->id, K_DONE);
        uint32_t count = 0;
        for (size_t i = 0; i < p.count; i++) count += !unchanged(&p.targets[i]);
        wr_u32(a->out, count);
        for (size_t i = 0; i < p.count; i++)
            if (!unchanged(&p.targets[i])) wr_bytes(a->out, p.targets[i].path, strlen(p.targets[i].path));
        frame_end(a->out, begun);
    } else {
        fail(a, f->id, p.code, p.error, "%s", p.why);
    }
    section_clear(&p.s);
    for (size_t i = 0; i < p.count; i++) free(p.targets[i].path), free(p.targets[i].old), free(p.targets[i].new);
    free(p.targets);
}
