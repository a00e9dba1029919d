// replacing an exact string
#define _GNU_SOURCE
#include "drive.h"

static struct reply edit(const char *path, const char *old, const char *new, unsigned count) { return ASK(K_EDIT, "ppp4", path, old, new, count); }

int main(void) {
    drive_begin();
    put("f", "one two one two one\r\n");
    CHECK(chmod("f", 0640) == 0 && link("f", "other") == 0 && symlink("f", "l") == 0);
    CHECK(is_done(edit("f", "two", "2", 2)) && holds_text("f", "one 2 one 2 one\r\n"));
    struct reply r = edit("f", "one", "1", 1);
    CHECK(r.code == E_CONFLICT && strstr(r.message, "3 places"));
    reply_free(&r);
    CHECK(is_error(edit("f", "none", "1", 0), E_CONFLICT, 0) && holds_text("f", "one 2 one 2 one\r\n"));
    CHECK(is_done(edit("l", "one", "eleven", 0)) && holds_text("other", "eleven 2 eleven 2 eleven\r\n"));
    struct stat st;
    CHECK(lstat("l", &st) == 0 && S_ISLNK(st.st_mode) && stat("f", &st) == 0 && (st.st_mode & 07777) == 0640 && st.st_nlink == 2);
    CHECK(is_done(edit("f", "eleven 2 eleven 2 eleven\r\n", "", 1)) && holds_text("f", ""));
    CHECK(is_error(edit("f", "", "x", 0), E_REJECTED, 0));
    CHECK(is_error(edit("none", "a", "x", 0), E_OS, ENOENT));
    CHECK(is_error(edit("", "a", "x", 0), E_OS, EISDIR));
    mkfifo("fifo", 0644);
    CHECK(is_error(edit("fifo", "a", "x", 0), E_OS, ENXIO));
    put("o", "aaaa");
    CHECK(is_done(edit("o", "aa", "a", 2)) && holds_text("o", "aa"));
    put_file("z", "a\0b\0a", 5);
    CHECK(is_done(ASK(K_EDIT, "pPP4", "z", (size_t)2, "\0b", (size_t)3, "\0\0c", 1u)) && stat("z", &st) == 0 && st.st_size == 6);
    autoclose int fd = open("huge", O_WRONLY | O_CREAT, 0644);
    CHECK(ftruncate(fd, (64 << 20) + 1) == 0);
    CHECK(is_error(edit("huge", "a", "b", 0), E_TOO_LARGE, EFBIG));
    return drive_end();
}
