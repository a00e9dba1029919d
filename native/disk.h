// Where upper directories live, and how much they may hold.
//
// The first of these that the host offers: project quotas of the state directory's file system; btrfs with quotas on, a subvolume for each sandbox;
// one sparse btrfs image that the engine made for the purpose (root only). Otherwise directories without a limit.
#ifndef UNTAX_DISK_H
#define UNTAX_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum disk_mode { DISK_PLAIN = 0, DISK_PROJECT = 1, DISK_BTRFS = 2, DISK_IMAGE = 3 };

struct disk_box {
    int dir;  // holds upper/, and whatever overlay needs beside it
};

// `dir` holds boxes/ and trash/. `image` is a file with btrfs on it, or "". Never fails for want of quotas; `why` then says what was missing.
int disk_open(const char *dir, const char *image, char *why, size_t why_size);
enum disk_mode disk_mode(void);
void disk_is_second(void);  // two processes make directories at once, and this is the other one
// `number` is no other live sandbox's on this machine. With `in_memory` a tmpfs of that size. 0, or -1 with errno; nothing is left behind.
int disk_make(const char *id, uint16_t number, uint64_t bytes, bool in_memory, struct disk_box *out);
void disk_box_close(struct disk_box *box);
// Makes an empty subvolume ahead of need: right after a sandbox wrote many files that takes long. False: enough are ready, or none are needed here.
bool disk_prepare(void);
void disk_close(void);  // those are removed
// What is written under `next` from now on counts together with what lies under `first`, which may have been joined before: both are one sandbox's.
// Where that cannot be had each has its limit for itself.
void disk_join(const char *first, const char *next, uint64_t bytes);
// Another limit for what lies under `id` and is joined with it. 0, or -1 with errno: EOPNOTSUPP where there are no limits.
int disk_limit(const char *id, uint64_t bytes, bool in_memory);
// A copy of what lies under `id`, as it is now, under `copy`: only upper/ is promised. May take long. 0, or -1 with errno; then disk_drop removes what there is.
int disk_clone(const char *id, const char *copy);
// What lies under `id` from now on lies under `to`; overlays that are made of it do not mind.
int disk_rename(const char *id, const char *to);
// A directory below boxes/, for looking; -1 with errno.
int disk_peek(const char *path);
// The sandbox is gone: its files too, at once or in the background.
void disk_drop(const char *id);
// Starts deleting in the background when there is something to delete and nobody does; the child's pid, else -1.
pid_t disk_sweep_trash(void);
// Removes a tree, never following a link and never leaving it. False: something is still there.
bool disk_remove_tree(int dir, const char *name);

#endif
