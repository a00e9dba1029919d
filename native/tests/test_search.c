// search in trees, by text, expression and symbol
#define _GNU_SOURCE
#include "drive.h"

// The matches as text, "path:line:column:kind:text\n" each.
static char *matches(struct reply r, uint64_t *files, uint64_t *skipped, int *more) {
    static char text[1 << 20];
    size_t at = 0;
    text[0] = 0;
    struct rd p = rd_of(r.done.data, r.done.size);
    uint64_t f = rd_u64(&p), s = rd_u64(&p);
    int m = rd_u8(&p);
    uint32_t last = rd_u32(&p);
    wr_raw(&r.items, p.at, (size_t)(p.end - p.at));
    if (files) *files = f;
    if (skipped) *skipped = s;
    if (more) *more = m;
    p = rd_of(r.items.data, r.items.size);
    for (uint32_t n = r.item_count + last; n; n--) {
        struct span path = rd_bytes(&p);
        uint32_t line = rd_u32(&p), column = rd_u32(&p);
        int kind = rd_u8(&p);
        struct span line_text = rd_bytes(&p);
        at += (size_t)snprintf(text + at, sizeof text - at, "%.*s:%u:%u:%d:%.*s\n", (int)path.size, path.at, line, column, kind, (int)line_text.size, line_text.at);
    }
    CHECK(r.kind == K_DONE && (r.items.size == 0 || rd_done(&p)));
    if (r.kind == K_ERROR) fprintf(stderr, "%s\n", r.message);
    reply_free(&r);
    return text;
}

static struct reply search(const char *root, const char *pattern, int how, int flags, const char *glob, unsigned most, uint64_t max_file) {
    return ASK(K_SEARCH, "pp11s48", root, pattern, how, flags, glob, most, max_file);
}

#define FOUND(want, ...)                                                                \
    do {                                                                                \
        char *got = matches(search(__VA_ARGS__), NULL, NULL, NULL);                     \
        if (strcmp(got, want) != 0) fprintf(stderr, "got:\n%swanted:\n%s", got, want);  \
        CHECK(strcmp(got, want) == 0);                                                  \
    } while (0)

int main(void) {
    drive_begin();
    mkdir("p", 0755), mkdir("p/src", 0755), mkdir("p/src/sub", 0755), mkdir("p/.git", 0755);
    put("p/a.txt", "first\nsecond needle here\r\nNEEDLE\nneedles");
    put("p/src/b.py", "def needle():\n    pass\n\n\nclass Hay:\n    async def needle(self): ...\n    def other(self): return 'needle'\n");
    put("p/src/sub/c.py", "x = 1\nneedle = 2\n");
    put("p/.git/d", "needle\n");
    put_file("p/binary", "needle\0", 7);
    put("p/large", "needle and a lot of text that makes it larger than the others are, much larger in fact, so that a limit can be put between it and them");
    CHECK(symlink("src", "p/loop") == 0 && symlink("/", "p/root") == 0 && mkfifo("p/fifo", 0644) == 0);
    char odd[] = "p/new\nline.py";
    put(odd, "needle\n");

    uint64_t files, skipped;
    int more;
    matches(search("p", "needle", 0, 0, NULL, 0, 0), &files, &skipped, &more);
    CHECK(files == 5 && skipped == 1 && !more);
    matches(search("p", "needle", 0, 0, NULL, 0, 120), &files, &skipped, &more);
    CHECK(files == 4 && skipped == 2);
    FOUND("a.txt:2:8:0:second needle here\na.txt:4:1:0:needles\n", "p", "needle", 0, 0, "*.txt", 0, 0);
    FOUND("a.txt:2:8:0:second needle here\na.txt:3:1:0:NEEDLE\n", "p", "Needle", 0, 3, "*.txt", 0, 0);
    FOUND("a.txt:4:1:0:needles\n", "p", "^need\\w+s$", 1, 0, "a.*", 0, 0);
    FOUND("src/sub/c.py:2:1:0:needle = 2\n", "p", "^needle", 1, 0, "src/**/*.py", 0, 0);
    FOUND("src/b.py:1:5:0:def needle():\n", "p", "needle\\(\\)", 1, 0, "**/b.py", 0, 0);
    FOUND("new\nline.py:1:1:0:needle\n", "p", "needle", 0, 0, "new?line.py", 0, 0);
    FOUND("new\nline.py:1:1:0:needle\nsrc/sub/c.py:2:1:0:needle = 2\n", "p", "^needle", 1, 0, "*.py", 0, 0);
    FOUND("b.py:1:5:0:def needle():\n", "p/src/b.py", "needle()", 0, 0, NULL, 0, 0);
    FOUND("", "p", "absent", 0, 0, NULL, 0, 0);
    matches(search("p", "needle", 0, 0, NULL, 2, 0), NULL, NULL, &more);
    CHECK(more == 1);

    FOUND("src/b.py:1:1:1:needle\nsrc/b.py:6:5:2:Hay.needle\n", "p", "needle", 2, 0, NULL, 0, 0);
    FOUND("src/b.py:6:5:2:Hay.needle\n", "p", "Hay.needle", 2, 0, NULL, 0, 0);
    FOUND("src/b.py:5:1:3:Hay\n", "p", "ha?", 2, 1, NULL, 0, 0);
    FOUND("src/b.py:5:1:3:Hay\nsrc/b.py:7:5:1:Hay.other\n", "p", "[Ho][at]*", 2, 0, NULL, 0, 0);
    FOUND("src/b.py:1:1:1:needle\nsrc/b.py:5:1:3:Hay\nsrc/b.py:6:5:2:Hay.needle\nsrc/b.py:7:5:1:Hay.other\n", "p", "", 2, 0, NULL, 0, 0);

    CHECK(is_error(search("p", "(", 1, 0, NULL, 0, 0), E_REJECTED, 0));
    CHECK(is_error(search("p", "", 0, 0, NULL, 0, 0), E_REJECTED, 0));
    CHECK(is_error(search("p", "x", 3, 0, NULL, 0, 0), E_REJECTED, 0));
    CHECK(is_error(search("none", "x", 0, 0, NULL, 0, 0), E_OS, ENOENT));
    CHECK(is_error(search("p/fifo", "x", 0, 0, NULL, 0, 0), E_OS, ENXIO));

    // Lines far longer than a result shows, and more results than one frame holds.
    char *wide = malloc(100002);
    memset(wide, 'w', 100000), memcpy(wide + 70000, "pin", 3), wide[100000] = '\n', wide[100001] = 0;
    mkdir("w", 0755);
    put("w/wide", wide);
    char *got = matches(search("w", "pin", 0, 0, NULL, 0, 0), NULL, NULL, NULL);
    CHECK(strncmp(got, "wide:1:70001:0:www", 18) == 0 && strlen(got) < 600 && strstr(got, "wpinw"));
    mkdir("m", 0755);
    for (int i = 0; i < 20000; i++) memcpy(wide + i * 5, "pin\n\n", 5);
    put("m/many", wide);
    struct reply r = search("m", "pi?n", 1, 0, NULL, 0, 0);
    CHECK(r.kind == K_DONE && r.item_count > 10000);
    reply_free(&r);
    free(wide);

    // It stops when told to, between slices.
    for (int i = 0; i < 200; i++) {
        char name[32];
        snprintf(name, sizeof name, "m/%d", i);
        put(name, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n");
    }
    drive_send(8, K_SEARCH, 1, "pp11s48", "/usr", "(a|b)*cdefghij", 1, 0, NULL, 0u, (uint64_t)0);
    CHECK(is_error(drive_wait(8, 1000), E_DEADLINE, 0));
    drive_send(8, K_SEARCH, 0, "pp11s48", "/usr", "(a|b)*cdefghij", 1, 0, NULL, 0u, (uint64_t)0);
    drive_send(8, K_CANCEL, 0, "");
    CHECK(is_error(drive_wait(8, 1000), E_CANCELLED, 0));
    return drive_end();
}
