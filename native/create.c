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

struct create {
    char id[ID_MAX];
    struct layout layout;
    bool in_memory;
    struct cg_limits limits;
    uint64_t disk, tmp, shm;
    char *workdir;
};

static bool parse_create(struct rd *r, struct create *c) {
    struct span id = rd_name(r);
    if (!launcher_valid_id(id) || !layout_parse(&c->layout, r)) return false;
    c->in_memory = rd_u8(r);
    c->limits.memory_bytes = rd_u64(r), c->limits.pids = rd_u32(r), c->limits.cpu_permille = rd_u32(r);
    c->disk = rd_u64(r), c->tmp = rd_u64(r), c->shm = rd_u64(r);
    struct span workdir = rd_name(r);
    if (!rd_done(r)) return false;
    memcpy(c->id, id.at, id.size);
    c->id[id.size] = 0;
    c->workdir = launcher_text(workdir);
    return c->workdir != NULL;
}

static void close_plan(struct plan *p) {
    io_close(&p->dev);
    io_close(&p->channel);
    io_close(&p->control);
    io_close(&p->status);
    cg_box_close(&p->cg);
}

// What the child is given when it starts. What is made is found in the plan, also after a failure.
static int prepare(struct plan *p, struct create *c, const char **step) {
    if (cg_box_make(c->id, &c->limits, &p->cg, step)) return -1;
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
static int furnish(const struct plan *p, struct create *c, struct box *b, const char **step) {
    struct disk_box disk;
    struct view views[VIEWS_MAX];
    size_t count;
    int root;
    *step = "upper directory";
    if (disk_make(c->id, (uint16_t)(p->slot.base / RANGE_SIZE), c->disk, c->in_memory, &disk)) return -1;
    int failed = layout_mount(&c->layout, false, &p->slot, &disk, &root, views, &count, step);
    if (!failed) b->print = launcher_print(&c->layout, disk.dir);
    disk_box_close(&disk);
    if (failed) return -1;
    *step = "mounts";
    failed = launcher_send_mounts(b->control, root, views, count);
    int error = errno;
    close(root);
    while (count) close(views[--count].mount);
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

void launcher_create(uint32_t seq, struct rd *r) {
    struct create c = {0};
    if (!parse_create(r, &c)) {
        free(c.workdir);
        layout_free(&c.layout);
        launcher_refuse(seq, "request", EINVAL);
        return;
    }
    struct plan p = {.in_userns = L.in_userns, .hostname = c.id, .workdir = c.workdir, .empty_ns = L.mounts.empty_ns, .dev = -1, .places = c.layout.places, .place_count = c.layout.place_count,
                     .tmp_bytes = c.tmp, .shm_bytes = c.shm, .disk_bytes = c.disk, .pids = c.limits.pids, .channel = -1, .control = -1, .status = -1,
                     .cg = CG_BOX_NONE};
    const char *step = "memory";
    struct box *b = calloc(1, sizeof *b);
    autoclose int channel = -1;
    pid_t pid = -1;
    if (b) *b = (struct box){.pidfd = -1, .control = -1, .status = -1, .workdir = c.workdir, .disk_bytes = c.disk, .file_bytes = c.disk, .pids = c.limits.pids};
    bool has_slot = b && !slot_take(&p.slot, &step);
    if (has_slot && !prepare(&p, &c, &step)) pid = start_child(&p, b, &channel, &step);
    int error = errno;
    close_plan(&p);
    if (pid > 0) b->handle = ++L.generation << RANGE_BITS | p.slot.range;
    if (pid > 0 && (furnish(&p, &c, b, &step) || (step = "watching it", launcher_watch(b)))) {
        error = errno;
        k_pidfd_send_signal(b->pidfd, SIGKILL);
        waitpid(pid, NULL, 0);
        pid = -1;
    }
    if (pid < 0) {
        layout_let_go();
        if (has_slot) {
            cg_box_remove(c.id);
            disk_drop(c.id);
            slot_give(&p.slot);
        }
        if (b) launcher_free(b);
        else free(c.workdir);
        layout_free(&c.layout);
        launcher_refuse(seq, step, error);
        return;
    }
    strcpy(b->id, c.id);
    strcpy(b->disk, c.id);
    b->layout = c.layout;
    b->in_memory = c.in_memory;
    b->pid = pid;
    b->slot = p.slot;
    L.boxes[p.slot.range] = b;
    struct wr w = launcher_answer(seq, 0);
    wr_u32(&w, b->handle);
    wr_u32(&w, (uint32_t)pid);
    launcher_send(&w, &channel, 1);
    io_close(&b->slot.netns);  // it lives in its processes now
    layout_let_go();
}
