// System calls that the C library we are built with may not know, under names that cannot collide with it.
#ifndef UNTAX_KERNEL_H
#define UNTAX_KERNEL_H

#include <stdint.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum {
    NR_open_tree = 428, NR_move_mount = 429, NR_fsopen = 430, NR_fsconfig = 431, NR_fsmount = 432, NR_fspick = 433, NR_pidfd_send_signal = 424,
    NR_clone3 = 435, NR_close_range = 436, NR_openat2 = 437, NR_mount_setattr = 442, NR_quotactl_fd = 443,
};

// linux/mount.h and sys/mount.h cannot be included together, so the few constants stand here.
enum {
    K_OPEN_TREE_CLONE = 1, K_OPEN_TREE_CLOEXEC = 02000000, K_AT_RECURSIVE = 0x8000, K_AT_EMPTY_PATH = 0x1000,
    K_MOVE_FROM_EMPTY = 0x4, K_MOVE_TO_EMPTY = 0x40,
    K_FSOPEN_CLOEXEC = 1, K_FSMOUNT_CLOEXEC = 1, K_FSCONFIG_FLAG = 0, K_FSCONFIG_STRING = 1, K_FSCONFIG_CREATE = 6, K_FSCONFIG_RECONFIGURE = 7,
    K_FSPICK_CLOEXEC = 1, K_FSPICK_EMPTY_PATH = 8,
    K_ATTR_RDONLY = 0x1, K_ATTR_NOSUID = 0x2, K_ATTR_NODEV = 0x4, K_ATTR_NOEXEC = 0x8, K_ATTR_IDMAP = 0x100000,
};

struct k_mount_attr {
    uint64_t set, clear, propagation, userns_fd;
};

struct k_open_how {
    uint64_t flags, mode, resolve;
};
enum { K_RESOLVE_NO_SYMLINKS = 0x4, K_RESOLVE_BENEATH = 0x8 };

struct k_clone_args {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

static inline int k_open_tree(int dir, const char *path, unsigned flags) { return (int)syscall(NR_open_tree, dir, path, flags); }
static inline int k_move_mount(int from, const char *from_path, int to, const char *to_path, unsigned flags) {
    return (int)syscall(NR_move_mount, from, from_path, to, to_path, flags);
}
static inline int k_fsopen(const char *type) { return (int)syscall(NR_fsopen, type, K_FSOPEN_CLOEXEC); }
static inline int k_fsconfig(int fd, unsigned command, const char *key, const void *value) {
    return (int)syscall(NR_fsconfig, fd, command, key, value, 0);
}
static inline int k_fsmount(int fd, unsigned attributes) { return (int)syscall(NR_fsmount, fd, K_FSMOUNT_CLOEXEC, attributes); }
static inline int k_fspick(int dir) { return (int)syscall(NR_fspick, dir, "", K_FSPICK_CLOEXEC | K_FSPICK_EMPTY_PATH); }
static inline int k_mount_setattr(int dir, const char *path, unsigned flags, struct k_mount_attr *attr) {
    return (int)syscall(NR_mount_setattr, dir, path, flags, attr, sizeof *attr);
}
static inline int k_pidfd_send_signal(int pidfd, int signal) { return (int)syscall(NR_pidfd_send_signal, pidfd, signal, NULL, 0); }
static inline int k_openat2(int dir, const char *path, struct k_open_how *how) { return (int)syscall(NR_openat2, dir, path, how, sizeof *how); }
static inline pid_t k_clone3(struct k_clone_args *args) { return (pid_t)syscall(NR_clone3, args, sizeof *args); }
static inline int k_close_range(unsigned first, unsigned last) { return (int)syscall(NR_close_range, first, last, 0); }

#endif
