// Definitions in a Python source: the names, kinds and lines that CPython's `ast` gives, found by a tokenizer.
//
// Names are given as they are written: NFKC normalisation, which Python applies to identifiers beyond ASCII, is left out.
#ifndef UNTAX_SYMBOLS_H
#define UNTAX_SYMBOLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum symbol_kind { SYMBOL_FUNCTION = 1, SYMBOL_ASYNC_FUNCTION = 2, SYMBOL_CLASS = 3 };

struct symbol {
    enum symbol_kind kind;
    uint32_t line, column;      // of `def`, `async` or `class`; both from 1, the column in bytes
    const char *name;           // dotted, with the definitions it stands in; valid until the next one
    size_t name_size;
};

// Calls `found` for each definition in the order of the text; false from it ends the search.
void symbols_find(const uint8_t *text, size_t size, bool (*found)(void *context, const struct symbol *), void *context);

#endif
