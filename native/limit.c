// LIMIT: other limits for a live sandbox, for whoever leases one that was made ahead of need. Only the engine can ask: control groups and quotas lie outside of
// what a sandbox can reach.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <sys/statfs.h>
#include <unistd.h>

#include "cgroup.h"
#include "disk.h"
#include "io.h"
#include "kernel.h"
#include "launcher.h"

enum held { HELD_MEMORY = 1, HELD_PIDS = 2, HELD_CPU = 4, HELD_DISK = 8 };  // the first three as in enum cg_ability

// Its size goes with the memory limit, under which what is in it counts as well: one that stays as it was breaks nothing.
static void resize_tmp(const struct box *b, uint64_t bytes) {
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/root", b->pid);
    struct k_open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = K_RESOLVE_BENEATH | K_RESOLVE_NO_SYMLINKS};
    struct statfs fs;
    autoclose int root = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    autoclose int tmp = root < 0 ? -1 : k_openat2(root, "tmp", &how);
    if (tmp >= 0 && !fstatfs(tmp, &fs) && fs.f_type == TMPFS_MAGIC) mounts_resize(tmp, bytes, TMPFS_INODES(bytes));
}

// Which of them hold now, of enum held; *stale: what runs in it has to be started anew for that.
static unsigned hold_to(struct box *b, const struct cg_limits *limits, uint64_t disk, uint64_t tmp, bool *stale) {
    unsigned held = cg_box_limit(b->group, limits);
    if (!disk_limit(b->disk, disk, b->in_memory)) held |= HELD_DISK;
    if (b->status < 0) resize_tmp(b, tmp);  // before its set-up is over the root is not yet its own
    // What a process got when it was started it keeps: no limit of its own may be the tighter one, and where there is no other it must be the right one.
    *stale = held & HELD_DISK ? disk > b->file_bytes : disk != b->file_bytes;
    if (!(cg_abilities() & CG_PIDS)) {
        *stale |= limits->pids != b->pids;
        held |= HELD_PIDS;
    }
    if (held & HELD_DISK) b->disk_bytes = disk;
    if (held & HELD_PIDS) b->pids = limits->pids;
    return held;
}

bool launcher_rebind(struct box *b, const struct order *o) {
    unsigned all = (cg_abilities() & (CG_MEMORY | CG_PIDS | CG_CPU)) | (disk_mode() == DISK_PLAIN ? 0 : HELD_DISK);
    bool stale;
    return b->status < 0 && (hold_to(b, &o->limits, o->disk, o->tmp, &stale) & all) == all && !stale;
}

void launcher_limit(uint32_t seq, struct rd *r) {
    struct box *b = launcher_find(rd_u32(r));
    struct cg_limits limits = {.memory_bytes = rd_u64(r), .pids = rd_u32(r), .cpu_permille = rd_u32(r)};
    uint64_t disk = rd_u64(r), tmp = rd_u64(r);
    if (!b || !rd_done(r)) {
        launcher_refuse(seq, "sandbox", b ? EINVAL : ESRCH);
        return;
    }
    bool stale;
    unsigned held = hold_to(b, &limits, disk, tmp, &stale);
    if (stale) b->file_bytes = disk;
    struct wr w = launcher_answer(seq, 0);
    wr_u8(&w, (uint8_t)held);
    wr_u8(&w, stale);
    launcher_send(&w, NULL, 0);
}
