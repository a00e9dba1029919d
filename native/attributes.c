// Owner and extended attributes, which the other file actions leave as they are. Links are followed as by any program.
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "job.h"

#define NAMES_ROOM 65536u         // XATTR_LIST_MAX: all names of one file
#define VALUE_ROOM 4096u          // a longer value is left out
#define ANSWER_MAX (192u << 10)   // beyond this much no more attributes are given: what follows must fit the frame
#define PATHS_MAX 8192u
#define UNCHANGED 0xffffffffu

// The names of `path` in `names`, each with its NUL; 0 also where there are none or the file system has no such thing.
static size_t names_of(const char *path, char *names) {
    ssize_t size = listxattr(path, names, NAMES_ROOM);
    return size > 0 ? (size_t)size : 0;
}

static bool begins(const char *name, struct span prefix) { return strlen(name) > prefix.size && !memcmp(name, prefix.at, prefix.size); }

static int remove_attributes(const char *path, struct span prefix, char *names) {
    size_t size = names_of(path, names);
    for (const char *name = names; name < names + size; name += strlen(name) + 1)
        if (begins(name, prefix) && removexattr(path, name) && errno != ENODATA) return errno;
    return 0;
}

static int set_attribute(const char *path, struct span prefix, struct span pair) {
    const uint8_t *equals = memchr(pair.at, '=', pair.size);
    char name[XATTR_NAME_MAX + 1];
    size_t size = equals ? (size_t)(equals - pair.at) : 0;
    if (!size || prefix.size + size > XATTR_NAME_MAX) return EINVAL;
    memcpy(name, prefix.at, prefix.size);
    memcpy(name + prefix.size, pair.at, size);
    name[prefix.size + size] = 0;
    return setxattr(path, name, equals + 1, pair.size - size - 1, 0) ? errno : 0;
}

void action_mark(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct rd *r = &g.payload;
    struct span path = rd_name(r);
    uint32_t uid = rd_u32(r), gid = rd_u32(r), count;
    struct span prefix = rd_name(r), pairs = rd_strs(r, &count);
    if (malformed(a, &g)) return;
    char room[PATH_ROOM];
    path_of(a, path, room);
    int error = (uid != UNCHANGED || gid != UNCHANGED) && chown(room, uid, gid) ? errno : 0;
    if (!error && prefix.size) {
        char *names = malloc(NAMES_ROOM);
        error = names ? remove_attributes(room, prefix, names) : ENOMEM;
        free(names);
        struct rd each = rd_of(pairs.at, pairs.size);
        rd_u32(&each);
        while (!error && count--) error = set_attribute(room, prefix, rd_name(&each));
    }
    if (error) fail_os(a, f->id, error, "mark", room);
    else done_empty(a, f->id);
}

static void wr_attributes(struct wr *out, size_t most, const char *path, struct span prefix, char *names, char *value) {
    size_t size = names_of(path, names), at = out->size;
    uint32_t count = 0;
    wr_u32(out, 0);
    for (const char *name = names; name < names + size && out->size < most; name += strlen(name) + 1) {
        if (!begins(name, prefix)) continue;
        ssize_t length = getxattr(path, name, value, VALUE_ROOM);
        if (length < 0) continue;
        wr_bytes(out, name + prefix.size, strlen(name) - prefix.size);
        wr_bytes(out, value, (size_t)length);
        count++;
    }
    if (!out->failed) memcpy(out->data + at, &count, sizeof count);
}

void action_marks(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct rd *r = &g.payload;
    uint32_t count;
    struct span prefix = rd_name(r), paths = rd_strs(r, &count);
    if (malformed(a, &g)) return;
    if (count > PATHS_MAX) {
        fail(a, f->id, E_REJECTED, 0, "more than %u paths", PATHS_MAX);
        return;
    }
    char *room = malloc(PATH_ROOM + NAMES_ROOM + VALUE_ROOM);
    if (!room) {
        fail_os(a, f->id, ENOMEM, "marks", NULL);
        return;
    }
    char *names = room + PATH_ROOM, *value = names + NAMES_ROOM;
    size_t begun = frame_begin(a->out, f->id, K_DONE);
    wr_u32(a->out, count);
    struct rd each = rd_of(paths.at, paths.size);
    rd_u32(&each);
    while (count--) wr_attributes(a->out, begun + ANSWER_MAX, path_of(a, rd_name(&each), room), prefix, names, value);
    frame_end(a->out, begun);
    free(room);
}
