// Prints the definitions in Python files as "path<TAB>line<TAB>kind<TAB>name": what tests/integration/test_symbols_against_ast.py compares with `ast`.
// The paths come on standard input, one in each line.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "symbols.h"

static bool print(void *path, const struct symbol *s) {
    printf("%s\t%u\t%d\t%.*s\n", (const char *)path, s->line, (int)s->kind, (int)s->name_size, s->name);
    return true;
}

int main(void) {
    char *path = NULL;
    size_t room = 0;
    ssize_t size;
    while ((size = getline(&path, &room, stdin)) > 0) {
        if (path[size - 1] == '\n') path[size - 1] = 0;
        FILE *file = fopen(path, "rb");
        if (!file) {
            perror(path);
            return 1;
        }
        fseek(file, 0, SEEK_END);
        long length = ftell(file);
        rewind(file);
        uint8_t *text = malloc((size_t)length + 1);
        if (!text || fread(text, 1, (size_t)length, file) != (size_t)length) return 1;
        fclose(file);
        symbols_find(text, (size_t)length, print, path);
        free(text);
    }
    free(path);
    return 0;
}
