#define _GNU_SOURCE
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "birth.h"
#include "io.h"
#include "wire.h"

#define CHILD_STACK (128u << 10)
#define DEFAULT_PATH "/usr/local/bin:/usr/bin:/bin"

// Shared with the child, which runs in our memory until it executes while we stand still.
static struct {
    const struct spawn *spawn;
    int pts, null;
    volatile int error;
    volatile enum spawn_step step;
    volatile pid_t pid;
    char path[PATH_MAX + 2];
} shared = {.null = -1};

// Set where CLONE_PARENT is without effect, as under gVisor: then a process in between starts the program and goes, and the
// program falls to the agent, which is everybody's reaper.
static bool by_orphaning;

static int failed(enum spawn_step step, int error) {
    shared.step = step;
    shared.error = error;
    return -1;
}

// As execvpe, with the PATH of the command, and without handing unknown formats to a shell. Returns the errno to report.
static int execute(const char *name, char **argv, char **env) {
    if (!*name) return ENOENT;
    if (strchr(name, '/')) {
        execve(name, argv, env);
        return errno;
    }
    const char *path = DEFAULT_PATH;
    for (char **e = env; *e; e++)
        if (!strncmp(*e, "PATH=", 5)) path = *e + 5;
    size_t name_size = strlen(name) + 1;
    int denied = 0;
    for (;;) {
        size_t dir = strcspn(path, ":");
        if (dir + 1 + name_size <= sizeof shared.path) {
            memcpy(shared.path, path, dir);
            size_t at = dir;
            if (dir) shared.path[at++] = '/';
            memcpy(shared.path + at, name, name_size);
            execve(shared.path, argv, env);
            switch (errno) {
            case EACCES: denied = EACCES; break;
            case ENOENT: case ENOTDIR: case ENAMETOOLONG: case ELOOP: case ESTALE: case ENODEV: case ETIMEDOUT: break;
            default: return errno;
            }
        }
        if (!path[dir]) break;
        path += dir + 1;
    }
    return denied ? denied : ENOENT;
}

static int set_descriptors(const struct spawn *s) {
    int count = s->fds_count;
    if (s->options & SPAWN_PTY) {
        for (int i = 0; i < 3; i++)
            if (dup2(shared.pts, i) < 0) return -1;
        return ioctl(0, TIOCSCTTY, 0) < 0 ? -1 : 3;
    }
    for (int i = 0; i < count; i++)
        if (dup2(s->fds[i] < 0 ? shared.null : s->fds[i], i) < 0) return -1;
    return count;
}

static int child(void *unused) {
    (void)unused;
    const struct spawn *s = shared.spawn;
    setsid();
    umask(022);
    int next = set_descriptors(s);
    if (next < 0) failed(STEP_SETUP, errno), _exit(127);
    if (chdir(s->cwd) < 0) failed(STEP_CHDIR, errno), _exit(127);
    syscall(SYS_close_range, next, ~0u, 0);  // all of ours are close-on-exec besides; an old kernel loses nothing
    if (s->options & EXEC_DIE_WITH_PARENT && !by_orphaning) prctl(PR_SET_PDEATHSIG, SIGKILL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int error = execute(s->argv[0], s->argv, s->env);
    if (error == ENOENT && s->options & EXEC_FALLBACK_SH) {
        s->argv[0] = (char[]){"sh"};
        error = execute("sh", s->argv, s->env);
    }
    failed(STEP_EXEC, error);
    _exit(127);
}

// gVisor gives the other side by its name only, below a file system that nobody inside can change.
static int open_pts_by_name(int master) {
    unsigned number;
    char path[32];
    if (ioctl(master, TIOCGPTN, &number) < 0) return -1;
    snprintf(path, sizeof path, "/dev/pts/%u", number);
    return open(path, O_RDWR | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC);
}

// Both sides of a new terminal; no name is looked up for the second one, where the kernel can do without.
static int open_pty(const struct spawn *s, int *master) {
    *master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (*master < 0) return -1;
    int unlock = 0;
    struct winsize size = {.ws_row = s->rows, .ws_col = s->cols};
    shared.pts = -1;
    if (ioctl(*master, TIOCSPTLCK, &unlock) == 0) shared.pts = ioctl(*master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (shared.pts < 0 && errno == ENOTTY) shared.pts = open_pts_by_name(*master);
    if (shared.pts >= 0 && (!s->rows || !s->cols || ioctl(*master, TIOCSWINSZ, &size) == 0)) return 0;
    int error = errno;
    io_close(&shared.pts);
    io_close(master);
    errno = error;
    return -1;
}

static char *new_stack(void) {
    char *stack = mmap(NULL, CHILD_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    return stack == MAP_FAILED ? NULL : stack;
}

struct between {
    char *stack;
    struct birth *birth;
};

static int between(void *given) {
    struct between *b = given;
    shared.pid = clone(child, b->stack + CHILD_STACK, CLONE_VM | CLONE_VFORK | CLONE_PARENT_SETTID | SIGCHLD, NULL, &b->birth->pid);
    if (shared.pid < 0) shared.error = errno;
    _exit(0);
}

static pid_t clone_child(char *stack, struct birth *birth) {
    if (!by_orphaning) return clone(child, stack + CHILD_STACK, CLONE_VM | CLONE_VFORK | CLONE_PARENT | CLONE_PARENT_SETTID | SIGCHLD, NULL, &birth->pid);
    static char *stack_between;
    if (!stack_between && !(stack_between = new_stack())) return -1;
    struct between b = {stack, birth};
    pid_t pid = clone(between, stack_between + CHILD_STACK, CLONE_VM | CLONE_VFORK | SIGCHLD, &b);
    if (pid < 0) return -1;
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) continue;
    if (shared.pid < 0) errno = shared.error;
    return shared.pid;
}

static int tell_parent(void *seen) {
    *(pid_t *)seen = getppid();
    _exit(0);
}

bool spawn_find_way(void) {
    char *stack = new_stack();
    pid_t us = getpid(), helper = stack ? fork() : -1;
    if (helper == 0) {
        pid_t seen = us;
        clone(tell_parent, stack + CHILD_STACK, CLONE_VM | CLONE_VFORK | CLONE_PARENT | SIGCHLD, &seen);
        _exit(seen != us);
    }
    int status = 0;
    while (helper > 0 && waitpid(helper, &status, 0) < 0 && errno == EINTR) continue;
    by_orphaning = helper > 0 && WIFEXITED(status) && WEXITSTATUS(status);
    while (waitpid(-1, NULL, WNOHANG) > 0) continue;
    if (stack) munmap(stack, CHILD_STACK);
    return !by_orphaning;
}

struct spawned spawn_run(const struct spawn *s) {
    static char *stack;
    struct spawned r = {.pty = -1};
    shared.spawn = s;
    shared.error = 0;
    shared.step = STEP_NONE;
    shared.pts = -1;
    if (!stack) stack = new_stack();
    if (shared.null < 0) shared.null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (!stack || shared.null < 0) {
        r.error = errno, r.step = STEP_SETUP;
        return r;
    }
    if (s->options & SPAWN_PTY && open_pty(s, &r.pty) < 0) {
        r.error = errno, r.step = STEP_PTY;
        return r;
    }
    r.start_ns = io_now_ns();
    // All signals are blocked in the worker, and stay so in the child until it is ready for them.
    struct birth unread, *birth = s->birth ? s->birth : &unread;
    *birth = (struct birth){.call = s->call, .start_ns = r.start_ns};
    r.pid = clone_child(stack, birth);
    if (r.pid < 0) r.error = errno, r.step = STEP_CLONE, r.pid = 0;
    else r.error = shared.error, r.step = shared.step;
    if (r.step) birth->call = 0;
    io_close(&shared.pts);
    if (r.step) io_close(&r.pty);
    return r;
}
