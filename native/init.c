// A machine's first process. Everything that does not depend on whose machine it is comes first; then it says `ready` on the control port and waits.
// That is the moment at which a machine is saved, so what makes it this sandbox and no other (its seed, name, clock, limits, user) comes afterwards,
// in a restored machine as in one that was booted.
#define _GNU_SOURCE
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <net/if.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"
#include "contained.h"
#include "io.h"
#include "kernel.h"

#define CONTROL "vport0p1"
#define CHANNEL "vport0p2"
#define SECOND "vport0p3"  // another agent's, for whoever compares ways in; only where the command line has untax.second
#define BASE "vda"
#define OWN "vdb"
#define DEVICE_PATIENCE_MS 60000  // an emulated machine on a busy host; the host has a deadline of its own
#define SEED_MAX 64
#define WORDS_MAX (16u << 10)
#define PROBED "untax: the probe has booted\n"

// To the console, which the host keeps the end of.
_Noreturn static void give_up(const char *step) {
    dprintf(2, "untax: %s: %s\n", step, strerror(errno));
    sync();
    reboot(RB_POWER_OFF);
    for (;;) pause();
}

static void put(const char *type, const char *at, unsigned long flags, const char *options) {
    if (mkdir(at, 0755) && errno != EEXIST) give_up(at);
    if (mount(type, at, type, flags, options)) give_up(at);
}

// ---- before the disks ----

static bool has_argument(const char *word) {
    char text[4096];
    ssize_t n = io_read_file(AT_FDCWD, "/proc/cmdline", text, sizeof text);
    char *save;
    for (const char *at = n > 0 ? strtok_r(text, " \n", &save) : NULL; at; at = strtok_r(NULL, " \n", &save))
        if (!strcmp(at, word)) return true;
    return false;
}

// In the order that the host found out. One that is there already, or that this machine has no use for, is as good.
static void load_modules(void) {
    FILE *order = fopen("/modules/order", "re");
    char name[128], path[160];
    while (order && fgets(name, sizeof name, order)) {
        name[strcspn(name, "\n")] = 0;
        snprintf(path, sizeof path, "/modules/%s", name);
        autoclose int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0 && syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST && errno != ENODEV) dprintf(2, "untax: %s: %s\n", name, strerror(errno));
    }
    if (order) fclose(order);
}

// Ports are added by the host's word, after their driver has begun: waits until /dev has it.
static void wait_device(const char *name) {
    char path[64];
    snprintf(path, sizeof path, "/dev/%s", name);
    autoclose int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (watch < 0 || inotify_add_watch(watch, "/dev", IN_CREATE) < 0) give_up("watching /dev");
    while (access(path, F_OK)) {
        char events[4096];
        if (poll(&(struct pollfd){.fd = watch, .events = POLLIN}, 1, DEVICE_PATIENCE_MS) <= 0) {
            errno = ENODEV;
            give_up(path);
        }
        while (read(watch, events, sizeof events) > 0) continue;
    }
}

static int open_port(const char *name) {
    wait_device(name);
    char path[64];
    snprintf(path, sizeof path, "/dev/%s", name);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) give_up(path);
    return fd;
}

// ---- the root ----

// What is written goes to a disk of the machine's own, whose size is its limit; the chain below is shared and never written to.
static void mount_disks(void) {
    wait_device(BASE);
    wait_device(OWN);
    static const char *const places[] = {"/base", "/own", "/root"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (mkdir(places[i], 0755) && errno != EEXIST) give_up(places[i]);
    if (mount("/dev/" BASE, "/base", "squashfs", MS_RDONLY | MS_NODEV, NULL)) give_up("the base disk, which is not a squashfs that this kernel reads");
    if (mount("/dev/" OWN, "/own", "ext4", MS_NODEV | MS_NOATIME, "noinit_itable,nobarrier")) give_up("the machine's own disk, which is damaged");
    struct stat top;
    if (stat("/base", &top)) give_up("the base disk");
    if (mkdir("/own/upper", 0700) || mkdir("/own/work", 0700) || chown("/own/upper", top.st_uid, top.st_gid) || chmod("/own/upper", top.st_mode & 07777))
        give_up("the machine's own disk");
    if (mount("overlay", "/root", "overlay", MS_NODEV, "lowerdir=/base,upperdir=/own/upper,workdir=/own/work")) give_up("overlay");
}

static const struct node {
    const char *name;
    unsigned major, minor;
    mode_t mode;
} nodes[] = {{"null", 1, 3, 0666}, {"zero", 1, 5, 0666}, {"full", 1, 7, 0666}, {"random", 1, 8, 0666}, {"urandom", 1, 9, 0666}, {"tty", 5, 0, 0666}, {"console", 5, 1, 0600}};

// No disk and no port is in it: root inside has the right to open what it finds, and not the right to make a node.
static void make_dev(void) {
    put("tmpfs", "/root/dev", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k,nr_inodes=256");
    char path[64];
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
        snprintf(path, sizeof path, "/root/dev/%s", nodes[i].name);
        if (mknod(path, S_IFCHR | nodes[i].mode, makedev(nodes[i].major, nodes[i].minor)) || chmod(path, nodes[i].mode)) give_up(path);
    }
    static const char *const links[][2] = {{"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"}, {"pts/ptmx", "ptmx"}};
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        snprintf(path, sizeof path, "/root/dev/%s", links[i][1]);
        if (symlink(links[i][0], path)) give_up(path);
    }
    put("devpts", "/root/dev/pts", MS_NOSUID | MS_NOEXEC, "ptmxmode=0666,mode=0620,max=64");
    put("tmpfs", "/root/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777,size=64m");
}

static void fix(const char *path) {
    if (mount(path, path, NULL, MS_BIND, NULL) || mount(NULL, path, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL))
        give_up(path);
}

static void build_root(void) {
    mount_disks();
    make_dev();
    put("proc", "/root/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    fix("/root/proc/sys");
    fix("/root/proc/sysrq-trigger");
    put("tmpfs", "/root/tmp", MS_NOSUID | MS_NODEV, "mode=1777,size=50%");
    if (chdir("/root") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/")) give_up("root");
}

static void raise_loopback(void) {
    autoclose int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    if (sock < 0 || ioctl(sock, SIOCSIFFLAGS, &lo)) give_up("loopback");
}

// ---- what it is held to ----

// A mount that no path leads to. Gives the workload's group.
static int make_group(void) {
    autoclose int fs = k_fsopen("cgroup2");
    if (fs < 0 || k_fsconfig(fs, K_FSCONFIG_CREATE, NULL, NULL)) give_up("cgroup");
    autoclose int top = k_fsmount(fs, K_ATTR_NOSUID | K_ATTR_NODEV | K_ATTR_NOEXEC);
    if (top < 0 || io_write_file(top, "cgroup.subtree_control", "+memory +pids +cpu") || mkdirat(top, "work", 0755)) give_up("cgroup controllers");
    int work = openat(top, "work", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (work < 0) give_up("cgroup");
    return work;
}

static void limit(int what, rlim_t most) {
    struct rlimit set = {most, most};
    if (setrlimit((__rlimit_resource_t)what, &set)) give_up("limits");
}

// ---- who it is ----

struct birth_words {
    struct contained contained;
};

static void reseed(const char *hex) {
    _Alignas(struct rand_pool_info) uint8_t room[sizeof(struct rand_pool_info) + SEED_MAX] = {0};
    struct rand_pool_info *seed = (struct rand_pool_info *)room;
    uint8_t *bytes = (uint8_t *)seed->buf;
    size_t size = strlen(hex) / 2;
    if (size > SEED_MAX) size = SEED_MAX;
    for (size_t i = 0; i < size; i++) {
        char pair[3] = {hex[2 * i], hex[2 * i + 1], 0};
        bytes[i] = (uint8_t)strtoul(pair, NULL, 16);
    }
    seed->entropy_count = (int)size * 8;
    seed->buf_size = (int)size;
    autoclose int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    // The second makes the generator use what the first gave: otherwise it goes on for minutes with the state that every restored machine has.
    if (fd < 0 || ioctl(fd, RNDADDENTROPY, seed) || ioctl(fd, RNDRESEEDCRNG, 0)) give_up("random seed");
}

static int set_clock(const char *text) {
    char *rest;
    struct timespec now = {.tv_sec = (time_t)strtoll(text, &rest, 10)};
    if (*rest == '.') now.tv_nsec = strtol(rest + 1, NULL, 10);
    return clock_settime(CLOCK_REALTIME, &now);
}

// A machine that was paused has a clock that stood still: the host tells the time again, and a process of its own sets it, for the agent has no right to.
_Noreturn static void keep_clock(int control) {
    char line[128];
    prctl(PR_SET_NAME, "cell-clock");
    for (size_t size = 0;;) {
        ssize_t n = read(control, line + size, 1);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) _exit(0);
        if (line[size] != '\n') {
            size = size < sizeof line - 1 ? size + 1 : 0;
            continue;
        }
        line[size] = 0;
        if (!strncmp(line, "clock=", 6) && set_clock(line + 6) == 0 && !io_write_all(control, "set\n", 4)) _exit(0);
        size = 0;
    }
}

// Where the image has one: others of the same image must not have the same.
static void set_machine_id(const char *id) {
    autoclose int fd = open("/etc/machine-id", O_WRONLY | O_TRUNC | O_NOFOLLOW | O_CLOEXEC | (access("/etc", F_OK) ? 0 : O_CREAT), 0444);
    if (fd >= 0 && dprintf(fd, "%s\n", id) < 0) give_up("machine id");
}

static void set_tmp(const char *bytes) {
    char options[64];
    snprintf(options, sizeof options, "size=%s", bytes);
    if (mount(NULL, "/tmp", NULL, MS_REMOUNT | MS_NOSUID | MS_NODEV, options)) give_up("/tmp");
}

static void hold(int group, const char *file, const char *value) {
    if (io_write_file(group, file, value)) give_up(file);
}

static void apply(char *name, char *value, int group, struct birth_words *w) {
    if (!strcmp(name, "seed")) reseed(value);
    else if (!strcmp(name, "clock") && set_clock(value)) give_up("clock");
    else if (!strcmp(name, "hostname") && sethostname(value, strlen(value))) give_up("host name");
    else if (!strcmp(name, "machine-id")) set_machine_id(value);
    else if (!strcmp(name, "tmp")) set_tmp(value);
    else if (!strcmp(name, "memory")) hold(group, "memory.max", value);
    else if (!strcmp(name, "pids")) hold(group, "pids.max", value);
    else if (!strcmp(name, "cpu")) hold(group, "cpu.max", value);
    else if (!strcmp(name, "user")) w->contained.user = value;
    else if (!strcmp(name, "own") && w->contained.own_count < OWN_MAX) w->contained.own[w->contained.own_count++] = value;
}

// Lines of `name=value`, up to an empty one. Says `ready` first, and returns when it has been told everything.
static void be_told(int control, int group, struct birth_words *w) {
    static char words[WORDS_MAX];
    size_t size = 0;
    if (!io_write_all(control, "ready\n", 6)) give_up("control port");
    while (size < 2 || memcmp(words + size - 2, "\n\n", 2)) {
        ssize_t n = size < sizeof words - 1 ? read(control, words + size, sizeof words - 1 - size) : 0;
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) give_up("control port");
        size += (size_t)n;
    }
    words[size] = 0;
    char *save;
    for (char *line = strtok_r(words, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *equals = strchr(line, '=');
        if (!equals) continue;
        *equals = 0;
        apply(line, equals + 1, group, w);
    }
}

static int serve(int channel, int control, int group, struct birth_words *w, bool is_init) {
    struct agent_opts opts = {
        .channel_in = channel, .channel_out = channel, .worker_fd = -1, .control_fd = -1, .workdir = "/", .is_init = is_init,
    };
    autoclose int console = fcntl(2, F_DUPFD_CLOEXEC, 3);
    if (is_init) dup2(control, 2);  // what is wrong with the user or the directories is the host's to know
    if (!contained_prepare(&w->contained, &opts)) {
        for (;;) pause();  // until the host, who has been told, ends it
    }
    if (is_init) dup2(console, 2);
    opts.memory_events_fd = openat(group, "memory.events", O_RDONLY | O_CLOEXEC);
    opts.pids_events_fd = openat(group, "pids.events", O_RDONLY | O_CLOEXEC);
    opts.work_join = openat(group, "cgroup.procs", O_WRONLY | O_CLOEXEC);
    if (opts.work_join < 0) give_up("cgroup");
    if (is_init && !io_write_all(control, "born\n", 5)) give_up("control port");
    close(control);
    return agent_main(&opts);
}

int init_main(void) {
    put("devtmpfs", "/dev", MS_NOSUID, NULL);
    put("proc", "/proc", 0, NULL);
    if (has_argument("untax.probe")) {
        dprintf(2, PROBED);
        reboot(RB_POWER_OFF);
        for (;;) pause();
    }
    load_modules();
    int control = open_port(CONTROL), channel = open_port(CHANNEL);
    int second = has_argument("untax.second") ? open_port(SECOND) : -1;
    build_root();
    raise_loopback();
    int group = make_group();
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_NOFILE, 4096);
    limit(RLIMIT_MEMLOCK, 64 << 10);
    limit(RLIMIT_MSGQUEUE, 800 << 10);
    limit(RLIMIT_RTPRIO, 0);
    limit(RLIMIT_NICE, 0);
    struct birth_words words = {0};
    be_told(control, group, &words);
    if (second >= 0 && fork() == 0) return serve(second, control, group, &words, false);
    io_close(&second);
    if (fork() == 0) {
        io_close(&channel), io_close(&group);
        keep_clock(control);
    }
    return serve(channel, control, group, &words, true);
}
