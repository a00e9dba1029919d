#define _GNU_SOURCE
#include "users.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"

#define PASSWD_MAX (256u << 10)

// A whole decimal number below 2³²−1 (which means "no id" to the kernel) ending at `end`.
static bool number(const char *at, const char *end, unsigned *out) {
    unsigned long long v = 0;
    if (at == end || end - at > 10) return false;
    for (; at < end; at++) {
        if (*at < '0' || *at > '9') return false;
        v = v * 10 + (unsigned)(*at - '0');
    }
    *out = (unsigned)v;
    return v < 0xffffffffull;
}

// name:password:uid:gid:…; matches by name, or by uid when `name` is NULL.
static bool line_matches(const char *line, const char *end, const char *name, size_t name_size, unsigned uid, struct identity *out) {
    const char *field[5];
    field[0] = line;
    for (int i = 1; i < 5; i++) {
        const char *colon = memchr(field[i - 1], ':', (size_t)(end - field[i - 1]));
        if (!colon) return false;
        field[i] = colon + 1;
    }
    unsigned u, g;
    if (!number(field[2], field[3] - 1, &u) || !number(field[3], field[4] - 1, &g)) return false;
    if (name ? (size_t)(field[1] - 1 - line) != name_size || memcmp(line, name, name_size) != 0 : u != uid) return false;
    *out = (struct identity){u, g};
    return true;
}

static bool search_file(const char *passwd, const char *name, size_t name_size, unsigned uid, struct identity *out) {
    char *text = malloc(PASSWD_MAX);
    bool found = false;
    ssize_t n = text ? io_read_file(AT_FDCWD, passwd, text, PASSWD_MAX) : -1;
    for (const char *line = text; n > 0 && line < text + n && !found;) {
        const char *end = memchr(line, '\n', (size_t)(text + n - line));
        if (!end) end = text + n;
        found = line_matches(line, end, name, name_size, uid, out);
        line = end + 1;
    }
    free(text);
    return found;
}

bool user_lookup(const char *passwd, struct span user, struct identity *out) {
    const char *at = (const char *)user.at, *end = at + user.size;
    if (!user.size) return false;
    if (search_file(passwd, at, user.size, 0, out)) return true;
    const char *colon = memchr(at, ':', user.size);
    unsigned uid, gid;
    if (!number(at, colon ? colon : end, &uid)) return false;
    if (colon) {
        if (!number(colon + 1, end, &gid)) return false;
        *out = (struct identity){uid, gid};
        return true;
    }
    if (!search_file(passwd, NULL, 0, uid, out)) *out = (struct identity){uid, uid};
    return true;
}
