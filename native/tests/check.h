// What the C tests share: CHECK counts, check_report prints and gives the exit status.
#ifndef UNTAX_CHECK_H
#define UNTAX_CHECK_H

#include <stdio.h>

static int check_passed, check_failed;

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (condition) {                                                      \
            check_passed++;                                                   \
        } else {                                                              \
            check_failed++;                                                   \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);   \
        }                                                                     \
    } while (0)

static inline int check_report(void) {
    printf("%d passed, %d failed\n", check_passed, check_failed);
    return check_failed != 0;
}

#endif
