// the Python tokenizer, on what the running Python may be too old to compare with
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "symbols.h"

static char seen[4096];

static bool note(void *context, const struct symbol *s) {
    (void)context;
    size_t at = strlen(seen);
    snprintf(seen + at, sizeof seen - at, "%u%c%.*s ", s->line, " fac"[s->kind], (int)s->name_size, s->name);
    return true;
}

static void expect(const char *source, const char *want) {
    seen[0] = 0;
    uint8_t *copy = malloc(strlen(source) + 1);  // of its own size: reading past the end is noticed
    memcpy(copy, source, strlen(source));
    symbols_find(copy, strlen(source), note, NULL);
    if (strcmp(seen, want) != 0) fprintf(stderr, "in %s\ngot %s, not %s\n", source, seen, want);
    CHECK(strcmp(seen, want) == 0);
    free(copy);
}

int main(void) {
    expect("def f(): pass\nclass A:\n  async def g(self): pass\n  def h(self):\n    class B: pass\nx = 1\n", "1ff 2cA 3aA.g 4fA.h 5cA.h.B ");
    expect("\xef\xbb\xbf" "def f(): pass", "1ff ");
    expect("class A:\r\n\tdef f(self): pass\r\n\r\nclass B: pass\r\n", "1cA 2fA.f 4cB ");
    expect("class A:\r def f(self): pass\rclass B: pass", "1cA 2fA.f 3cB ");
    expect("def f():\n  pass\ntry:\n  class C: pass\nexcept E:\n  def g(): pass\n", "1ff 4cC 6fg ");
    expect("x = '''\ndef no(): pass\n'''; y = \"\\\"\\\ndef no(): pass\"\ndef yes(): pass\n", "5fyes ");
    expect("x = R\"\\\"; class \"\ndef yes(): pass\n", "2fyes ");
    // nested as 3.12 allows it
    expect("x = f\"{d[\"a\"]}\"\ndef yes(): pass\n", "2fyes ");
    expect("x = f'{f'{f'{1}'}'}'\ndef yes(): pass\n", "2fyes ");
    expect("x = f'{\n  # it's a comment }'\n  a}'\ndef yes(): pass\n", "4fyes ");
    expect("x = f'''{a:{'''w'''}}\ndef no(): pass\n'''\ndef yes(): pass\n", "4fyes ");
    expect("x = f\"{a!r:>{w}} {{ }} {b != c}\"\ndef yes(): pass\n", "2fyes ");
    expect("x = rf'\\{a}' f'\\N{DASH}' t'{b}'\ndef yes(): pass\n", "2fyes ");
    expect("x = f'{lambda x: 1}' f'{(lambda: {1: \"}\"})}'\ndef yes(): pass\n", "2fyes ");
    expect("@d(\ndef_)\ndef \\\n f(): pass\nasync \\\n  def g(): pass\n", "3ff 5ag ");
    expect("\fdef f(): pass\n   \fclass A:\n  x = 1\n  def g(): pass\n", "1ff 2cA 4fA.g ");
    expect("if x:\n\tdef f():\n\t\tpass\n        def g(): pass\n", "2ff 4fg ");
    expect("def f[T: int](a): pass\ntype X = int\nclass A[T]: pass\n", "1ff 3cA ");
    expect("a = 0xdef\nx = (1,\ndef_)\nasync with a: pass\nclassy = define = 1\n", "");
    expect("def f():\n    x = 1 \\\n  + 2\n    def g(): pass\n", "1ff 4ff.g ");
    // broken ones must end, and not run into each other for ever
    expect("def", "");
    expect("def \\", "");
    expect("async", "");
    expect("x = '\ndef yes(): pass\n", "2fyes ");
    expect("x = f'{\n", "");
    expect("x = f'{a:", "");
    expect("x = f'{a:\\", "");
    expect("x = '\\", "");
    expect("\\", "");
    expect("  \\\n  \\\n", "");
    char *deep = malloc(40001);
    for (int i = 0; i < 10000; i++) memcpy(deep + i * 4, "f'{ ", 4);
    deep[40000] = 0;
    expect(deep, "");
    for (int i = 0; i < 10000; i++) memcpy(deep + i * 4, "f'{:{", 4);
    expect(deep, "");
    free(deep);
    return check_report();
}
