// Names that somebody else chose, kept inside one directory: no "..", no absolute name, and no link on the way.
#ifndef UNTAX_BENEATH_H
#define UNTAX_BENEATH_H

#include <stdbool.h>
#include <stddef.h>

// Takes "./", doubled and trailing slashes out, in place. False: absolute, or has "..", or a NUL. The directory itself becomes "".
bool beneath_clean(char *path, size_t size);
// Opens (O_PATH) the directory `path`, cleaned and not empty, below `root`; `make`: with mkdir of what is missing. -1 with errno, ELOOP: a link.
int beneath_dir(int root, const char *path, bool make);

#endif
