#define _GNU_SOURCE
#include "cgroup.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"
#include "kernel.h"

// The agent needs 2 MiB at rest; this leaves room for its bounded queues and is small beside any workload.
#define AGENT_MEMORY_BYTES (64ull << 20)
#define CPU_PERIOD_US 100000u

enum tree_index { T_UNIFIED, T_MEMORY, T_PIDS, T_CPU, TREES };

// One hierarchy in which the engine has a group. `parent` is where that group was made, for sweeping siblings.
struct tree {
    int parent, own;
    bool v2;
};

static struct tree trees[TREES] = {{-1, -1, true}, {-1, -1, false}, {-1, -1, false}, {-1, -1, false}};
static unsigned abilities;
static bool v2_limits;  // the unified tree has the controllers
static char own_name[96];

unsigned cg_abilities(void) { return abilities; }

// ---- finding the trees ----

struct mount_point {
    char path[512];   // where the hierarchy is mounted
    char inside[512]; // which of its directories is the mount's root
};

// The mount of a hierarchy: `type` "cgroup2", or "cgroup" with `controller` among its options.
static bool find_mount(const char *type, const char *controller, struct mount_point *out) {
    FILE *f = fopen("/proc/self/mountinfo", "re");
    if (!f) return false;
    char line[4096];
    bool found = false;
    while (!found && fgets(line, sizeof line, f)) {
        char *dash = strstr(line, " - ");
        if (!dash) continue;
        *dash = 0;
        char *left, *right;  // strtok rather than scanf, which alone is a tenth of the program (it brings floating point)
        const char *fstype = strtok_r(dash + 3, " \n", &right), *source = strtok_r(NULL, " \n", &right);
        char *options = strtok_r(NULL, " \n", &right);
        if (!fstype || !source || strcmp(fstype, type)) continue;
        const char *field[5] = {strtok_r(line, " ", &left)};
        for (size_t i = 1; i < 5; i++) field[i] = strtok_r(NULL, " ", &left);
        if (!field[4] || strlen(field[3]) >= sizeof out->inside || strlen(field[4]) >= sizeof out->path) continue;
        strcpy(out->inside, field[3]);
        strcpy(out->path, field[4]);
        if (!controller) {
            found = true;
        } else {
            for (char *save, *o = options ? strtok_r(options, ",", &save) : NULL; o; o = strtok_r(NULL, ",", &save))
                if (!strcmp(o, controller)) found = true;
        }
    }
    fclose(f);
    return found;
}

// This process's own group in a hierarchy, as /proc/self/cgroup gives it.
static bool own_group(const char *controller, char *out, size_t size) {
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f) return false;
    char line[1024];
    bool found = false;
    while (!found && fgets(line, sizeof line, f)) {
        char *names = strchr(line, ':');
        char *path = names ? strchr(names + 1, ':') : NULL;
        if (!path) continue;
        *names++ = 0, *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        if (!controller) {
            found = !strcmp(line, "0") && !*names;
        } else {
            for (char *save, *o = strtok_r(names, ",", &save); o; o = strtok_r(NULL, ",", &save))
                if (!strcmp(o, controller)) found = true;
        }
        if (found) snprintf(out, size, "%s", path);
    }
    fclose(f);
    return found;
}

static int open_group(const struct mount_point *m, const char *group) {
    size_t skip = strcmp(m->inside, "/") && !strncmp(group, m->inside, strlen(m->inside)) ? strlen(m->inside) : 0;
    char path[1100];
    snprintf(path, sizeof path, "%s%s", m->path, group + skip);
    return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static bool make_own(struct tree *t) {
    if (mkdirat(t->parent, own_name, 0755) && errno != EEXIST) return false;
    t->own = openat(t->parent, own_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return t->own >= 0;
}

static void drop_tree(struct tree *t) {
    if (t->own >= 0) unlinkat(t->parent, own_name, AT_REMOVEDIR);
    io_close(&t->own);
    io_close(&t->parent);
}

static bool has_word(const char *text, const char *word) {
    size_t n = strlen(word);
    for (const char *at = text; (at = strstr(at, word)); at += n)
        if ((at == text || at[-1] == ' ') && (at[n] == 0 || at[n] == ' ' || at[n] == '\n')) return true;
    return false;
}

// Asks a v2 group to give its children a controller; true when they have it.
static bool enable(int dir, const char *controller) {
    char text[32], now[256];
    snprintf(text, sizeof text, "+%s", controller);
    io_write_file(dir, "cgroup.subtree_control", text);
    return io_read_file(dir, "cgroup.subtree_control", now, sizeof now) >= 0 && has_word(now, controller);
}

static unsigned enable_limits(int dir) {
    return (enable(dir, "memory") ? CG_MEMORY : 0u) | (enable(dir, "pids") ? CG_PIDS : 0u) | (enable(dir, "cpu") ? CG_CPU : 0u);
}

static bool is_writable(int dir) { return !faccessat(dir, ".", W_OK, AT_EACCESS) && !faccessat(dir, "cgroup.procs", W_OK, AT_EACCESS); }

// Where in the v2 tree to make our group. A group that holds processes cannot give controllers to its children, so this
// climbs from our own group towards the root and takes the first that both lets us write and has the controllers to give;
// failing that, the nearest that lets us write, which is still good for kill and freeze.
static bool open_unified(void) {
    struct mount_point m;
    char group[512];
    struct tree *t = &trees[T_UNIFIED];
    if (!find_mount("cgroup2", NULL, &m) || !own_group(NULL, group, sizeof group)) return false;
    unsigned best = 0;
    for (;;) {
        struct tree try = {.parent = open_group(&m, *group ? group : "/"), .own = -1, .v2 = true};
        if (try.parent >= 0 && is_writable(try.parent) && make_own(&try)) {
            unsigned got = enable_limits(try.parent) ? enable_limits(try.own) : 0;
            if (t->own < 0 || __builtin_popcount(got) > __builtin_popcount(best)) {
                if (t->own >= 0) drop_tree(t);
                *t = try, best = got;
            } else {
                drop_tree(&try);
            }
        } else {
            io_close(&try.parent);
        }
        if (best == (CG_MEMORY | CG_PIDS | CG_CPU) || !*group || !strcmp(group, "/")) break;
        *strrchr(group, '/') = 0;
    }
    if (t->own < 0) return false;
    v2_limits = best != 0;
    abilities |= best;
    if (!faccessat(t->own, "cgroup.kill", W_OK, AT_EACCESS)) abilities |= CG_KILL;
    if (!faccessat(t->own, "cgroup.freeze", W_OK, AT_EACCESS)) abilities |= CG_FREEZE;
    return true;
}

static void open_v1(enum tree_index which, const char *controller, unsigned ability) {
    struct mount_point m;
    char group[512];
    struct tree *t = &trees[which];
    if (abilities & ability || !find_mount("cgroup", controller, &m) || !own_group(controller, group, sizeof group)) return;
    t->parent = open_group(&m, group);
    if (t->parent < 0 || !make_own(t)) {
        io_close(&t->parent);
        return;
    }
    abilities |= ability;
}

unsigned cg_open(const char *run) {
    snprintf(own_name, sizeof own_name, "untax-%s", run);
    open_unified();
    open_v1(T_MEMORY, "memory", CG_MEMORY);
    open_v1(T_PIDS, "pids", CG_PIDS);
    open_v1(T_CPU, "cpu", CG_CPU);
    return abilities;
}

// ---- one sandbox ----

static int set_number(int dir, const char *file, uint64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    return io_write_file(dir, file, text);
}

// Makes a directory below `dir` and opens it.
static int make_group(int dir, const char *name) {
    if (mkdirat(dir, name, 0755)) return -1;
    return openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static int open_file(int dir, const char *name, int flags) { return openat(dir, name, flags | O_CLOEXEC); }

static int set_cpu_v2(int dir, uint32_t permille) {
    char text[64];
    snprintf(text, sizeof text, "%llu %u", (unsigned long long)permille * CPU_PERIOD_US / 1000, CPU_PERIOD_US);
    return io_write_file(dir, "cpu.max", text);
}

static void agent_name(const char *id, char *out, size_t size) { snprintf(out, size, "%s.agent", id); }

// The v2 tree. Where it has no controllers it serves to freeze and kill the workload, and the agent needs no group in it.
static int unified_make(const char *id, const struct cg_limits *limits, struct cg_box *out) {
    struct tree *t = &trees[T_UNIFIED];
    int work = out->work_group = make_group(t->own, id);
    if (work < 0) return -1;
    if (!v2_limits) return 0;
    char name[96];
    agent_name(id, name, sizeof name);
    int agent = out->agent_group = make_group(t->own, name);
    if (agent < 0) return -1;
    if (abilities & CG_MEMORY) {
        if (set_number(work, "memory.max", limits->memory_bytes)) return -1;
        io_write_file(work, "memory.swap.max", "0");  // absent without swap accounting; then there is no swap to use
        if (set_number(agent, "memory.max", AGENT_MEMORY_BYTES)) return -1;
        out->memory_events = open_file(work, "memory.events", O_RDONLY);
    }
    if (abilities & CG_PIDS) {
        if (set_number(work, "pids.max", limits->pids)) return -1;
        out->pids_events = open_file(work, "pids.events", O_RDONLY);
    }
    return abilities & CG_CPU ? set_cpu_v2(work, limits->cpu_permille) : 0;
}

// Groups are flat: <id> for the workload, <id>.agent only where the agent must be kept apart.
static int memory_v1_make(const char *id, const struct cg_limits *limits, struct cg_box *out) {
    struct tree *t = &trees[T_MEMORY];
    char name[96];
    agent_name(id, name, sizeof name);
    autoclose int work = make_group(t->own, id);
    autoclose int agent = make_group(t->own, name);
    if (work < 0 || agent < 0) return -1;
    if (set_number(work, "memory.limit_in_bytes", limits->memory_bytes)) return -1;
    set_number(work, "memory.memsw.limit_in_bytes", limits->memory_bytes);  // absent without swap accounting
    if (set_number(agent, "memory.limit_in_bytes", AGENT_MEMORY_BYTES)) return -1;
    out->memory_events = open_file(work, "memory.oom_control", O_RDONLY);
    out->agent_join[out->agent_joins++] = open_file(agent, "tasks", O_WRONLY);
    out->work_join[out->work_joins++] = open_file(work, "tasks", O_WRONLY);
    return 0;
}

// The agent stays outside the groups for processes and CPU: it must be able to answer while the workload is at its limit.
static int pids_v1_make(const char *id, const struct cg_limits *limits, struct cg_box *out) {
    autoclose int work = make_group(trees[T_PIDS].own, id);
    if (work < 0 || set_number(work, "pids.max", limits->pids)) return -1;
    out->pids_events = open_file(work, "pids.events", O_RDONLY);
    out->work_join[out->work_joins++] = open_file(work, "tasks", O_WRONLY);
    return 0;
}

static int set_cpu_v1(int dir, uint32_t permille) { return set_number(dir, "cpu.cfs_quota_us", (uint64_t)permille * CPU_PERIOD_US / 1000); }

static int cpu_v1_make(const char *id, const struct cg_limits *limits, struct cg_box *out) {
    autoclose int work = make_group(trees[T_CPU].own, id);
    if (work < 0) return -1;
    if (set_number(work, "cpu.cfs_period_us", CPU_PERIOD_US) || set_cpu_v1(work, limits->cpu_permille)) return -1;
    out->work_join[out->work_joins++] = open_file(work, "tasks", O_WRONLY);
    return 0;
}

static const char *make_all(const char *id, const struct cg_limits *limits, struct cg_box *out) {
    if (trees[T_UNIFIED].own >= 0 && unified_make(id, limits, out)) return "cgroup";
    if (trees[T_MEMORY].own >= 0 && memory_v1_make(id, limits, out)) return "cgroup memory";
    if (trees[T_PIDS].own >= 0 && pids_v1_make(id, limits, out)) return "cgroup pids";
    if (trees[T_CPU].own >= 0 && cpu_v1_make(id, limits, out)) return "cgroup cpu";
    for (int i = 0; i < out->agent_joins; i++)
        if (out->agent_join[i] < 0) return "cgroup join";
    for (int i = 0; i < out->work_joins; i++)
        if (out->work_join[i] < 0) return "cgroup join";
    return NULL;
}

int cg_box_make(const char *id, const struct cg_limits *limits, struct cg_box *out, const char **step) {
    *out = CG_BOX_NONE;
    *step = make_all(id, limits, out);
    if (!*step) return 0;
    int error = errno;
    cg_box_close(out);
    cg_box_remove(id);
    errno = error;
    return -1;
}

// The limit with swap may at no moment be below the one without.
static int change_memory_v1(int work, uint64_t bytes) {
    if (!set_number(work, "memory.limit_in_bytes", bytes)) {
        set_number(work, "memory.memsw.limit_in_bytes", bytes);
        return 0;
    }
    return set_number(work, "memory.memsw.limit_in_bytes", bytes) ? -1 : set_number(work, "memory.limit_in_bytes", bytes);
}

static int open_work(enum tree_index which, const char *id) { return openat(trees[which].own, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

unsigned cg_box_limit(const char *id, const struct cg_limits *limits) {
    unsigned changed = 0;
    autoclose int unified = v2_limits ? open_work(T_UNIFIED, id) : -1;
    autoclose int memory = trees[T_MEMORY].own >= 0 ? open_work(T_MEMORY, id) : -1;
    autoclose int pids = trees[T_PIDS].own >= 0 ? open_work(T_PIDS, id) : -1;
    autoclose int cpu = trees[T_CPU].own >= 0 ? open_work(T_CPU, id) : -1;
    if (memory >= 0 ? !change_memory_v1(memory, limits->memory_bytes) : !set_number(unified, "memory.max", limits->memory_bytes)) changed |= CG_MEMORY;
    if (!set_number(pids >= 0 ? pids : unified, "pids.max", limits->pids)) changed |= CG_PIDS;
    if (cpu >= 0 ? !set_cpu_v1(cpu, limits->cpu_permille) : !set_cpu_v2(unified, limits->cpu_permille)) changed |= CG_CPU;
    return changed;
}

static void open_join(struct cg_box *out, enum tree_index which, const char *format, const char *id) {
    char path[160];
    snprintf(path, sizeof path, format, id);
    if (trees[which].own >= 0) out->work_join[out->work_joins++] = open_file(trees[which].own, path, O_WRONLY);
}

int cg_box_open(const char *id, struct cg_box *out) {
    *out = CG_BOX_NONE;
    open_join(out, T_UNIFIED, "%s/cgroup.procs", id);
    open_join(out, T_MEMORY, "%s/tasks", id);
    open_join(out, T_PIDS, "%s/tasks", id);
    open_join(out, T_CPU, "%s/tasks", id);
    for (int i = 0; i < out->work_joins; i++)
        if (out->work_join[i] < 0) return -1;
    return 0;
}

void cg_box_close(struct cg_box *box) {
    for (int i = 0; i < box->agent_joins; i++) io_close(&box->agent_join[i]);
    for (int i = 0; i < box->work_joins; i++) io_close(&box->work_join[i]);
    box->agent_joins = box->work_joins = 0;
    io_close(&box->agent_group);
    io_close(&box->work_group);
    io_close(&box->memory_events);
    io_close(&box->pids_events);
}

int cg_join(const int *fds, int count) {
    for (int i = 0; i < count; i++)
        if (write(fds[i], "0", 1) != 1) return -1;
    return 0;
}

#define K_CLONE_INTO_CGROUP 0x200000000ull

pid_t cg_clone(struct k_clone_args *args, int group) {
    if (group >= 0) {
        args->flags |= K_CLONE_INTO_CGROUP;
        args->cgroup = (uint64_t)group;
    }
    return k_clone3(args);
}

static int write_below(int dir, const char *id, const char *rest, const char *text) {
    char path[160];
    snprintf(path, sizeof path, "%s/%s", id, rest);
    return io_write_file(dir, path, text);
}

int cg_box_dir(const char *id) { return trees[T_UNIFIED].own < 0 ? -1 : openat(trees[T_UNIFIED].own, id, O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

int cg_box_freeze(const char *id, bool on) {
    if (!(abilities & CG_FREEZE)) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return write_below(trees[T_UNIFIED].own, id, "cgroup.freeze", on ? "1" : "0");
}

void cg_box_kill(const char *id) {
    if (abilities & CG_KILL) write_below(trees[T_UNIFIED].own, id, "cgroup.kill", "1");
}

static bool remove_group(int dir, const char *name) { return !unlinkat(dir, name, AT_REMOVEDIR) || errno == ENOENT; }

bool cg_box_remove(const char *id) {
    char agent[96];
    agent_name(id, agent, sizeof agent);
    bool gone = true;
    for (int i = 0; i < TREES; i++) {
        if (trees[i].own < 0) continue;
        gone &= remove_group(trees[i].own, id);
        if (i == T_MEMORY || i == T_UNIFIED) gone &= remove_group(trees[i].own, agent);
    }
    return gone;
}

// ---- what a dead engine left ----

// Everything inside a group is ours to kill: nobody else puts processes there.
static void kill_members(int dir) {
    if (!io_write_file(dir, "cgroup.kill", "1")) return;
    int fd = openat(dir, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    FILE *f = fd >= 0 ? fdopen(fd, "r") : NULL;
    char line[32];
    while (f && fgets(line, sizeof line, f)) {
        int pid = atoi(line);
        if (pid > 0) kill(pid, SIGKILL);
    }
    if (f) fclose(f);
    else io_close(&fd);
}

static bool remove_tree(int parent, const char *name) {
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT;
    io_write_file(fd, "cgroup.freeze", "0");
    kill_members(fd);
    DIR *d = fdopendir(dup(fd));
    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_type == DT_DIR && e->d_name[0] != '.') remove_tree(fd, e->d_name);
    if (d) closedir(d);
    close(fd);
    return remove_group(parent, name);
}

bool cg_sweep(const char *run) {
    char name[96];
    snprintf(name, sizeof name, "untax-%s", run);
    bool gone = true;
    for (int i = 0; i < TREES; i++)
        if (trees[i].parent >= 0) gone &= remove_tree(trees[i].parent, name);
    return gone;
}

void cg_close(void) {
    for (int i = 0; i < TREES; i++) {
        if (trees[i].own >= 0) remove_tree(trees[i].parent, own_name);
        io_close(&trees[i].own);
        io_close(&trees[i].parent);
    }
    abilities = 0;
}
