// Descriptors that come over a socket: all that were sent, or none.
#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "io.h"
#include "spare.h"

static int pair[2];

static int open_count(void) {
    int count = 0;
    DIR *d = opendir("/proc/self/fd");
    while (readdir(d)) count++;
    closedir(d);
    return count;
}

static void send_some(size_t count) {
    int fds[FDS_MAX];
    for (size_t i = 0; i < count; i++) fds[i] = pair[0];
    CHECK(io_send_fds(pair[0], "x", 1, fds, count) == 1);
}

static void whole_or_not_at_all(void) {
    int fds[FDS_MAX], before = open_count();
    size_t count;
    char byte;
    struct rlimit files, few;
    getrlimit(RLIMIT_NOFILE, &files);
    few = files;
    int first = dup(pair[0]);  // the lowest that is free
    close(first);
    few.rlim_cur = (rlim_t)first + 2;
    send_some(3);
    setrlimit(RLIMIT_NOFILE, &few);
    errno = 0;
    ssize_t n = io_recv_fds(pair[1], &byte, 1, fds, &count);
    int error = errno;
    setrlimit(RLIMIT_NOFILE, &files);
    CHECK(n == -1 && error == EMFILE && count == 0);
    CHECK(open_count() == before);

    send_some(3);
    CHECK(io_recv_fds(pair[1], &byte, 1, fds, &count) == 1 && count == 3);
    while (count) close(fds[--count]);
    CHECK(open_count() == before);
}

static void no_furniture_has_no_descriptor(void) {
    struct furniture f = FURNITURE_NONE;
    CHECK(f.root == -1 && f.slot.netns == -1 && f.cg.agent_group == -1);
}

int main(void) {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair)) return 1;
    whole_or_not_at_all();
    no_furniture_has_no_descriptor();
    return check_report();
}
