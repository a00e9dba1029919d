// A second process of the launcher's that makes what is needed next, so that whoever asks for a sandbox or a snapshot never waits behind that.
//
// Making takes some milliseconds of system calls in a row: control groups, a network namespace, a subvolume, several overlays. The launcher asks for one thing at
// a time and is told by message. The maker was forked before there was any sandbox, holds nothing of any, and ends with the launcher.
#ifndef UNTAX_MAKER_H
#define UNTAX_MAKER_H

#include <stdbool.h>
#include <stdint.h>

#include "cgroup.h"
#include "spare.h"
#include "wire.h"

// Starts it: its socket, to be watched; -1: there will be none, and nothing is made ahead.
int maker_open(void);
bool maker_is_free(void);
// Asks for furniture over that layout, under that name, for the slot: all of it with a network namespace, or with `limits` NULL only an upper directory and overlays
// over a frozen one of its own. False: it is busy, or gone.
bool maker_ask(const char *name, struct span layout, const struct slot *slot, uint64_t disk_bytes, const struct cg_limits *limits);

// When the socket is readable. With MAKER_DONE `out` has everything but the slot's range and user namespace; with MAKER_FAILED nothing is left.
// After MAKER_GONE what it was making may lie about.
enum maker_says maker_said(struct furniture *out);
// Closes these mounts, whose last holder has to wait for a grace period of the kernel's for each: that shall be the maker.
void maker_discard(struct furniture *f);
// The same for one descriptor.
void maker_discard_one(int *fd);
// Ends it, and waits for that.
void maker_close(void);

#endif
