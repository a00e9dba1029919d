// read, write, list, stat, mkdir, remove, move
#define _GNU_SOURCE
#include <sys/socket.h>
#include <sys/un.h>

#include "drive.h"

static struct reply read_it(const char *path, uint64_t offset, uint64_t limit, int flags) { return ASK(K_READ, "p881", path, offset, limit, flags); }

// The whole content that a READ gave, OUT frames and rest together.
static bool content_is(struct reply r, const void *data, size_t size) {
    struct rd p = rd_of(r.done.data, r.done.size);
    rd_u64(&p), rd_u32(&p), rd_u64(&p);
    struct span rest = rd_bytes(&p);
    wr_raw(&r.data, rest.at, rest.size);
    bool is = r.kind == K_DONE && rd_done(&p) && r.data.size == size && (!size || memcmp(r.data.data, data, size) == 0);
    reply_free(&r);
    return is;
}

static void reading(void) {
    put("a", "hello");
    CHECK(content_is(read_it("a", 0, 100, 0), "hello", 5));
    CHECK(content_is(read_it("a", 1, 3, 0), "ell", 3));
    CHECK(content_is(read_it("a", 9, 3, 0), "", 0));
    CHECK(content_is(read_it("a", 0, 0, 0), "", 0));
    CHECK(content_is(read_it("a", 0, 5, 1), "hello", 5));
    CHECK(is_error(read_it("a", 0, 4, 1), E_TOO_LARGE, EFBIG));
    CHECK(is_error(read_it("none", 0, 4, 1), E_OS, ENOENT));
    CHECK(is_error(read_it("", 0, 4, 1), E_OS, EISDIR));
    CHECK(is_error(read_it("a/b", 0, 4, 1), E_OS, ENOTDIR));
    put("empty", "");
    CHECK(content_is(read_it("empty", 0, 100, 1), "", 0));

    size_t size = (3u << 20) + 17;
    uint8_t *big = malloc(size);
    for (size_t i = 0; i < size; i++) big[i] = (uint8_t)(i * 31 >> 3);
    put_file("big", big, size);
    CHECK(content_is(read_it("big", 0, UINT64_MAX, 0), big, size));
    CHECK(content_is(read_it("big", 5, 1 << 20, 0), big + 5, 1 << 20));
    free(big);
    struct reply r = read_it("/proc/self/status", 0, 1 << 20, 1);  // states no size
    CHECK(r.kind == K_DONE && r.done.size > 100);
    reply_free(&r);
    CHECK(is_error(read_it("/proc/self/status", 0, 10, 1), E_TOO_LARGE, EFBIG));
    CHECK(is_error(ASK(K_READ, "P881", (size_t)3, "a\0b", (uint64_t)0, (uint64_t)1, 0), E_REJECTED, 0));
    CHECK(is_error(ASK(K_READ, "p8", "a", (uint64_t)0), E_REJECTED, 0));
}

// F4: none of these may hold the worker up.
static void special_files(void) {
    mkfifo("fifo", 0644);
    CHECK(is_error(read_it("fifo", 0, 10, 0), E_OS, ENXIO));
    CHECK(is_error(ASK(K_WRITE, "p41p", "fifo", 0u, 0, "x"), E_OS, ENXIO));
    CHECK(is_error(read_it("/dev/zero", 0, 10, 0), E_OS, ENXIO));
    struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "socket"};
    autoclose int s = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(bind(s, (struct sockaddr *)&name, sizeof name) == 0);
    CHECK(is_error(read_it("socket", 0, 10, 0), E_OS, ENXIO));
}

static void writing(void) {
    CHECK(is_done(ASK(K_WRITE, "p41p", "w", 0u, 0, "one")) && holds_text("w", "one"));
    CHECK(is_done(ASK(K_WRITE, "p41p", "w", 0u, 1, "two")) && holds_text("w", "onetwo"));
    CHECK(is_done(ASK(K_WRITE, "p41p", "w", 0755u, 0, "x")) && holds_text("w", "x"));
    struct stat st;
    CHECK(stat("w", &st) == 0 && (st.st_mode & 07777) == 0755);
    CHECK(is_error(ASK(K_WRITE, "p41p", "w", 0u, 2, "y"), E_OS, EEXIST));
    CHECK(is_error(ASK(K_WRITE, "p41p", "d/e/f", 0u, 0, "y"), E_OS, ENOENT));
    CHECK(is_done(ASK(K_WRITE, "p41p", "d/e//f", 0u, 4, "y")) && holds_text("d/e/f", "y"));
    CHECK(is_error(ASK(K_WRITE, "p41p", "d", 0u, 0, "y"), E_OS, EISDIR));

    char name[257];
    memset(name, 'n', 256), name[256] = 0;
    CHECK(is_error(ASK(K_WRITE, "p41p", name, 0u, 0, "y"), E_OS, ENAMETOOLONG));
    name[255] = 0;
    CHECK(is_done(ASK(K_WRITE, "p41p", name, 0u, 0, "y")));
    CHECK(is_done(ASK(K_WRITE, "p41p", "-\xff \n", 0u, 0, "y")) && holds_text("-\xff \n", "y"));
    char *path = malloc(9000);
    memset(path, '/', 9000), path[8999] = 0;
    CHECK(is_error(ASK(K_STAT, "p1", path, 0), E_OS, ENAMETOOLONG));
    free(path);
}

static void streaming_in(void) {
    static char piece[100 << 10];
    memset(piece, 'p', sizeof piece);
    CHECK(drive_send(9, K_WRITE, 0, "p41p", "s", 0u, 8, "begin"));
    for (int i = 0; i < 20; i++) drive_data(9, false, piece, sizeof piece);
    drive_data(9, true, "end", 3);
    struct reply r = drive_wait(9, 100);
    CHECK(r.kind == K_DONE && r.credits >= 20 * sizeof piece - STREAM_WINDOW / 4);
    struct rd p = rd_of(r.done.data, r.done.size);
    CHECK(rd_u64(&p) == 8 + 20 * sizeof piece && rd_done(&p));
    reply_free(&r);
    drive_data(9, true, "late", 4);
    CHECK(drive_out.size == 0);

    static char flood[STREAM_WINDOW + 1];
    drive_send(9, K_WRITE, 0, "p41p", "s", 0u, 8, "");
    drive_data(9, false, flood, sizeof flood);
    CHECK(is_error(drive_wait(9, 100), E_REJECTED, 0));
    drive_send(9, K_WRITE, 0, "p41p", "s", 0u, 8, "");
    drive_send(9, K_CANCEL, 0, "");
    CHECK(is_error(drive_wait(9, 100), E_CANCELLED, 0));
    drive_send(9, K_WRITE, 20, "p41p", "s", 0u, 8, "");
    CHECK(is_error(drive_wait(9, 2000), E_DEADLINE, 0));
    CHECK(!drive_send(9, K_CANCEL, 0, ""));
}

static void listing(void) {
    mkdir("many", 0755);
    char name[32];
    for (int i = 0; i < 3000; i++) snprintf(name, sizeof name, "many/file-%04d", i), put(name, "");
    CHECK(symlink("target", "many/link") == 0);
    struct reply r = ASK(K_LIST, "p4", "many", 0u);
    struct rd p = rd_of(r.done.data, r.done.size);
    CHECK(r.kind == K_DONE && rd_u8(&p) == 0);
    CHECK(r.item_count + rd_u32(&p) == 3001);
    reply_free(&r);
    r = ASK(K_LIST, "p4", "many", 10u);
    p = rd_of(r.done.data, r.done.size);
    CHECK(rd_u8(&p) == 1 && r.item_count + rd_u32(&p) == 10);
    reply_free(&r);
    CHECK(is_error(ASK(K_LIST, "p4", "a", 0u), E_OS, ENOTDIR));
    r = ASK(K_STAT, "p1", "many/link", 0);
    p = rd_of(r.done.data, r.done.size);
    struct span base = rd_bytes(&p);
    CHECK(base.size == 4 && rd_u8(&p) == 'l');
    rd_u32(&p), rd_u32(&p), rd_u32(&p), rd_u64(&p), rd_u64(&p);
    CHECK(rd_bytes(&p).size == 6 && rd_done(&p));
    reply_free(&r);
    CHECK(is_error(ASK(K_STAT, "p1", "many/link", 1), E_OS, ENOENT));
}

static void directories(void) {
    CHECK(is_done(ASK(K_MKDIR, "p41", "m", 0700u, 0)));
    CHECK(is_error(ASK(K_MKDIR, "p41", "m", 0u, 0), E_OS, EEXIST));
    CHECK(is_done(ASK(K_MKDIR, "p41", "m", 0u, 1)));
    CHECK(is_done(ASK(K_MKDIR, "p41", "m/x/y/", 0777u, 1)));
    struct stat st;
    CHECK(stat("m/x/y", &st) == 0 && (st.st_mode & 07777) == 0777);
    CHECK(is_error(ASK(K_MKDIR, "p41", "a/z", 0u, 1), E_OS, ENOTDIR));
    CHECK(is_error(ASK(K_REMOVE, "p1", "m", 0), E_OS, ENOTEMPTY));
    CHECK(is_error(ASK(K_REMOVE, "p1", "none", 1), E_OS, ENOENT));
    CHECK(symlink(drive_dir, "m/out") == 0);
    CHECK(is_done(ASK(K_REMOVE, "p1", "m", 1)) && access("m", F_OK) && access("a", F_OK) == 0);
    CHECK(is_done(ASK(K_REMOVE, "p1", "many", 1)) && access("many", F_OK));

    // Deeper than PATH_MAX and than descriptors go.
    CHECK(mkdir("deep", 0755) == 0 && chdir("deep") == 0);
    for (int i = 0; i < 1500; i++)
        if (mkdir("level", 0755) || chdir("level")) abort();
    put("leaf", "");
    CHECK(chdir(drive_dir) == 0);
    struct reply r = ASK(K_REMOVE, "p1", "deep", 1);
    struct rd p = rd_of(r.done.data, r.done.size);
    CHECK(rd_u64(&p) == 1502 && access("deep", F_OK));
    reply_free(&r);

    put("from", "1"), put("to", "2");
    CHECK(is_error(ASK(K_MOVE, "pp1", "from", "to", 0), E_OS, EEXIST));
    CHECK(is_done(ASK(K_MOVE, "pp1", "from", "to", 1)) && holds_text("to", "1") && access("from", F_OK));
    CHECK(is_done(ASK(K_MOVE, "pp1", "to", "from", 0)) && holds_text("from", "1"));
    CHECK(is_error(ASK(K_MOVE, "pp1", "none", "to", 0), E_OS, ENOENT));
}

// Another file system: /dev/shm is one nearly everywhere; without it there is nothing to see.
static void moving_far(void) {
    char far[] = "/dev/shm/untax-test-XXXXXX", path[64];
    struct stat here, there;
    if (!mkdtemp(far)) return;
    if (stat(far, &there) == 0 && stat(".", &here) == 0 && here.st_dev != there.st_dev) {
        mkdir("tree", 0755), mkdir("tree/sub", 0755), put("tree/sub/f", "text"), mkdir("tree/closed", 0755), put("tree/closed/g", "");
        CHECK(symlink("f", "tree/sub/l") == 0 && mkfifo("tree/p", 0600) == 0 && chmod("tree/sub/f", 0640) == 0 && chmod("tree/closed", 0500) == 0);
        snprintf(path, sizeof path, "%s/moved", far);
        CHECK(is_done(ASK(K_MOVE, "pp1", "tree", path, 0)) && access("tree", F_OK));
        CHECK(is_done(ASK(K_MOVE, "pp1", path, "again", 0)) && access(path, F_OK));
        struct stat st;
        CHECK(holds_text("again/sub/f", "text") && stat("again/sub/f", &st) == 0 && (st.st_mode & 07777) == 0640);
        CHECK(lstat("again/sub/l", &st) == 0 && S_ISLNK(st.st_mode) && stat("again/closed", &st) == 0 && (st.st_mode & 07777) == 0500);
        CHECK(stat("again/p", &st) == 0 && S_ISFIFO(st.st_mode) && chmod("again/closed", 0700) == 0);
        snprintf(path, sizeof path, "%s/file", far);
        put("near", "near"), put(path, "far");
        CHECK(is_error(ASK(K_MOVE, "pp1", "near", path, 0), E_OS, EEXIST) && holds_text(path, "far") && holds_text("near", "near"));
        CHECK(is_done(ASK(K_MOVE, "pp1", "near", path, 1)) && holds_text(path, "near") && access("near", F_OK));
        CHECK(is_done(ASK(K_REMOVE, "p1", path, 0)));
    }
    CHECK(rmdir(far) == 0);  // nothing is left beside
}

int main(void) {
    drive_begin();
    reading();
    special_files();
    writing();
    streaming_in();
    listing();
    directories();
    moving_far();
    return drive_end();
}
