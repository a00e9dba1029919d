// The filter as the kernel would run it: every verdict of the table, the architecture check, and the arguments that matter.
#define _GNU_SOURCE
#include "../seccomp.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>

#include "check.h"

#define ALLOWED SECCOMP_RET_ALLOW
#define REFUSED(error) (SECCOMP_RET_ERRNO | (error))

static struct sock_filter code[1024];
static size_t length;

// The few instructions of classic BPF that the filter uses; anything else is a failure of the test.
static uint32_t run(const struct seccomp_data *data) {
    uint32_t a = 0;
    for (size_t at = 0; at < length; at++) {
        const struct sock_filter *i = &code[at];
        switch (i->code) {
        case BPF_LD | BPF_W | BPF_ABS:
            if (i->k + 4 > sizeof *data) return 0xdead;
            memcpy(&a, (const char *)data + i->k, 4);
            break;
        case BPF_JMP | BPF_JEQ | BPF_K: at += a == i->k ? i->jt : i->jf; break;
        case BPF_JMP | BPF_JGE | BPF_K: at += a >= i->k ? i->jt : i->jf; break;
        case BPF_JMP | BPF_JSET | BPF_K: at += a & i->k ? i->jt : i->jf; break;
        case BPF_RET | BPF_K: return i->k;
        default: return 0xdead;
        }
    }
    return 0xdead;
}

static uint32_t call(unsigned number, uint64_t first, uint64_t second, uint64_t third) {
    struct seccomp_data data = {.nr = (int)number, .arch = seccomp_arch(), .args = {first, second, third}};
    return run(&data);
}

static void every_number_has_its_verdict(void) {
    for (unsigned n = 0; n <= 700; n++) {
        uint32_t got = call(n, 0, 0, 0);
        switch (seccomp_verdict(n)) {
        case V_ENOSYS: CHECK(got == REFUSED(ENOSYS)); break;
        case V_EPERM: CHECK(got == REFUSED(EPERM)); break;
        case V_ALLOW: case V_CLONE: case V_IOCTL: case V_PERSONALITY: case V_PRLIMIT: CHECK(got == ALLOWED); break;
        case V_SOCKET: CHECK(got == REFUSED(EPERM)); break;  // family 0
        }
    }
    CHECK(call(0x40000000u | SYS_read, 0, 0, 0) == REFUSED(ENOSYS));  // x32
    CHECK(call(0xffffffffu, 0, 0, 0) == REFUSED(ENOSYS));
}

static void another_architecture_is_refused(void) {
    for (unsigned n = 0; n < SECCOMP_NUMBERS; n++) {
        struct seccomp_data data = {.nr = (int)n, .arch = AUDIT_ARCH_I386};
        CHECK(run(&data) == REFUSED(EPERM));
    }
}

static void namespaces_cannot_be_made(void) {
    static const unsigned flags[] = {CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC, CLONE_NEWUTS, CLONE_NEWCGROUP};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) CHECK(call(SYS_clone, flags[i] | 17, 0, 0) == REFUSED(EPERM));
    CHECK(call(SYS_clone, CLONE_VM | CLONE_VFORK | 17, 0, 0) == ALLOWED);
    CHECK(call(SYS_unshare, 0, 0, 0) == REFUSED(EPERM));
    CHECK(call(435 /* clone3 */, 0, 0, 0) == REFUSED(ENOSYS));
}

static void only_ordinary_sockets(void) {
    static const int good[] = {1, 2, 10}, bad[] = {0, 3, 15, 17, 38, 40};
    for (size_t i = 0; i < 3; i++) CHECK(call(SYS_socket, (uint64_t)good[i], 1, 0) == ALLOWED);
    for (size_t i = 0; i < 6; i++) CHECK(call(SYS_socket, (uint64_t)bad[i], 1, 0) == REFUSED(EPERM));
    CHECK(call(SYS_socket, 16, 3, 0) == ALLOWED);
    CHECK(call(SYS_socket, 16, 3, 12) == REFUSED(EPERM));
}

static void terminals_cannot_be_typed_into(void) {
    CHECK(call(SYS_ioctl, 0, 0x5412, 0) == REFUSED(EPERM));
    CHECK(call(SYS_ioctl, 0, 0x541c, 0) == REFUSED(EPERM));
    CHECK(call(SYS_ioctl, 0, 0xffffffff00005412u, 0) == REFUSED(EPERM));  // the kernel looks at the low half
    CHECK(call(SYS_ioctl, 0, 0x5413, 0) == ALLOWED);
    CHECK(call(SYS_personality, 0, 0, 0) == ALLOWED);
    CHECK(call(SYS_personality, 0x0040000, 0, 0) == REFUSED(EPERM));
    CHECK(call(SYS_prlimit64, 0, 7, 0x7fff00001000) == ALLOWED);
    CHECK(call(SYS_prlimit64, 1, 7, 0) == ALLOWED);
    CHECK(call(SYS_prlimit64, 1, 7, 0x7fff00001000) == REFUSED(EPERM));
    CHECK(call(SYS_prlimit64, 1, 7, 0x7fff00000000) == REFUSED(EPERM));  // only its upper half says that it is an address
}

// THREATS E17, by name: none of these may ever become allowed by a slip in the table.
static void what_must_never_be_allowed(void) {
    static const unsigned never[] = {
        SYS_bpf, SYS_perf_event_open, SYS_userfaultfd, SYS_io_uring_setup, SYS_keyctl, SYS_add_key, SYS_request_key, SYS_kexec_load, SYS_init_module,
        SYS_finit_module, SYS_delete_module, SYS_open_by_handle_at, SYS_mount, SYS_umount2, SYS_move_mount, SYS_open_tree, SYS_fsopen, SYS_fsmount,
        SYS_fspick, 442, SYS_pivot_root, SYS_setns, SYS_unshare, SYS_swapon, SYS_reboot, SYS_settimeofday, SYS_clock_settime, SYS_acct, SYS_quotactl,
        SYS_fanotify_init, SYS_kcmp, SYS_syslog, SYS_vhangup,
#if defined(__x86_64__)
        SYS_iopl, SYS_ioperm,
#endif
    };
    for (size_t i = 0; i < sizeof never / sizeof *never; i++) CHECK(call(never[i], 0, 0, 0) == REFUSED(EPERM));
}

int main(void) {
    length = seccomp_build(code, sizeof code / sizeof *code);
    CHECK(length > 0 && length < sizeof code / sizeof *code);
    every_number_has_its_verdict();
    another_architecture_is_refused();
    namespaces_cannot_be_made();
    only_ordinary_sockets();
    terminals_cannot_be_typed_into();
    what_must_never_be_allowed();
    return check_report();
}
