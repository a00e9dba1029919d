// Regular expressions over lines of bytes, in time linear in the text whatever the expression.
//
// Syntax: . [] [^] \d \D \w \W \s \S \b \B ^ $ | () (?:) * + ? {m,n} and escapes; "(?i)" at the beginning. UTF-8 sequences are
// one character; case is folded for ASCII only. What needs backtracking (back references, look-around) is refused.
#ifndef UNTAX_REGEX_H
#define UNTAX_REGEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct regex;

enum regex_flags { REGEX_IGNORE_CASE = 1, REGEX_WORDS = 2, REGEX_LITERAL = 4 };

// NULL with words in `*error` (a static string) when the expression is malformed or too large.
struct regex *regex_compile(const void *pattern, size_t size, int flags, const char **error);
void regex_free(struct regex *re);
// The first line from `at` (the beginning of a line) that has a match: gives a place inside or at the end of that line, or NULL. No more
// than `budget` bytes are looked at: then `*resume` is the beginning of a line to go on from, otherwise NULL.
const uint8_t *regex_find(struct regex *re, const uint8_t *at, const uint8_t *end, size_t budget, const uint8_t **resume);
// Where the leftmost match in a line that has one begins.
size_t regex_column(struct regex *re, const uint8_t *line, size_t size);
// Whether a text without newlines matches somewhere.
bool regex_matches(struct regex *re, const void *text, size_t size);

// memmem, by way of the needle's least common byte.
const uint8_t *find_bytes(const uint8_t *at, const uint8_t *end, const uint8_t *needle, size_t size);

#endif
