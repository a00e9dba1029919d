// unified diffs
#define _GNU_SOURCE
#include "drive.h"

static struct reply patch(const char *diff, int flags, int strip) { return ASK(K_PATCH, "pp11", "", diff, flags, strip); }

int main(void) {
    drive_begin();
    put("f", "1\n2\n3\n4\n5\n6\n7\n8\n9\n");
    const char *change = "--- a/f\t2020-01-01\n+++ b/f\t2020-01-02\n@@ -2,3 +2,4 @@ section\n 2\n-3\n+three\n+drei\n 4\n@@ -8,2 +9,1 @@\n 8\n-9\n";
    CHECK(is_done(patch(change, 1, 1)) && holds_text("f", "1\n2\n3\n4\n5\n6\n7\n8\n9\n"));
    struct reply r = patch(change, 0, 1);
    struct rd p = rd_of(r.done.data, r.done.size);
    CHECK(r.kind == K_DONE && rd_u32(&p) == 1 && rd_bytes(&p).size == 1 && rd_done(&p));
    reply_free(&r);
    CHECK(holds_text("f", "1\n2\nthree\ndrei\n4\n5\n6\n7\n8\n"));
    CHECK(is_error(patch(change, 0, 1), E_CONFLICT, 0));

    // elsewhere than the numbers say, in both directions
    put("o", "x\nx\nx\na\nb\nc\n");
    CHECK(is_done(patch("--- a/o\n+++ b/o\n@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n", 0, 1)) && holds_text("o", "x\nx\nx\na\nB\nc\n"));
    CHECK(is_done(patch("--- a/o\n+++ b/o\n@@ -40,2 +40,1 @@\n-x\n x\n", 0, 1)));

    // new, deleted, renamed, mode, with no newline at the end
    put("dead", "bye"), put("old name", "keep\nthis\n"), put("tool", "#!\n");
    r = patch("From someone\n\ndiff --git a/new/file b/new/file\nnew file mode 100755\nindex 0..1\n--- /dev/null\n+++ b/new/file\n@@ -0,0 +1,2 @@\n+one\n+two\n\\ No newline at end of file\n"
              "diff --git a/dead b/dead\ndeleted file mode 100644\n--- a/dead\n+++ /dev/null\n@@ -1 +0,0 @@\n-bye\n\\ No newline at end of file\n"
              "diff --git a/old name b/sub/new name\nsimilarity index 50%\nrename from old name\nrename to sub/new name\n--- a/old name\n+++ b/sub/new name\n@@ -1,2 +1,2 @@\n keep\n-this\n+that\n"
              "diff --git a/tool b/tool\nold mode 100644\nnew mode 100755\n"
              "diff --git a/void b/void\nnew file mode 100644\nindex 0..0\n"
              "diff --git \"a/q\\303\\251\\n\" \"b/q\\303\\251\\n\"\nnew file mode 100644\n--- /dev/null\n+++ \"b/q\\303\\251\\n\"\n@@ -0,0 +1 @@\n+quoted\n-- \n2.39\n", 0, 1);
    CHECK(r.kind == K_DONE);
    if (r.kind == K_ERROR) fprintf(stderr, "%s\n", r.message);
    p = rd_of(r.done.data, r.done.size);
    CHECK(rd_u32(&p) == 7);
    reply_free(&r);
    struct stat st;
    CHECK(holds_text("new/file", "one\ntwo") && stat("new/file", &st) == 0 && (st.st_mode & 0777) == 0755);
    CHECK(access("dead", F_OK) && access("old name", F_OK) && holds_text("sub/new name", "keep\nthat\n"));
    CHECK(stat("tool", &st) == 0 && (st.st_mode & 0777) == 0755 && holds_text("void", "") && holds_text("q\303\251\n", "quoted\n"));
    CHECK(is_done(patch("--- a/new/file\n+++ b/new/file\n@@ -1,2 +1,2 @@\n one\n-two\n\\ No newline at end of file\n+two\n", 0, 1)) && holds_text("new/file", "one\ntwo\n"));
    CHECK(is_done(patch("--- new/file\n+++ new/file\n@@ -1,2 +1,2 @@\n one\n-two\n+two\n\\ No newline at end of file\n", 0, 0)) && holds_text("new/file", "one\ntwo"));

    put("crlf", "a\r\nb\r\nc\r\n");
    CHECK(is_done(patch("--- a/crlf\n+++ b/crlf\n@@ -1,3 +1,3 @@\n a\r\n-b\r\n+B\r\n c\r\n", 0, 1)) && holds_text("crlf", "a\r\nB\r\nc\r\n"));
    CHECK(is_error(patch("--- a/crlf\n+++ b/crlf\n@@ -1,1 +1,1 @@\n-a\n+A\n", 0, 1), E_CONFLICT, 0));
    put("blank", "a\n\nb\n");
    CHECK(is_done(patch("--- a/blank\n+++ b/blank\n@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n", 0, 1)) && holds_text("blank", "a\n\nc\n"));
    put("twice", "a\nb\n");
    CHECK(is_done(patch("--- a/twice\n+++ b/twice\n@@ -1 +1 @@\n-a\n+A\n--- a/twice\n+++ b/twice\n@@ -2 +2 @@\n-b\n+B\n", 0, 1)) && holds_text("twice", "A\nB\n"));

    // all or nothing
    put("x", "x\n"), put("y", "y\n");
    CHECK(is_error(patch("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-x\n+X\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n-z\n+Z\n", 0, 1), E_CONFLICT, 0) && holds_text("x", "x\n"));
    CHECK(is_error(patch("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-x\n+X\n--- /dev/null\n+++ b/y/z\n@@ -0,0 +1 @@\n+Z\n", 0, 1), E_OS, ENOTDIR) && holds_text("x", "x\n"));
    CHECK(is_error(patch("--- a/none\n+++ b/none\n@@ -1 +1 @@\n-x\n+X\n", 0, 1), E_CONFLICT, ENOENT));
    CHECK(is_error(patch("--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+X\n", 0, 1), E_CONFLICT, EEXIST));
    CHECK(is_error(patch("--- a/x\n+++ /dev/null\n@@ -1,0 +0,0 @@\n", 0, 1), E_CONFLICT, 0) && holds_text("x", "x\n"));

    // never outside of the directory
    CHECK(symlink("/tmp", "out") == 0 && symlink("x", "lx") == 0);
    CHECK(is_error(patch("--- /dev/null\n+++ b/../evil\n@@ -0,0 +1 @@\n+X\n", 0, 1), E_REJECTED, 0));
    CHECK(is_error(patch("--- /dev/null\n+++ /etc/evil\n@@ -0,0 +1 @@\n+X\n", 0, 0), E_REJECTED, 0));
    CHECK(is_error(patch("--- /dev/null\n+++ b/out/evil\n@@ -0,0 +1 @@\n+X\n", 0, 1), E_REJECTED, ELOOP));
    CHECK(is_error(patch("--- a/lx\n+++ b/lx\n@@ -1 +1 @@\n-x\n+X\n", 0, 1), E_REJECTED, ELOOP));
    CHECK(is_error(patch("diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n", 0, 1), E_REJECTED, 0));

    // nonsense
    static const char *const bad[] = {"", "hello\n", "--- a/x\n+++ b/x\n@@ -1 +1\n", "--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n x\n", "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-x\nX\n", "--- x\n+++ x\n@@ -1 +1 @@\n-x\n+X\n",
                                      "--- a/x\n+++ b/x\n@@ -99999999999999999999 +1 @@\n-x\n+X\n", "--- \"a/x\n+++ b/x\n@@ -1 +1 @@\n-x\n+X\n", "diff --git a/x b/x\nGIT binary patch\n",
                                      "diff --git a/q b/k\nrename to k\nnew file mode 100644\n--- /dev/null\n+++ b/k\n@@ -0,0 +1 @@\n+x\n", "diff --git a/q b/k\nrename to k\n", "diff --git a/q b/k\nrename from q\n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK(is_error(patch(bad[i], 0, 1), E_REJECTED, 0));
    CHECK(holds_text("x", "x\n"));
    CHECK(is_error(ASK(K_PATCH, "pp11", "none", change, 0, 1), E_OS, ENOENT));
    return drive_end();
}
