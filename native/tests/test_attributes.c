// mark, marks
#define _GNU_SOURCE
#include <sys/xattr.h>

#include "drive.h"

static bool attributes_are(struct reply r, const char *expected, size_t size) {
    bool is = r.kind == K_DONE && r.done.size == size && memcmp(r.done.data, expected, size) == 0;
    reply_free(&r);
    return is;
}

int main(void) {
    drive_begin();
    put("a", "hello");
    bool has_attributes = setxattr("a", "user.other", "kept", 4, 0) == 0;
    const uint32_t same = 0xffffffff;
    CHECK(is_done(ASK(K_MARK, "p44p4", "a", (uint32_t)getuid(), (uint32_t)getgid(), "", 0u)));
    CHECK(is_error(ASK(K_MARK, "p44p4", "none", (uint32_t)getuid(), same, "", 0u), E_OS, ENOENT));
    CHECK(is_error(ASK(K_MARK, "p44p", "a", same, same, ""), E_REJECTED, 0));
    if (has_attributes) {
        CHECK(is_done(ASK(K_MARK, "p44p4pp", "a", same, same, "user.t.", 2u, "x=1", "y=two=2")));
        CHECK(is_done(ASK(K_MARK, "p44p4p", "a", same, same, "user.t.", 1u, "x=3")));
        char value[16];
        CHECK(getxattr("a", "user.t.x", value, sizeof value) == 1 && value[0] == '3');
        CHECK(getxattr("a", "user.t.y", value, sizeof value) < 0);
        CHECK(getxattr("a", "user.other", value, sizeof value) == 4);
        CHECK(is_error(ASK(K_MARK, "p44p4p", "a", same, same, "user.t.", 1u, "=3"), E_OS, EINVAL));
        CHECK(is_done(ASK(K_MARK, "p44p4p", "a", same, same, "user.t.", 1u, "x=3")));
        CHECK(attributes_are(ASK(K_MARKS, "p4pp", "user.t.", 2u, "none", "a"), "\2\0\0\0\0\0\0\0\1\0\0\0\1\0\0\0x\1\0\0\0003", 22));
    } else {
        fprintf(stderr, "no extended attributes in /tmp here\n");
    }
    CHECK(is_error(ASK(K_MARKS, "p4p", "user.t.", 2u, "a"), E_REJECTED, 0));
    return drive_end();
}
