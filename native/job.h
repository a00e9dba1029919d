// What the file actions share among themselves; everybody else uses actions.h.
//
// A short action writes its final frame and returns. A long one is a `struct job` at the head of a structure of its own: it is
// stepped in slices, fed with DATA and CREDIT, and ends when one of its functions has written the final frame.
#ifndef UNTAX_JOB_H
#define UNTAX_JOB_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "wire.h"

#define PATH_ROOM (PATH_MAX + 16)           // one more than any path the kernel takes, so that it is the kernel that says so
#define ITEMS_FRAME (64u << 10)             // ITEMS are sent when about so much has come together
#define OUT_PIECE (64u << 10)               // data in one OUT frame of a windowed stream: four in flight keep both ends busy
#define OUT_FULL (1u << 20)                 // above this much waiting to be sent nothing is read ahead
#define FILE_WHOLE_MAX (64u << 20)          // files that must be held whole (edit, patch, search) are refused above this
#define SLICE_NS 1000000u

struct actions {
    struct wr *out;
    char *workdir;
    struct job *jobs, *turn;                // in order of arrival; the one whose slice is next
    int epoll, timer;                       // what jobs wait on; -1 until the first needs it
    uint64_t timer_ns;                      // when the timer goes off; 0: not set
    mode_t umask;
};

enum step {
    STEP_MORE,  // could go on at once
    STEP_WAIT,  // for data, credit, the kernel or `wake_ns`
    STEP_END,   // the final frame has been written
};

struct job {
    struct job *next;
    struct actions *a;
    uint32_t id;
    uint64_t deadline_ns, wake_ns;          // 0: none
    bool waiting, ends_well;                // ends_well: CANCEL is how it ends, with an empty DONE
    uint32_t window;                        // bytes of OUT that may be sent before the next CREDIT
    uint32_t owed, ahead;                   // DATA consumed but not yet credited; what the other side may still send
    enum step (*step)(struct job *, uint64_t until_ns);
    enum step (*data)(struct job *, struct span, bool eof);  // NULL: takes none
    void (*dispose)(struct job *);          // frees it
};

// ---- actions.c ----

// Allocates a job of `size` bytes, zeroed; answers with ENOMEM and gives NULL when there is no memory.
void *job_new(struct actions *a, const struct frame *f, size_t size);
// Runs its first slice and keeps the job when that was not all. `j` may be gone afterwards.
void job_start(struct job *j);
// Waits for a descriptor to become readable; 0 or errno.
int job_poll(struct job *j, int fd);
// Sees to it that the job is stepped again at that time.
void job_wake(struct job *j, uint64_t ns);
// Says that `size` bytes of DATA have been consumed; sends CREDIT when it is worth a frame.
void job_consumed(struct job *j, uint32_t size);

void done_empty(struct actions *a, uint32_t id);
// A payload that does not have the form of its kind; gives true when it was so.
bool malformed(struct actions *a, const struct frame *f);
void fail(struct actions *a, uint32_t id, uint16_t code, int error, const char *format, ...) __attribute__((format(printf, 5, 6)));
// A failed system call: errno `error`, the step, and the path it was about (may be NULL).
void fail_os(struct actions *a, uint32_t id, int error, const char *step, const char *path);

// The path as the kernel is to see it: below the working directory unless absolute; empty means the working directory. Never fails: one too
// long is cut at a length that the kernel refuses with ENAMETOOLONG.
const char *path_of(const struct actions *a, struct span s, char room[static PATH_ROOM]);

// ---- files.c ----

// Opens an existing regular file for reading, never waiting for a FIFO or a device; -1 with errno: EISDIR, ENXIO for what is neither.
int open_regular(int dir, const char *path, int flags, struct stat *st);
// mkdir -p of everything above the last component; 0 or errno.
int make_parents(const char *path, mode_t mode);
ssize_t read_full(int fd, void *to, size_t size);
// Writes all of it; 0 or errno.
int write_full(int fd, const void *data, size_t size);
void wr_entry(struct wr *w, const char *name, const struct stat *st, const char *target, size_t target_size);
static inline int64_t mtime_ns(const struct stat *st) { return (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec; }

// ---- move.c ----

// The rest of MOVE when rename has answered EXDEV.
void move_by_copy(struct actions *a, const struct frame *f, const char *from, const char *to, bool overwrite);

// ---- one function for each action ----

void action_read(struct actions *a, const struct frame *f);
void action_write(struct actions *a, const struct frame *f);
void action_list(struct actions *a, const struct frame *f);
void action_stat(struct actions *a, const struct frame *f);
void action_mkdir(struct actions *a, const struct frame *f);
void action_remove(struct actions *a, const struct frame *f);
void action_move(struct actions *a, const struct frame *f);
void action_upload(struct actions *a, const struct frame *f);
void action_download(struct actions *a, const struct frame *f);
void action_search(struct actions *a, const struct frame *f);
void action_edit(struct actions *a, const struct frame *f);
void action_patch(struct actions *a, const struct frame *f);
void action_watch(struct actions *a, const struct frame *f);
void action_mark(struct actions *a, const struct frame *f);
void action_marks(struct actions *a, const struct frame *f);

#endif
