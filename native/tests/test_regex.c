// the matcher, by itself
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "regex.h"

// The column of the leftmost match, counted from 0; -1: none, -2: refused.
static int column(const char *pattern, const char *text, int flags) {
    const char *error;
    struct regex *re = regex_compile(pattern, strlen(pattern), flags, &error);
    if (!re) return -2;
    const uint8_t *at = (const uint8_t *)text, *resume, *hit = regex_find(re, at, at + strlen(text), SIZE_MAX, &resume);
    int found = hit ? (int)regex_column(re, at, strlen(text)) : -1;
    regex_free(re);
    return found;
}
static void at(const char *pattern, const char *text, int want) {
    int got = column(pattern, text, 0);
    if (got != want) fprintf(stderr, "%s in %s: %d, not %d\n", pattern, text, got, want);
    CHECK(got == want);
}

static void syntax(void) {
    at("abc", "xxabcx", 2), at("a.c", "abbac-abc", 6), at("a.*c", "xabbc", 1), at("^b", "ab", -1), at("^a", "ab", 0), at("b$", "ab", 1), at("a$", "ab", -1);
    at("a|bc", "xbc", 1), at("(a|b)+c", "xxabac", 2), at("a?b", "cb", 1), at("a{2,3}b", "aaaab", 1), at("a{2}", "ba", -1), at("a{,2}b", "aab", 0), at("a{2,}b", "caaab", 1);
    at("x{", "x{", 0), at("x{a}", "x{a}", 0), at("[abc]+d", "xabd", 1), at("[^abc]", "abcd", 3), at("[a-f]$", "zf", 1), at("[]a]", "]", 0), at("[a-]", "-", 0), at("[\\]]", "]", 0);
    at("\\d+", "ab12", 2), at("\\D", "12a", 2), at("\\w+", "  a_1", 2), at("\\W", "ab c", 2), at("\\s", "ab c", 2), at("\\S", "  c", 2), at("\\bfoo\\b", "xfoo foo", 5), at("\\Boo", "foo", 1);
    at("\\.", "a.b", 1), at("\\x41", "xA", 1), at("\\t", "a\t", 1), at("(?:ab)*c", "ababc", 0), at("(?P<n>a)b", "ab", 0), at("a*?b", "aab", 0), at("(?i)HeLLo", "xhello", 1), at("[[:digit:]]", "a1", 1);
    at("", "abc", 0), at("^$", "", 0), at("()", "a", 0), at("(a*)*b", "aaab", 0), at("a||b", "c", 0), at("def \\w+\\(self", "    def run(self, x):", 4);
    at("é+", "caféé", 3), at("^.$", "é", 0), at("^..$", "é", -1), at("[éa]x", "zéx", 1), at("[^x]y", "éy", 0);
    CHECK(column("HELLO", "xhello", REGEX_IGNORE_CASE) == 1 && column("[^a]", "A", REGEX_IGNORE_CASE) == -1);
    CHECK(column("cat", "concat cat", REGEX_WORDS) == 7 && column("a|b", "ab a", REGEX_WORDS) == 3 && column("+x", "1+x +x", REGEX_WORDS | REGEX_LITERAL) == 4);
    CHECK(column("a.c", "abc a.c", REGEX_LITERAL) == 4 && column("A.c", "abc a.C", REGEX_LITERAL | REGEX_IGNORE_CASE) == 4);
    static const char *const bad[] = {"(", ")", "a)", "[", "[a", "[]", "*", "+a", "a**", "a{2}{3}", "\\", "\\1", "\\q", "(?=a)", "(?<!a)", "a{1001}", "a{3,2}", "[b-a]", "[\\", "\\x4", "((((((a{1000}){1000}){1000}){1000})))", "[^é]", "[é-ü]"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (column(bad[i], "a", 0) != -2) fprintf(stderr, "accepted %s\n", bad[i]);
        CHECK(column(bad[i], "a", 0) == -2);
    }
    char deep[1000];
    memset(deep, '(', 500), memset(deep + 500, ')', 499), deep[999] = 0;
    CHECK(column(deep, "a", 0) == -2);
}

static void lines(void) {
    const char *error, *text = "one\ntwo foo\nthree\nfour foo\n";
    static const char *const patterns[] = {"foo", "oo+", "f\\w*$", ".*foo"};
    for (size_t i = 0; i < 4; i++) {
        struct regex *re = regex_compile(patterns[i], strlen(patterns[i]), 0, &error);
        const uint8_t *at = (const uint8_t *)text, *end = at + strlen(text), *resume, *hit = regex_find(re, at, end, SIZE_MAX, &resume);
        CHECK(hit && hit >= at + 8 && hit <= at + 11);
        hit = regex_find(re, at + 12, end, SIZE_MAX, &resume);
        CHECK(hit && hit >= at + 23 && hit <= at + 26);
        CHECK(!regex_find(re, at, end, 2, &resume) && resume == at + 4);
        regex_free(re);
    }
    at("e\\s*t", "one\ntwo", -1), at("[^z]*", "\n", 0);
}

// Expressions that take a backtracker ages, over text made for them.
static void linear_time(void) {
    static const char *const evil[] = {"(a*)*b", "(a|aa)+$b", "(x+x+)+y", "(.*.*.*)=z", "(a?){500}a{500}c", "([a-z]*[0-9]*)*!", "(.{0,30}a){30}q"};
    size_t size = 200000;
    char *text = malloc(size + 1);
    memset(text, 'a', size), text[size] = 0;
    struct timespec t0, t1;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    for (size_t i = 0; i < sizeof evil / sizeof *evil; i++) CHECK(column(evil[i], text, 0) == -1);
    clock_gettime(CLOCK_MONOTONIC, &t1);
    CHECK(t1.tv_sec - t0.tv_sec < 60);  // with sanitizers; a backtracker would not end today
    free(text);
}

int main(void) {
    syntax();
    lines();
    linear_time();
    return check_report();
}
