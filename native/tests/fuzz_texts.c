// libFuzzer target for the two languages that the cell reads: expressions to search for, and Python sources. What counts as a frame
// here is one expression or one source.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "frames.h"
#include "regex.h"
#include "symbols.h"

#define TEXT_MAX 256u  // searched for each expression

static void expression(const uint8_t *pattern, size_t pattern_size, int flags, const uint8_t *at, const uint8_t *end) {
    const char *error;
    frames_count(1);
    struct regex *re = regex_compile(pattern, pattern_size, flags, &error);
    if (!re) {
        if (!error) abort();
        return;
    }
    for (const uint8_t *resume; at && at < end;) {
        const uint8_t *hit = regex_find(re, at, end, 100, &resume), *stop = hit ? memchr(hit, '\n', (size_t)(end - hit)) : NULL;
        if (!hit) {
            at = resume;
            continue;
        }
        const uint8_t *line = hit > at ? memrchr(at, '\n', (size_t)(hit - at)) : NULL;
        line = line ? line + 1 : at;
        if (!stop) stop = end;
        if (regex_column(re, line, (size_t)(stop - line)) > (size_t)(stop - line)) abort();
        at = stop + 1;
    }
    regex_free(re);
}

static bool check_symbol(void *context, const struct symbol *s) {
    size_t *size = context;
    if (!s->line || !s->column || !s->name_size || s->column > *size) abort();
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) return 0;
    const uint8_t *at = data + 1, *end = data + size;
    if (data[0] % 2) {
        size_t rest = size - 1;
        frames_count(1);
        symbols_find(at, rest, check_symbol, &rest);
        return 0;
    }
    while (at < end) {  // each line: flags, an expression; it is searched for in what comes after it
        const uint8_t *stop = memchr(at, '\n', (size_t)(end - at));
        if (!stop) stop = end;
        const uint8_t *text = stop < end ? stop + 1 : end;
        if (stop > at) expression(at + 1, (size_t)(stop - at - 1), at[0] & 7, text, (size_t)(end - text) > TEXT_MAX ? text + TEXT_MAX : end);
        at = text;
    }
    return 0;
}
