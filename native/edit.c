// Replacing an exact string in a file.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "edit.h"
#include "io.h"
#include "job.h"
#include "regex.h"

static int write_at(int fd, const uint8_t *data, size_t size, size_t offset) {
    while (size) {
        ssize_t n = pwrite(fd, data, size, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno;
        data += n, offset += (size_t)n, size -= (size_t)n;
    }
    return 0;
}

int replace_content(int fd, const uint8_t *old, size_t old_size, const uint8_t *new, size_t new_size) {
    size_t same = 0, shared = old_size < new_size ? old_size : new_size;
    while (same < shared && old[same] == new[same]) same++;
    int error = write_at(fd, new + same, new_size - same, same);
    if (!error && new_size < old_size && ftruncate(fd, (off_t)new_size)) error = errno;
    if (!error) return 0;
    // The blocks of the old content are still there, so that putting it back needs no space.
    int undone = write_at(fd, old + same, old_size - same, same);
    return undone || ftruncate(fd, (off_t)old_size) ? EIO : error;
}

int load_file(int fd, const struct stat *st, uint8_t **data, size_t *size) {
    if (st->st_size > (off_t)FILE_WHOLE_MAX) return EFBIG;
    *size = (size_t)st->st_size;
    *data = malloc(*size + 1);
    if (!*data) return ENOMEM;
    ssize_t n = read_full(fd, *data, *size);
    if (n < 0) {
        int error = errno;
        free(*data);
        *data = NULL;
        return error;
    }
    *size = (size_t)n;
    return 0;
}

static uint32_t count_places(const uint8_t *text, size_t size, struct span old) {
    uint32_t places = 0;
    for (const uint8_t *at = text, *end = text + size; (at = find_bytes(at, end, old.at, old.size)); at += old.size) places++;
    return places;
}

static bool replace_all(struct wr *out, const uint8_t *text, size_t size, struct span old, struct span new, uint32_t places) {
    const uint8_t *at = text, *end = text + size;
    wr_reserve(out, size - (size_t)places * old.size + (size_t)places * new.size + 1);  // at once: the result is of known size
    for (const uint8_t *hit; (hit = find_bytes(at, end, old.at, old.size)); at = hit + old.size) {
        wr_raw(out, at, (size_t)(hit - at));
        wr_raw(out, new.at, new.size);
    }
    wr_raw(out, at, (size_t)(end - at));
    return !out->failed;
}

// Everything between opening and answering; 0 or errno, CONFLICT has been answered when `*answered`.
static int edit_file(struct actions *a, uint32_t id, int fd, const struct stat *st, struct span old, struct span new, uint32_t count, bool *answered) {
    uint8_t *text;
    size_t size;
    int error = load_file(fd, st, &text, &size);
    if (error) return error;
    uint32_t places = count_places(text, size, old);
    struct wr out = {0};
    if (!places || (count && places != count)) {
        if (!places) fail(a, id, E_CONFLICT, 0, "the text to replace was not found");
        else fail(a, id, E_CONFLICT, 0, "the text to replace was found in %u places, expected %u", places, count);
        *answered = true;
    } else if ((uint64_t)places * new.size > FILE_WHOLE_MAX) {
        error = EFBIG;
    } else {
        error = replace_all(&out, text, size, old, new, places) ? replace_content(fd, text, size, out.data, out.size) : ENOMEM;
    }
    if (!error && !*answered) {
        size_t begun = frame_begin(a->out, id, K_DONE);
        wr_u32(a->out, places);
        frame_end(a->out, begun);
    }
    wr_free(&out);
    free(text);
    return error;
}

void action_edit(struct actions *a, const struct frame *f) {
    struct frame g = *f;
    struct span path = rd_name(&g.payload), old = rd_bytes(&g.payload), new = rd_bytes(&g.payload);
    uint32_t count = rd_u32(&g.payload);
    if (malformed(a, &g)) return;
    if (!old.size) {
        fail(a, f->id, E_REJECTED, 0, "the text to replace is empty");
        return;
    }
    char room[PATH_ROOM];
    struct stat st;
    autoclose int fd = open_regular(AT_FDCWD, path_of(a, path, room), O_RDWR, &st);
    bool answered = false;
    int error = fd < 0 ? errno : edit_file(a, f->id, fd, &st, old, new, count, &answered);
    if (error == EFBIG) fail(a, f->id, E_TOO_LARGE, error, "edit %.300s: more than %u MiB", room, FILE_WHOLE_MAX >> 20);
    else if (error) fail_os(a, f->id, error, "edit", room);
}
