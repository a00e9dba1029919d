// PRISTINE: whether a sandbox is as it was made. What is looked at: who runs in it, its upper directory, /tmp and /dev/shm, and what processes leave in an IPC
// namespace. Mounts and host name are not: nobody inside has the means to change them.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "cgroup.h"
#include "disk.h"
#include "io.h"
#include "kernel.h"
#include "launcher.h"

#define PATHS_MAX 64
#define LISTED_MAX 4096  // as text; a sandbox with more processes is not idle

// ---- the upper directory ----

struct paths {
    char *path[PATHS_MAX];
    size_t count;
};

static bool add_path(struct paths *p, const char *path) {
    for (size_t i = 0; i < p->count; i++)
        if (!strcmp(p->path[i], path)) return true;
    if (p->count == PATHS_MAX || !(p->path[p->count] = strdup(path))) return false;
    p->count++;
    return true;
}

static bool add_with_parents(struct paths *p, const char *path) {
    char text[4096];
    if (strlen(path) >= sizeof text) return false;
    strcpy(text, path + strspn(path, "/"));
    for (char *slash = text; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        if (!add_path(p, text)) return false;
    }
    return !*text || add_path(p, text);
}

static void free_paths(struct paths *p) {
    while (p->count) free(p->path[--p->count]);
}

// Everything that a fresh upper directory holds, itself first.
static bool find_paths(const struct layout *l, struct paths *p) {
    bool all = add_path(p, ".") && add_path(p, "proc") && add_path(p, "dev") && add_path(p, "tmp");
    for (uint32_t i = 0; all && i < l->dir_count; i++) all = add_with_parents(p, l->dirs[i]);
    for (uint32_t i = 0; all && i < l->place_count; i++) all = add_with_parents(p, l->places[i]);
    return all;
}

static uint64_t mix(uint64_t h, uint64_t value) { return (h ^ value) * 0x100000001b3u + (h >> 29); }

// A link that somebody inside put in a parent's place leads to the host's own files, and looking at one may take for ever.
static int look_at(int upper, const char *path, struct stat *st) {
    struct k_open_how how = {.flags = O_PATH | O_NOFOLLOW | O_CLOEXEC, .resolve = K_RESOLVE_BENEATH | K_RESOLVE_NO_SYMLINKS};
    autoclose int fd = k_openat2(upper, path, &how);
    return fd < 0 ? -1 : fstat(fd, st);
}

// `is_fresh`: nobody inside has seen it yet.
static uint64_t print_of(int upper, const struct paths *p, bool is_fresh) {
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < p->count; i++) {
        struct stat st;
        if (is_fresh ? fstatat(upper, p->path[i], &st, AT_SYMLINK_NOFOLLOW) : look_at(upper, p->path[i], &st)) return 0;
        h = mix(mix(mix(h, st.st_mode), st.st_uid), st.st_gid);
        h = mix(mix(mix(h, (uint64_t)st.st_mtim.tv_sec), (uint64_t)st.st_mtim.tv_nsec), st.st_ino);
    }
    return h;
}

uint64_t launcher_print(const struct layout *l, int disk) {
    struct paths p = {.count = 0};
    autoclose int upper = openat(disk, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    uint64_t print = upper >= 0 && find_paths(l, &p) ? print_of(upper, &p, true) : 0;
    free_paths(&p);
    return print;
}

static bool has_attributes(int fd) {
    char names[1024];
    ssize_t size = flistxattr(fd, names, sizeof names);
    for (const char *at = names; size > 0 && at < names + size; at += strlen(at) + 1)
        if (strncmp(at, "trusted.overlay.", 16) && strncmp(at, "user.overlay.", 13) && strncmp(at, "security.", 9)) return true;
    return size < 0 && errno == ERANGE;
}

// How many entries a directory has, none of which is looked at; -1: it has been given attributes, or is no directory any more.
static int count_entries(int dir, const char *path, bool with_attributes) {
    struct k_open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC, .resolve = K_RESOLVE_BENEATH | K_RESOLVE_NO_SYMLINKS};
    autoclose int fd = k_openat2(dir, path, &how);
    if (fd < 0 || (with_attributes && has_attributes(fd))) return -1;
    _Alignas(struct dirent) char buffer[4096];
    int n = 0;
    for (long size; (size = syscall(SYS_getdents64, fd, buffer, sizeof buffer)) != 0;) {
        if (size < 0) return -1;
        for (long at = 0; at < size; n++) at += ((const struct dirent *)(const void *)(buffer + at))->d_reclen;
        if (n > PATHS_MAX) break;
    }
    return n > 2 ? n - 2 : 0;
}

static bool is_unwritten(const struct box *b) {
    struct paths p = {.count = 0};
    char path[ID_MAX + 16];
    snprintf(path, sizeof path, "%s/upper", b->disk);
    autoclose int upper = disk_peek(path);
    bool is = b->print && upper >= 0 && find_paths(&b->layout, &p) && print_of(upper, &p, false) == b->print;
    size_t found = 1;  // the upper directory itself
    for (size_t i = 0; is && i < p.count; i++) {
        int n = count_entries(upper, p.path[i], true);
        is = n >= 0;
        found += (size_t)n;
    }
    is = is && found == p.count;
    free_paths(&p);
    return is;
}

// ---- what is in memory ----

static bool is_empty_tmpfs(int root, const char *path) {
    struct k_open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = K_RESOLVE_BENEATH | K_RESOLVE_NO_SYMLINKS};
    autoclose int fd = k_openat2(root, path, &how);
    struct statfs fs;
    struct stat st;
    if (fd < 0 || fstatfs(fd, &fs) || fstat(fd, &st) || fs.f_type != TMPFS_MAGIC) return false;
    return fs.f_files - fs.f_ffree == 1 && (st.st_mode & 07777) == 01777;
}

static bool is_header_only(const char *path) {
    char text[512];
    ssize_t n = io_read_file(AT_FDCWD, path, text, sizeof text);
    const char *eol = n > 0 ? strchr(text, '\n') : NULL;
    return n == 0 || (n < 0 && errno == ENOENT) || (eol && !eol[1]);
}

static bool has_no_queues(void) {
    autoclose int fs = k_fsopen("mqueue");
    if (fs < 0) return errno == ENODEV;
    if (k_fsconfig(fs, K_FSCONFIG_CREATE, NULL, NULL)) return false;
    autoclose int queues = k_fsmount(fs, 0);
    return queues >= 0 && count_entries(queues, ".", false) == 0;
}

static bool has_no_ipc(const struct box *b) {
    static int home = -1;
    if (home < 0 && (home = open("/proc/self/ns/ipc", O_RDONLY | O_CLOEXEC)) < 0) return false;
    if (setns(home, CLONE_NEWIPC)) return false;  // an ordinary user's launcher is at home in the host's: it would not be let in again
    if (setns(b->pidfd, CLONE_NEWIPC)) return false;
    bool none = is_header_only("/proc/sysvipc/shm") && is_header_only("/proc/sysvipc/sem") && is_header_only("/proc/sysvipc/msg") && has_no_queues();
    if (setns(home, CLONE_NEWIPC)) _exit(70);  // in the wrong namespace nothing can be trusted any more
    return none;
}

// ---- who runs ----

// Whether all in the list run the cell's own program, which nobody inside can start or even open.
static bool are_workers(const char *list) {
    struct stat own, its;
    if (stat("/proc/self/exe", &own)) return false;
    for (char *end; *list; list = end) {
        long pid = strtol(list, &end, 10);
        if (end == list) break;
        char path[32];
        snprintf(path, sizeof path, "/proc/%ld/exe", pid);
        if (stat(path, &its) || its.st_dev != own.st_dev || its.st_ino != own.st_ino) return false;
    }
    return true;
}

static bool runs_nothing(const struct box *b) {
    char text[LISTED_MAX], path[64];
    autoclose int group = cg_box_dir(b->group);
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", b->pid, b->pid);
    ssize_t n = group >= 0 ? io_read_file(group, "cgroup.procs", text, sizeof text) : io_read_file(AT_FDCWD, path, text, sizeof text);
    return n >= 0 && n < (ssize_t)sizeof text - 1 && are_workers(text);
}

void launcher_pristine(uint32_t seq, struct rd *r) {
    const struct box *b = launcher_find(rd_u32(r));
    if (!b || !rd_done(r)) {
        launcher_refuse(seq, "sandbox", ESRCH);
        return;
    }
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/root", b->pid);
    autoclose int root = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    struct wr w = launcher_answer(seq, 0);
    wr_u8(&w, root >= 0 && runs_nothing(b) && is_unwritten(b) && is_empty_tmpfs(root, "tmp") && is_empty_tmpfs(root, "dev/shm") && has_no_ipc(b));
    launcher_send(&w, NULL, 0);
}
