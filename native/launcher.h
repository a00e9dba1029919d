// What the parts of the launcher share: its sandboxes, its state, and how it answers the engine.
#ifndef UNTAX_LAUNCHER_H
#define UNTAX_LAUNCHER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "layout.h"
#include "mounts.h"
#include "sandbox.h"
#include "slot.h"
#include "wire.h"

#define BOXES_MAX 4096
#define RANGE_BITS 12  // a handle is a generation and the sandbox's range
#define ID_MAX 64

enum op { OP_CONFIG = 1, OP_CREATE, OP_DESTROY, OP_ENTER, OP_FREEZE, OP_SWEEP, OP_SNAPSHOT, OP_DROP_LAYER, OP_PRISTINE, OP_LIMIT };

struct box {
    uint32_t handle;
    char id[ID_MAX];
    char disk[ID_MAX];  // under which name its upper directory lies; its id until a snapshot put another on top
    char group[ID_MAX]; // and its control groups; neither is renamed when a spare becomes a sandbox's
    char *workdir;
    struct layout layout;
    uint64_t print;     // of its upper directory as it was made; 0: unknown, or no longer so
    bool in_memory;
    struct slot slot;
    pid_t pid;          // of its first process
    int pidfd, control, status;
    int mounts;         // its mount namespace, so that its last process need not take that apart; -1: it has to
    uint64_t disk_bytes;
    uint64_t file_bytes;   // no file of its workers' may become larger
    uint32_t pids;
    uint32_t destroy_seq;  // who waits for its end; 0: nobody
    struct setup_failure failure;
    bool failed;
    bool is_spare;         // nobody holds it yet
    unsigned snapshots;    // that were taken of it
};

// What a CREATE asks for, but for its id.
struct order {
    struct span stands_on;  // the layout as it came, at the beginning of the order
    const uint8_t *end;     // of the order
    struct layout layout;
    bool in_memory;
    struct cg_limits limits;
    uint64_t disk, tmp, shm;
    char *workdir;
};

extern struct launcher {
    int engine, epoll;
    bool in_userns, ready;
    int userns_error;               // why an ordinary user cannot have sandboxes; 0: nothing is wrong
    int home_uts;                   // its own name is nobody's
    struct mounts mounts;
    struct box *boxes[BOXES_MAX];
    uint32_t generation;
    char leftovers[BOXES_MAX][ID_MAX];  // ids whose control groups would not go yet
    unsigned leftover_count;
    pid_t sweeper;
    bool buried;                    // a sandbox ended in this round
} L;

struct wr launcher_answer(uint32_t seq, uint8_t status);
void launcher_send(struct wr *w, const int *fds, size_t count);
void launcher_refuse(uint32_t seq, const char *step, int error);
void launcher_done(uint32_t seq);  // answers that it is done, with nothing more to say
struct box *launcher_find(uint32_t handle);
// From now on its end is noticed, and what its set-up has to say.
// 0, or -1 with errno: an ordinary user's workload can use up what its user may watch (epoll(7)).
int launcher_watch(struct box *b);
int launcher_watch_entry(int fd, uint32_t index);
// Closes what was watched. A plain close would not do: a child that was forked meanwhile may hold the same pipe or socket, and then epoll goes on
// telling of it, under a number that is nobody's or somebody else's by then.
void launcher_unwatch(int *fd);
void launcher_free(struct box *b);
// Ends it; its death is told, unless somebody waits for it.
void launcher_end(struct box *b);
// Its first process is dead: everything of it is removed. Waits until it is so.
void launcher_bury(struct box *b);
// A NUL-terminated copy; the caller frees.
char *launcher_text(struct span s);
// Letters, digits and hyphens: an id becomes a directory, a control group and a host name.
bool launcher_valid_id(struct span s);

// In create.c: answers with a handle, the first process and its channel, or with the step that failed.
void launcher_create(uint32_t seq, struct rd *r);
// All that is left to read. False: it is malformed, or there is no memory; order_free either way.
bool order_parse(struct order *o, struct rd *r);
void order_free(struct order *o);
struct furniture;
// Starts a sandbox with that furniture, or what there is of it, and makes the rest. `id` "": it has no name yet. The box takes what it needs from the order. NULL with
// errno and *step on failure, and then nothing is left of the furniture.
struct box *launcher_build(const char *id, const char *disk, struct order *o, struct furniture *f, int *channel, const char **step);

// The root and the views, as descriptors, to whoever mounts them. 0, or -1 with errno.
int launcher_send_mounts(int control, int root, const struct view *views, size_t count);

// In enter.c: answers when the worker stands and its agent has been told, with the step that failed, or after a while.
void launcher_enter(uint32_t seq, struct rd *r);
void launcher_entered(uint32_t index);  // its status pipe is readable
bool launcher_entering(void);           // true while any are on their way; gives up on those that take too long
bool launcher_is_entering(uint32_t handle);

// In snapshot.c: answers when the snapshot is taken, with how, how long everything stood still, and under which name the layer lies.
void launcher_snapshot(uint32_t seq, struct rd *r);
void launcher_snapshot_said(uint32_t index);  // its socket is readable
int launcher_watch_snapshot(int fd, uint32_t index);
void launcher_abandon(uint32_t handle);       // the sandbox is to end: so is a snapshot of it
void launcher_drop_layer(uint32_t seq, struct rd *r);
// Keeps a request about a sandbox for when its snapshot is taken. False: none is, or there is no memory.
bool launcher_defer(uint32_t handle, const uint8_t *packet, size_t size);
bool launcher_snapshotting(void);             // true while any are taken; ends those that take too long, and hands out what has waited
void launcher_packet(const uint8_t *packet, size_t size);

// In limit.c.
void launcher_limit(uint32_t seq, struct rd *r);
// Holds a spare that nobody has used to other limits than it was made for. False: to make another is better.
bool launcher_rebind(struct box *b, const struct order *o);

// In pristine.c.
uint64_t launcher_print(const struct layout *l, int disk);
void launcher_pristine(uint32_t seq, struct rd *r);

#endif
