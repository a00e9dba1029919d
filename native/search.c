// Search in a tree of files: text, regular expressions, Python definitions.
//
// Skipped and counted: binary files (a NUL near the beginning), files above the limit, files that cannot be read. Links are not
// followed, .git is not entered.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io.h"
#include "job.h"
#include "regex.h"
#include "symbols.h"
#include "walk.h"

#define TEXT_MAX 512u               // of a line in a result
#define TEXT_BEFORE 64u             // of it shown before a match that lies further right
#define BINARY_LOOK (32u << 10)
#define SCAN_BYTES (256u << 10)     // of a file between two looks at the clock
#define PATH_SHOWN_MAX (16u << 10)  // longer ones, which no call could open, would not fit a frame
#define COLUMN_LINE_MAX (1u << 20)  // in longer lines the column is not looked for

enum search_how { HOW_TEXT = 0, HOW_REGEX = 1, HOW_SYMBOL = 2 };
enum search_flags { SEARCH_IGNORE_CASE = 1, SEARCH_WORDS = 2 };

struct search {
    struct job job;
    struct walk walk;
    bool walking, bounded, more, stopped;
    uint8_t how;
    uint32_t left;              // matches that may still be given
    uint64_t max_file, files, skipped;
    struct regex *pattern, *wanted, *unwanted;
    uint8_t *must;              // symbols: a file without this has none of them
    size_t must_size;
    struct wr items;
    uint32_t count;
    // the file being searched
    struct wr text, path;
    const uint8_t *at, *end, *counted;
    uint32_t line;              // of `counted`
};

static void search_dispose(struct job *j) {
    struct search *s = (struct search *)j;
    if (s->walking) walk_close(&s->walk);
    regex_free(s->pattern);
    regex_free(s->wanted);
    regex_free(s->unwanted);
    free(s->must);
    wr_free(&s->items);
    wr_free(&s->text);
    wr_free(&s->path);
    free(s);
}

static void flush(struct search *s, uint8_t kind) {
    struct wr *out = s->job.a->out;
    size_t begun = frame_begin(out, s->job.id, kind);
    if (kind == K_DONE) {
        wr_u64(out, s->files);
        wr_u64(out, s->skipped);
        wr_u8(out, s->more);
    }
    wr_u32(out, s->count);
    wr_raw(out, s->items.data, s->items.size);
    frame_end(out, begun);
    s->count = 0;
    s->items.size = 0;
}

static void give(struct search *s, uint32_t line, size_t column, uint8_t kind, const void *text, size_t size) {
    if (s->bounded && !s->left) {
        s->more = s->stopped = true;
        return;
    }
    s->left--;
    s->count++;
    wr_bytes(&s->items, s->path.data, s->path.size);
    wr_u32(&s->items, line);
    wr_u32(&s->items, column > UINT32_MAX ? UINT32_MAX : (uint32_t)column);
    wr_u8(&s->items, kind);
    wr_bytes(&s->items, text, size);
    if (s->items.size >= ITEMS_FRAME) flush(s, K_ITEMS);
}

// ---- patterns ----

static void append(struct wr *w, const char *text) { wr_raw(w, text, strlen(text)); }

// A wildcard pattern as a regular expression; "*" and "?" do not cross the separator, "/" or ".".
static void translate(struct wr *w, const uint8_t *at, const uint8_t *end, char separator) {
    const char *any = separator == '/' ? "[^/]" : "[^.]";
    while (at < end) {
        uint8_t c = *at++;
        if (c == '*' && separator == '/' && at < end && *at == '*') {
            at++;
            if (at < end && *at == '/') at++, append(w, "(?:.*/)?");
            else append(w, ".*");
        } else if (c == '*') {
            append(w, any), append(w, "*");
        } else if (c == '?') {
            append(w, any);
        } else if (c == '[' && at + 1 < end && memchr(at + 1, ']', (size_t)(end - at) - 1)) {
            const uint8_t *close = memchr(at + 1, ']', (size_t)(end - at) - 1);
            append(w, *at == '!' || *at == '^' ? "[^" : "[");
            for (at += *at == '!' || *at == '^'; at < close; at++) {
                if (*at == '\\' || *at == '[' || *at == '^') wr_u8(w, '\\');
                wr_u8(w, *at);
            }
            at = close + 1;
            wr_u8(w, ']');
        } else {
            if (strchr("\\.+()|{}^$[]", c) && c) wr_u8(w, '\\');
            wr_u8(w, c == '\n' ? 1 : c);  // see path_matches
        }
    }
}

// One expression for all globs of one kind (with or without a leading "!"); leaves NULL when there are none.
static const char *compile_globs(struct span strs, bool excluding, struct regex **out) {
    struct rd r = rd_of(strs.at, strs.size);
    struct wr w = {0};
    const char *error = NULL;
    for (uint32_t n = rd_u32(&r); n; n--) {
        struct span glob = rd_bytes(&r);
        const uint8_t *at = glob.at, *end = glob.at + glob.size;
        if ((at < end && *at == '!') != excluding) continue;
        if (excluding) at++;
        if (end - at >= 2 && at[0] == '.' && at[1] == '/') at += 2;
        bool path = memchr(at, '/', (size_t)(end - at));
        if (at < end && *at == '/') at++;
        append(&w, w.size ? "|" : "");
        append(&w, path ? "^(?:" : "(?:^|/)(?:");
        translate(&w, at, end, '/');
        append(&w, ")$");
    }
    if (w.failed) error = "out of memory";
    else if (w.size) *out = regex_compile(w.data, w.size, 0, &error);
    wr_free(&w);
    return error;
}

static bool path_matches(struct regex *re, const char *path, size_t size) {
    if (!memchr(path, '\n', size)) return regex_matches(re, path, size);
    char *copy = malloc(size);  // expressions do not cross lines, names may: a newline counts as \1
    if (!copy) return false;
    for (size_t i = 0; i < size; i++) copy[i] = path[i] == '\n' ? 1 : path[i];
    bool matches = regex_matches(re, copy, size);
    free(copy);
    return matches;
}

static const char *compile_symbol(struct search *s, struct span pattern, uint8_t flags) {
    struct wr w = {0};
    const char *error = NULL;
    if (!pattern.size) return NULL;
    append(&w, "(?:^|\\.)(?:");
    translate(&w, pattern.at, pattern.at + pattern.size, '.');
    append(&w, ")$");
    if (w.failed) error = "out of memory";
    else s->pattern = regex_compile(w.data, w.size, flags & SEARCH_IGNORE_CASE ? REGEX_IGNORE_CASE : 0, &error);
    wr_free(&w);
    // The last component, when it is plain, must stand in the file.
    const uint8_t *dot = memrchr(pattern.at, '.', pattern.size), *last = dot ? dot + 1 : pattern.at, *end = pattern.at + pattern.size;
    bool plain = last < end && !(flags & SEARCH_IGNORE_CASE);
    for (const uint8_t *p = last; p < end; p++) plain = plain && *p != '*' && *p != '?' && *p != '[';
    if (plain && (s->must = malloc((size_t)(end - last)))) memcpy(s->must, last, s->must_size = (size_t)(end - last));
    return error;
}

static const char *compile(struct search *s, struct span pattern, uint8_t flags, struct span globs, uint32_t glob_count) {
    const char *error = compile_globs(globs, false, &s->wanted);
    if (!error) error = compile_globs(globs, true, &s->unwanted);
    if (!error && s->how == HOW_SYMBOL && !glob_count) s->wanted = regex_compile("\\.pyi?$", 7, 0, &error);
    if (error) return error;
    if (s->how == HOW_SYMBOL) return compile_symbol(s, pattern, flags);
    if (!pattern.size) return "the pattern is empty";
    if (memchr(pattern.at, '\n', pattern.size)) return "the pattern has a newline; lines are searched one by one";
    int how = (flags & SEARCH_IGNORE_CASE ? REGEX_IGNORE_CASE : 0) | (flags & SEARCH_WORDS ? REGEX_WORDS : 0) | (s->how == HOW_TEXT ? REGEX_LITERAL : 0);
    s->pattern = regex_compile(pattern.at, pattern.size, how, &error);
    return error;
}

// ---- one file ----

// Reads it whole into s->text; false when it is to be skipped.
static bool load(struct search *s, int dir, const char *name, int flags) {
    struct stat st;
    autoclose int fd = open_regular(dir, name, flags, &st);
    if (fd < 0 || st.st_size < 0 || (uint64_t)st.st_size > s->max_file) return false;
    s->text.size = 0;
    size_t want = (size_t)st.st_size;
    uint8_t *to = wr_reserve(&s->text, want + 1);
    if (!to) {
        s->text.failed = false;
        return false;
    }
    ssize_t n = read_full(fd, to, want);
    if (n < 0) return false;
    wr_commit(&s->text, (size_t)n);
    return !memchr(to, 0, (size_t)n < BINARY_LOOK ? (size_t)n : BINARY_LOOK);
}

static bool on_symbol(void *context, const struct symbol *symbol) {
    struct search *s = context;
    if (!s->pattern || regex_matches(s->pattern, symbol->name, symbol->name_size))
        give(s, symbol->line, symbol->column, (uint8_t)symbol->kind, symbol->name, symbol->name_size);
    return !s->stopped;
}

static void begin_file(struct search *s, int dir, const char *name, const char *path, size_t path_size, int flags) {
    if (!load(s, dir, name, flags)) {
        s->skipped++;
        return;
    }
    s->files++;
    s->path.size = 0;
    wr_raw(&s->path, path, path_size);
    const uint8_t *at = s->text.data, *end = at + s->text.size;
    if (s->how != HOW_SYMBOL) {
        s->at = s->counted = at, s->end = end, s->line = 1;
    } else if (!s->must || find_bytes(at, end, s->must, s->must_size)) {
        symbols_find(at, s->text.size, on_symbol, s);
    }
}

static void give_line(struct search *s, const uint8_t *hit) {
    const uint8_t *line = s->at, *newline = hit > line ? memrchr(line, '\n', (size_t)(hit - line)) : NULL, *stop = memchr(hit, '\n', (size_t)(s->end - hit));
    if (newline) line = newline + 1;
    if (!stop) stop = s->end;
    for (const uint8_t *p = s->counted; p < line && (p = memchr(p, '\n', (size_t)(line - p))); p++) s->line++;
    s->counted = line;
    s->at = stop < s->end ? stop + 1 : s->end;
    size_t size = (size_t)(stop - line), column = 0;
    if (size <= COLUMN_LINE_MAX) column = regex_column(s->pattern, line, size) + 1;
    size_t from = column > TEXT_MAX / 2 && size > TEXT_MAX ? column - 1 - TEXT_BEFORE : 0;
    if (size && line[size - 1] == '\r') size--;
    if (from > size) from = size;
    give(s, s->line, column, 0, line + from, size - from < TEXT_MAX ? size - from : TEXT_MAX);
}

// ---- the tree ----

static void next_file(struct search *s) {
    struct walk *w = &s->walk;
    enum walk_event event = s->walking ? walk_next(w) : WALK_END;
    if (event == WALK_END) s->stopped = true;
    if (event == WALK_ERROR) s->skipped++;
    if (event != WALK_ENTRY) return;
    if (w->type == DT_DIR) {
        if (strcmp(w->name, ".git") != 0 && walk_enter(w)) s->skipped++;
        return;
    }
    if (w->type != DT_REG) return;
    if (w->path_size > PATH_SHOWN_MAX) {
        s->skipped++;
        return;
    }
    if (s->wanted && !path_matches(s->wanted, w->path, w->path_size)) return;
    if (s->unwanted && path_matches(s->unwanted, w->path, w->path_size)) return;
    begin_file(s, w->dir, w->name, w->path, w->path_size, O_NOFOLLOW);
}

static enum step search_step(struct job *j, uint64_t until) {
    struct search *s = (struct search *)j;
    for (uint32_t n = 1; !s->stopped; n++) {
        if (s->at < s->end) {
            const uint8_t *resume, *hit = regex_find(s->pattern, s->at, s->end, SCAN_BYTES, &resume);
            if (hit) give_line(s, hit);
            else s->at = resume ? resume : s->end;
        } else {
            next_file(s);
        }
        if (s->items.failed || s->path.failed) {
            fail_os(j->a, j->id, ENOMEM, "search", NULL);
            return STEP_END;
        }
        if (n % 8 == 0 && !s->stopped && (io_now_ns() >= until || j->a->out->size >= OUT_FULL)) return STEP_MORE;
    }
    flush(s, K_DONE);
    return STEP_END;
}

void action_search(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct rd *r = &g.payload;
    struct span root = rd_name(r), pattern = rd_bytes(r);
    uint8_t how = rd_u8(r), flags = rd_u8(r);
    uint32_t glob_count;
    struct span globs = rd_strs(r, &glob_count);
    uint32_t most = rd_u32(r);
    uint64_t max_file = rd_u64(r);
    if (how > HOW_SYMBOL) r->bad = true;
    if (malformed(a, &g)) return;
    struct search *s = job_new(a, f, sizeof *s);
    if (!s) return;
    s->how = how, s->left = most, s->bounded = most != 0;
    s->max_file = max_file && max_file < FILE_WHOLE_MAX ? max_file : FILE_WHOLE_MAX;
    s->job.step = search_step, s->job.dispose = search_dispose;
    const char *wrong = compile(s, pattern, flags, globs, glob_count);
    if (wrong) {
        fail(a, f->id, E_REJECTED, 0, "pattern: %s", wrong);
        search_dispose(&s->job);
        return;
    }
    char room[PATH_ROOM];
    int error = 0, fd = open(path_of(a, root, room), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        error = walk_open(&s->walk, fd);
        s->walking = !error;
    } else if (errno == ENOTDIR) {
        struct stat st;
        int file = open_regular(AT_FDCWD, room, 0, &st);
        if (file < 0) error = errno;
        io_close(&file);
        const char *slash = strrchr(room, '/'), *name = slash ? slash + 1 : room;
        if (!error) begin_file(s, AT_FDCWD, room, name, strlen(name), 0);
    } else {
        error = errno;
    }
    if (error) {
        fail_os(a, f->id, error, "search", room);
        search_dispose(&s->job);
        return;
    }
    job_start(&s->job);
}
