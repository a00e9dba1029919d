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

#include "callnumbers.h"

#if defined(__x86_64__)
#define ARCH_NATIVE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH_NATIVE AUDIT_ARCH_AARCH64
#else
#error "untax has a system-call table for x86_64 and aarch64 only"
#endif

static const uint8_t table[SECCOMP_NUMBERS] = {
#define CALL(name, verdict) [SYS_##name] = verdict,
#include "syscalls.h"
#undef CALL
};

static const char *const call_names[SECCOMP_NUMBERS] = {
#define CALL(name, verdict) [SYS_##name] = #name,
#include "syscalls.h"
#undef CALL
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

int seccomp_table_main(bool by_name) {
    for (unsigned n = 0; n < SECCOMP_NUMBERS; n++) {
        if (!by_name) printf("%u %s\n", n, seccomp_verdict_name(seccomp_verdict(n)));
        else if (call_names[n]) printf("%s %s\n", call_names[n], seccomp_verdict_name(seccomp_verdict(n)));
    }
    return 0;
}
