#include "symbols.h"

#include <stdlib.h>
#include <string.h>

#define NAME_ROOM 4096  // a dotted name; deeper nesting than fits is cut off
#define SCOPES 200      // CPython allows 100 levels of indentation
#define STRINGS 200     // f-strings inside the fields of f-strings

struct scope {
    uint32_t indent;
    size_t name_size;   // of the dotted name up to and with this one
};

struct scan {
    const uint8_t *at, *end, *line_start;
    uint32_t line;
    uint32_t depth;             // open brackets
    struct scope scopes[SCOPES];
    size_t scope_count;
    char name[NAME_ROOM];
};

static uint8_t peek(const struct scan *s, size_t ahead) { return (size_t)(s->end - s->at) > ahead ? s->at[ahead] : 0; }

static bool name_start(uint8_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c >= 0x80; }
static bool name_part(uint8_t c) { return name_start(c) || (c >= '0' && c <= '9'); }

// Steps over "\n", "\r\n" or "\r", each of which ends a line; false when there is none here.
static bool newline(struct scan *s) {
    if (s->at >= s->end || (*s->at != '\n' && *s->at != '\r')) return false;
    s->at += *s->at == '\r' && peek(s, 1) == '\n' ? 2 : 1;
    s->line++;
    s->line_start = s->at;
    return true;
}

// A backslash at the end of a line joins it with the next.
static bool continuation(struct scan *s) {
    if (peek(s, 0) != '\\' || (peek(s, 1) != '\n' && peek(s, 1) != '\r')) return false;
    s->at++;
    return newline(s);
}

static void skip_blank(struct scan *s) {
    while (s->at < s->end && (*s->at == ' ' || *s->at == '\t' || *s->at == '\f' || continuation(s)))
        if (s->at < s->end && (*s->at == ' ' || *s->at == '\t' || *s->at == '\f')) s->at++;
}

static void skip_comment(struct scan *s) {
    while (s->at < s->end && *s->at != '\n' && *s->at != '\r') s->at++;
}

static void skip_string(struct scan *s, bool formatted, bool raw, int nesting);

// The prefix of a string literal at a name of this size; sets what it means.
static bool string_prefix(const uint8_t *name, size_t size, bool *formatted, bool *raw) {
    if (size > 2) return false;
    bool bytes = false, unicode = false;
    *formatted = *raw = false;
    for (size_t i = 0; i < size; i++) {
        switch (name[i] | 32) {
            case 'r': if (*raw) return false; *raw = true; break;
            case 'b': if (bytes) return false; bytes = true; break;
            case 'f': case 't': if (*formatted) return false; *formatted = true; break;
            case 'u': unicode = true; break;
            default: return false;
        }
    }
    return !(bytes && *formatted) && !(unicode && size > 1);
}

// A name that turns out to be a string's prefix takes the string with it; true when it was one.
static bool name_or_string(struct scan *s, int nesting) {
    const uint8_t *name = s->at;
    while (s->at < s->end && name_part(*s->at)) s->at++;
    bool formatted, raw;
    if ((peek(s, 0) != '"' && peek(s, 0) != '\'') || !string_prefix(name, (size_t)(s->at - name), &formatted, &raw)) return false;
    skip_string(s, formatted, raw, nesting);
    return true;
}

// Behind "{" of an f-string: the expression, and the format that may follow it, up to and with "}". `quote` is for the case that the
// field is broken: a single-quoted string must not run on over the end of its line for ever.
static void skip_field(struct scan *s, uint8_t quote, bool triple, bool raw, int nesting) {
    uint32_t depth = 0;
    while (s->at < s->end) {
        uint8_t c = *s->at;
        if (c == '#') {
            skip_comment(s);
        } else if (newline(s) || continuation(s)) {
            continue;
        } else if (c == '"' || c == '\'') {
            skip_string(s, false, false, nesting);
        } else if (name_start(c)) {
            name_or_string(s, nesting);
        } else if (c >= '0' && c <= '9') {
            while (s->at < s->end && (name_part(*s->at) || *s->at == '.')) s->at++;
        } else if (c == '(' || c == '[' || c == '{') {
            depth++, s->at++;
        } else if (c == '}' && !depth) {
            s->at++;
            return;
        } else if (c == ')' || c == ']' || c == '}') {
            if (depth) depth--;
            s->at++;
        } else if (c == '!' && peek(s, 1) == '=') {
            s->at += 2;
        } else if (c == ':' && !depth) {
            // The format is text again, with fields of its own, until the field's brace closes.
            s->at++;
            while (s->at < s->end && *s->at != '}') {
                if (*s->at == '{') {
                    s->at++;
                    if (nesting >= STRINGS) return;
                    skip_field(s, quote, triple, raw, nesting + 1);
                } else if (*s->at == '\\' && !raw && s->at + 1 < s->end) {
                    s->at++;
                    if (!newline(s)) s->at++;
                } else if (!triple && (*s->at == quote || *s->at == '\n' || *s->at == '\r')) {
                    return;
                } else if (!newline(s)) {
                    s->at++;
                }
            }
            if (s->at < s->end) s->at++;
            return;
        } else {
            s->at++;
        }
    }
}

// At the opening quote; ends behind the closing one. One in single quotes that is not closed ends with its line.
static void skip_string(struct scan *s, bool formatted, bool raw, int nesting) {
    uint8_t quote = *s->at;
    bool triple = peek(s, 1) == quote && peek(s, 2) == quote;
    s->at += triple ? 3 : 1;
    while (s->at < s->end) {
        uint8_t c = *s->at;
        if (c == quote && (!triple || (peek(s, 1) == quote && peek(s, 2) == quote))) {
            s->at += triple ? 3 : 1;
            return;
        }
        if (c == '\\') {  // in raw strings as well: a quote behind it does not end the string
            s->at++;
            if (formatted && !raw && peek(s, 0) == 'N' && peek(s, 1) == '{') {  // \N{NAME} is no field
                while (s->at < s->end && *s->at != '}' && *s->at != quote && *s->at != '\n') s->at++;
                continue;
            }
            if (formatted && (peek(s, 0) == '{' || peek(s, 0) == '}')) continue;
            if (!newline(s) && s->at < s->end) s->at++;
        } else if (c == '\n' || c == '\r') {
            if (!triple) return;
            newline(s);
        } else if (formatted && c == '{') {
            s->at++;
            if (peek(s, 0) == '{') s->at++;
            else if (nesting < STRINGS) skip_field(s, quote, triple, raw, nesting + 1);
        } else {
            s->at++;
        }
    }
}

// Blanks at the beginning of a line: how far they reach, with tabs to multiples of eight and a form feed going back to the margin.
static uint32_t indentation(struct scan *s) {
    uint32_t column = 0, joined = 0;
    bool was_joined = false;
    for (; s->at < s->end; s->at++) {
        if (*s->at == ' ') column++;
        else if (*s->at == '\t') column = (column / 8 + 1) * 8;
        else if (*s->at == '\f') column = 0;
        else if (*s->at == '\\') {  // blanks and a backslash: the indentation is that of the first line of them
            if (!was_joined) joined = column;
            was_joined = true;
            if (!continuation(s)) break;
            s->at--;
        } else break;
    }
    return was_joined && joined ? joined : column;
}

static bool word_is(const uint8_t *at, size_t size, const char *word) { return strlen(word) == size && memcmp(at, word, size) == 0; }

static size_t word_size(const struct scan *s) {
    size_t size = 0;
    if (s->at < s->end && name_start(*s->at))
        while (s->at + size < s->end && name_part(s->at[size])) size++;
    return size;
}

// At the first word of a logical line: a definition, if it is one.
static bool definition(struct scan *s, uint32_t indent, struct symbol *out) {
    size_t size = word_size(s);
    out->line = s->line;
    out->column = (uint32_t)(s->at - s->line_start) + 1;
    out->kind = SYMBOL_FUNCTION;
    struct scan ahead_from = {.at = s->at, .end = s->end, .line_start = s->line_start, .line = s->line};
    if (word_is(s->at, size, "async")) {
        s->at += size;
        skip_blank(s);
        size = word_size(s);
        out->kind = SYMBOL_ASYNC_FUNCTION;
    }
    if (word_is(s->at, size, "class") && out->kind == SYMBOL_FUNCTION) out->kind = SYMBOL_CLASS;
    else if (!word_is(s->at, size, "def")) {
        s->at = ahead_from.at, s->line = ahead_from.line, s->line_start = ahead_from.line_start;
        return false;
    }
    s->at += size;
    skip_blank(s);
    size = word_size(s);
    if (!size) return false;
    size_t base = s->scope_count ? s->scopes[s->scope_count - 1].name_size : 0;
    if (base && base < NAME_ROOM) s->name[base++] = '.';
    size_t fits = size < NAME_ROOM - base ? size : NAME_ROOM - base;
    memcpy(s->name + base, s->at, fits);
    s->at += size;
    out->name = s->name;
    out->name_size = base + fits;
    if (s->scope_count < SCOPES) s->scopes[s->scope_count++] = (struct scope){indent, base + fits};
    return true;
}

// The rest of a logical line, with everything in its brackets and strings.
static void skip_logical_line(struct scan *s) {
    s->depth = 0;
    while (s->at < s->end) {
        uint8_t c = *s->at;
        if (c == '\n' || c == '\r') {
            newline(s);
            if (!s->depth) return;
        } else if (name_start(c)) {
            name_or_string(s, 0);
        } else if (c == '"' || c == '\'') {
            skip_string(s, false, false, 0);
        } else if (c == '#') {
            skip_comment(s);
        } else if (c == '(' || c == '[' || c == '{') {
            s->depth++, s->at++;
        } else if (c == ')' || c == ']' || c == '}') {
            if (s->depth) s->depth--;
            s->at++;
        } else if (c >= '0' && c <= '9') {
            while (s->at < s->end && (name_part(*s->at))) s->at++;  // 0xdef is no definition
        } else if (!continuation(s)) {
            s->at++;
        }
    }
}

void symbols_find(const uint8_t *text, size_t size, bool (*found)(void *, const struct symbol *), void *context) {
    struct scan *s = malloc(sizeof *s);
    if (!s) return;
    if (size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) text += 3, size -= 3;
    s->at = s->line_start = text;
    s->end = text + size;
    s->line = 1;
    s->scope_count = 0;
    struct symbol one;
    while (s->at < s->end) {
        uint32_t indent = indentation(s);
        if (s->at < s->end && *s->at == '#') skip_comment(s);
        if (newline(s)) continue;
        while (s->scope_count && s->scopes[s->scope_count - 1].indent >= indent) s->scope_count--;
        uint8_t c = peek(s, 0);
        if ((c == 'd' || c == 'a' || c == 'c') && definition(s, indent, &one) && !found(context, &one)) break;
        skip_logical_line(s);
    }
    free(s);
}
