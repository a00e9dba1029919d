#define _GNU_SOURCE
#include "walk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define OPEN_LEVELS 48              // descriptors held at once; levels further up are opened again through ".."
#define NAMES_MAX (4u << 20)        // bytes of names held for one directory
#define DENTS_SIZE (32u << 10)

struct name {
    uint32_t at;  // in `text`: a byte of type, then the name
};

struct walk_level {
    int fd;                 // -1: given back for now
    dev_t dev;
    ino_t ino;
    bool more;              // the directory has names beyond those held
    off_t resume;           // where they begin
    char *text;
    uint32_t text_size, text_room;
    struct name *names;
    uint32_t count, next, names_room;
    size_t path_size;       // of the path of this directory
};

static void level_free(struct walk_level *l) {
    if (l->fd >= 0) close(l->fd);
    free(l->text);
    free(l->names);
}

static bool grow(void **data, uint32_t *room, size_t need, size_t each) {
    if (need <= *room) return true;
    size_t more = *room ? *room : 64;
    while (more < need) more *= 2;
    void *data2 = realloc(*data, more * each);
    if (!data2) return false;
    *data = data2;
    *room = (uint32_t)more;
    return true;
}

static int by_name(const void *a, const void *b, void *text) {
    const char *t = text;
    return strcmp(t + ((const struct name *)a)->at + 1, t + ((const struct name *)b)->at + 1);
}

// Reads the next names of the directory, up to NAMES_MAX; 0 or errno.
static int level_fill(struct walk_level *l) {
    _Alignas(struct dirent64) char dents[DENTS_SIZE];
    l->count = l->next = l->text_size = 0;
    l->more = false;
    for (;;) {
        ssize_t n = getdents64(l->fd, dents, sizeof dents);
        if (n < 0) return errno;
        if (n == 0) break;
        for (ssize_t at = 0; at < n;) {
            const struct dirent64 *e = (const struct dirent64 *)(const void *)(dents + at);
            at += e->d_reclen;
            l->resume = e->d_off;
            if (e->d_name[0] == '.' && (!e->d_name[1] || (e->d_name[1] == '.' && !e->d_name[2]))) continue;
            size_t size = strlen(e->d_name) + 2;
            if (!grow((void **)&l->text, &l->text_room, l->text_size + size, 1)) return ENOMEM;
            if (!grow((void **)&l->names, &l->names_room, l->count + 1, sizeof *l->names)) return ENOMEM;
            l->names[l->count++].at = l->text_size;
            l->text[l->text_size] = (char)e->d_type;
            memcpy(l->text + l->text_size + 1, e->d_name, size - 1);
            l->text_size += (uint32_t)size;
        }
        if (l->text_size >= NAMES_MAX) {
            l->more = true;
            break;
        }
    }
    if (l->count > 1) qsort_r(l->names, l->count, sizeof *l->names, by_name, l->text);
    return 0;
}

static int push(struct walk *w, int fd) {
    struct stat st;
    if (fstat(fd, &st)) return errno;
    if (w->depth == w->room) {
        size_t room = w->room ? w->room * 2 : 8;
        struct walk_level *levels = realloc(w->levels, room * sizeof *levels);
        if (!levels) return ENOMEM;
        w->levels = levels;
        w->room = room;
    }
    struct walk_level *l = &w->levels[w->depth];
    *l = (struct walk_level){.fd = fd, .dev = st.st_dev, .ino = st.st_ino, .path_size = w->path_size};
    int error = level_fill(l);
    if (error) {
        l->fd = -1;
        level_free(l);
        return error;
    }
    w->depth++;
    if (w->depth > OPEN_LEVELS) {
        struct walk_level *far = &w->levels[w->depth - 1 - OPEN_LEVELS];
        if (far->fd >= 0) close(far->fd);
        far->fd = -1;
    }
    return 0;
}

int walk_open(struct walk *w, int fd) {
    *w = (struct walk){.dir = -1};
    int error = push(w, fd);
    if (error) close(fd);
    return error;
}

void walk_close(struct walk *w) {
    while (w->depth) level_free(&w->levels[--w->depth]);
    free(w->levels);
    free(w->path_buffer);
    *w = (struct walk){.dir = -1};
}

static bool set_path(struct walk *w, size_t base, const char *name) {
    size_t size = strlen(name), need = base + size + 2;
    if (need > w->path_room) {
        char *buffer = realloc(w->path_buffer, need * 2);
        if (!buffer) return false;
        w->path_buffer = buffer;
        w->path_room = need * 2;
    }
    if (base) w->path_buffer[base++] = '/';
    memcpy(w->path_buffer + base, name, size + 1);
    w->path = w->path_buffer;
    w->path_size = base + size;
    return true;
}

static void describe(struct walk *w, struct walk_level *l) {
    const char *entry = l->text + l->names[l->next - 1].at;
    w->dir = l->fd;
    w->name = entry + 1;
    w->type = (uint8_t)entry[0];
}

// The level above the one just left must be open again and be the same directory as before.
static int reopen(struct walk_level *up, const struct walk_level *down) {
    if (up->fd >= 0) return 0;
    int fd = openat(down->fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return errno;
    struct stat st;
    int error = fstat(fd, &st) ? errno : st.st_dev != up->dev || st.st_ino != up->ino ? ESTALE : 0;
    if (!error && up->more && lseek(fd, up->resume, SEEK_SET) < 0) error = errno;
    if (error) close(fd);
    else up->fd = fd;
    return error;
}

static enum walk_event broken(struct walk *w, int error) {
    w->error = error;
    return WALK_ERROR;
}

enum walk_event walk_next(struct walk *w) {
    if (!w->depth) return WALK_END;
    struct walk_level *l = &w->levels[w->depth - 1];
    if (l->next == l->count && l->more) {
        int error = level_fill(l);
        if (error) {
            l->more = false, l->next = l->count = 0;
            return broken(w, error);
        }
    }
    if (l->next < l->count) {
        l->next++;
        describe(w, l);
        if (!set_path(w, l->path_size, w->name)) return broken(w, ENOMEM);
        struct stat st;
        if (w->type == DT_UNKNOWN) {
            if (fstatat(l->fd, w->name, &st, AT_SYMLINK_NOFOLLOW)) return broken(w, errno);
            w->type = IFTODT(st.st_mode);
        }
        return WALK_ENTRY;
    }
    w->depth--;
    if (!w->depth) {
        level_free(l);
        return WALK_END;
    }
    struct walk_level *up = &w->levels[w->depth - 1];
    int error = reopen(up, l);
    level_free(l);
    if (error) {  // moved away under us: nothing further up can be reached either
        while (w->depth) level_free(&w->levels[--w->depth]);
        return broken(w, error);
    }
    describe(w, up);
    w->type = DT_DIR;
    return set_path(w, up->path_size, w->name) ? WALK_LEAVE : broken(w, ENOMEM);
}

int walk_enter(struct walk *w) {
    struct walk_level *l = &w->levels[w->depth - 1];
    int fd = openat(l->fd, w->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno;
    int error = push(w, fd);
    if (error) close(fd);
    return error;
}
