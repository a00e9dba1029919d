// upload and download
#define _GNU_SOURCE
#include "drive.h"

// One entry of a tar stream, as a hostile sender would write it: nothing is checked.
static void entry(struct wr *w, const char *name, char type, const char *link, const char *body, unsigned long long told_size) {
    char h[512] = {0};
    strncpy(h, name, 100);
    memcpy(h + 100, "0000644", 8);
    snprintf(h + 124, 12, "%011llo", told_size & 077777777777ull);
    memcpy(h + 136, "00000001750", 12);
    h[156] = type;
    strncpy(h + 157, link, 100);
    memcpy(h + 257, "ustar\0" "00", 8);
    memset(h + 148, ' ', 8);
    unsigned sum = 0;
    for (int i = 0; i < 512; i++) sum += (unsigned char)h[i];
    snprintf(h + 148, 8, "%06o", sum);
    wr_raw(w, h, 512);
    static const char zeros[512];
    size_t size = strlen(body);
    wr_raw(w, body, size);
    wr_raw(w, zeros, -size & 511);
}
static void file(struct wr *w, const char *name, const char *body) { entry(w, name, '0', "", body, strlen(body)); }

// Sends the archive in pieces of `piece` bytes and frees it.
static struct reply upload(const char *dest, struct wr *w, size_t piece, uint64_t max_bytes, uint64_t max_entries) {
    drive_send(7, K_UPLOAD, 0, "p88", dest, max_bytes, max_entries);
    struct reply r = {0};
    for (size_t at = 0; at < w->size && !r.kind; at += piece) {
        drive_data(7, false, w->data + at, w->size - at < piece ? w->size - at : piece);
        drive_collect(7, &r);
    }
    if (!r.kind) drive_data(7, true, "", 0), drive_collect(7, &r);
    wr_free(w);
    return r;
}

static void unpacking(void) {
    struct wr w = {0};
    entry(&w, "./", '5', "", "", 0);
    entry(&w, "sub/", '5', "", "", 0);
    file(&w, "sub/one", "first");
    file(&w, "./made//on/./the/way", "second");
    entry(&w, "sub/link", '2', "../../outside", "", 0);
    entry(&w, "hard", '1', "sub/one", "", 0);
    entry(&w, "pax", 'x', "", "28 path=long/name/of/a/file\n19 mtime=1234567.5\n", 47);
    file(&w, "ignored", "third");
    entry(&w, "././@LongLink", 'L', "", "gnu/long", 8);
    file(&w, "ignored", "fourth");
    file(&w, "empty", "");
    struct wr copy = {0};
    wr_raw(&copy, w.data, w.size);
    struct reply r = upload("u/deep", &w, 1 << 20, 0, 0);
    struct rd p = rd_of(r.done.data, r.done.size);
    CHECK(r.kind == K_DONE && rd_u64(&p) == 9 && rd_u64(&p) == 22 && rd_done(&p));
    if (r.kind != K_DONE) fprintf(stderr, "%s\n", r.message);
    reply_free(&r);
    CHECK(holds_text("u/deep/sub/one", "first") && holds_text("u/deep/made/on/the/way", "second") && holds_text("u/deep/hard", "first"));
    CHECK(holds_text("u/deep/long/name/of/a/file", "third") && holds_text("u/deep/gnu/long", "fourth") && holds_text("u/deep/empty", ""));
    char target[64];
    CHECK(readlink("u/deep/sub/link", target, sizeof target) == 13);
    struct stat st;
    CHECK(stat("u/deep/sub/one", &st) == 0 && st.st_mtime == 01750 && (st.st_mode & 07777) == 0644);
    CHECK(stat("u/deep/long/name/of/a/file", &st) == 0 && st.st_mtime == 1234567 && st.st_mtim.tv_nsec == 500000000);
    CHECK(is_done(upload("u/deep", &copy, 7, 0, 0)));  // again over what is there, and cut anywhere
    CHECK(holds_text("u/deep/sub/one", "first") && holds_text("u/deep/gnu/long", "fourth"));
}

#define REJECTED(...)                                        \
    do {                                                     \
        struct wr w = {0};                                   \
        __VA_ARGS__;                                         \
        struct reply r = upload("h/in", &w, 4096, 1000, 10); \
        CHECK(is_error(r, E_REJECTED, 0));                   \
    } while (0)
#define TOO_LARGE(...)                                       \
    do {                                                     \
        struct wr w = {0};                                   \
        __VA_ARGS__;                                         \
        struct reply r = upload("h/in", &w, 4096, 1000, 10); \
        CHECK(is_error(r, E_TOO_LARGE, EFBIG));              \
    } while (0)

static void hostile(void) {
    mkdir("h", 0755), mkdir("h/in", 0755), mkdir("h/out", 0755);
    REJECTED(file(&w, "/etc/x", "no"));
    REJECTED(file(&w, "../out/x", "no"));
    REJECTED(file(&w, "a/../../out/x", "no"));
    REJECTED(file(&w, "..", "no"));
    REJECTED(entry(&w, "l", '2', "../out", "", 0); file(&w, "l/x", "no"));
    REJECTED(entry(&w, "l", '2', "../out", "", 0); entry(&w, "l/", '5', "", "", 0));
    REJECTED(entry(&w, "hl", '1', "../out/secret", "", 0));
    REJECTED(entry(&w, "hl", '1', "/etc/passwd", "", 0));
    REJECTED(entry(&w, "dev", '3', "", "", 0));
    REJECTED(entry(&w, "dev", '4', "", "", 0));
    REJECTED(entry(&w, "fifo", '6', "", "", 0));
    REJECTED(entry(&w, "sparse", 'S', "", "", 0));
    REJECTED(entry(&w, "p", 'x', "", "19 path=../out/evil\n", 20); file(&w, "x", ""));
    REJECTED(entry(&w, "p", 'x', "", "20 path=../out/evil\n", 20); file(&w, "x", ""));
    REJECTED(entry(&w, "p", 'x', "", "99999999999999 a=b\n", 19); file(&w, "x", ""));
    REJECTED(entry(&w, "p", 'x', "", "3 \n", 3); file(&w, "x", ""));
    REJECTED(entry(&w, "p", 'x', "", "x", 2ull << 20));
    REJECTED(entry(&w, "cut", '0', "", "short", 600));
    REJECTED(entry(&w, "././@LongLink", 'L', "", "a name behind which nothing comes", 33); wr_raw(&w, "cut", 3));
    REJECTED(file(&w, "sum", ""); w.data[0]++);
    REJECTED(wr_raw(&w, "not a tar stream at all", 23));
    TOO_LARGE(entry(&w, "bomb", '0', "", "", 07777777777ull));
    TOO_LARGE(for (int i = 0; i < 11; i++) entry(&w, "d", '5', "", "", 0));
    TOO_LARGE(for (int i = 0; i < 9; i++) file(&w, "f", "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"
                                                        "01234567890123456789012345678901234567890123456789"));
    // A link in the way is replaced, never written through.
    put("h/out/victim", "safe");
    CHECK(unlink("h/in/l") == 0 && symlink("../out/victim", "h/in/v") == 0 && symlink("../out", "h/in/l") == 0);
    struct wr w = {0};
    file(&w, "v", "new");
    CHECK(is_done(upload("h/in", &w, 4096, 0, 0)) && holds_text("h/out/victim", "safe") && holds_text("h/in/v", "new"));
    CHECK(access("h/out/x", F_OK) && access("h/out/evil", F_OK) && access("h/in/bomb", F_OK));
    struct wr dir = {0};
    file(&dir, "full", "x");
    mkdir("h/in/full", 0755);
    CHECK(is_error(upload("h/in", &dir, 4096, 0, 0), E_OS, EISDIR));
    struct wr none = {0};
    CHECK(is_error(upload("h/in/v", &none, 4096, 0, 0), E_OS, ENOTDIR));
}

static struct reply download(const char *path, uint64_t max_bytes) { return ASK(K_DOWNLOAD, "p8", path, max_bytes); }

static void round_trip(void) {
    mkdir("t", 0755), mkdir("t/closed", 0755), mkdir("t/empty", 0711);
    char name[400] = "t/";
    memset(name + 2, 'x', 180), name[182] = 0;
    mkdir(name, 0755);
    memset(name + 183, 'y', 180), name[182] = '/', name[363] = 0;
    put(name, "long name");
    put("t/closed/inside", "kept");
    size_t size = (1u << 20) + 1;
    char *big = malloc(size);
    memset(big, 'B', size);
    put_file("t/big", big, size);
    for (int i = 0; i < 500; i++) {
        char small[32];
        snprintf(small, sizeof small, "t/s%d", i);
        put(small, small);
    }
    CHECK(symlink("nowhere", "t/broken") == 0 && mkfifo("t/fifo", 0644) == 0);
    chmod("t/closed", 0555), chmod("t/big", 0600);
    struct reply r = download("t", 0);
    struct rd p = rd_of(r.done.data, r.done.size);
    CHECK(r.kind == K_DONE && rd_u64(&p) == 508 && rd_u64(&p) > size && r.data.size % 512 == 0);
    struct reply u = upload("back", &r.data, 100000, 0, 0);
    CHECK(u.kind == K_DONE && u.done.size == r.done.size && memcmp(u.done.data, r.done.data, 16) == 0);
    reply_free(&u), reply_free(&r);
    memcpy(big, "back", 4);
    struct stat a, b;
    CHECK(stat("t/big", &a) == 0 && stat("back/big", &b) == 0 && a.st_size == b.st_size && a.st_mode == b.st_mode && a.st_mtime == b.st_mtime);
    char *long_name = malloc(500);
    snprintf(long_name, 500, "back%s", name + 1);
    CHECK(holds_text(long_name, "long name") && holds_text("back/s7", "t/s7") && holds_text("back/closed/inside", "kept"));
    CHECK(stat("back/closed", &b) == 0 && (b.st_mode & 07777) == 0555 && stat("back/empty", &b) == 0 && (b.st_mode & 07777) == 0711);
    CHECK(lstat("back/broken", &b) == 0 && S_ISLNK(b.st_mode) && access("back/fifo", F_OK));
    chmod("t/closed", 0755), chmod("back/closed", 0755);
    free(long_name), free(big);

    r = download("t/s7", 0);
    CHECK(r.kind == K_DONE && r.data.size == 512 * 4 && strcmp((char *)r.data.data, "s7") == 0);
    reply_free(&r);
    CHECK(is_error(download("t", 1000), E_TOO_LARGE, EFBIG));
    CHECK(is_error(download("t/s7", 1), E_TOO_LARGE, EFBIG));
    CHECK(is_error(download("none", 0), E_OS, ENOENT));
    CHECK(is_error(download("t/fifo", 0), E_OS, ENXIO));
}

// No more than the window without credit, and both ways of ending early.
static void window(void) {
    drive_send(8, K_DOWNLOAD, 0, "p8", "t", (uint64_t)0);
    for (int i = 0; i < 1000 && actions_step(drive_actions); i++) {}
    struct reply r = {0};
    drive_collect(8, &r);
    CHECK(!r.kind && r.data.size == STREAM_WINDOW);
    drive_send(8, K_CREDIT, 0, "14", 1, 1000u);
    while (actions_step(drive_actions)) {}
    drive_collect(8, &r);
    CHECK(r.data.size == STREAM_WINDOW + 1000);
    drive_send(8, K_CANCEL, 0, "");
    drive_collect(8, &r);
    CHECK(r.kind == K_ERROR && r.code == E_CANCELLED);
    reply_free(&r);
    drive_send(8, K_UPLOAD, 30, "p88", "u", (uint64_t)0, (uint64_t)0);
    CHECK(is_error(drive_wait(8, 2000), E_DEADLINE, 0));
}

int main(void) {
    drive_begin();
    unpacking();
    hostile();
    round_trip();
    window();
    return drive_end();
}
