// watching a tree
#define _GNU_SOURCE
#include "drive.h"

// What has happened since the last call, as "Cpath Mpath Dpath Ra>b Apath O" in order.
static char *events(void) {
    static char text[65536];
    struct reply r = drive_wait(7, 60);
    size_t at = 0;
    text[0] = 0;
    struct rd p = rd_of(r.items.data, r.items.size);
    for (uint32_t n = r.item_count; n; n--) {
        int type = rd_u8(&p);
        struct span path = rd_bytes(&p), to = rd_bytes(&p);
        at += (size_t)snprintf(text + at, sizeof text - at, "%c%.*s%s%.*s ", "?CMDRAO"[type], (int)path.size, path.at, to.size ? ">" : "", (int)to.size, to.at);
    }
    CHECK(!r.kind && (!r.items.size || rd_done(&p)));
    reply_free(&r);
    return text;
}
#define HAPPENED(want)                                                                \
    do {                                                                              \
        char *got = events();                                                         \
        if (strcmp(got, want) != 0) fprintf(stderr, "got %s, not %s\n", got, want);   \
        CHECK(strcmp(got, want) == 0);                                                \
    } while (0)

int main(void) {
    drive_begin();
    mkdir("w", 0755), mkdir("w/d", 0755), mkdir("w/d/e", 0755), put("outside", ""), mkdir("elsewhere", 0755), put("elsewhere/inner", "");
    drive_send(7, K_WATCH, 0, "p1", "w", 1);
    struct reply r = drive_wait(7, 50);
    CHECK(!r.kind && r.started == 1);
    reply_free(&r);
    put("w/a", "text");
    HAPPENED("Ca Ma ");
    put("w/d/e/b", "text");
    HAPPENED("Cd/e/b Md/e/b ");
    CHECK(chmod("w/a", 0600) == 0);
    HAPPENED("Aa ");
    CHECK(rename("w/a", "w/d/a") == 0);
    HAPPENED("Ra>d/a ");
    CHECK(rename("w/d/a", "elsewhere/a") == 0);
    HAPPENED("Dd/a ");
    CHECK(rename("outside", "w/in") == 0);
    HAPPENED("Cin ");
    CHECK(rename("w/d", "w/moved") == 0);
    HAPPENED("Rd>moved ");
    put("w/moved/e/c", "");
    HAPPENED("Cmoved/e/c ");
    CHECK(rename("elsewhere", "w/tree") == 0);
    HAPPENED("Ctree Ctree/a Ctree/inner ");
    put("w/tree/new", "");
    HAPPENED("Ctree/new ");
    CHECK(rename("w/tree", "gone") == 0);
    HAPPENED("Dtree ");
    put("gone/unseen", "");
    HAPPENED("");
    mkdir("w/fresh", 0755), mkdir("w/fresh/er", 0755);
    events();
    put("w/fresh/er/x", "");
    HAPPENED("Cfresh/er/x ");
    CHECK(unlink("w/fresh/er/x") == 0);
    HAPPENED("Dfresh/er/x ");
    CHECK(rename("w/in", "w/in2") == 0 && rename("w/in2", "w/in3") == 0);
    HAPPENED("Rin>in2 Rin2>in3 ");
    drive_send(7, K_CANCEL, 0, "");
    CHECK(is_done(drive_wait(7, 50)));

    drive_send(7, K_WATCH, 0, "p1", "w/in3", 0);  // a file
    r = drive_wait(7, 50);
    CHECK(r.started == 1 && !r.kind);
    reply_free(&r);
    put("w/in3", "more");
    HAPPENED("M ");
    drive_send(7, K_CANCEL, 0, "");
    CHECK(is_done(drive_wait(7, 50)));
    CHECK(is_error(ASK(K_WATCH, "p1", "none", 1), E_OS, ENOENT));
    drive_send(7, K_WATCH, 20, "p1", "w", 1);
    CHECK(is_error(drive_wait(7, 1000), E_DEADLINE, 0));
    return drive_end();
}
