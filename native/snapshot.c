// SNAPSHOT and DROP_LAYER: the launcher's side. It never waits for the child that does the work, which stands and falls with what is in the sandbox.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "disk.h"
#include "io.h"
#include "kernel.h"
#include "launcher.h"
#include "maker.h"
#include "next.h"
#include "spare.h"
#include "swap.h"

#define SNAPSHOTS_MAX 256
#define ENTER_PATIENCE_NS 6000000000u  // longer than a worker is waited for
#define PATIENCE_NS 15000000000u  // a swap takes a millisecond; a copy says that it is one, and may take as long as it needs

static struct pending {
    uint32_t seq, handle;
    pid_t pid;               // 0: not in use
    int sock;
    char fresh[ID_MAX];      // the name for a new upper directory
    char copy[ID_MAX];       // and for a copy of the old one
    bool made, copies;       // something may lie under it
    struct furniture *mounts;  // not yet sent; NULL: none
    uint64_t glance;         // at what they were made from
    bool pushed;             // the old upper directory is a layer, provisionally
    bool answered;
    bool is_over;            // but for the child's last steps
    uint64_t until_ns;       // 0: it copies
} pending[SNAPSHOTS_MAX];
static unsigned used;

// Requests that cannot be met while a snapshot is taken, in order.
static struct deferred {
    struct deferred *next;
    uint32_t handle;
    uint64_t since_ns;
    size_t size;
    uint8_t packet[];
} *deferred;

static struct pending *find(uint32_t handle) {
    for (size_t i = 0, seen = 0; seen < used && i < SNAPSHOTS_MAX; i++) {
        if (!pending[i].pid) continue;
        if (pending[i].handle == handle && !pending[i].is_over) return &pending[i];
        seen++;
    }
    return NULL;
}

// ---- what the child has to say ----

static void refuse(struct pending *p, const char *step, int error) {
    if (!p->answered) launcher_refuse(p->seq, step, error ? error : EIO);
    p->answered = true;
}

static void answer(struct pending *p, bool copied, uint64_t ns, const char *layer) {
    struct wr w = launcher_answer(p->seq, 0);
    wr_u8(&w, copied);
    wr_u64(&w, ns);
    wr_bytes(&w, layer, strlen(layer));
    launcher_send(&w, NULL, 0);
    p->answered = true;
}

static void undo(struct pending *p, struct box *b) {
    if (p->mounts) maker_discard(p->mounts);
    free(p->mounts), p->mounts = NULL;
    if (p->pushed && b) layout_pop(&b->layout);
    if (p->made) disk_drop(p->fresh);
    if (p->copies) disk_drop(p->copy);
    p->pushed = p->made = p->copies = false;
}

// The overlays over a fresh upper directory and the one so far. What is left after a failure undo takes away.
static const char *make_mounts(struct pending *p, struct box *b) {
    struct disk_box disk;
    const char *step;
    char above[4200 + ID_MAX];
    snprintf(above, sizeof above, "%s/%s/upper", layout_boxes(), b->disk);
    p->glance = layout_glance(&b->layout, above);
    p->mounts = malloc(sizeof *p->mounts);
    if (p->mounts) *p->mounts = FURNITURE_NONE;
    if (!p->mounts || !layout_push(&b->layout, above)) return "memory";
    p->pushed = true;
    if (disk_make(p->fresh, (uint16_t)(b->slot.base / RANGE_SIZE), b->disk_bytes, b->in_memory, &disk)) return "upper directory";
    p->made = true;
    struct furniture *f = p->mounts;
    int failed = layout_mount(&b->layout, true, &b->slot, &disk, &f->root, f->views, &f->count, &step), error = errno;
    disk_box_close(&disk);
    errno = error;
    return failed ? step : NULL;
}

// Those that were made before anybody asked. False: there are none, and nothing is changed.
static bool take_mounts(struct pending *p, struct box *b) {
    char above[4200 + ID_MAX];
    snprintf(above, sizeof above, "%s/%s/upper", layout_boxes(), b->disk);
    p->mounts = malloc(sizeof *p->mounts);
    if (!p->mounts || !next_take(b, p->fresh, p->mounts, &p->glance)) {
        free(p->mounts), p->mounts = NULL;
        return false;
    }
    p->made = true;
    p->pushed = layout_push(&b->layout, above);
    return true;
}

// They were made while the sandbox went on, because that takes longest; nothing is looked up in them before they are used, so only what they copied from the
// old upper directory must still be so now that it stands still.
static bool are_current(const struct pending *p, const struct box *b) { return p->mounts && p->pushed && p->glance && p->glance == layout_glance(&b->layout, b->layout.lowers[0]); }

static const char *send_mounts(struct pending *p) {
    int failed = launcher_send_mounts(p->sock, p->mounts->root, p->mounts->views, p->mounts->count), error = errno;
    furniture_close(p->mounts);
    free(p->mounts), p->mounts = NULL;
    errno = error;
    return failed ? "mounts" : NULL;
}

static void on_wants_mounts(struct pending *p, struct box *b) {
    const char *step = p->made && !p->mounts ? "mounts" : NULL;  // it has had them
    if (!step && !are_current(p, b)) {
        undo(p, b);
        step = make_mounts(p, b);
    }
    if (!step) step = send_mounts(p);
    if (!step) return;
    struct swap_note no = {.error = errno};
    snprintf(no.step, sizeof no.step, "%s", step);
    undo(p, b);
    send(p->sock, &no, sizeof no, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void on_note(struct pending *p, struct box *b, struct swap_note *n) {
    n->step[sizeof n->step - 1] = 0;
    switch ((enum swap_said)n->said) {
    case SWAP_WANTS_MOUNTS: on_wants_mounts(p, b); break;
    case SWAP_COPIES:
        undo(p, b);
        p->copies = true;
        p->until_ns = 0;
        break;
    case SWAP_SWAPPED:
        answer(p, false, n->still_ns, b->disk);
        // Not before: the first look into new overlays writes marks, and one that is full shall not be lost for that.
        if (!b->in_memory) disk_join(b->disk, p->fresh, b->disk_bytes);
        strcpy(b->disk, p->fresh);
        b->print = 0;
        p->made = p->pushed = false;
        next_snapshotted(b);
        layout_let_go();  // a grace period of the kernel's, for which nobody has to stand still
        break;
    case SWAP_COPIED:
        answer(p, true, n->still_ns, p->copy);
        next_snapshotted(b);
        p->copies = false;
        break;
    case SWAP_FAILED:
        undo(p, b);
        refuse(p, n->step, n->error);
        break;
    case SWAP_SPOILED:
        launcher_end(b);
        refuse(p, n->step, ESRCH);
        break;
    }
}

// Letting go of the old mounts takes the child most of a millisecond, which nobody has to wait for.
static void reap(struct pending *p) {
    if (!waitpid(p->pid, NULL, WNOHANG)) return;
    *p = (struct pending){.sock = -1};
    used--;
}

// Its child has ended: with a last word, or else nobody knows in what state it left the sandbox.
static void finish(struct pending *p) {
    struct box *b = launcher_find(p->handle);
    if (!p->answered) {
        if (b) launcher_end(b);
        refuse(p, "snapshot", ESRCH);
    }
    undo(p, b);
    launcher_unwatch(&p->sock);
    p->is_over = true;
    reap(p);
}

void launcher_snapshot_said(uint32_t index) {
    struct pending *p = &pending[index];
    struct swap_note n;
    if (index >= SNAPSHOTS_MAX || !p->pid || p->is_over) return;
    ssize_t got = recv(p->sock, &n, sizeof n, MSG_DONTWAIT);
    // Reset: it ended with mounts that it had no use for still in its socket; what it said comes after that.
    if (got < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNRESET)) return;
    struct box *b = launcher_find(p->handle);
    if (got == (ssize_t)sizeof n && b) on_note(p, b, &n);
    else if (got <= 0) finish(p);
}

// ---- requests ----

static int start(uint32_t seq, struct box *b, const char *fresh) {
    size_t i = 0;
    while (i < SNAPSHOTS_MAX && pending[i].pid) i++;
    int pair[2];
    if (i == SNAPSHOTS_MAX) {
        errno = EAGAIN;
        return -1;
    }
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return -1;
    autoclose int ours = pair[0], its = pair[1];
    if (launcher_watch_snapshot(ours, (uint32_t)i)) return -1;
    bool may_swap = b->layout.lower_count + 2 < LAYERS_MAX;  // the kernel takes no more
    struct pending *p = &pending[i];
    *p = (struct pending){.seq = seq, .handle = b->handle, .sock = ours, .until_ns = io_now_ns() + PATIENCE_NS};
    strcpy(p->fresh, fresh);
    strcpy(p->copy, fresh);
    strcat(p->copy, "-c");
    p->pid = fork();
    if (!p->pid) {
        io_close(&ours);
        swap_main(b, its, p->copy, may_swap);
    }
    if (p->pid < 0) {
        p->pid = 0;
        return -1;
    }
    used++;
    ours = -1;
    if (may_swap && !take_mounts(p, b) && make_mounts(p, b)) undo(p, b);  // it is tried again when they are wanted, and then told
    return 0;
}

void launcher_snapshot(uint32_t seq, struct rd *r) {
    struct box *b = launcher_find(rd_u32(r));
    struct span name = rd_name(r);
    char fresh[ID_MAX] = "";
    if (!rd_done(r) || !launcher_valid_id(name)) {
        launcher_refuse(seq, "request", EINVAL);
        return;
    }
    memcpy(fresh, name.at, name.size);
    if (!b) launcher_refuse(seq, "sandbox", ESRCH);
    // With this sandbox's own ids in it a layer could serve no other.
    else if (L.mounts.cannot_shift) launcher_refuse(seq, "layers of this state directory cannot be shared", EOPNOTSUPP);
    else if (start(seq, b, fresh)) launcher_refuse(seq, "snapshot", errno);
}

void launcher_drop_layer(uint32_t seq, struct rd *r) {
    struct span name = rd_name(r);
    char id[ID_MAX] = "";
    if (!rd_done(r) || !launcher_valid_id(name)) {
        launcher_refuse(seq, "request", EINVAL);
        return;
    }
    memcpy(id, name.at, name.size);
    for (size_t i = 0; i < BOXES_MAX; i++)
        if (L.boxes[i] && !strcmp(L.boxes[i]->disk, id)) {
            launcher_refuse(seq, "a live sandbox writes to it", EBUSY);
            return;
        }
    char above[4200 + ID_MAX];
    snprintf(above, sizeof above, "%s/%s/upper", layout_boxes(), id);
    spares_drop(above);
    disk_drop(id);
    launcher_done(seq);
}

// ---- what must wait ----

static bool must_wait(uint32_t handle, uint8_t op) { return find(handle) || (op == OP_SNAPSHOT && launcher_is_entering(handle)); }

// The workload can stop a worker on its way in, and with it whoever waits for that.
static bool has_waited_enough(const struct deferred *d) { return !find(d->handle) && io_now_ns() - d->since_ns > ENTER_PATIENCE_NS; }

bool launcher_defer(uint32_t handle, const uint8_t *packet, size_t size) {
    struct deferred **at = &deferred;
    struct deferred *d = must_wait(handle, packet[4]) ? malloc(sizeof *d + size) : NULL;
    if (!d) return false;
    *d = (struct deferred){.handle = handle, .since_ns = io_now_ns(), .size = size};
    memcpy(d->packet, packet, size);
    while (*at) at = &(*at)->next;
    *at = d;
    return true;
}

// The sandbox's first process goes before its child, with whom the kernel kills those whom it made to act: nobody is told of that as of a command's own end.
static void give_up(const struct pending *p) {
    struct box *b = p->answered ? NULL : launcher_find(p->handle);
    if (b) k_pidfd_send_signal(b->pidfd, SIGKILL);
    kill(p->pid, SIGKILL);
}

// It may have been us who stood still; what it says is read in the next round.
static bool has_spoken(const struct pending *p) { return poll(&(struct pollfd){.fd = p->sock, .events = POLLIN}, 1, 0) > 0; }

bool launcher_snapshotting(void) {
    for (size_t i = 0; used && i < SNAPSHOTS_MAX; i++) {
        struct pending *p = &pending[i];
        if (p->pid && p->is_over) reap(p);
        else if (p->pid && p->until_ns && io_now_ns() > p->until_ns && !has_spoken(p)) give_up(p);
    }
    for (struct deferred **at = &deferred; *at;) {
        struct deferred *d = *at;
        bool waits = must_wait(d->handle, d->packet[4]);
        if (waits && !has_waited_enough(d)) {
            at = &d->next;
            continue;
        }
        *at = d->next;
        struct rd r = rd_of(d->packet, d->size);
        if (waits) launcher_refuse(rd_u32(&r), "a worker that is still on its way in", EBUSY);
        else launcher_packet(d->packet, d->size);  // may defer others again, at the end of the list
        free(d);
    }
    return used;
}

void launcher_abandon(uint32_t handle) {
    struct pending *p = find(handle);
    if (p) give_up(p);
}
