// Names to ids, from files that may hold anything.
#define _GNU_SOURCE
#include "users.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

static char path[] = "/tmp/untax-test-users-XXXXXX";

static bool look(const char *user, struct identity *who) {
    return user_lookup(path, (struct span){(const uint8_t *)user, (uint32_t)strlen(user)}, who);
}

int main(void) {
    static const char text[] = "root:x:0:0:root:/root:/bin/bash\nbroken\n:::\nbad:x:12x:1::/:\nhuge:x:99999999999:1::/:\n"
                               "none:x:4294967295:1::/:\nalice:x:1000:1001::/home/alice:/bin/sh\n1234:x:7:8::/:\nlast:x:5:6:";
    int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, text, sizeof text - 1) == (ssize_t)sizeof text - 1);
    struct identity who;
    CHECK(look("root", &who) && who.uid == 0 && who.gid == 0);
    CHECK(look("alice", &who) && who.uid == 1000 && who.gid == 1001);
    CHECK(look("last", &who) && who.uid == 5 && who.gid == 6);
    CHECK(look("1000", &who) && who.uid == 1000 && who.gid == 1001);
    CHECK(look("1234", &who) && who.uid == 7 && who.gid == 8);  // a name before a number
    CHECK(look("2000", &who) && who.uid == 2000 && who.gid == 2000);
    CHECK(look("2000:3000", &who) && who.uid == 2000 && who.gid == 3000);
    CHECK(!look("", &who) && !look("bob", &who) && !look("broken", &who) && !look("bad", &who) && !look("huge", &who) && !look("none", &who));
    CHECK(!look("4294967295", &who) && !look("-1", &who) && !look("5:", &who) && !look(":5", &who) && !look("5:x", &who));
    unlink(path);
    CHECK(!look("root", &who) && look("0", &who) && who.uid == 0);
    close(fd);
    return check_report();
}
