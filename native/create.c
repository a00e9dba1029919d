// CREATE: from the request to a cloned child that builds its own inside. What only the launcher can make is made here: control
// groups before the child, the upper directory and the overlays beside it.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cgroup.h"
#include "disk.h"
#include "io.h"
#include "kernel.h"
#include "launcher.h"
#include "layout.h"
#include "next.h"
#include "spare.h"

bool order_parse(struct order *o, struct rd *r) {
    o->stands_on.at = r->at;
    if (!layout_parse(&o->layout, r)) return false;
    o->stands_on.size = (uint32_t)(r->at - o->stands_on.at);
    o->in_memory = rd_u8(r);
    o->limits.memory_bytes = rd_u64(r), o->limits.pids = rd_u32(r), o->limits.cpu_permille = rd_u32(r);
    o->disk = rd_u64(r), o->tmp = rd_u64(r), o->shm = rd_u64(r);
    struct span workdir = rd_name(r);
    o->end = r->at;
    return rd_done(r) && (o->workdir = launcher_text(workdir));
}

void order_free(struct order *o) {
    layout_free(&o->layout);
    free(o->workdir);
    *o = (struct order){.disk = 0};
}

static void close_plan(struct plan *p) {
    io_close(&p->dev);
    io_close(&p->channel);
    io_close(&p->control);
    io_close(&p->status);
    cg_box_close(&p->cg);
}

// What the child is given when it starts. What is made is found in the plan, also after a failure.
static int prepare(struct plan *p, const char *group, const struct order *o, struct furniture *f, const char **step) {
    if (!*f->group) {
        if (cg_box_make(group, &o->limits, &f->cg, step)) return -1;
        strcpy(f->group, group);
    }
    p->slot = f->slot;
    p->cg = f->cg, f->cg = CG_BOX_NONE;
    *step = "device directory";
    p->dev = mounts_dev(&L.mounts);
    return p->dev < 0 ? -1 : 0;
}

// In order, as many at a time as a message takes.
int launcher_send_mounts(int control, int root, const struct view *views, size_t count) {
    int fds[FDS_MAX] = {root};
    size_t n = 1;
    for (size_t i = 0;; i++) {
        if (n == FDS_MAX || i == count) {
            if (n && io_send_fds(control, "m", 1, fds, n) != 1) return -1;
            n = 0;
        }
        if (i == count) return 0;
        fds[n++] = views[i].mount;
    }
}

// The overlays, made while the child makes what needs no launcher.
static int furnish(const char *name, const struct order *o, struct furniture *f, const char **step) {
    struct disk_box disk;
    *step = "upper directory";
    if (disk_make(name, (uint16_t)(f->slot.base / RANGE_SIZE), o->disk, o->in_memory, &disk)) return -1;
    int failed = layout_mount(&o->layout, false, &f->slot, &disk, &f->root, f->views, &f->count, step);
    if (!failed) f->print = launcher_print(&o->layout, disk.dir);
    disk_box_close(&disk);
    return failed;
}

static int hand_over(struct furniture *f, struct box *b, const char **step) {
    *step = "mounts";
    b->print = f->print;
    int failed = launcher_send_mounts(b->control, f->root, f->views, f->count), error = errno;
    furniture_close(f);
    errno = error;
    return failed;
}

static int start_child(struct plan *p, struct box *b, int *channel, const char **step) {
    int pair[2], control[2], status[2];
    *step = "sockets";
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair)) return -1;
    *channel = pair[0], p->channel = pair[1];
    io_roomy(pair[0]), io_roomy(pair[1]);
    // An agent that does not read must not hold up the launcher.
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, control)) return -1;
    b->control = control[0], p->control = control[1];
    if (pipe2(status, O_CLOEXEC | O_NONBLOCK)) return -1;
    b->status = status[0], p->status = status[1];
    *step = "clone";
    struct k_clone_args args = {
        .flags = CLONE_PIDFD | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS, .pidfd = (uint64_t)(uintptr_t)&b->pidfd, .exit_signal = SIGCHLD,
    };
    pid_t pid = cg_clone(&args, p->cg.agent_group);
    if (!pid) sandbox_main(p);
    return pid;
}

static void unbuild(struct box *b, const char *disk, struct furniture *f) {
    layout_let_go();
    furniture_close(f);
    if (*f->group) cg_box_remove(f->group);
    disk_drop(disk);
    slot_give(&f->slot);
    if (b) launcher_free(b);
}

struct box *launcher_build(const char *id, const char *disk, struct order *o, struct furniture *f, int *channel, const char **step) {
    struct plan p = {.in_userns = L.in_userns, .hostname = id, .workdir = o->workdir, .empty_ns = L.mounts.empty_ns, .dev = -1, .places = o->layout.places,
                     .place_count = o->layout.place_count, .tmp_bytes = o->tmp, .shm_bytes = o->shm, .disk_bytes = o->disk, .pids = o->limits.pids,
                     .channel = -1, .control = -1, .status = -1, .cg = CG_BOX_NONE};
    *step = "memory";
    struct box *b = calloc(1, sizeof *b);
    pid_t pid = -1;
    if (b) *b = (struct box){.pidfd = -1, .control = -1, .status = -1, .mounts = -1, .disk_bytes = o->disk, .file_bytes = o->disk, .pids = o->limits.pids};
    if (b && !prepare(&p, disk, o, f, step)) pid = start_child(&p, b, channel, step);
    int error = errno;
    close_plan(&p);
    if (pid > 0) b->handle = ++L.generation << RANGE_BITS | f->slot.range;
    if (pid > 0 && ((f->root < 0 && furnish(disk, o, f, step)) || hand_over(f, b, step) || (*step = "watching it", launcher_watch(b)))) {
        error = errno;
        k_pidfd_send_signal(b->pidfd, SIGKILL);
        waitpid(pid, NULL, 0);
        pid = -1;
    }
    if (pid < 0) {
        unbuild(b, disk, f);
        errno = error;
        return NULL;
    }
    b->layout = o->layout, b->workdir = o->workdir;
    o->layout = (struct layout){.text = NULL}, o->workdir = NULL;
    strcpy(b->id, id);
    strcpy(b->disk, disk);
    strcpy(b->group, f->group);
    b->in_memory = o->in_memory;
    b->pid = pid;
    b->slot = f->slot;
    io_close(&b->slot.netns);  // it lives in its processes now
    L.boxes[f->slot.range] = b;
    return b;
}

static bool find_slot(struct slot *slot, const char **step) {
    if (!slot_take(slot, step)) return true;
    if (errno != EUSERS || !spares_empty()) return false;  // they hold ranges too
    return !slot_take(slot, step);
}

void launcher_create(uint32_t seq, struct rd *r) {
    struct order o = {.disk = 0};
    struct span name = rd_name(r);
    char id[ID_MAX] = "";
    const char *step = "request";
    if (!launcher_valid_id(name) || !order_parse(&o, r)) {
        order_free(&o);
        launcher_refuse(seq, step, EINVAL);
        return;
    }
    memcpy(id, name.at, name.size);
    autoclose int channel = -1;
    bool may_wait = !o.in_memory && !o.layout.cache;  // neither can be had ahead of need
    struct box *b = may_wait ? spares_take(&o, id, &channel) : NULL;
    struct furniture f = FURNITURE_NONE;
    if (!b && find_slot(&f.slot, &step)) b = launcher_build(id, id, &o, &f, &channel, &step);
    if (b) {
        struct wr w = launcher_answer(seq, 0);
        wr_u32(&w, b->handle);
        wr_u32(&w, (uint32_t)b->pid);
        launcher_send(&w, &channel, 1);
        next_created(b);
        layout_let_go();
    } else {
        launcher_refuse(seq, step, errno);
    }
    order_free(&o);
}
