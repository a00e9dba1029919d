// ENTER: a further worker in a live sandbox, from the request to the socket that its agent is sent.
//
// Nothing here waits. On its way in the worker takes on the workload's user id and control group, and from then on the workload can stop it
// (SIGSTOP, a frozen group); a launcher that stood waiting for it would stand for every other sandbox too.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "birth.h"
#include "cgroup.h"
#include "io.h"
#include "launcher.h"

#define ENTRIES_MAX 256
#define USER_LENGTH_MAX 64
#define PATIENCE_NS 5000000000u  // entering takes a millisecond; on a starved CPU more, but not this

static struct pending {
    uint32_t seq, handle;
    pid_t pid;                    // of the child forked here; 0: not in use
    int status, sock;             // what the children have to say; the agent's end of the worker's socket
    int note;                     // where the worker says what it starts (birth.h)
    char *name;
    uint64_t until_ns;
    struct setup_failure failure;
    bool failed, answered;
} entries[ENTRIES_MAX];
static unsigned entries_used;

static void refuse(struct pending *p, const char *step, int error) {
    launcher_refuse(p->seq, step, error);
    p->answered = true;
    io_close(&p->sock);
}

static void hand_over(struct pending *p) {
    const struct box *b = launcher_find(p->handle);
    if (!b) refuse(p, "sandbox", ESRCH);
    else if (p->failed) refuse(p, p->failure.step, p->failure.error);
    else if (io_send_fds(b->control, p->name, strlen(p->name), (int[]){p->sock, p->note}, 2) < 0) refuse(p, "worker", errno);
    else launcher_done(p->seq);
}

static void drop(struct pending *p) {
    launcher_unwatch(&p->status);
    io_close(&p->sock);
    io_close(&p->note);
    free(p->name);
    *p = (struct pending){.status = -1, .sock = -1, .note = -1};
    entries_used--;
}

void launcher_entered(uint32_t index) {
    struct pending *p = &entries[index];
    struct setup_failure f;
    if (index >= ENTRIES_MAX || !p->pid) return;
    ssize_t n = read(p->status, &f, sizeof f);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n == (ssize_t)sizeof f) {  // the end of file is still to come
        p->failure = f;
        p->failed = true;
        return;
    }
    // All the children have let go of their end: the worker stands or has said why not, and the one forked here is past everything that could hold it.
    waitpid(p->pid, NULL, 0);
    if (!p->answered) hand_over(p);
    drop(p);
}

bool launcher_entering(void) {
    for (size_t i = 0, seen = 0; seen < entries_used; i++) {
        struct pending *p = &entries[i];
        if (!p->pid) continue;
        seen++;
        if (!p->answered && io_now_ns() > p->until_ns) refuse(p, "worker", ETIMEDOUT);  // kept until its children end, with the sandbox if not before
    }
    return entries_used;
}

bool launcher_is_entering(uint32_t handle) {
    for (size_t i = 0, seen = 0; seen < entries_used; i++) {
        if (!entries[i].pid) continue;
        if (entries[i].handle == handle) return true;
        seen++;
    }
    return false;
}

// 0, or -1 with errno. `name` belongs to the entry from then on.
static int start(uint32_t seq, const struct box *b, const char *user, char *name) {
    size_t i = 0;
    while (i < ENTRIES_MAX && entries[i].pid) i++;
    int pair[2], status[2];
    if (i == ENTRIES_MAX) {
        errno = EAGAIN;
        return -1;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) return -1;
    autoclose int agents = pair[0], workers = pair[1];
    io_roomy(agents), io_roomy(workers);
    if (pipe2(status, O_CLOEXEC | O_NONBLOCK)) return -1;
    autoclose int ours = status[0], theirs = status[1];
    autoclose int note = birth_file();
    if (launcher_watch_entry(ours, (uint32_t)i)) return -1;
    struct birth *birth = birth_map(note);
    if (!birth) return -1;
    struct entry e = {.birth = birth, .in_userns = L.in_userns, .pidfd = b->pidfd, .userns = b->slot.userns, .sock = workers, .status = theirs, .setup = b->status, .user = user,
                      .workdir = b->workdir, .disk_bytes = b->file_bytes, .pids = b->pids};
    pid_t pid = cg_box_open(b->id, &e.cg) ? -1 : fork();
    if (!pid) sandbox_enter(&e);
    int error = errno;
    birth_free(birth);
    cg_box_close(&e.cg);
    errno = error;
    if (pid < 0) return -1;
    entries[i] = (struct pending){.seq = seq, .handle = b->handle, .pid = pid, .status = ours, .sock = agents, .note = note, .name = name, .until_ns = io_now_ns() + PATIENCE_NS};
    entries_used++;
    ours = agents = note = -1;
    return 0;
}

void launcher_enter(uint32_t seq, struct rd *r) {
    const struct box *b = launcher_find(rd_u32(r));
    char *user = launcher_text(rd_name(r)), *name = launcher_text(rd_name(r));
    if (!b || !user || !name || !rd_done(r) || strlen(user) > USER_LENGTH_MAX) launcher_refuse(seq, "sandbox", b ? EINVAL : ESRCH);
    else if (start(seq, b, user, name)) launcher_refuse(seq, "worker", errno);
    else name = NULL;
    free(user), free(name);
}
