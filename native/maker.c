#define _GNU_SOURCE
#include "maker.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "disk.h"
#include "io.h"
#include "launcher.h"
#include "layout.h"

#define LAYOUT_SIZE_MAX (128u << 10)  // as a packet of the engine's
#define NICENESS 10                   // behind the commands of sandboxes that somebody holds; not last of all, for it holds locks of the kernel's now and then

struct ask {
    bool discards;  // the descriptors that come with it; there is nothing else to it
    bool is_next;   // only an upper directory and its overlays
    bool shifts, cannot_shift;  // what the launcher has learnt of mounts since this process began
    char name[ID_MAX];
    uid_t base;
    uint64_t disk_bytes;
    struct cg_limits limits;
};

// Descriptors follow, as many at a time as a message takes, in the order of list().
struct said {
    char name[ID_MAX];
    bool failed;
    struct cg_box cg;  // its numbers are this process's: only which of them are -1 means something elsewhere
    bool has_net;
    size_t views;
    uint64_t print;
};

#define LISTED_MAX (14 + VIEWS_MAX)

// Every descriptor there is in it.
static size_t list(struct furniture *f, int **out) {
    size_t n = 0;
    int *const single[] = {&f->root, &f->slot.netns, &f->cg.agent_group, &f->cg.work_group, &f->cg.memory_events, &f->cg.pids_events};
    for (size_t i = 0; i < sizeof single / sizeof *single; i++)
        if (*single[i] >= 0) out[n++] = single[i];
    for (int i = 0; i < f->cg.agent_joins; i++) out[n++] = &f->cg.agent_join[i];
    for (int i = 0; i < f->cg.work_joins; i++) out[n++] = &f->cg.work_join[i];
    for (size_t i = 0; i < f->count; i++) out[n++] = &f->views[i].mount;
    return n;
}

// ---- in the second process ----

static bool furnish(const struct ask *a, const struct layout *l, struct furniture *f) {
    struct disk_box disk;
    const char *step;
    if (disk_make(a->name, (uint16_t)(a->base / RANGE_SIZE), a->disk_bytes, false, &disk)) return false;
    int failed = layout_mount(l, a->is_next, &f->slot, &disk, &f->root, f->views, &f->count, &step);
    if (!failed && !a->is_next) f->print = launcher_print(l, disk.dir);
    disk_box_close(&disk);
    if (failed) disk_drop(a->name);
    return !failed;
}

static bool make(const struct ask *a, struct span layout, int userns, struct furniture *f) {
    const char *step;
    struct layout l = {0};
    struct rd r = rd_of(layout.at, layout.size);
    f->slot = (struct slot){.userns = userns, .netns = -1, .base = a->base};
    bool well = layout_parse(&l, &r);
    if (well && !a->is_next) well = (f->slot.netns = slot_make_net()) >= 0 && !cg_box_make(a->name, &a->limits, &f->cg, &step);
    bool has_groups = well && !a->is_next;
    well = well && furnish(a, &l, f);
    if (!well && has_groups) {
        cg_box_close(&f->cg);
        cg_box_remove(a->name);
    }
    layout_free(&l);  // the places that views name are its own; nobody reads them here
    return well;
}

static bool send_all(int sock, const struct said *head, struct furniture *f) {
    int *at[LISTED_MAX], fds[FDS_MAX];
    size_t count = head->failed ? 0 : list(f, at);
    for (size_t sent = 0; !sent || sent < count;) {
        size_t n = 0;
        while (n < FDS_MAX && sent + n < count) fds[n] = *at[sent + n], n++;
        if (io_send_fds(sock, head, sizeof *head, fds, n) < 0) return false;
        if (!count) return true;
        sent += n;
    }
    return true;
}

_Noreturn static void be_maker(int sock) {
    static uint8_t packet[sizeof(struct ask) + LAYOUT_SIZE_MAX];
    prctl(PR_SET_NAME, "cell-maker");
    io_close(&L.engine);  // whose end would not be seen otherwise
    io_close(&L.epoll);
    L.mounts.is_second = true;
    disk_is_second();
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) _exit(1);
    errno = 0;
    if (nice(NICENESS) == -1 && errno) _exit(1);
    for (;;) {
        int fds[FDS_MAX];
        size_t count;
        ssize_t n = io_recv_fds(sock, packet, sizeof packet, fds, &count);
        if (n < (ssize_t)sizeof(struct ask)) _exit(0);
        struct ask a;
        memcpy(&a, packet, sizeof a);
        if (!a.discards) {
            struct furniture f = FURNITURE_NONE;
            L.mounts.shifts |= a.shifts;  // found out anew, one passing failure would decide it, and differently from there
            L.mounts.cannot_shift |= a.cannot_shift;
            bool well = make(&a, (struct span){packet + sizeof a, (uint32_t)((size_t)n - sizeof a)}, count ? fds[0] : -1, &f);
            struct said head = {.failed = !well, .cg = f.cg, .has_net = f.slot.netns >= 0, .views = f.count, .print = f.print};
            memcpy(head.name, a.name, sizeof head.name);
            if (!send_all(sock, &head, &f)) _exit(0);
            furniture_close(&f);
            io_close(&f.slot.netns);
            layout_let_go();  // takes a grace period of the kernel's
        }
        while (count) close(fds[--count]);
    }
}

// ---- in the launcher ----

static struct {
    pid_t pid;
    int sock;
    bool is_busy;
    int got[LISTED_MAX];  // of what it is sending
    size_t count;
} maker = {.pid = -1, .sock = -1};

int maker_open(void) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return -1;
    maker.pid = fork();
    if (!maker.pid) {
        close(pair[0]);
        be_maker(pair[1]);
    }
    close(pair[1]);
    if (maker.pid < 0 || !io_nonblocking(pair[0])) {
        close(pair[0]);  // which ends it
        return -1;
    }
    maker.sock = pair[0];
    return maker.sock;
}

bool maker_is_free(void) { return maker.sock >= 0 && !maker.is_busy; }

bool maker_ask(const char *name, struct span layout, const struct slot *slot, uint64_t disk_bytes, const struct cg_limits *limits) {
    static uint8_t packet[sizeof(struct ask) + LAYOUT_SIZE_MAX];
    if (!maker_is_free() || layout.size > LAYOUT_SIZE_MAX) return false;
    struct ask a = {.is_next = !limits, .shifts = L.mounts.shifts, .cannot_shift = L.mounts.cannot_shift, .base = slot->base, .disk_bytes = disk_bytes};
    if (limits) a.limits = *limits;
    strcpy(a.name, name);
    memcpy(packet, &a, sizeof a);
    memcpy(packet + sizeof a, layout.at, layout.size);
    maker.is_busy = io_send_fds(maker.sock, packet, sizeof a + layout.size, &slot->userns, 1) > 0;
    return maker.is_busy;
}

void maker_discard(struct furniture *f) {
    int *at[LISTED_MAX], fds[FDS_MAX];
    struct ask a = {.discards = true};
    size_t count = list(f, at);
    for (size_t sent = 0; maker.sock >= 0 && sent < count;) {
        size_t n = 0;
        while (n < FDS_MAX && sent + n < count) fds[n] = *at[sent + n], n++;
        if (io_send_fds(maker.sock, &a, sizeof a, fds, n) < 0) break;  // then it falls to this process after all
        sent += n;
    }
    furniture_close(f);
}

void maker_discard_one(int *fd) {
    struct ask a = {.discards = true};
    if (maker.sock >= 0 && *fd >= 0) io_send_fds(maker.sock, &a, sizeof a, fd, 1);
    io_close(fd);
}

static void end(void) {
    while (maker.count) close(maker.got[--maker.count]);
    launcher_unwatch(&maker.sock);
    kill(maker.pid, SIGKILL);
    waitpid(maker.pid, NULL, 0);
    maker.pid = -1, maker.is_busy = false;
}

enum maker_says maker_said(struct furniture *out) {
    struct said head;
    int fds[FDS_MAX], *at[LISTED_MAX];
    size_t count;
    ssize_t n = io_recv_fds(maker.sock, &head, sizeof head, fds, &count);
    if (n < 0 && errno == EAGAIN) return MAKER_NOTHING;
    bool is_whole = n == (ssize_t)sizeof head;
    for (size_t i = 0; i < count; i++) {
        if (maker.count < LISTED_MAX) maker.got[maker.count++] = fds[i];
        else close(fds[i]);
    }
    if (!is_whole) {
        end();
        return MAKER_GONE;
    }
    *out = (struct furniture){.slot.netns = head.has_net ? 0 : -1, .cg = head.cg, .count = head.views, .print = head.print};
    size_t all = head.failed ? 0 : list(out, at);
    if (maker.count < all) return MAKER_NOTHING;
    for (size_t i = 0; i < all; i++) *at[i] = maker.got[i];
    maker.count = 0, maker.is_busy = false;
    memcpy(out->group, head.name, sizeof head.name);
    return head.failed ? MAKER_FAILED : MAKER_DONE;
}

void maker_close(void) {
    if (maker.sock >= 0) end();
}
