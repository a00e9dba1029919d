// Drives file actions by hand-made frames in a temporary directory of its own: what the C tests of the actions share.
#ifndef UNTAX_DRIVE_H
#define UNTAX_DRIVE_H

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "actions.h"
#include "check.h"
#include "io.h"

static struct wr drive_out;
static struct actions *drive_actions;
static char drive_dir[64];

// What came back for one request: its final frame, with the data of OUT frames and the items of ITEMS frames joined.
struct reply {
    uint8_t kind;           // 0: nothing final has come
    uint16_t code;          // of an ERROR
    int error;
    char message[600];
    struct wr data, items, done;
    uint32_t item_count, started;
    uint64_t credits;
};

static inline void reply_free(struct reply *r) { wr_free(&r->data), wr_free(&r->items), wr_free(&r->done); }

static inline int drive_remove(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static inline void drive_begin(void) {
    strcpy(drive_dir, "/tmp/untax-test-XXXXXX");
    if (!mkdtemp(drive_dir) || chdir(drive_dir)) abort();
    umask(022);
    drive_actions = actions_new(&drive_out);
    actions_workdir(drive_actions, drive_dir);
}

static inline int drive_end(void) {
    actions_free(drive_actions);
    wr_free(&drive_out);
    if (chdir("/")) abort();
    nftw(drive_dir, drive_remove, 32, FTW_DEPTH | FTW_PHYS);
    return check_report();
}

// Takes the frames of `id` that have come so far into `r` and drops everything else.
static inline void drive_collect(uint32_t id, struct reply *r) {
    size_t at = 0;
    for (int64_t size; at < drive_out.size && (size = frame_size(drive_out.data + at, drive_out.size - at, FRAME_MAX_OUT)) > 0; at += (size_t)size) {
        struct frame f;
        CHECK(frame_open(drive_out.data + at, (size_t)size, &f));
        struct rd p = f.payload;
        if (f.id != id) continue;
        if (f.kind == K_OUT) {
            rd_u8(&p);
            struct span s = rd_rest(&p);
            wr_raw(&r->data, s.at, s.size);
        } else if (f.kind == K_ITEMS) {
            r->item_count += rd_u32(&p);
            struct span s = rd_rest(&p);
            wr_raw(&r->items, s.at, s.size);
        } else if (f.kind == K_STARTED) {
            r->started++;
        } else if (f.kind == K_CREDIT) {
            rd_u8(&p);
            r->credits += rd_u32(&p);
        } else {
            CHECK(r->kind == 0);  // one final frame
            r->kind = f.kind;
            if (f.kind == K_ERROR) {
                r->code = rd_u16(&p);
                r->error = rd_i32(&p);
                struct span s = rd_bytes(&p);
                snprintf(r->message, sizeof r->message, "%.*s", (int)s.size, (const char *)s.at);
                CHECK(rd_done(&p));
            } else {
                struct span s = rd_rest(&p);
                wr_raw(&r->done, s.at, s.size);
            }
        }
    }
    CHECK(at == drive_out.size);  // whole frames within the limit
    drive_out.size = 0;
}

// Payloads by a format: p bytes from a string, P bytes with a size before it, s strs of one string, 1 2 4 8 integers.
static inline void drive_fields(struct wr *w, const char *format, va_list args) {
    for (; *format; format++) switch (*format) {
        case 'p': {
            const char *text = va_arg(args, const char *);
            wr_bytes(w, text, strlen(text));
            break;
        }
        case 'P': {
            size_t size = va_arg(args, size_t);
            wr_bytes(w, va_arg(args, const void *), size);
            break;
        }
        case 's': {
            const char *text = va_arg(args, const char *);
            wr_u32(w, text ? 1 : 0);
            if (text) wr_bytes(w, text, strlen(text));
            break;
        }
        case '1': wr_u8(w, (uint8_t)va_arg(args, int)); break;
        case '4': wr_u32(w, va_arg(args, unsigned)); break;
        case '8': wr_u64(w, va_arg(args, uint64_t)); break;
    }
}

static inline bool drive_send(uint32_t id, uint8_t kind, uint32_t deadline_ms, const char *format, ...) {
    struct wr w = {0};
    size_t begun = frame_begin(&w, id, kind);
    if (deadline_ms) w.data[9] = FLAG_DEADLINE, wr_u32(&w, deadline_ms);
    va_list args;
    va_start(args, format);
    drive_fields(&w, format, args);
    va_end(args);
    frame_end(&w, begun);
    struct frame f;
    bool handled = frame_open(w.data, w.size, &f) && actions_handle(drive_actions, &f);
    wr_free(&w);
    return handled;
}

static inline void drive_data(uint32_t id, bool eof, const void *data, size_t size) {
    struct wr w = {0};
    size_t begun = frame_begin(&w, id, K_DATA);
    wr_u8(&w, eof);
    wr_raw(&w, data, size);
    frame_end(&w, begun);
    struct frame f;
    if (frame_open(w.data, w.size, &f)) actions_handle(drive_actions, &f);
    wr_free(&w);
}

// Steps until the final frame for `id`, giving credit back as data comes, or until nothing more happens for `wait_ms`.
static inline struct reply drive_wait(uint32_t id, int wait_ms) {
    struct reply r = {0};
    for (;;) {
        size_t before = r.data.size;
        drive_collect(id, &r);
        if (r.kind) return r;
        if (r.data.size > before) drive_send(id, K_CREDIT, 0, "14", 1, (unsigned)(r.data.size - before));
        if (actions_step(drive_actions)) continue;
        struct pollfd p = {.fd = actions_fd(drive_actions), .events = POLLIN};
        if (poll(&p, 1, wait_ms) <= 0) return r;
        actions_ready(drive_actions);
    }
}

#define ASK(kind, format, ...) (drive_send(7, kind, 0, format, __VA_ARGS__) ? drive_wait(7, 200) : (struct reply){0})

static inline bool is_error(struct reply r, int code, int error) {
    bool is = r.kind == K_ERROR && r.code == code && r.error == error;
    if (!is) fprintf(stderr, "got kind %x code %d errno %d %s\n", r.kind, r.code, r.error, r.message);
    reply_free(&r);
    return is;
}
static inline bool is_done(struct reply r) {
    bool is = r.kind == K_DONE;
    if (!is) fprintf(stderr, "got kind %x code %d errno %d %s\n", r.kind, r.code, r.error, r.message);
    reply_free(&r);
    return is;
}

static inline void put_file(const char *path, const void *data, size_t size) {
    autoclose int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size) abort();
}
static inline void put(const char *path, const char *text) { put_file(path, text, strlen(text)); }

static inline bool holds_text(const char *path, const char *text) {
    static char have[1 << 20];
    ssize_t n = io_read_file(AT_FDCWD, path, have, sizeof have);
    bool same = n == (ssize_t)strlen(text) && memcmp(have, text, (size_t)n) == 0;
    if (!same) fprintf(stderr, "%s holds %zd bytes: %.*s\n", path, n, n < 0 ? 0 : (int)n, have);
    return same;
}

#endif
