// A thread that is held, sent to another directory and let go: what it was waiting for comes as if nothing had been.
#define _GNU_SOURCE
#include "inject.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "io.h"

#define MS 1000000ull
#define WAIT_MS 400u        // what those wait that wait for a time
#define HELD_MS 150u        // how long into it they are held
#define SLACK_MS 250u       // a busy machine

static char place[] = "/tmp/untax-test-inject-XXXXXX";
static int proc, to_child[2];
static atomic_int *shared;  // [0]: it is about to wait; [1] and up: its own

static void doze(unsigned ms) { nanosleep(&(struct timespec){ms / 1000, (long)(ms % 1000 * MS)}, NULL); }

// ---- what the children do; 0 is right ----

static void announce(void) { atomic_store(&shared[0], 1); }

static bool lasted(uint64_t since) {
    uint64_t ms = (io_now_ns() - since) / MS;
    return ms >= WAIT_MS - 5 && ms < WAIT_MS + SLACK_MS;
}

static int reads(void) {
    char c = 0;
    announce();
    return read(to_child[0], &c, 1) == 1 && c == 'x' ? 0 : 1;
}

static int sleeps(void) {
    uint64_t since = io_now_ns();
    struct timespec left = {0, (long)(WAIT_MS * MS)};
    announce();
    if (syscall(SYS_nanosleep, &left, &left)) return 1;
    return lasted(since) ? 0 : 2;
}

static int polls(void) {
    uint64_t since = io_now_ns();
    struct pollfd p = {.fd = to_child[0], .events = POLLIN};
    announce();
    if (poll(&p, 1, (int)WAIT_MS)) return 1;
    return lasted(since) ? 0 : 2;
}

static int waits_on_futex(void) {
    uint64_t since = io_now_ns();
    announce();
    if (syscall(SYS_futex, &shared[1], FUTEX_WAIT, 0, &(struct timespec){0, (long)(WAIT_MS * MS)}, NULL, 0) != -1 || errno != ETIMEDOUT) return 1;
    return lasted(since) ? 0 : 2;
}

static int waits_for_a_child(void) {
    pid_t pid = fork();
    if (!pid) {
        doze(WAIT_MS);
        _exit(7);
    }
    int status;
    announce();
    return waitpid(pid, &status, 0) == pid && WEXITSTATUS(status) == 7 ? 0 : 1;
}

static void on_signal(int s) { atomic_fetch_add(&shared[1], s); }
static void handle(int s, int flags) { sigaction(s, &(struct sigaction){.sa_handler = on_signal, .sa_flags = flags}, NULL); }

static int waits_for_events(void) {
    int epoll = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN};
    epoll_ctl(epoll, EPOLL_CTL_ADD, to_child[0], &e);
    announce();
    int n = epoll_wait(epoll, &e, 1, -1);
#if !defined __x86_64__
    if (n < 0 && errno == EINTR) n = epoll_wait(epoll, &e, 1, -1);
#endif
    return n == 1 && e.events & EPOLLIN ? 0 : n < 0 ? errno : 100 + n;
}

static int waits_for_events_or_a_signal(void) {
    int epoll = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN};
    handle(SIGUSR1, SA_RESTART);
    announce();
    return epoll_wait(epoll, &e, 1, -1) == -1 && errno == EINTR && atomic_load(&shared[1]) == SIGUSR1 ? 0 : 1;
}

static int pauses(void) {
    handle(SIGUSR1, 0);
    announce();
    return pause() == -1 && errno == EINTR && atomic_load(&shared[1]) == SIGUSR1 ? 0 : 1;
}

static int suspends(void) {
    sigset_t all, none, now;
    sigfillset(&all);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &all, NULL);
    handle(SIGUSR1, 0);
    announce();
    bool woken = sigsuspend(&none) == -1 && errno == EINTR && atomic_load(&shared[1]) == SIGUSR1;
    sigprocmask(SIG_SETMASK, NULL, &now);
    return woken && sigismember(&now, SIGUSR1) && sigismember(&now, SIGTERM) ? 0 : 1;
}

static int computes(void) {
    uint64_t sum = 0, n = 0, x = 1;
    announce();
    while (!atomic_load(&shared[2])) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        sum += x, n++;
    }
    uint64_t again = 0;
    x = 1;
    for (uint64_t i = 0; i < n; i++) again += x = x * 6364136223846793005u + 1442695040888963407u;
    return sum == again ? 0 : 1;
}

// Floating point and vector registers are nobody's business here.
static int computes_fractions(void) {
    double x = 0.5;
    uint64_t n = 0;
    announce();
    while (!atomic_load(&shared[2])) x = 3.9 * x * (1 - x), n++;
    double y = 0.5;
    for (uint64_t i = 0; i < n; i++) y = 3.9 * y * (1 - y);
    return !memcmp(&x, &y, sizeof x) ? 0 : 1;
}

static int blocks_signals(void) {
    sigset_t all, now, pending;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    prctl(PR_SET_DUMPABLE, 0);
    int fine = reads();
    sigprocmask(SIG_SETMASK, NULL, &now);
    sigpending(&pending);
    struct sigaction trap;
    sigaction(SIGTRAP, NULL, &trap);
    return !fine && sigismember(&now, SIGTRAP) && sigismember(&pending, SIGUSR1) && !sigismember(&pending, SIGTRAP) && trap.sa_handler == SIG_DFL ? 0 : 1;
}

static void *thread_sleeps(void *arg) {
    uint64_t since = io_now_ns();
    struct timespec left = {0, (long)(WAIT_MS * MS)};
    atomic_fetch_add(&shared[0], 1);
    (void)arg;
    return syscall(SYS_nanosleep, &left, &left) || !lasted(since) ? (void *)1 : NULL;
}

static int has_threads(void) {
    pthread_t t[4];
    for (int i = 0; i < 4; i++) pthread_create(&t[i], NULL, thread_sleeps, NULL);
    int bad = 0;
    for (int i = 0; i < 4; i++) {
        void *result;
        pthread_join(t[i], &result);
        bad |= result != NULL;
    }
    return bad;
}

static volatile char selector;  // 0 allows, 1 dispatches

// System calls are handed to its own handler (prctl(2)), which ours must not cost it.
static int dispatches_calls(void) {
    handle(SIGSYS, 0);
    if (prctl(59 /* PR_SET_SYSCALL_USER_DISPATCH */, 1, 0, 0, &selector)) return 77;
    announce();
    selector = 1;
    while (!atomic_load(&shared[2])) {
    }
    selector = 0;
    struct sigaction now;
    sigaction(SIGSYS, NULL, &now);
    return now.sa_handler == on_signal ? 0 : 1;
}

// ---- holding them ----

#define HELD_MAX 16

static size_t hold_all(pid_t pid, struct held *h) {
    char path[64];
    size_t n = 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    for (pid_t tid = pid; tid < pid + 64 && n < HELD_MAX; tid++) {
        char one[96];
        snprintf(one, sizeof one, "%s/%d", path, tid);
        if (access(one, F_OK)) continue;
        if (!inject_hold(&h[n], pid, tid)) n++;
    }
    for (size_t i = 0; i < n; i++) CHECK(!inject_wait(&h[i]));
    return n;
}

static bool stands_in(pid_t pid, const char *where) {
    char path[64], cwd[4096];
    snprintf(path, sizeof path, "/proc/%d/cwd", pid);
    ssize_t n = readlink(path, cwd, sizeof cwd - 1);
    if (n < 0) return false;
    cwd[n] = 0;
    return !strcmp(cwd, where);
}

struct trial {
    const char *name;
    int (*child)(void);
    int threads;       // that must have announced themselves
    int signal;        // sent while it is held
    bool byte;         // it waits for one
    bool stop;         // it is stopped before, and continued after
};

static void try(const struct trial *t) {
    memset(shared, 0, 16 * sizeof *shared);
    if (pipe(to_child)) abort();
    pid_t pid = fork();
    if (!pid) {
        alarm(20);
        _exit(t->child());
    }
    while (atomic_load(&shared[0]) < t->threads) doze(1);
    doze(HELD_MS);
    if (t->stop) {
        int status;
        kill(pid, SIGSTOP);
        waitpid(pid, &status, WUNTRACED);
    }
    struct held h[HELD_MAX];
    uint64_t since = io_now_ns();
    inject_deadline(since + 2000 * MS);
    size_t n = hold_all(pid, h);
    CHECK(n == (size_t)t->threads + (t->threads > 1));
    CHECK(n && !inject_chdir(&h[0], proc, "/"));
    CHECK(stands_in(pid, "/"));
    if (t->signal) kill(pid, t->signal);
    CHECK(n && inject_chdir(&h[0], proc, "/no/such/place") && errno == ENOENT);
    CHECK(n && !inject_chdir(&h[0], proc, place));
    CHECK(stands_in(pid, place));
    for (size_t i = 0; i < n; i++) CHECK(inject_release(&h[i]));
    inject_deadline(0);
    printf("%-24s %6llu us\n", t->name, (unsigned long long)(io_now_ns() - since) / 1000);
    if (t->stop) {
        int status;
        CHECK(waitpid(pid, &status, WNOHANG) == 0);
        char path[64], text[512];
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        doze(20);
        CHECK(io_read_file(AT_FDCWD, path, text, sizeof text) > 0 && strstr(text, ") T "));
        kill(pid, SIGCONT);
    }
    if (t->byte) CHECK(write(to_child[1], "x", 1) == 1);
    atomic_store(&shared[2], 1);
    int status = -1;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
    if (!WIFEXITED(status) || WEXITSTATUS(status)) fprintf(stderr, "%s: status %x\n", t->name, (unsigned)status);
    close(to_child[0]), close(to_child[1]);
}

// One that cannot be made to act is told from those that can before anything of it has changed.
static void try_dispatching(void) {
    memset(shared, 0, 16 * sizeof *shared);
    pid_t pid = fork();
    if (!pid) {
        alarm(20);
        _exit(dispatches_calls());
    }
    int status = -1;
    while (!atomic_load(&shared[0]) && !waitpid(pid, &status, WNOHANG)) doze(1);
    if (status != -1) return;  // this kernel cannot
    doze(HELD_MS);
    struct held h;
    inject_deadline(io_now_ns() + 2000 * MS);
    CHECK(!inject_hold(&h, pid, pid) && !inject_wait(&h));
    CHECK(inject_chdir(&h, proc, "/") && errno == EOPNOTSUPP);
    CHECK(inject_release(&h));
    inject_deadline(0);
    atomic_store(&shared[2], 1);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status));
}

// A tracer that is killed: whom it only held goes on, whom it had made to act is killed and does not take our call's end for its own.
static void try_death(bool acts) {
    memset(shared, 0, 16 * sizeof *shared);
    pid_t pid = fork();
    if (!pid) {
        alarm(20);
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
        _exit(sleeps());
    }
    while (!atomic_load(&shared[0])) doze(1);
    doze(HELD_MS);
    pid_t tracer = fork();
    if (!tracer) {
        struct held h;
        inject_deadline(io_now_ns() + 2000 * MS);
        if (inject_hold(&h, pid, pid) || inject_wait(&h) || (acts && inject_chdir(&h, proc, "/"))) _exit(1);
        raise(SIGKILL);
    }
    int status = -1;
    CHECK(waitpid(tracer, &status, 0) == tracer && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(acts ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : WIFEXITED(status) && !WEXITSTATUS(status));
}

int main(void) {
    if (!mkdtemp(place)) return 1;
    proc = open("/proc", O_PATH | O_DIRECTORY);
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    static const struct trial trials[] = {
        {.name = "read", .child = reads, .threads = 1, .byte = true},
        {.name = "nanosleep", .child = sleeps, .threads = 1},
        {.name = "poll", .child = polls, .threads = 1},
        {.name = "futex", .child = waits_on_futex, .threads = 1},
        {.name = "waitpid", .child = waits_for_a_child, .threads = 1},
        {.name = "epoll", .child = waits_for_events, .threads = 1, .byte = true},
        {.name = "epoll and a signal", .child = waits_for_events_or_a_signal, .threads = 1, .signal = SIGUSR1},
        {.name = "pause", .child = pauses, .threads = 1, .signal = SIGUSR1},
        {.name = "sigsuspend", .child = suspends, .threads = 1, .signal = SIGUSR1},
        {.name = "computing", .child = computes, .threads = 1},
        {.name = "fractions", .child = computes_fractions, .threads = 1},
        {.name = "all blocked", .child = blocks_signals, .threads = 1, .signal = SIGUSR1, .byte = true},
        {.name = "threads", .child = has_threads, .threads = 4},
        {.name = "stopped", .child = reads, .threads = 1, .byte = true, .stop = true},
        {.name = "stopped while computing", .child = computes, .threads = 1, .stop = true},
    };
    for (size_t i = 0; i < sizeof trials / sizeof *trials; i++) try(&trials[i]);
    try_dispatching();
    try_death(false);
    try_death(true);
    rmdir(place);
    return check_report();
}
