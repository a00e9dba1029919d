// libFuzzer target for everything that reads somebody else's bytes in the file actions: frame payloads, patches, tar streams.
// Expressions and Python sources, which are long and hold no frames, have fuzz_texts.c.
//
// It runs in a private temporary directory and hands on only relative names without "..", so that nothing else can be touched.
#define _GNU_SOURCE
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "actions.h"
#include "frames.h"

static char home[64];
static bool mixed;  // an input of many frames: a link unpacked by one could be followed by the next, so it unpacks nothing

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)st, (void)type;
    if (ftw->level == 0) return 0;
    chmod(path, 0700);
    return remove(path) && 0;
}

static void sweep(void) { nftw(home, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

static void leave(void) {
    sweep();
    rmdir(home);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    strcpy(home, "/dev/shm/untax-fuzz-XXXXXX");  // in memory, where there is that
    if (!mkdtemp(home) && !mkdtemp(strcpy(home, "/tmp/untax-fuzz-XXXXXX"))) abort();
    atexit(leave);
    return 0;
}

static void put(const char *name, const void *data, size_t size) {
    char path[100];
    snprintf(path, sizeof path, "%s/%s", home, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0644);
    if (fd < 0) return;
    if (write(fd, data, size) < 0) abort();
    close(fd);
}

// Names as the kernel would see them must stay inside.
static bool harmless(struct span name) {
    if (name.size && name.at[0] == '/') return false;
    return !memmem(name.at, name.size, "..", 2);
}

static bool stays_inside(const struct frame *f) {
    struct rd p = f->payload;
    switch (f->kind) {
        case K_MOVE: {
            struct span from = rd_bytes(&p);
            return harmless(from) && harmless(rd_bytes(&p)) && from.size;
        }
        case K_UPLOAD: return !mixed && harmless(rd_bytes(&p));
        case K_READ: case K_WRITE: case K_LIST: case K_STAT: case K_MKDIR: case K_DOWNLOAD: case K_SEARCH: case K_EDIT: case K_PATCH: case K_WATCH: case K_MARK:
            return harmless(rd_bytes(&p));
        case K_REMOVE: {
            struct span path = rd_bytes(&p);
            return harmless(path) && path.size;  // not the directory itself
        }
        case K_DATA: return !mixed;
        default: return true;
    }
}

// A link in the archive leads out of the directory if an action on a path follows it, so none is left for the next input.
static int drop_link(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)st, (void)ftw;
    if (type == FTW_SL) unlink(path);
    return 0;
}

static struct wr out;

static void check_frames(void) {
    size_t at = 0;
    while (at < out.size) {
        int64_t size = frame_size(out.data + at, out.size - at, FRAME_MAX_OUT);
        if (size <= 0) abort();
        at += (size_t)size;
    }
    out.size = 0;
}

static void hand_over(struct actions *a, const uint8_t *data, size_t size) {
    struct frame f;
    if (!frame_open(data, size, &f) || !stays_inside(&f)) return;
    frames_count(1);
    actions_handle(a, &f);
    for (int i = 0; i < 20 && actions_step(a); i++) {}
    check_frames();
}

// A frame of this kind around the rest of the input, with a plain field before it where the kind wants one.
static void wrapped(struct actions *a, uint8_t kind, const uint8_t *data, size_t size) {
    struct wr w = {0};
    size_t begun = frame_begin(&w, 1, kind);
    if (kind == K_PATCH) wr_bytes(&w, "", 0), wr_bytes(&w, data, size), wr_u8(&w, 0), wr_u8(&w, 1);
    else if (kind == K_DATA) wr_u8(&w, 1), wr_raw(&w, data, size);
    else if (kind == K_UPLOAD) wr_bytes(&w, "up", 2), wr_u64(&w, 100000), wr_u64(&w, 50);
    else wr_raw(&w, data, size);
    frame_end(&w, begun);
    hand_over(a, w.data, w.size);
    wr_free(&w);
}

// Checksums and sizes are what a mutator cannot guess: give each block that looks like a header a right sum.
static void tar_stream(struct actions *a, const uint8_t *data, size_t size) {
    wrapped(a, K_UPLOAD, NULL, 0);
    uint8_t *copy = malloc(size + 512);
    if (!copy) return;
    memcpy(copy, data, size), memset(copy + size, 0, 512);
    for (size_t at = 0; at + 157 < size; at += 512) {
        if (!copy[at] || (copy[at + 156] && !strchr("01257xgLK36", copy[at + 156]))) continue;
        memcpy(copy + at + 100, "0000644", 8);
        if (copy[at + 124] > '7') memcpy(copy + at + 124, "00000000012", 12);
        unsigned sum = 0;
        memset(copy + at + 148, ' ', 8);
        for (size_t i = 0; i < 512; i++) sum += copy[at + i];
        snprintf((char *)copy + at + 148, 8, "%06o", sum);
    }
    wrapped(a, K_DATA, copy, size + (size > 3000 ? 0 : 512));
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static unsigned inputs;
    if (size < 1) return 0;
    uint8_t which = data[0] % 4;
    data++, size--;
    if (inputs++ % 64 == 0) {
        sweep();
        put("f", "one\ntwo\nthree\nfour\n", 19), put("g.py", "class A:\n  def f(self): pass\n", 29);
        char dir[80];
        snprintf(dir, sizeof dir, "%s/d", home);
        mkdir(dir, 0755), put("d/h", "x\n", 2);
    }
    struct actions *a = actions_new(&out);
    actions_workdir(a, home);
    mixed = which == 0;
    if (mixed) {  // frames as they come
        for (int64_t n; size && (n = frame_size(data, size, FRAME_MAX_IN)) > 0; data += n, size -= (size_t)n) hand_over(a, data, (size_t)n);
    } else if (which == 1) {  // one payload behind a well-formed header
        static const uint8_t kinds[] = {K_READ, K_WRITE, K_LIST, K_STAT, K_MKDIR, K_REMOVE, K_MOVE, K_UPLOAD, K_DOWNLOAD, K_SEARCH, K_EDIT, K_PATCH, K_WATCH, K_MARK, K_MARKS};
        if (size) {
            struct wr w = {0};
            size_t begun = frame_begin(&w, 1, kinds[data[0] % sizeof kinds]);
            wr_raw(&w, data + 1, size - 1);
            frame_end(&w, begun);
            hand_over(a, w.data, w.size);
            wr_free(&w);
            wrapped(a, K_DATA, data, size);
        }
    } else if (which == 2) {
        wrapped(a, K_PATCH, data, size);
    } else {
        tar_stream(a, data, size);
    }
    actions_free(a);
    if (which == 1 || which == 3) nftw(home, drop_link, 16, FTW_PHYS);
    if (out.size > (1u << 20)) abort();
    out.size = 0;
    if (frames_done) leave();
    return 0;
}
