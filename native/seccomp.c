#define _GNU_SOURCE
#include "seccomp.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCH_NATIVE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH_NATIVE AUDIT_ARCH_AARCH64
#else
#error "untax has a system-call table for x86_64 and aarch64 only"
#endif

// Calls that came after the headers we may be built with; one number on every architecture.
enum {
    N_close_range = 436, N_openat2 = 437, N_pidfd_getfd = 438, N_faccessat2 = 439, N_process_madvise = 440, N_epoll_pwait2 = 441,
    N_mount_setattr = 442, N_quotactl_fd = 443, N_landlock_create = 444, N_landlock_add = 445, N_landlock_self = 446,
    N_memfd_secret = 447, N_process_mrelease = 448, N_futex_waitv = 449, N_set_mempolicy_home_node = 450, N_cachestat = 451,
    N_fchmodat2 = 452, N_map_shadow_stack = 453, N_futex_wake = 454, N_futex_wait = 455, N_futex_requeue = 456,
    N_statmount = 457, N_listmount = 458, N_lsm_get_self_attr = 459, N_lsm_set_self_attr = 460, N_lsm_list_modules = 461,
    N_mseal = 462, N_setxattrat = 463, N_getxattrat = 464, N_listxattrat = 465, N_removexattrat = 466, N_open_tree_attr = 467,
    N_file_getattr = 468, N_file_setattr = 469,
};

#define S(name) [SYS_##name]

// What is not named here does not exist for the workload. Allowed are the calls that ordinary programs, compilers, interpreters
// and debuggers make; refused with EPERM those that exist but would reach the kernel's administration, other namespaces, or its less travelled parts.
static const uint8_t table[SECCOMP_NUMBERS] = {
    // files
    S(read) = V_ALLOW, S(write) = V_ALLOW, S(close) = V_ALLOW, S(fstat) = V_ALLOW, S(lseek) = V_ALLOW, S(pread64) = V_ALLOW,
    S(pwrite64) = V_ALLOW, S(readv) = V_ALLOW, S(writev) = V_ALLOW, S(preadv) = V_ALLOW, S(pwritev) = V_ALLOW, S(preadv2) = V_ALLOW,
    S(pwritev2) = V_ALLOW, S(openat) = V_ALLOW, [N_openat2] = V_ALLOW, [N_close_range] = V_ALLOW, S(dup) = V_ALLOW, S(dup3) = V_ALLOW,
    S(fcntl) = V_ALLOW, S(flock) = V_ALLOW, S(fsync) = V_ALLOW, S(fdatasync) = V_ALLOW, S(sync) = V_ALLOW, S(syncfs) = V_ALLOW,
    S(sync_file_range) = V_ALLOW, S(truncate) = V_ALLOW, S(ftruncate) = V_ALLOW, S(fallocate) = V_ALLOW, S(fadvise64) = V_ALLOW,
    S(readahead) = V_ALLOW, S(getdents64) = V_ALLOW, S(getcwd) = V_ALLOW, S(chdir) = V_ALLOW, S(fchdir) = V_ALLOW, S(mkdirat) = V_ALLOW,
    S(unlinkat) = V_ALLOW, S(renameat2) = V_ALLOW, S(linkat) = V_ALLOW, S(symlinkat) = V_ALLOW, S(readlinkat) = V_ALLOW,
    S(mknodat) = V_ALLOW, S(fchmod) = V_ALLOW, S(fchmodat) = V_ALLOW, [N_fchmodat2] = V_ALLOW, S(fchown) = V_ALLOW, S(fchownat) = V_ALLOW,
    S(faccessat) = V_ALLOW, [N_faccessat2] = V_ALLOW, S(newfstatat) = V_ALLOW, S(statx) = V_ALLOW, S(statfs) = V_ALLOW,
    S(fstatfs) = V_ALLOW, S(umask) = V_ALLOW, S(utimensat) = V_ALLOW, S(sendfile) = V_ALLOW, S(splice) = V_ALLOW, S(tee) = V_ALLOW,
    S(vmsplice) = V_ALLOW, S(copy_file_range) = V_ALLOW, S(pipe2) = V_ALLOW, S(ioctl) = V_IOCTL, S(memfd_create) = V_ALLOW,
    S(setxattr) = V_ALLOW, S(lsetxattr) = V_ALLOW, S(fsetxattr) = V_ALLOW, S(getxattr) = V_ALLOW, S(lgetxattr) = V_ALLOW,
    S(fgetxattr) = V_ALLOW, S(listxattr) = V_ALLOW, S(llistxattr) = V_ALLOW, S(flistxattr) = V_ALLOW, S(removexattr) = V_ALLOW,
    S(lremovexattr) = V_ALLOW, S(fremovexattr) = V_ALLOW, [N_setxattrat] = V_ALLOW, [N_getxattrat] = V_ALLOW, [N_listxattrat] = V_ALLOW,
    [N_removexattrat] = V_ALLOW, [N_file_getattr] = V_ALLOW, [N_cachestat] = V_ALLOW, S(inotify_init1) = V_ALLOW,
    S(inotify_add_watch) = V_ALLOW, S(inotify_rm_watch) = V_ALLOW,
    // memory
    S(mmap) = V_ALLOW, S(munmap) = V_ALLOW, S(mprotect) = V_ALLOW, S(mremap) = V_ALLOW, S(msync) = V_ALLOW, S(mincore) = V_ALLOW,
    S(madvise) = V_ALLOW, S(brk) = V_ALLOW, S(mlock) = V_ALLOW, S(mlock2) = V_ALLOW, S(munlock) = V_ALLOW, S(mlockall) = V_ALLOW,
    S(munlockall) = V_ALLOW, S(membarrier) = V_ALLOW, S(pkey_mprotect) = V_ALLOW, S(pkey_alloc) = V_ALLOW, S(pkey_free) = V_ALLOW,
    S(remap_file_pages) = V_ALLOW, [N_mseal] = V_ALLOW, [N_map_shadow_stack] = V_ALLOW, [N_memfd_secret] = V_ALLOW,
    // processes, signals, identity
    S(clone) = V_CLONE, S(execve) = V_ALLOW, S(execveat) = V_ALLOW, S(exit) = V_ALLOW, S(exit_group) = V_ALLOW, S(wait4) = V_ALLOW,
    S(waitid) = V_ALLOW, S(kill) = V_ALLOW, S(tkill) = V_ALLOW, S(tgkill) = V_ALLOW, S(getpid) = V_ALLOW, S(getppid) = V_ALLOW,
    S(gettid) = V_ALLOW, S(getpgid) = V_ALLOW, S(setpgid) = V_ALLOW, S(getsid) = V_ALLOW, S(setsid) = V_ALLOW, S(getuid) = V_ALLOW,
    S(geteuid) = V_ALLOW, S(getgid) = V_ALLOW, S(getegid) = V_ALLOW, S(getresuid) = V_ALLOW, S(getresgid) = V_ALLOW, S(getgroups) = V_ALLOW,
    S(setuid) = V_ALLOW, S(setgid) = V_ALLOW, S(setreuid) = V_ALLOW, S(setregid) = V_ALLOW, S(setresuid) = V_ALLOW, S(setresgid) = V_ALLOW,
    S(setgroups) = V_ALLOW, S(setfsuid) = V_ALLOW, S(setfsgid) = V_ALLOW, S(capget) = V_ALLOW, S(capset) = V_ALLOW, S(prctl) = V_ALLOW,
    S(seccomp) = V_ALLOW, S(personality) = V_PERSONALITY, S(ptrace) = V_ALLOW, S(process_vm_readv) = V_ALLOW,
    S(process_vm_writev) = V_ALLOW, S(pidfd_open) = V_ALLOW, S(pidfd_send_signal) = V_ALLOW, S(rt_sigaction) = V_ALLOW,
    S(rt_sigprocmask) = V_ALLOW, S(rt_sigreturn) = V_ALLOW, S(rt_sigpending) = V_ALLOW, S(rt_sigtimedwait) = V_ALLOW,
    S(rt_sigqueueinfo) = V_ALLOW, S(rt_tgsigqueueinfo) = V_ALLOW, S(rt_sigsuspend) = V_ALLOW, S(sigaltstack) = V_ALLOW,
    S(signalfd4) = V_ALLOW, S(set_tid_address) = V_ALLOW, S(set_robust_list) = V_ALLOW, S(get_robust_list) = V_ALLOW, S(rseq) = V_ALLOW,
    S(futex) = V_ALLOW, [N_futex_waitv] = V_ALLOW, [N_futex_wake] = V_ALLOW, [N_futex_wait] = V_ALLOW, [N_futex_requeue] = V_ALLOW,
    S(restart_syscall) = V_ALLOW, [N_landlock_create] = V_ALLOW, [N_landlock_add] = V_ALLOW, [N_landlock_self] = V_ALLOW,
    // scheduling, limits, time, facts about the machine
    S(sched_yield) = V_ALLOW, S(sched_getaffinity) = V_ALLOW, S(sched_setaffinity) = V_ALLOW, S(sched_getparam) = V_ALLOW,
    S(sched_setparam) = V_ALLOW, S(sched_getscheduler) = V_ALLOW, S(sched_setscheduler) = V_ALLOW, S(sched_getattr) = V_ALLOW,
    S(sched_setattr) = V_ALLOW, S(sched_get_priority_max) = V_ALLOW, S(sched_get_priority_min) = V_ALLOW,
    S(sched_rr_get_interval) = V_ALLOW, S(getpriority) = V_ALLOW, S(setpriority) = V_ALLOW, S(ioprio_get) = V_ALLOW, S(ioprio_set) = V_ALLOW,
    S(getrlimit) = V_ALLOW, S(setrlimit) = V_ALLOW, S(prlimit64) = V_PRLIMIT, S(getrusage) = V_ALLOW, S(times) = V_ALLOW, S(sysinfo) = V_ALLOW,
    S(uname) = V_ALLOW, S(getcpu) = V_ALLOW, S(getrandom) = V_ALLOW, S(gettimeofday) = V_ALLOW, S(clock_gettime) = V_ALLOW,
    S(clock_getres) = V_ALLOW, S(clock_nanosleep) = V_ALLOW, S(nanosleep) = V_ALLOW, S(getitimer) = V_ALLOW, S(setitimer) = V_ALLOW,
    S(timer_create) = V_ALLOW, S(timer_settime) = V_ALLOW, S(timer_gettime) = V_ALLOW, S(timer_getoverrun) = V_ALLOW,
    S(timer_delete) = V_ALLOW, S(timerfd_create) = V_ALLOW, S(timerfd_settime) = V_ALLOW, S(timerfd_gettime) = V_ALLOW,
    // waiting
    S(ppoll) = V_ALLOW, S(pselect6) = V_ALLOW, S(epoll_create1) = V_ALLOW, S(epoll_ctl) = V_ALLOW, S(epoll_pwait) = V_ALLOW,
    [N_epoll_pwait2] = V_ALLOW, S(eventfd2) = V_ALLOW, S(io_setup) = V_ALLOW, S(io_destroy) = V_ALLOW, S(io_submit) = V_ALLOW,
    S(io_cancel) = V_ALLOW, S(io_getevents) = V_ALLOW,
    // sockets and System V and POSIX queues
    S(socket) = V_SOCKET, S(socketpair) = V_SOCKET, S(bind) = V_ALLOW, S(listen) = V_ALLOW, S(accept) = V_ALLOW, S(accept4) = V_ALLOW,
    S(connect) = V_ALLOW, S(getsockname) = V_ALLOW, S(getpeername) = V_ALLOW, S(sendto) = V_ALLOW, S(recvfrom) = V_ALLOW,
    S(sendmsg) = V_ALLOW, S(recvmsg) = V_ALLOW, S(sendmmsg) = V_ALLOW, S(recvmmsg) = V_ALLOW, S(shutdown) = V_ALLOW,
    S(setsockopt) = V_ALLOW, S(getsockopt) = V_ALLOW, S(shmget) = V_ALLOW, S(shmat) = V_ALLOW, S(shmdt) = V_ALLOW, S(shmctl) = V_ALLOW,
    S(semget) = V_ALLOW, S(semop) = V_ALLOW, S(semtimedop) = V_ALLOW, S(semctl) = V_ALLOW, S(msgget) = V_ALLOW, S(msgsnd) = V_ALLOW,
    S(msgrcv) = V_ALLOW, S(msgctl) = V_ALLOW, S(mq_open) = V_ALLOW, S(mq_unlink) = V_ALLOW, S(mq_timedsend) = V_ALLOW,
    S(mq_timedreceive) = V_ALLOW, S(mq_notify) = V_ALLOW, S(mq_getsetattr) = V_ALLOW,
#if defined(__x86_64__)
    // the older forms that only this architecture still has
    S(open) = V_ALLOW, S(creat) = V_ALLOW, S(stat) = V_ALLOW, S(lstat) = V_ALLOW, S(access) = V_ALLOW, S(pipe) = V_ALLOW, S(dup2) = V_ALLOW,
    S(poll) = V_ALLOW, S(select) = V_ALLOW, S(pause) = V_ALLOW, S(alarm) = V_ALLOW, S(fork) = V_ALLOW, S(vfork) = V_ALLOW,
    S(getdents) = V_ALLOW, S(rename) = V_ALLOW, S(renameat) = V_ALLOW, S(mkdir) = V_ALLOW, S(rmdir) = V_ALLOW, S(link) = V_ALLOW,
    S(unlink) = V_ALLOW, S(symlink) = V_ALLOW, S(readlink) = V_ALLOW, S(chmod) = V_ALLOW, S(chown) = V_ALLOW, S(lchown) = V_ALLOW,
    S(mknod) = V_ALLOW, S(utime) = V_ALLOW, S(utimes) = V_ALLOW, S(futimesat) = V_ALLOW, S(getpgrp) = V_ALLOW, S(arch_prctl) = V_ALLOW,
    S(time) = V_ALLOW, S(epoll_create) = V_ALLOW, S(epoll_wait) = V_ALLOW, S(eventfd) = V_ALLOW, S(signalfd) = V_ALLOW,
    S(inotify_init) = V_ALLOW, S(uselib) = V_EPERM, S(ustat) = V_EPERM, S(sysfs) = V_EPERM, S(modify_ldt) = V_EPERM, S(iopl) = V_EPERM,
    S(ioperm) = V_EPERM,
#else
    S(renameat) = V_ALLOW,
#endif
    // refused: mounts and namespaces
    S(mount) = V_EPERM, S(umount2) = V_EPERM, S(move_mount) = V_EPERM, S(open_tree) = V_EPERM, S(fsopen) = V_EPERM, S(fsconfig) = V_EPERM,
    S(fsmount) = V_EPERM, S(fspick) = V_EPERM, [N_mount_setattr] = V_EPERM, [N_open_tree_attr] = V_EPERM, [N_statmount] = V_EPERM,
    [N_listmount] = V_EPERM, S(pivot_root) = V_EPERM, S(chroot) = V_EPERM, S(setns) = V_EPERM, S(unshare) = V_EPERM,
    S(sethostname) = V_EPERM, S(setdomainname) = V_EPERM,
    // refused: the machine's administration
    S(reboot) = V_EPERM, S(kexec_load) = V_EPERM, S(kexec_file_load) = V_EPERM, S(init_module) = V_EPERM, S(finit_module) = V_EPERM,
    S(delete_module) = V_EPERM, S(swapon) = V_EPERM, S(swapoff) = V_EPERM, S(acct) = V_EPERM, S(quotactl) = V_EPERM,
    [N_quotactl_fd] = V_EPERM, S(settimeofday) = V_EPERM, S(clock_settime) = V_EPERM, S(clock_adjtime) = V_EPERM, S(adjtimex) = V_EPERM,
    S(syslog) = V_EPERM, S(vhangup) = V_EPERM, S(nfsservctl) = V_EPERM, [N_file_setattr] = V_EPERM,
    // refused: large or rarely needed parts of the kernel, and ways to look at others
    S(bpf) = V_EPERM, S(perf_event_open) = V_EPERM, S(userfaultfd) = V_EPERM, S(io_uring_setup) = V_EPERM, S(io_uring_enter) = V_EPERM,
    S(io_uring_register) = V_EPERM, S(keyctl) = V_EPERM, S(add_key) = V_EPERM, S(request_key) = V_EPERM, S(open_by_handle_at) = V_EPERM,
    S(name_to_handle_at) = V_EPERM, S(fanotify_init) = V_EPERM, S(fanotify_mark) = V_EPERM, S(kcmp) = V_EPERM, S(lookup_dcookie) = V_EPERM,
    [N_pidfd_getfd] = V_EPERM, [N_process_madvise] = V_EPERM, [N_process_mrelease] = V_EPERM, S(mbind) = V_EPERM, S(set_mempolicy) = V_EPERM,
    S(get_mempolicy) = V_EPERM, S(migrate_pages) = V_EPERM, S(move_pages) = V_EPERM, [N_set_mempolicy_home_node] = V_EPERM,
    [N_lsm_get_self_attr] = V_EPERM, [N_lsm_set_self_attr] = V_EPERM, [N_lsm_list_modules] = V_EPERM,
};

enum verdict seccomp_verdict(unsigned number) { return number < SECCOMP_NUMBERS ? (enum verdict)table[number] : V_ENOSYS; }
uint32_t seccomp_arch(void) { return ARCH_NATIVE; }

const char *seccomp_verdict_name(enum verdict v) {
    static const char *const names[] = {"enosys", "eperm", "allow", "clone", "socket", "ioctl", "personality", "prlimit"};
    return names[v];
}

// ---- the filter ----

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define LOAD_ARG(n) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args) + 8 * (n))  // low half, little-endian
#define LOAD_HIGH(n) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args) + 8 * (n) + 4)
#define IF_EQUAL(value, then, otherwise) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, then, otherwise)
#define IF_LESS(value, then, otherwise) BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, value, otherwise, then)
#define IF_ANY_BIT(bits, then, otherwise) BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bits, then, otherwise)
#define ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define FAIL(error) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (error))

#define NAMESPACE_FLAGS (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)

// The code that decides one call; each piece ends in a return on every path.
static const struct sock_filter on_clone[] = {LOAD_ARG(0), IF_ANY_BIT(NAMESPACE_FLAGS, 0, 1), FAIL(EPERM), ALLOW};
static const struct sock_filter on_socket[] = {
    LOAD_ARG(0), IF_EQUAL(1 /* AF_UNIX */, 6, 0), IF_EQUAL(2 /* AF_INET */, 5, 0), IF_EQUAL(10 /* AF_INET6 */, 4, 0),
    IF_EQUAL(16 /* AF_NETLINK */, 0, 2), LOAD_ARG(2), IF_EQUAL(0 /* NETLINK_ROUTE */, 1, 0), FAIL(EPERM), ALLOW,
};
static const struct sock_filter on_ioctl[] = {
    LOAD_ARG(1), IF_EQUAL(0x5412 /* TIOCSTI */, 1, 0), IF_EQUAL(0x541c /* TIOCLINUX */, 0, 1), FAIL(EPERM), ALLOW,
};
static const struct sock_filter on_personality[] = {
    LOAD_ARG(0), IF_EQUAL(0, 4, 0), IF_EQUAL(0x0008 /* PER_LINUX32 */, 3, 0), IF_EQUAL(0x20000 /* UNAME26 */, 2, 0),
    IF_EQUAL(0xffffffff /* only asks */, 1, 0), FAIL(EPERM), ALLOW,
};
static const struct sock_filter on_prlimit[] = {
    LOAD_ARG(0), IF_EQUAL(0 /* the caller itself */, 5, 0), LOAD_ARG(2), IF_EQUAL(0, 0, 2), LOAD_HIGH(2), IF_EQUAL(0 /* no new limit */, 1, 0),
    FAIL(EPERM), ALLOW,
};
static const struct sock_filter on_allow[] = {ALLOW};
static const struct sock_filter on_eperm[] = {FAIL(EPERM)};
static const struct sock_filter on_enosys[] = {FAIL(ENOSYS)};

static const struct {
    const struct sock_filter *code;
    size_t length;
} pieces[] = {
#define PIECE(array) {array, sizeof array / sizeof *array}
    [V_ENOSYS] = PIECE(on_enosys), [V_EPERM] = PIECE(on_eperm), [V_ALLOW] = PIECE(on_allow), [V_CLONE] = PIECE(on_clone),
    [V_SOCKET] = PIECE(on_socket), [V_IOCTL] = PIECE(on_ioctl), [V_PERSONALITY] = PIECE(on_personality), [V_PRLIMIT] = PIECE(on_prlimit),
};

struct program {
    struct sock_filter *at;
    size_t length, room;
};

static void emit(struct program *p, const struct sock_filter *code, size_t length) {
    if (p->length + length > p->room) return;
    memcpy(p->at + p->length, code, length * sizeof *code);
    p->length += length;
}

// Neighbours with one verdict share one comparison: the number is compared with the end of each run in turn. The kernel
// remembers which numbers are always allowed, so the length of this list costs nothing at run time.
size_t seccomp_build(struct sock_filter *out, size_t room) {
    struct program p = {out, 0, room};
    const struct sock_filter head[] = {
        LOAD(arch), IF_EQUAL(ARCH_NATIVE, 1, 0), FAIL(EPERM),
        LOAD(nr), IF_LESS(SECCOMP_NUMBERS, 1, 0), FAIL(ENOSYS),  // x32 calls have bit 30 set and end here too
    };
    emit(&p, head, sizeof head / sizeof *head);
    for (unsigned first = 0; first < SECCOMP_NUMBERS;) {
        enum verdict v = seccomp_verdict(first);
        unsigned end = first + 1;
        while (end < SECCOMP_NUMBERS && seccomp_verdict(end) == v) end++;
        const struct sock_filter test = IF_LESS(end, 0, (uint8_t)pieces[v].length);
        emit(&p, &test, 1);
        emit(&p, pieces[v].code, pieces[v].length);
        first = end;
    }
    emit(&p, on_enosys, 1);
    return p.length;
}

static struct sock_filter code[1024];
static size_t length;

void seccomp_prepare(void) {
    if (!length) length = seccomp_build(code, sizeof code / sizeof *code);
}

int seccomp_apply(void) {
    seccomp_prepare();
    struct sock_fprog program = {(unsigned short)length, code};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
}

int seccomp_table_main(void) {
    for (unsigned n = 0; n < SECCOMP_NUMBERS; n++) printf("%u %s\n", n, seccomp_verdict_name(seccomp_verdict(n)));
    return 0;
}
