// The steps: seize, interrupt, wait; then, from where the thread stands, let it run into one system call of ours and stop it at that call's end. Stops at
// system calls are used rather than single steps: a step ends in a signal, and forcing one on a thread that blocks it changes its handlers for good.
#define _GNU_SOURCE
#include "inject.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/rseq.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "io.h"

// glibc has these as members of an enum that older versions lack.
#define P_SEIZE 0x4206
#define P_INTERRUPT 0x4207
#define P_GETSIGMASK 0x420a
#define P_SETSIGMASK 0x420b
#define P_GET_RSEQ 0x420f
#define P_GET_DISPATCH 0x4211  // Linux 6.4
#define P_SYSGOOD 1
#define P_EXITKILL 0x100000
#define P_EVENT_STOP 128

#define AT_SYSCALL_STOP (SIGTRAP | 0x80)
#define RED_ZONE 256        // x86_64 keeps 128 bytes below the stack pointer in use
#define VDSO_BYTES 16384
#define WAKE_US 1000        // how late a deadline may be noticed

// ---- what differs between machines ----

#if defined __x86_64__

#define CODE_BYTES 2
static bool is_call(const uint8_t *code) { return code[0] == 0x0f && code[1] == 0x05; }
static bool is_ours(const inject_regs *r) { return r->cs == 0x33; }  // not a 32-bit program
static uint64_t pc_of(const inject_regs *r) { return r->rip; }
static uint64_t sp_of(const inject_regs *r) { return r->rsp; }
static long result_of(const inject_regs *r) { return (long)r->rax; }

static inject_regs calling(const inject_regs *from, uint64_t code, long number) {
    inject_regs r = *from;
    r.rip = code;
    r.rax = (unsigned long)number;
    r.orig_rax = ~0ul;
    return r;
}
static void set_argument(inject_regs *r, uint64_t value) { r->rdi = value; }

#elif defined __aarch64__

#define CODE_BYTES 4
static bool is_call(const uint8_t *code) { return !memcmp(code, "\x01\x00\x00\xd4", 4); }
static bool is_ours(const inject_regs *r) { return !(r->pstate & 0x10); }
static uint64_t pc_of(const inject_regs *r) { return r->pc; }
static uint64_t sp_of(const inject_regs *r) { return r->sp; }
static long result_of(const inject_regs *r) { return (long)r->regs[0]; }

static inject_regs calling(const inject_regs *from, uint64_t code, long number) {
    inject_regs r = *from;
    r.pc = code;
    r.regs[8] = (unsigned long)number;
    return r;
}
static void set_argument(inject_regs *r, uint64_t value) { r->regs[0] = value; }

#else
#error "no registers for this machine"
#endif

// ---- waiting, within a deadline ----

static uint64_t deadline;

static void on_alarm(int signal) { (void)signal; }

void inject_deadline(uint64_t deadline_ns) {
    deadline = deadline_ns;
    struct itimerval every = {.it_interval.tv_usec = deadline_ns ? WAKE_US : 0, .it_value.tv_usec = deadline_ns ? WAKE_US : 0};
    struct sigaction act = {.sa_handler = on_alarm};  // no SA_RESTART: it is there to end a wait
    if (deadline_ns) sigaction(SIGALRM, &act, NULL);
    setitimer(ITIMER_REAL, &every, NULL);
    if (!deadline_ns) signal(SIGALRM, SIG_DFL);
}

// How it stopped, or -1: ETIMEDOUT, or ESRCH when it has ended.
static int next_stop(struct held *h) {
    int status;
    for (;;) {
        pid_t got = waitpid(h->tid, &status, __WALL);
        if (got == h->tid && WIFSTOPPED(status)) return status;
        if (got == h->tid || (got < 0 && errno == ECHILD)) {
            h->gone = true, h->stopped = false;
            errno = ESRCH;
            return -1;
        }
        if (got < 0 && errno != EINTR) return -1;
        if (deadline && io_now_ns() > deadline) {
            errno = ETIMEDOUT;
            return -1;
        }
    }
}

static int ask(const struct held *h, int request, uintptr_t address, uintptr_t data) {
    return ptrace((enum __ptrace_request)request, h->tid, (void *)address, (void *)data) < 0 ? -1 : 0;
}

static int get_regs(const struct held *h, inject_regs *out) {
    struct iovec iov = {out, sizeof *out};
    if (ask(h, PTRACE_GETREGSET, NT_PRSTATUS, (uintptr_t)&iov)) return -1;
    if (iov.iov_len == sizeof *out) return 0;
    errno = EOPNOTSUPP;  // a 32-bit program
    return -1;
}

static int set_regs(const struct held *h, const inject_regs *regs) {
    struct iovec iov = {(void *)(uintptr_t)regs, sizeof *regs};
    return ask(h, PTRACE_SETREGSET, NT_PRSTATUS, (uintptr_t)&iov);
}

static int set_mask(const struct held *h, uint64_t mask) { return ask(h, P_SETSIGMASK, sizeof mask, (uintptr_t)&mask); }

static int peek(const struct held *h, uint64_t at, void *out, size_t size) {
    struct iovec ours = {out, size}, its = {(void *)(uintptr_t)at, size};
    return process_vm_readv(h->tid, &ours, 1, &its, 1, 0) == (ssize_t)size ? 0 : -1;
}

static int poke(const struct held *h, uint64_t at, const void *data, size_t size) {
    struct iovec ours = {(void *)(uintptr_t)data, size}, its = {(void *)(uintptr_t)at, size};
    return process_vm_writev(h->tid, &ours, 1, &its, 1, 0) == (ssize_t)size ? 0 : -1;
}

// ---- holding ----

int inject_hold(struct held *h, pid_t tgid, pid_t tid) {
    *h = (struct held){.tgid = tgid, .tid = tid};
    if (ask(h, P_SEIZE, 0, P_SYSGOOD)) return -1;
    return ask(h, P_INTERRUPT, 0, 0);
}

#if defined __x86_64__
#define RESTART_NO_HANDLER (-514)  // ERESTARTNOHAND: again, unless a handler runs

// Some calls end with EINTR whenever their thread was stopped, signal or not (signal(7)). Those that wait without end are made to go on.
static void mend_interrupted(const struct held *h) {
    inject_regs r;
    if (get_regs(h, &r) || !is_ours(&r) || (long)r.orig_rax < 0 || (long)r.rax != -EINTR) return;
    bool endless = false;
    switch ((long)r.orig_rax) {
    case SYS_epoll_wait: case SYS_epoll_pwait: endless = (int)r.r10 < 0; break;
    case 441 /* epoll_pwait2 */: case SYS_semtimedop: endless = !r.r10; break;
    case SYS_rt_sigtimedwait: endless = !r.rdx; break;
    case SYS_io_getevents: endless = !r.r8; break;
    case SYS_semop: endless = true; break;
    default: break;
    }
    if (!endless) return;
    r.rax = (unsigned long)RESTART_NO_HANDLER;
    set_regs(h, &r);
}
#else
static void mend_interrupted(const struct held *h) { (void)h; }  // the call's first argument is not to be had any more
#endif

int inject_wait(struct held *h) {
    while (!h->stopped) {
        int status = next_stop(h);
        if (status < 0) return h->gone ? 0 : -1;
        if (status >> 16 == P_EVENT_STOP) h->stopped = true;
        else if (ask(h, PTRACE_CONT, 0, (uintptr_t)WSTOPSIG(status))) return h->gone = errno == ESRCH, h->gone ? 0 : -1;  // a signal on its way
    }
    mend_interrupted(h);
    return 0;
}

// ---- borrowing ----

// Lets it run to the next stop at a system call. Signals are blocked but for those that cannot be.
static int run(struct held *h) {
    for (;;) {
        if (ask(h, PTRACE_SYSCALL, 0, 0)) return h->gone = errno == ESRCH, -1;
        h->stopped = false, h->has_run = true;
        int status = next_stop(h);
        if (status < 0) return -1;
        h->stopped = true;
        int signal = WSTOPSIG(status);
        if (status >> 16 == P_EVENT_STOP) continue;
        if (signal == AT_SYSCALL_STOP) return 0;
        if (signal == SIGSEGV || signal == SIGBUS || signal == SIGILL || signal == SIGSYS || signal == SIGTRAP) {
            errno = EFAULT;  // ours: it has not run a step of its own
            return -1;
        }
        h->owed |= 1ull << signal;
    }
}

// Whether it was in a call that is to be made again, and which.
static int find_restart(struct held *h) {
#if defined __x86_64__
    static const long again[] = {-512, -513, -514, -516};  // ERESTARTSYS, NOINTR, NOHAND, RESTARTBLOCK
    if ((long)h->saved.orig_rax < 0) return 0;
    for (size_t i = 0; i < 4 && !h->restarts; i++) h->restarts = (long)h->saved.rax == again[i];
    h->code = h->saved.rip - CODE_BYTES;
    uint8_t code[CODE_BYTES];
    if (!h->restarts || (!peek(h, h->code, code, sizeof code) && is_call(code))) return 0;
    h->restarts = false;  // int 0x80, whose numbers are others
    errno = EOPNOTSUPP;
    return -1;
#else
    // The kernel has turned it back to the instruction already, and tells only at the call's entry whether it is to be continued or made anew.
    uint8_t code[CODE_BYTES];
    if (peek(h, h->saved.pc, code, sizeof code) || !is_call(code)) return 0;
    inject_regs at_entry;
    if (run(h) || get_regs(h, &at_entry)) return -1;
    h->restarts = true;
    h->number = (long)at_entry.regs[8];
    h->code = h->saved.pc;
    int none = -1;
    struct iovec iov = {&none, sizeof none};
    return ask(h, PTRACE_SETREGSET, 0x404 /* NT_ARM_SYSTEM_CALL */, (uintptr_t)&iov) || run(h) ? -1 : 0;
#endif
}

// An instruction in its memory that makes a system call: the kernel maps a few into every program.
static int find_code(struct held *h, int proc) {
    static uint8_t vdso[VDSO_BYTES];
    char path[32];
    struct {
        uint64_t type, value;
    } aux[32];
    snprintf(path, sizeof path, "%d/auxv", h->tid);
    autoclose int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, aux, sizeof aux);
    uint64_t start = 0;
    for (size_t i = 0; size > 0 && i < (size_t)size / sizeof *aux; i++)
        if (aux[i].type == AT_SYSINFO_EHDR) start = aux[i].value;
    struct iovec ours = {vdso, sizeof vdso}, its = {(void *)(uintptr_t)start, sizeof vdso};
    ssize_t have = start ? process_vm_readv(h->tid, &ours, 1, &its, 1, 0) : -1;
    for (ssize_t i = 0; i + CODE_BYTES <= have; i += CODE_BYTES == 2 ? 1 : CODE_BYTES)
        if (is_call(vdso + i)) {
            h->code = start + (uint64_t)i;
            return 0;
        }
    errno = ENOEXEC;
    return -1;
}

// In a restartable sequence the kernel would no longer see that it was interrupted.
static bool in_sequence(const struct held *h) {
    struct {
        uint64_t area;
        uint32_t size, signature, flags, pad;
    } config = {0};
    uint64_t at;
    struct rseq_cs cs;
    if (ask(h, P_GET_RSEQ, sizeof config, (uintptr_t)&config) || !config.area) return false;
    if (peek(h, config.area + 8, &at, sizeof at) || !at || peek(h, at, &cs, sizeof cs)) return false;
    return pc_of(&h->saved) - cs.start_ip < cs.post_commit_offset;
}

// With system calls dispatched to a handler (prctl(2)) ours would end in a SIGSYS, and forcing that on a thread that blocks it takes its handler away.
static bool dispatches(const struct held *h) {
    struct {
        uint64_t mode, selector, offset, length;
    } config = {0};
    return !ask(h, P_GET_DISPATCH, sizeof config, (uintptr_t)&config) && config.mode;
}

static bool put_back(struct held *h) {
    bool well = !h->kept || !poke(h, h->at, h->kept, h->size);
    free(h->kept);
    h->kept = NULL;
    return well;
}

// The path goes below its stack, or else over what lies there, which is put back before it runs again.
static int place(struct held *h, const char *path) {
    if (!put_back(h)) return -1;
    h->size = (uint32_t)strlen(path) + 1;
    h->kept = malloc(h->size);
    if (!h->kept) return -1;
    uint64_t sp = sp_of(&h->saved), below = (sp - RED_ZONE - h->size) & ~15ull;
    for (int i = 0; i < 2; i++) {
        h->at = i ? sp : below;
        if (!peek(h, h->at, h->kept, h->size) && !poke(h, h->at, path, h->size)) return 0;
    }
    free(h->kept);
    h->kept = NULL;
    errno = EFAULT;
    return -1;
}

static int borrow(struct held *h, int proc) {
    if (get_regs(h, &h->saved)) return -1;
    if (!is_ours(&h->saved) || dispatches(h)) {
        errno = EOPNOTSUPP;
        return -1;
    }
    if (ask(h, P_GETSIGMASK, sizeof h->mask, (uintptr_t)&h->mask)) return -1;
    // Let go by our death it would run on with our call's registers: a sleep would seem to be over, and its program end well.
    if (ask(h, PTRACE_SETOPTIONS, 0, P_SYSGOOD | P_EXITKILL) || set_mask(h, ~0ull)) return -1;
    h->borrowed = true;
    if (find_restart(h)) return -1;
    if (!h->restarts && find_code(h, proc)) return -1;
    if (!h->restarts && in_sequence(h)) {
        errno = EBUSY;
        return -1;
    }
    h->ready = true;
    return 0;
}

int inject_chdir(struct held *h, int proc, const char *path) {
    if (!h->borrowed && borrow(h, proc)) return -1;
    if (!h->ready) {
        errno = EFAULT;
        return -1;
    }
    if (place(h, path)) return -1;
    inject_regs r = calling(&h->saved, h->code, SYS_chdir);
    set_argument(&r, h->at);
    if (set_regs(h, &r) || run(h) || run(h) || get_regs(h, &r)) return -1;
    long result = result_of(&r);
    if (!result) return 0;
    errno = result < 0 && result > -4096 ? (int)-result : EFAULT;
    return -1;
}

// ---- giving back ----

#if defined __x86_64__
// Where the kernel handles signals, and decides what becomes of an interrupted call: with the registers as they were it decides as it would have done.
static bool give_back(struct held *h) {
    if (h->has_run) {
        if (ask(h, P_INTERRUPT, 0, 0) || ask(h, PTRACE_CONT, 0, 0)) return false;
        h->stopped = false;
        if (inject_wait(h) || !h->stopped) return false;
    }
    return !set_regs(h, &h->saved) && !set_mask(h, h->mask);
}
#else
// Here the decision was made before the thread could be stopped. The call is made again, and let go at its entry with the thread's own signal mask:
// whatever came meanwhile then ends it as it would have done, where a handler run before it would leave pause() waiting for a signal that has been.
static bool give_back(struct held *h) {
    if (!h->restarts) return !set_regs(h, &h->saved) && !set_mask(h, h->mask);
    inject_regs r = calling(&h->saved, h->code, h->number);
    return !set_regs(h, &r) && !run(h) && !set_mask(h, h->mask);
}
#endif

bool inject_release(struct held *h) {
    if (!h->stopped && !h->borrowed) return true;  // it was asked to stop and has not: the kernel forgets that with our own end
    bool well = h->gone || (h->stopped && (!h->borrowed || (put_back(h) && give_back(h))) && !ask(h, PTRACE_DETACH, 0, 0));
    free(h->kept);
    h->kept = NULL;
    for (int s = 1; well && !h->gone && s < 64; s++)
        if (h->owed >> s & 1) syscall(SYS_tgkill, h->tgid, h->tid, s);
    return well || h->gone;
}
