#define _GNU_SOURCE
#include "command.h"

#include <stdlib.h>
#include <string.h>

#include "proxy.h"
#include "spawn.h"

static struct {
    char *workdir;
    uint8_t *env;  // `strs`
    uint32_t env_size;
    uint16_t proxy_port;
} config;

bool config_open(const char *workdir) {
    config.workdir = strdup(workdir ? workdir : "/");
    return config.workdir != NULL;
}

void config_free(void) {
    free(config.workdir);
    free(config.env);
    memset(&config, 0, sizeof config);
}

static void no_stop(struct request *r, enum stop_reason why) { (void)r, (void)why; }
static const struct request_ops at_once = {.stop = no_stop};

void config_handle(const struct frame *f) {
    struct rd r = f->payload;
    struct span dir = rd_name(&r);
    uint32_t count;
    struct span env = rd_strs(&r, &count);
    uint16_t port = rd_u16(&r);
    const char *fault = env_fault(env);
    if (!rd_done(&r) || fault || (dir.size && dir.at[0] != '/')) {
        reject(f, fault ? fault : !rd_done(&r) ? "a malformed CONFIGURE" : "the working directory must be absolute");
        return;
    }
    struct request *q = request_new(f, &at_once, NULL);
    if (!q) return;
    uint8_t *copy = malloc(env.size ? env.size : 1);
    char *path = dir.size ? strndup((const char *)dir.at, dir.size) : strdup(config.workdir);
    if (!copy || !path) {
        free(copy);
        free(path);
        request_fail(q, E_BUSY, 0, "out of memory");
        return;
    }
    memcpy(copy, env.at, env.size);
    config_free();
    config.workdir = path;
    config.env = copy;
    config.env_size = env.size;
    config.proxy_port = port;
    workers_configure(path);
    int error = proxy_listen(port);
    if (error) request_fail(q, E_OS, error, "proxy on port %u: %s", port, words(error));
    else request_done(q);
}

uint16_t config_proxy_port(void) { return config.proxy_port; }

// ---- variables ----

static uint32_t name_size(struct span s) {
    const uint8_t *eq = s.size ? memchr(s.at, '=', s.size) : NULL;
    return eq ? (uint32_t)(eq - s.at) : s.size;
}

const char *env_fault(struct span env) {
    struct rd r = rd_of(env.at, env.size);
    for (uint32_t n = rd_u32(&r); n && !r.bad; n--)
        if (!name_size(rd_bytes(&r))) return "a variable without a name";
    return NULL;
}

// Which entry of a list is the last one for a name. Open addressing; slots hold index + 1.
struct names {
    struct span *entries;
    uint32_t *slots;
    uint32_t mask;
};

static uint32_t *names_slot(const struct names *t, struct span entry) {
    uint32_t size = name_size(entry), hash = 2166136261u;
    for (uint32_t i = 0; i < size; i++) hash = (hash ^ entry.at[i]) * 16777619u;
    for (;; hash++) {
        uint32_t *slot = &t->slots[hash & t->mask];
        if (!*slot) return slot;
        struct span other = t->entries[*slot - 1];
        if (name_size(other) == size && !memcmp(other.at, entry.at, size)) return slot;
    }
}

static bool names_build(struct names *t, struct span env, uint32_t count) {
    uint32_t room = 16;
    while (room < count * 2) room *= 2;
    t->mask = room - 1;
    t->slots = calloc(room, sizeof *t->slots);
    t->entries = calloc(count, sizeof *t->entries);
    if (!t->slots || !t->entries) return false;
    struct rd r = rd_of(env.at, env.size);
    rd_u32(&r);
    for (uint32_t i = 0; i < count; i++) {
        t->entries[i] = rd_bytes(&r);
        *names_slot(t, t->entries[i]) = i + 1;
    }
    return true;
}

// Strings of an EXEC carry their NUL.
static void put_string(struct wr *out, struct span s) {
    wr_u32(out, s.size + 1);
    wr_raw(out, s.at, s.size);
    wr_u8(out, 0);
}

static bool put_env(struct wr *out, struct span changes, uint32_t changes_count) {
    struct names t = {0};
    bool ok = !changes_count || names_build(&t, changes, changes_count);
    size_t at = out->size;
    uint32_t count = 0;
    wr_u32(out, 0);
    struct rd r = rd_of(config.env, config.env_size);
    for (uint32_t n = config.env ? rd_u32(&r) : 0; ok && n; n--) {
        struct span entry = rd_bytes(&r);
        if (changes_count && *names_slot(&t, entry)) continue;
        put_string(out, entry);
        count++;
    }
    for (uint32_t i = 0; ok && i < changes_count; i++) {
        struct span entry = t.entries[i];
        if (*names_slot(&t, entry) != i + 1 || name_size(entry) == entry.size) continue;
        put_string(out, entry);
        count++;
    }
    if (!out->failed) memcpy(out->data + at, (uint8_t[]){(uint8_t)count, (uint8_t)(count >> 8), (uint8_t)(count >> 16), (uint8_t)(count >> 24)}, 4);
    free(t.slots);
    free(t.entries);
    return ok;
}

// ---- EXEC ----

struct span first_of(struct span strs) {
    struct rd r = rd_of(strs.at, strs.size);
    return rd_u32(&r) ? rd_bytes(&r) : (struct span){(const uint8_t *)"", 0};
}

static void put_cwd(struct wr *out, struct span cwd) {
    bool relative = !cwd.size || cwd.at[0] != '/';
    size_t base = relative ? strlen(config.workdir) : 0;
    wr_u32(out, (uint32_t)(base + (relative && cwd.size) + cwd.size + 1));
    wr_raw(out, config.workdir, base);
    if (relative && cwd.size) wr_u8(out, '/');
    wr_raw(out, cwd.at, cwd.size);
    wr_u8(out, 0);
}

static void put_argv(struct wr *out, const struct command *c) {
    struct rd r = rd_of(c->argv.at, c->argv.size);
    uint32_t n = rd_u32(&r);
    bool shell = c->options & SPAWN_SHELL;
    wr_u32(out, shell ? 3 : n);
    if (shell) {
        put_string(out, (struct span){(const uint8_t *)"bash", 4});
        put_string(out, (struct span){(const uint8_t *)"-c", 2});
    }
    for (; n; n--) put_string(out, rd_bytes(&r));
}

bool command_write(struct wr *out, const struct command *c, bool die_with_parent) {
    wr_u16(out, (uint16_t)(c->options | (c->options & SPAWN_SHELL ? EXEC_FALLBACK_SH : 0) | (die_with_parent ? EXEC_DIE_WITH_PARENT : 0)));
    wr_u16(out, c->rows);
    wr_u16(out, c->cols);
    wr_u8(out, c->null_input);
    wr_u8(out, c->fds);
    put_cwd(out, c->cwd);
    put_argv(out, c);
    return put_env(out, c->env, c->env_count);
}
