// Parser to syntax tree, tree to program, program to a DFA that is built while it runs and thrown away when it grows too large.
#define _GNU_SOURCE
#include "regex.h"

#include <stdlib.h>
#include <string.h>

#define PROGRAM_MAX 20000   // instructions
#define NODES_MAX 20000
#define REPEAT_MAX 1000
#define NESTING_MAX 200
#define STATES_MAX 2048     // of the DFA, before it is begun anew
#define POOL_MAX (1u << 20) // instruction numbers in all states together
#define NONE (-1)

struct set {
    uint64_t bits[4];
};
static bool set_has(const struct set *s, unsigned b) { return s->bits[b >> 6] >> (b & 63) & 1; }
static void set_add(struct set *s, unsigned b) { s->bits[b >> 6] |= UINT64_C(1) << (b & 63); }
static void set_range(struct set *s, unsigned from, unsigned to) {
    for (unsigned b = from; b <= to; b++) set_add(s, b);
}

// 0-9, A-Z, _, a-z, and everything beyond ASCII
static const struct set word_bytes = {{UINT64_C(0x3ff) << '0', UINT64_C(0x07fffffe87fffffe), UINT64_MAX, UINT64_MAX}};
static bool is_word(unsigned b) { return set_has(&word_bytes, b); }

enum node_type { N_EMPTY, N_SET, N_CAT, N_ALT, N_REPEAT, N_ASSERT };
enum assertion { A_BEGIN, A_END, A_WORD, A_NOT_WORD, A_OPEN, A_CLOSE };  // the last two: no word character before, after

struct node {
    enum node_type type;
    int a, b;           // children; N_ASSERT: a is which
    int least, most;    // N_REPEAT; most NONE: no end
    struct set set;
};

enum op { OP_SET, OP_SPLIT, OP_ASSERT, OP_MATCH };
struct inst {
    enum op op;
    int x, y;           // next ones; OP_ASSERT: y is which
    struct set set;
};

enum before { BEFORE_BEGIN = 1, BEFORE_WORD = 2 };

struct state {
    uint32_t at, count; // its instructions in the pool
    uint8_t before;     // what the previous byte was
    uint32_t hash;
};

struct regex {
    struct inst *program;
    int size, start;
    uint8_t class_of[256];
    uint8_t sample[256];        // a byte of each class
    int classes;                // the newline's is the last
    uint8_t *must;              // a literal that every match contains
    size_t must_size;
    bool only_must;             // a line that contains it matches
    // the DFA
    struct state states[STATES_MAX];
    int count;
    int32_t *next;              // [state][class]: state, UNKNOWN or MATCHED
    uint32_t *pool;
    uint32_t pool_size;
    int next_room, pool_room;   // states and numbers that there is room for; both grow
    int32_t table[STATES_MAX * 2];
    // room for building a state
    uint32_t *marks, *stack, *list, mark;
    size_t *starts[2];          // for regex_column
    uint32_t *threads[2];
};

enum { UNKNOWN = -1, MATCHED = -2 };

// ---- parsing ----

struct parser {
    const uint8_t *at, *end;
    struct node *nodes;
    int count, room, depth;
    bool fold;
    const char *error;
};

static int parse_alternatives(struct parser *p);

// Doubles an array that is full, up to `most`; false when it may or can not grow.
static bool grow(void **data, int *room, int most, size_t each) {
    int more = *room ? *room * 2 : 64;
    if (more > most) more = most;
    void *bigger = more > *room ? realloc(*data, (size_t)more * each) : NULL;
    if (!bigger) return false;
    *data = bigger;
    *room = more;
    return true;
}

static int node_new(struct parser *p, enum node_type type, int a, int b) {
    if (p->error) return 0;
    if (p->count == p->room && !grow((void **)&p->nodes, &p->room, NODES_MAX, sizeof *p->nodes)) {
        p->error = "the expression is too large";
        return 0;
    }
    p->nodes[p->count] = (struct node){.type = type, .a = a, .b = b};
    return p->count++;
}

static int complain(struct parser *p, const char *words) {
    if (!p->error) p->error = words;
    return 0;
}

static int node_set(struct parser *p, struct set s) {
    int n = node_new(p, N_SET, 0, 0);
    if (p->error) return 0;
    if (p->fold)
        for (unsigned c = 'a'; c <= 'z'; c++) {
            if (set_has(&s, c)) set_add(&s, c - 32);
            if (set_has(&s, c - 32)) set_add(&s, c);
        }
    s.bits[0] &= ~(UINT64_C(1) << '\n');  // a match never crosses a line
    p->nodes[n].set = s;
    return n;
}

static int node_byte(struct parser *p, unsigned b) {
    struct set s = {0};
    set_add(&s, b);
    return node_set(p, s);
}

static int node_range(struct parser *p, unsigned from, unsigned to) {
    struct set s = {0};
    set_range(&s, from, to);
    return node_set(p, s);
}

static int node_cat(struct parser *p, int a, int b) { return node_new(p, N_CAT, a, b); }

// Any UTF-8 sequence of more than one byte, or a byte that cannot begin one.
static int node_beyond_ascii(struct parser *p) {
    struct set stray = {0};
    set_range(&stray, 0x80, 0xc1);
    set_range(&stray, 0xf5, 0xff);
    int tail = node_range(p, 0x80, 0xbf);
    int two = node_cat(p, node_range(p, 0xc2, 0xdf), tail);
    int three = node_cat(p, node_range(p, 0xe0, 0xef), node_cat(p, tail, tail));
    int four = node_cat(p, node_range(p, 0xf0, 0xf4), node_cat(p, tail, node_cat(p, tail, tail)));
    return node_new(p, N_ALT, node_set(p, stray), node_new(p, N_ALT, two, node_new(p, N_ALT, three, four)));
}

static int sequence_size(const uint8_t *at, const uint8_t *end) {
    int size = *at < 0xc2 ? 1 : *at < 0xe0 ? 2 : *at < 0xf0 ? 3 : *at < 0xf5 ? 4 : 1;
    for (int i = 1; i < size; i++)
        if (at + i >= end || (at[i] & 0xc0) != 0x80) return 1;
    return size;
}

static int node_character(struct parser *p) {
    int size = sequence_size(p->at, p->end), n = node_byte(p, *p->at++);
    while (--size > 0) n = node_cat(p, n, node_byte(p, *p->at++));
    return n;
}

// \d and its like; false when `c` names no class. `beyond`: it holds the characters outside of ASCII.
static bool class_escape(uint8_t c, struct set *s, bool *beyond) {
    struct set one = {0};
    switch (c | 32) {
        case 'd': set_range(&one, '0', '9'); break;
        case 'w': set_range(&one, '0', '9'), set_range(&one, 'a', 'z'), set_range(&one, 'A', 'Z'), set_add(&one, '_'); break;
        case 's': set_range(&one, 9, 13), set_add(&one, ' '); break;
        default: return false;
    }
    bool negated = c < 'a';
    *beyond |= (c == 'w') || (negated && c != 'W');
    for (unsigned b = 0; b < 128; b++)
        if (set_has(&one, b) != negated) set_add(s, b);
    return true;
}

static int hex(uint8_t c) { return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : NONE; }

// After a backslash: one byte, or NONE with a complaint.
static int byte_escape(struct parser *p) {
    uint8_t c = *p->at++;
    switch (c) {
        case 't': return '\t';
        case 'n': return '\n';
        case 'r': return '\r';
        case 'f': return '\f';
        case 'v': return '\v';
        case 'a': return '\a';
        case '0': return 0;
        case 'x':
            if (p->end - p->at >= 2 && hex(p->at[0]) >= 0 && hex(p->at[1]) >= 0) {
                p->at += 2;
                return hex(p->at[-2]) * 16 + hex(p->at[-1]);
            }
            complain(p, "\\x needs two hexadecimal digits");
            return NONE;
        default: break;
    }
    if (c >= '1' && c <= '9') {
        complain(p, "back references are not supported");
        return NONE;
    }
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) {
        complain(p, "unknown escape");
        return NONE;
    }
    return c;
}

static int node_any_of(struct parser *p, struct set ascii, bool beyond) {
    int n = node_set(p, ascii);
    return beyond ? node_new(p, N_ALT, n, node_beyond_ascii(p)) : n;
}

// [:alpha:] and its like, p->at behind "[:"; false when it is none.
static bool posix_class(struct parser *p, struct set *s) {
    static const struct { const char *name; const char *ranges; } known[] = {
        {"alpha:]", "azAZ"}, {"digit:]", "09"}, {"alnum:]", "09azAZ"}, {"upper:]", "AZ"}, {"lower:]", "az"}, {"space:]", "\t\r  "},
        {"blank:]", "\t\t  "}, {"punct:]", "!/:@[`{~"}, {"xdigit:]", "09afAF"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        size_t size = strlen(known[i].name);
        if ((size_t)(p->end - p->at) < size || memcmp(p->at, known[i].name, size) != 0) continue;
        for (const char *r = known[i].ranges; *r; r += 2) set_range(s, (uint8_t)r[0], (uint8_t)r[1]);
        p->at += size;
        return true;
    }
    return false;
}

static int parse_class(struct parser *p) {
    struct set s = {0};
    bool negated = p->at < p->end && *p->at == '^', beyond = false, first = true, wide_members = false;
    int wide = NONE;  // characters outside of ASCII, as alternatives
    if (negated) p->at++;
    for (;; first = false) {
        if (p->at >= p->end) return complain(p, "[ is not closed");
        if (*p->at == ']' && !first) break;
        if (*p->at >= 0x80) {
            int one = node_character(p);
            wide = wide == NONE ? one : node_new(p, N_ALT, wide, one);
            wide_members = true;
            if (p->at + 1 < p->end && *p->at == '-' && p->at[1] != ']') return complain(p, "ranges beyond ASCII are not supported");
            continue;
        }
        int from = *p->at++;
        if (from == '[' && p->at < p->end && *p->at == ':') {
            p->at++;
            if (posix_class(p, &s)) continue;
            p->at--;
        }
        if (from == '\\') {
            if (p->at >= p->end) return complain(p, "a backslash at the end");
            if (class_escape(*p->at, &s, &beyond)) {
                p->at++;
                continue;
            }
            if (*p->at == 'b') p->at++, from = '\b';
            else if ((from = byte_escape(p)) == NONE) return 0;
        }
        int to = from;
        if (p->end - p->at >= 2 && *p->at == '-' && p->at[1] != ']') {
            p->at++;
            to = *p->at++;
            if (to == '\\') {
                if (p->at >= p->end) return complain(p, "a backslash at the end");
                if ((to = byte_escape(p)) == NONE) return 0;
            }
            if (to < from) return complain(p, "a range runs backwards");
            if (to >= 0x80 && from < 0x80) return complain(p, "ranges beyond ASCII are not supported");
        }
        set_range(&s, (unsigned)from, (unsigned)to);
    }
    p->at++;
    if (negated && wide_members) return complain(p, "characters beyond ASCII in [^…] are not supported");
    if (negated) {
        if (p->fold)
            for (unsigned c = 'a'; c <= 'z'; c++)
                if (set_has(&s, c) || set_has(&s, c - 32)) set_add(&s, c), set_add(&s, c - 32);
        struct set other = {0};
        for (unsigned b = 0; b < 128; b++)
            if (!set_has(&s, b)) set_add(&other, b);
        bool fold = p->fold;
        p->fold = false;
        int n = node_any_of(p, other, !beyond);
        p->fold = fold;
        return n;
    }
    int n = node_any_of(p, s, beyond);
    return wide == NONE ? n : node_new(p, N_ALT, n, wide);
}

static int parse_group(struct parser *p) {
    if (p->end - p->at >= 2 && p->at[0] == '?') {
        if (p->at[1] == ':') p->at += 2;
        else if (p->at[1] == 'P' && p->end - p->at >= 3 && p->at[2] == '<') {
            while (p->at < p->end && *p->at != '>') p->at++;
            if (p->at < p->end) p->at++;
        } else return complain(p, "of the groups with (? only (?:…) and (?P<name>…) are supported");
    }
    if (++p->depth > NESTING_MAX) return complain(p, "parentheses are nested too deeply");
    int n = parse_alternatives(p);
    p->depth--;
    if (p->error) return 0;
    if (p->at >= p->end || *p->at != ')') return complain(p, "( is not closed");
    p->at++;
    return n;
}

static int parse_escape(struct parser *p) {
    if (p->at >= p->end) return complain(p, "a backslash at the end");
    struct set s = {0};
    bool beyond = false;
    if (class_escape(*p->at, &s, &beyond)) {
        p->at++;
        return node_any_of(p, s, beyond);
    }
    switch (*p->at) {
        case 'b': p->at++; return node_new(p, N_ASSERT, A_WORD, 0);
        case 'B': p->at++; return node_new(p, N_ASSERT, A_NOT_WORD, 0);
        case 'A': p->at++; return node_new(p, N_ASSERT, A_BEGIN, 0);
        case 'Z': p->at++; return node_new(p, N_ASSERT, A_END, 0);
        default: break;
    }
    if (*p->at >= 0x80) return node_character(p);
    int b = byte_escape(p);
    return b == NONE ? 0 : node_byte(p, (unsigned)b);
}

static int parse_atom(struct parser *p) {
    struct set all = {0};
    switch (*p->at) {
        case '.': p->at++; set_range(&all, 0, 127); return node_any_of(p, all, true);
        case '[': p->at++; return parse_class(p);
        case '(': p->at++; return parse_group(p);
        case '\\': p->at++; return parse_escape(p);
        case '^': p->at++; return node_new(p, N_ASSERT, A_BEGIN, 0);
        case '$': p->at++; return node_new(p, N_ASSERT, A_END, 0);
        case '*': case '+': case '?': return complain(p, "nothing to repeat");
        default: return node_character(p);
    }
}

// {m}, {m,}, {,n} or {m,n} at p->at; anything else is an ordinary brace.
static bool parse_braces(struct parser *p, int *least, int *most) {
    const uint8_t *at = p->at + 1;
    int value[2] = {NONE, NONE}, which = 0;
    for (; at < p->end && *at != '}'; at++) {
        if (*at == ',' && which == 0) {
            which = 1;
        } else if (*at >= '0' && *at <= '9') {
            int v = value[which] == NONE ? 0 : value[which];
            value[which] = v > REPEAT_MAX ? v : v * 10 + (*at - '0');
        } else {
            return false;
        }
    }
    if (at >= p->end || (value[0] == NONE && value[1] == NONE)) return false;
    *least = value[0] == NONE ? 0 : value[0];
    *most = which ? value[1] : *least;
    p->at = at + 1;
    if (*least > REPEAT_MAX || *most > REPEAT_MAX) complain(p, "a repetition of more than 1000");
    else if (*most != NONE && *most < *least) complain(p, "a repetition runs backwards");
    return true;
}

static int parse_repeat(struct parser *p) {
    int n = parse_atom(p);
    bool repeated = false;
    while (!p->error && p->at < p->end) {
        int least, most;
        if (*p->at == '*') p->at++, least = 0, most = NONE;
        else if (*p->at == '+') p->at++, least = 1, most = NONE;
        else if (*p->at == '?') p->at++, least = 0, most = 1;
        else if (*p->at != '{' || !parse_braces(p, &least, &most)) break;
        if (p->error) break;
        if (repeated) return complain(p, "multiple repeat");
        repeated = true;
        if (p->at < p->end && *p->at == '?') p->at++;  // which of several matches is taken does not matter to a line
        n = node_new(p, N_REPEAT, n, 0);
        if (!p->error) p->nodes[n].least = least, p->nodes[n].most = most;
    }
    return n;
}

static int parse_alternatives(struct parser *p) {
    int all = NONE;
    for (;;) {
        int one = NONE;
        while (!p->error && p->at < p->end && *p->at != '|' && *p->at != ')') {
            int n = parse_repeat(p);
            one = one == NONE ? n : node_cat(p, one, n);
        }
        if (one == NONE) one = node_new(p, N_EMPTY, 0, 0);
        all = all == NONE ? one : node_new(p, N_ALT, all, one);
        if (p->error || p->at >= p->end || *p->at != '|') return all;
        p->at++;
    }
}

static int parse(struct parser *p, int flags) {
    if (flags & REGEX_LITERAL) {
        int n = NONE;
        while (p->at < p->end && !p->error) {
            int c = node_byte(p, *p->at++);
            n = n == NONE ? c : node_cat(p, n, c);
        }
        return n == NONE ? node_new(p, N_EMPTY, 0, 0) : n;
    }
    if (p->end - p->at >= 4 && memcmp(p->at, "(?i)", 4) == 0) p->at += 4, p->fold = true;
    int n = parse_alternatives(p);
    if (!p->error && p->at < p->end) return complain(p, ") without (");
    return n;
}

// ---- the literal that every match contains ----

struct literal {
    uint8_t run[256], best[256];
    size_t run_size, best_size;
};

static void literal_break(struct literal *l) {
    if (l->run_size > l->best_size) memcpy(l->best, l->run, l->run_size), l->best_size = l->run_size;
    l->run_size = 0;
}

static int only_byte(const struct set *s) {
    int only = NONE;
    for (int w = 0; w < 4; w++) {
        if (!s->bits[w]) continue;
        if (only != NONE || s->bits[w] & (s->bits[w] - 1)) return NONE;
        only = w * 64 + __builtin_ctzll(s->bits[w]);
    }
    return only;
}

static void literal_of(const struct parser *p, int n, struct literal *l, bool *exact) {
    // The left spine of a long chain is as deep as the text is long, so it is unrolled.
    int chain[NODES_MAX > 512 ? 512 : NODES_MAX], depth = 0;
    while (p->nodes[n].type == N_CAT && depth < 512) chain[depth++] = p->nodes[n].b, n = p->nodes[n].a;
    for (;;) {
        const struct node *node = &p->nodes[n];
        int b = node->type == N_SET ? only_byte(&node->set) : NONE;
        if (b != NONE) {
            if (l->run_size == sizeof l->run) literal_break(l), *exact = false;
            l->run[l->run_size++] = (uint8_t)b;
        } else if (node->type == N_CAT && depth < 512) {
            literal_of(p, n, l, exact);
        } else if (node->type != N_EMPTY) {
            literal_break(l);
            *exact = false;
        }
        if (!depth) return;
        n = chain[--depth];
    }
}

// ---- compiling ----

struct compiler {
    const struct parser *p;
    struct inst *program;
    int size, room;
    bool failed;
};

static int inst_new(struct compiler *c, enum op op, int x, int y) {
    if (c->size == c->room && !grow((void **)&c->program, &c->room, PROGRAM_MAX, sizeof *c->program)) c->failed = true;
    if (c->failed) return 0;
    c->program[c->size] = (struct inst){.op = op, .x = x, .y = y};
    return c->size++;
}

// The instructions for a node, given what follows it; gives where they begin.
static int emit(struct compiler *c, int n, int next) {
    for (;;) {
        if (c->failed) return 0;
        const struct node *node = &c->p->nodes[n];
        switch (node->type) {
            case N_EMPTY: return next;
            case N_SET: {
                int at = inst_new(c, OP_SET, next, 0);
                if (!c->failed) c->program[at].set = node->set;
                return at;
            }
            case N_ASSERT: return inst_new(c, OP_ASSERT, next, node->a);
            case N_CAT:
                next = emit(c, node->b, next);
                n = node->a;  // no recursion down the left spine
                continue;
            case N_ALT: {
                int b = emit(c, node->b, next);
                return inst_new(c, OP_SPLIT, emit(c, node->a, next), b);
            }
            case N_REPEAT: break;
        }
        int at = next;
        if (node->most == NONE) {
            at = inst_new(c, OP_SPLIT, 0, next);
            int body = emit(c, node->a, at);
            if (!c->failed) c->program[at].x = body;
        } else {
            for (int i = node->least; i < node->most && !c->failed; i++) at = inst_new(c, OP_SPLIT, emit(c, node->a, at), next);
        }
        for (int i = 0; i < node->least && !c->failed; i++) at = emit(c, node->a, at);
        return at;
    }
}

// Splits each class into what is in the set and what is not, where both are something.
static int split_classes(struct set *classes, int count, const struct set *by) {
    for (int k = 0, before = count; k < before; k++) {
        struct set in, out;
        uint64_t some_in = 0, some_out = 0;
        for (int w = 0; w < 4; w++) {
            some_in |= in.bits[w] = classes[k].bits[w] & by->bits[w];
            some_out |= out.bits[w] = classes[k].bits[w] & ~by->bits[w];
        }
        if (some_in && some_out) classes[k] = out, classes[count++] = in;
    }
    return count;
}

// Bytes that no instruction and no assertion tells apart share a class, which keeps the DFA's rows short.
static void find_classes(struct regex *re) {
    static const struct set newline = {{UINT64_C(1) << '\n'}};
    struct set classes[256] = {{{UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX}}};
    int count = split_classes(classes, split_classes(classes, 1, &newline), &word_bytes);
    for (int i = 0; i < re->size; i++)
        if (re->program[i].op == OP_SET) count = split_classes(classes, count, &re->program[i].set);
    re->classes = count;
    for (int k = 0; k < count; k++)
        for (int w = 0; w < 4; w++)
            for (uint64_t left = classes[k].bits[w]; left; left &= left - 1) {
                re->sample[k] = (uint8_t)(w * 64 + __builtin_ctzll(left));
                re->class_of[re->sample[k]] = (uint8_t)k;
            }
}

void regex_free(struct regex *re) {
    if (!re) return;
    free(re->program);
    free(re->must);
    free(re->next);
    free(re->pool);
    free(re->marks);
    free(re->stack);
    free(re->list);
    for (int i = 0; i < 2; i++) free(re->starts[i]), free(re->threads[i]);
    free(re);
}

static void dfa_reset(struct regex *re) {
    re->count = 0;
    re->pool_size = 0;
    memset(re->table, 0xff, sizeof re->table);
}

static bool allocate(struct regex *re) {
    size_t n = (size_t)re->size + 2;
    re->next_room = 16, re->pool_room = (int)n + 256;  // any one state fits
    re->next = malloc(sizeof *re->next * (size_t)re->next_room * (size_t)re->classes);
    re->pool = malloc(sizeof *re->pool * (size_t)re->pool_room);
    re->marks = calloc(n, sizeof *re->marks);
    re->stack = malloc(sizeof *re->stack * n * 2);
    re->list = malloc(sizeof *re->list * n);
    for (int i = 0; i < 2; i++) re->starts[i] = malloc(sizeof **re->starts * n), re->threads[i] = malloc(sizeof **re->threads * n);
    return re->next && re->pool && re->marks && re->stack && re->list && re->starts[0] && re->starts[1] && re->threads[0] && re->threads[1];
}

static struct regex *build(struct parser *p, int root, int flags) {
    if (flags & REGEX_WORDS) {
        int open = node_new(p, N_ASSERT, A_OPEN, 0), close = node_new(p, N_ASSERT, A_CLOSE, 0);
        root = node_cat(p, node_cat(p, open, root), close);
    }
    if (p->error) return NULL;
    struct regex *re = calloc(1, sizeof *re);
    struct compiler c = {.p = p};
    struct literal l = {.run_size = 0};
    bool exact = true;
    if (re) {
        int match = inst_new(&c, OP_MATCH, 0, 0);
        re->start = emit(&c, root, match);
        literal_of(p, root, &l, &exact);
        literal_break(&l);
    }
    if (!re || c.failed) {
        p->error = c.failed ? "the expression is too large" : "out of memory";
        free(c.program);
        free(re);
        return NULL;
    }
    struct inst *fit = realloc(c.program, sizeof *fit * (size_t)c.size);
    re->program = fit ? fit : c.program;
    re->size = c.size;
    find_classes(re);
    if (l.best_size) {
        re->must = malloc(l.best_size);
        if (re->must) memcpy(re->must, l.best, l.best_size), re->must_size = l.best_size, re->only_must = exact;
    }
    if (!allocate(re)) {
        p->error = "out of memory";
        regex_free(re);
        return NULL;
    }
    dfa_reset(re);
    return re;
}

struct regex *regex_compile(const void *pattern, size_t size, int flags, const char **error) {
    struct parser p = {.at = pattern, .end = (const uint8_t *)pattern + size, .fold = flags & REGEX_IGNORE_CASE};
    int root = parse(&p, flags);
    struct regex *re = p.error ? NULL : build(&p, root, flags);
    free(p.nodes);
    *error = p.error;
    return re;
}

// ---- the DFA ----

static bool holds(enum assertion which, uint8_t before, bool end, unsigned byte) {
    bool word_before = before & BEFORE_WORD, word_after = !end && is_word(byte);
    switch (which) {
        case A_BEGIN: return before & BEFORE_BEGIN;
        case A_END: return end;
        case A_WORD: return word_before != word_after;
        case A_NOT_WORD: return word_before == word_after;
        case A_OPEN: return !word_before;
        case A_CLOSE: return !word_after;
    }
    return false;
}

// All instructions reachable from `from` without consuming anything, given what lies on both sides. True: the match is among them.
// Sets are put into `list`; the caller begins a new mark for each position.
static bool closure(struct regex *re, uint32_t from, uint8_t before, bool end, unsigned byte, uint32_t *list, uint32_t *count) {
    uint32_t depth = 0;
    bool matched = false;
    re->stack[depth++] = from;
    while (depth) {
        uint32_t pc = re->stack[--depth];
        if (re->marks[pc] == re->mark) continue;
        re->marks[pc] = re->mark;
        const struct inst *i = &re->program[pc];
        switch (i->op) {
            case OP_MATCH: matched = true; break;
            case OP_SET: list[(*count)++] = pc; break;
            case OP_SPLIT: re->stack[depth++] = (uint32_t)i->x, re->stack[depth++] = (uint32_t)i->y; break;
            case OP_ASSERT:
                if (holds((enum assertion)i->y, before, end, byte)) re->stack[depth++] = (uint32_t)i->x;
                break;
        }
    }
    return matched;
}

static void new_mark(struct regex *re) {
    if (++re->mark) return;
    memset(re->marks, 0, sizeof *re->marks * ((size_t)re->size + 2));
    re->mark = 1;
}

static int by_number(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

// The state with these instructions (sorted), made when it is new. May begin the DFA anew, so the caller must not hold other states.
static int state_of(struct regex *re, uint32_t *list, uint32_t count, uint8_t before, bool *renewed) {
    uint32_t hash = 2166136261u ^ before;
    for (uint32_t i = 0; i < count; i++) hash = (hash ^ list[i]) * 16777619u;
    for (;;) {
        uint32_t slot = hash % (STATES_MAX * 2);
        for (; re->table[slot] >= 0; slot = (slot + 1) % (STATES_MAX * 2)) {
            const struct state *s = &re->states[re->table[slot]];
            if (s->hash == hash && s->count == count && s->before == before && memcmp(re->pool + s->at, list, count * sizeof *list) == 0) return re->table[slot];
        }
        bool room = re->count < re->next_room || grow((void **)&re->next, &re->next_room, STATES_MAX, sizeof *re->next * (size_t)re->classes);
        while (room && re->pool_size + count > (uint32_t)re->pool_room) room = grow((void **)&re->pool, &re->pool_room, POOL_MAX, sizeof *re->pool);
        if (room) {
            int s = re->count++;
            re->states[s] = (struct state){re->pool_size, count, before, hash};
            memcpy(re->pool + re->pool_size, list, count * sizeof *list);
            re->pool_size += count;
            re->table[slot] = s;
            for (int k = 0; k < re->classes; k++) re->next[(size_t)s * (size_t)re->classes + (size_t)k] = UNKNOWN;
            return s;
        }
        dfa_reset(re);
        *renewed = true;
    }
}

static int start_state(struct regex *re, bool *renewed) {
    uint32_t start = (uint32_t)re->start;
    return state_of(re, &start, 1, BEFORE_BEGIN, renewed);
}

// Where state `s` goes on a byte of this class. A match is noticed when the byte after it is seen.
static int32_t transition(struct regex *re, int32_t s, unsigned byte) {
    struct state from = re->states[s];
    bool end = byte == '\n';
    uint32_t live = 0, count = 0;
    new_mark(re);
    for (uint32_t i = 0; i < from.count; i++)
        if (closure(re, re->pool[from.at + i], from.before, end, byte, re->list, &live)) {
            re->next[(size_t)s * (size_t)re->classes + re->class_of[byte]] = MATCHED;
            return MATCHED;
        }
    bool renewed = false;
    int32_t to;
    if (end) {
        to = start_state(re, &renewed);
    } else {
        new_mark(re);
        uint32_t *list = re->list;  // compacted in place: `count` never overtakes
        for (uint32_t i = 0; i < live; i++) {
            const struct inst *in = &re->program[list[i]];
            if (!set_has(&in->set, byte) || re->marks[in->x] == re->mark) continue;
            re->marks[in->x] = re->mark;
            list[count++] = (uint32_t)in->x;
        }
        if (re->marks[re->start] != re->mark) list[count++] = (uint32_t)re->start;  // a match may begin anywhere
        if (count > 1) qsort(list, count, sizeof *list, by_number);
        to = state_of(re, list, count, is_word(byte) ? BEFORE_WORD : 0, &renewed);
    }
    if (!renewed) re->next[(size_t)s * (size_t)re->classes + re->class_of[byte]] = to;
    return to;
}

// The first place where a match is known to have ended before it, or NULL. Begins at the beginning of a line; the end counts as one.
static const uint8_t *run(struct regex *re, const uint8_t *at, const uint8_t *end) {
    bool renewed = false;
    int32_t s = start_state(re, &renewed);
    size_t classes = (size_t)re->classes;
    for (; at < end; at++) {
        int32_t to = re->next[(size_t)s * classes + re->class_of[*at]];
        if (to < 0) {
            if (to == UNKNOWN) to = transition(re, s, *at);
            if (to == MATCHED) return at;
        }
        s = to;
    }
    int32_t last = re->next[(size_t)s * classes + re->class_of['\n']];
    if (last == UNKNOWN) last = transition(re, s, '\n');
    return last == MATCHED ? end : NULL;
}

// How common a byte is in source text, coarsely: the search stops at the rarest of the needle's.
static int commonness(uint8_t b) {
    if (b == ' ' || b == 'e' || b == 't') return 9;
    if (strchr("aoinsrl_", b) && b) return 8;
    if (strchr("dcupmfh\n", b) && b) return 7;
    if ((b >= 'a' && b <= 'z') || strchr("().,=\"'", b)) return b == 'z' || b == 'q' || b == 'j' ? 2 : 5;
    if (b >= '0' && b <= '9') return 4;
    return b < 0x80 ? 3 : 1;
}

const uint8_t *find_bytes(const uint8_t *at, const uint8_t *end, const uint8_t *needle, size_t size) {
    if (!size) return at;
    size_t rare = 0;
    for (size_t i = 1; i < size; i++)
        if (commonness(needle[i]) < commonness(needle[rare])) rare = i;
    unsigned misses = 0;
    const uint8_t *from = at;
    while ((size_t)(end - at) >= size) {
        const uint8_t *hit = memchr(at + rare, needle[rare], (size_t)(end - at) - size + 1);
        if (!hit) return NULL;
        at = hit - rare;
        if (memcmp(at, needle, size) == 0) return at;
        at++;
        // Where the rare byte turns out to be common, memmem's own algorithm is the better one.
        if (++misses > 64 && (size_t)(at - from) / misses < 16) return memmem(at, (size_t)(end - at), needle, size);
    }
    return NULL;
}

static const uint8_t *line_start(const uint8_t *from, const uint8_t *at) {
    const uint8_t *newline = memrchr(from, '\n', (size_t)(at - from));
    return newline ? newline + 1 : from;
}

const uint8_t *regex_find(struct regex *re, const uint8_t *at, const uint8_t *end, size_t budget, const uint8_t **resume) {
    *resume = NULL;
    const uint8_t *stop = end;
    if ((size_t)(end - at) > budget) {  // to the end of the line that the budget runs out in
        const uint8_t *newline = memchr(at + budget, '\n', (size_t)(end - at) - budget);
        if (newline && newline + 1 < end) stop = *resume = newline + 1;
    }
    if (!re->must) {
        const uint8_t *hit = run(re, at, stop == end ? end : stop - 1);
        if (hit) *resume = NULL;
        return hit;
    }
    while (at < stop) {
        const uint8_t *hit = find_bytes(at, stop, re->must, re->must_size);
        if (!hit) return NULL;
        if (re->only_must) {
            *resume = NULL;
            return hit;
        }
        const uint8_t *line = line_start(at, hit), *line_end = memchr(hit, '\n', (size_t)(end - hit));
        if (!line_end) line_end = end;
        const uint8_t *found = run(re, line, line_end);
        if (found) {
            *resume = NULL;
            return found;
        }
        at = line_end + 1;
    }
    return NULL;
}

bool regex_matches(struct regex *re, const void *text, size_t size) {
    const uint8_t *at = text;
    return run(re, at, at + size) != NULL;
}

size_t regex_column(struct regex *re, const uint8_t *line, size_t size) {
    if (re->only_must) {
        const uint8_t *hit = find_bytes(line, line + size, re->must, re->must_size);
        return hit ? (size_t)(hit - line) : 0;
    }
    // Threads in the order of where they began, each instruction held by the earliest.
    uint32_t now = 0;
    size_t best = SIZE_MAX;
    uint32_t *threads = re->threads[0], *later = re->threads[1];
    size_t *starts = re->starts[0], *later_starts = re->starts[1];
    for (size_t i = 0;; i++) {
        bool end = i == size;
        unsigned byte = end ? '\n' : line[i];
        uint8_t before = i == 0 ? BEFORE_BEGIN : is_word(line[i - 1]) ? BEFORE_WORD : 0;
        if (best == SIZE_MAX) threads[now] = (uint32_t)re->start, starts[now++] = i;
        uint32_t after = 0;
        new_mark(re);
        for (uint32_t t = 0; t < now && starts[t] < best; t++) {
            uint32_t live = 0;
            if (closure(re, threads[t], before, end, byte, re->list, &live)) best = starts[t];
            for (uint32_t k = 0; k < live && !end; k++) {
                const struct inst *in = &re->program[re->list[k]];
                if (!set_has(&in->set, byte)) continue;
                later[after] = (uint32_t)in->x, later_starts[after++] = starts[t];
            }
        }
        if (end || (best != SIZE_MAX && !after)) return best == SIZE_MAX ? 0 : best;
        // `later` may name an instruction twice: the first, and so the earliest, wins at the next position through the marks.
        now = 0;
        new_mark(re);
        for (uint32_t t = 0; t < after; t++) {
            if (re->marks[later[t]] == re->mark) continue;
            re->marks[later[t]] = re->mark;
            later[now] = later[t], later_starts[now++] = later_starts[t];
        }
        uint32_t *swap = threads;
        threads = later, later = swap;
        size_t *swap_starts = starts;
        starts = later_starts, later_starts = swap_starts;
    }
}
