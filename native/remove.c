// Removing a file, an empty directory, or a whole tree.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io.h"
#include "job.h"
#include "walk.h"

struct removing {
    struct job job;
    struct walk walk;
    uint64_t removed;
    int error;              // the first that was met; the rest is removed all the same
    char failed[256];       // what it was about
    char path[];
};

static void remove_dispose(struct job *j) {
    walk_close(&((struct removing *)j)->walk);
    free(j);
}

static void remove_done(struct actions *a, uint32_t id, uint64_t removed) {
    size_t begun = frame_begin(a->out, id, K_DONE);
    wr_u64(a->out, removed);
    frame_end(a->out, begun);
}

static void note(struct removing *r, int error) {
    if (r->error || error == ENOENT) return;
    r->error = error;
    strncpy(r->failed, r->walk.path ? r->walk.path : "", sizeof r->failed - 1);
}

static void unlink_one(struct removing *r, int flags) {
    if (unlinkat(r->walk.dir, r->walk.name, flags) == 0) r->removed++;
    else note(r, errno);
}

static enum step remove_step(struct job *j, uint64_t until) {
    struct removing *r = (struct removing *)j;
    for (uint32_t n = 1;; n++) {
        int error;
        switch (walk_next(&r->walk)) {
            case WALK_ENTRY:
                if (r->walk.type != DT_DIR) unlink_one(r, 0);
                else if ((error = walk_enter(&r->walk))) note(r, error);
                break;
            case WALK_LEAVE: unlink_one(r, AT_REMOVEDIR); break;
            case WALK_ERROR: note(r, r->walk.error); break;
            case WALK_END:
                if (!r->error && rmdir(r->path) == 0) r->removed++;
                else if (!r->error) r->error = errno;
                if (r->error) fail_os(j->a, j->id, r->error, "remove", *r->failed ? r->failed : r->path);
                else remove_done(j->a, j->id, r->removed);
                return STEP_END;
        }
        if (n % 32 == 0 && io_now_ns() >= until) return STEP_MORE;
    }
}

void action_remove(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct span path = rd_name(&g.payload);
    uint8_t recursive = rd_u8(&g.payload);
    if (malformed(a, &g)) return;
    char room[PATH_ROOM];
    path_of(a, path, room);

    int error = unlink(room) ? errno : 0;
    if (error == EISDIR || error == EPERM) error = rmdir(room) ? errno : 0;  // EPERM: POSIX's word for a directory
    if (!error) remove_done(a, f->id, 1);
    if (!error) return;
    int fd = -1;
    if (recursive && (error == ENOTEMPTY || error == EEXIST)) {
        fd = open(room, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0) error = errno;
    }
    if (fd < 0) {
        fail_os(a, f->id, error, "remove", room);
        return;
    }
    size_t size = strlen(room) + 1;
    struct removing *r = job_new(a, f, sizeof *r + size);
    if (!r) {
        close(fd);
        return;
    }
    memcpy(r->path, room, size);
    r->job.step = remove_step, r->job.dispose = remove_dispose;
    if ((error = walk_open(&r->walk, fd))) {
        fail_os(a, f->id, error, "remove", room);
        remove_dispose(&r->job);
        return;
    }
    job_start(&r->job);
}
