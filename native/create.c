// CREATE: from the request to a cloned child that builds its own inside. What only the launcher can make is made here: control
// groups, the upper directory, the overlay, views of host directories.
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
#include <unistd.h>

#include "cgroup.h"
#include "disk.h"
#include "io.h"
#include "kernel.h"
#include "launcher.h"

struct create {
    char id[ID_MAX];
    struct rd lowers, views, dirs;
    uint32_t lower_count, view_count, dir_count;
    uint8_t upper;
    struct cg_limits limits;
    uint64_t disk, tmp, shm;
    char *workdir;
};

static bool parse_create(struct rd *r, struct create *c) {
    struct span id = rd_name(r);
    struct span lowers = rd_strs(r, &c->lower_count);
    struct span views = rd_strs(r, &c->view_count);
    c->upper = rd_u8(r);
    c->limits.memory_bytes = rd_u64(r), c->limits.pids = rd_u32(r), c->limits.cpu_permille = rd_u32(r);
    c->disk = rd_u64(r), c->tmp = rd_u64(r), c->shm = rd_u64(r);
    struct span workdir = rd_name(r);
    struct span dirs = rd_strs(r, &c->dir_count);
    if (!rd_done(r) || !launcher_valid_id(id) || !c->lower_count || c->lower_count > LAYERS_MAX || c->view_count % 2 || c->view_count / 2 > VIEWS_MAX) return false;
    memcpy(c->id, id.at, id.size);
    c->id[id.size] = 0;
    c->lowers = rd_of(lowers.at + 4, lowers.size - 4);
    c->views = rd_of(views.at + 4, views.size - 4);
    c->dirs = rd_of(dirs.at + 4, dirs.size - 4);
    c->workdir = launcher_text(workdir);
    return c->workdir != NULL;
}

// mkdir -p below a fresh upper directory that nobody else has touched; the last part belongs to `uid`.
static int make_path(int upper, struct span path, uid_t root, uid_t uid) {
    char text[4096];
    if (path.size >= sizeof text) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(text, path.at, path.size);
    text[path.size] = 0;
    char *at = text;
    while (*at == '/') at++;
    for (char *slash; *at; at = slash) {
        slash = strchr(at, '/');
        if (slash) *slash = 0;
        const char *whole = text + strspn(text, "/");
        bool is_last = !slash || !slash[1];
        if (!strcmp(at, "..") || (mkdirat(upper, whole, 0755) && errno != EEXIST)) return -1;
        if (fchownat(upper, whole, is_last ? uid : root, is_last ? uid : root, AT_SYMLINK_NOFOLLOW)) return -1;
        if (!slash) break;
        *slash++ = '/';
    }
    return 0;
}

// Mount points are made in the upper directory: whatever an image has there, a link for instance, is covered by a plain directory.
static int fill_upper(int upper, const struct slot *slot, struct create *c) {
    static const char *const points[] = {"proc", "dev", "tmp"};
    uid_t root = slot->base, user = L.in_userns ? 0 : slot->base + WORKLOAD_UID;
    if (!L.in_userns && fchown(upper, root, root)) return -1;
    for (size_t i = 0; i < 3; i++)
        if (mkdirat(upper, points[i], 0755)) return -1;
    for (uint32_t i = 0; i < c->dir_count; i++)
        if (make_path(upper, rd_bytes(&c->dirs), root, user)) return -1;
    return 0;
}

static void close_plan(struct plan *p) {
    io_close(&p->root);
    io_close(&p->dev);
    for (size_t i = 0; i < p->view_count; i++) {
        io_close(&p->views[i].mount);
        free((char *)(uintptr_t)p->views[i].at);
    }
    p->view_count = 0;
    io_close(&p->channel);
    io_close(&p->control);
    io_close(&p->status);
    cg_box_close(&p->cg);
}

static int add_views(struct plan *p, struct create *c, const char **step) {
    *step = "view of a host directory";
    for (uint32_t i = 0; i < c->view_count / 2; i++) {
        char *source = launcher_text(rd_bytes(&c->views)), *at = launcher_text(rd_bytes(&c->views));
        int fd = source && at ? mounts_bind(&L.mounts, source) : -1;
        int error = errno;
        free(source);
        if (fd < 0) {
            free(at);
            errno = error;
            return -1;
        }
        p->views[p->view_count++] = (struct view){fd, at};
    }
    return 0;
}

// A sized tmpfs in place of the directory on disk. It is attached while overlay looks at it; overlay keeps it from then on.
static int tmpfs_upper(uint64_t bytes, struct disk_box *box) {
    autoclose int fs = mounts_tmpfs(bytes, 0, "755", K_ATTR_NOSUID | K_ATTR_NODEV);
    if (fs < 0 || (mkdirat(L.mounts.stage, "u", 0700) && errno != EEXIST)) return -1;
    if (k_move_mount(fs, "", L.mounts.stage, "u", K_MOVE_FROM_EMPTY)) return -1;
    if (mkdirat(fs, "upper", 0755) || mkdirat(fs, "work", 0755)) return -1;
    disk_box_close(box);
    box->upper = openat(fs, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    box->work = openat(fs, "work", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return box->upper < 0 || box->work < 0 ? -1 : 0;
}

static int open_lowers(struct create *c, int *fds) {
    for (uint32_t i = 0; i < c->lower_count; i++) {
        char *path = launcher_text(rd_bytes(&c->lowers));
        fds[i] = path ? open(path, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
        int error = errno;
        free(path);
        if (fds[i] >= 0) continue;
        while (i--) close(fds[i]);
        errno = error;
        return -1;
    }
    return 0;
}

static int mount_root(struct plan *p, struct create *c, const char **step) {
    static int lowers[LAYERS_MAX];
    struct disk_box box;
    bool in_memory = c->upper == 1;
    *step = "upper directory";
    if (disk_make(c->id, (uint16_t)(p->slot.base / RANGE_SIZE), c->disk, &box)) return -1;
    bool ready = !(in_memory && tmpfs_upper(c->disk, &box)) && !fill_upper(box.upper, &p->slot, c);
    if (ready) *step = "image";
    if (ready && !open_lowers(c, lowers)) {
        p->root = mounts_overlay(&L.mounts, lowers, c->lower_count, box.upper, box.work, L.in_userns ? -1 : p->slot.userns, step);
        int error = errno;
        for (uint32_t i = 0; i < c->lower_count; i++) close(lowers[i]);
        errno = error;
    }
    int error = errno;
    disk_box_close(&box);
    if (in_memory) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d/u", L.mounts.stage);
        umount2(path, MNT_DETACH);
    }
    errno = error;
    return p->root < 0 ? -1 : 0;
}

// Everything the child needs that only the launcher can make. What is made is found in the plan, also after a failure.
static int prepare(struct plan *p, struct create *c, const char **step) {
    if (cg_box_make(c->id, &c->limits, &p->cg, step)) return -1;
    if (mount_root(p, c, step) || add_views(p, c, step)) return -1;
    *step = "device directory";
    p->dev = mounts_dev(&L.mounts);
    return p->dev < 0 ? -1 : 0;
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
        launcher_refuse(seq, "request", EINVAL);
        return;
    }
    struct plan p = {.in_userns = L.in_userns, .hostname = c.id, .workdir = c.workdir, .empty_ns = L.mounts.empty_ns, .root = -1, .dev = -1,
                     .tmp_bytes = c.tmp, .shm_bytes = c.shm, .disk_bytes = c.disk, .pids = c.limits.pids, .channel = -1, .control = -1, .status = -1,
                     .cg = CG_BOX_NONE};
    const char *step = "memory";
    struct box *b = calloc(1, sizeof *b);
    autoclose int channel = -1;
    pid_t pid = -1;
    if (b) *b = (struct box){.pidfd = -1, .control = -1, .status = -1, .workdir = c.workdir, .disk_bytes = c.disk, .pids = c.limits.pids};
    bool has_slot = b && !slot_take(&p.slot, &step);
    if (has_slot && !prepare(&p, &c, &step)) pid = start_child(&p, b, &channel, &step);
    int error = errno;
    close_plan(&p);
    if (pid < 0) {
        if (has_slot) {
            cg_box_remove(c.id);
            disk_drop(c.id);
            slot_give(&p.slot);
        }
        if (b) launcher_free(b);
        else free(c.workdir);
        launcher_refuse(seq, step, error);
        return;
    }
    strcpy(b->id, c.id);
    b->slot = p.slot;
    b->handle = ++L.generation << RANGE_BITS | p.slot.range;
    L.boxes[p.slot.range] = b;
    struct wr w = launcher_answer(seq, 0);
    wr_u32(&w, b->handle);
    wr_u32(&w, (uint32_t)pid);
    launcher_send(&w, &channel, 1);
    launcher_watch(b);
    io_close(&b->slot.netns);  // it lives in its processes now
}
