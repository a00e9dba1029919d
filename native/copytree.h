// A directory tree copied as it is: contents with their holes, modes, owners, times, hard links, extended attributes, and what overlay has marked as gone.
#ifndef UNTAX_COPYTREE_H
#define UNTAX_COPYTREE_H

#include <stdbool.h>

// Owner, mode, extended attributes and times of an open file or directory, given to another; overlay's own marks only when asked for. 0, or -1 with errno.
int copy_attributes(int from, int to, bool with_marks);
// Everything below `from` into the empty directory `to`; data is shared where the file system can. `links` is an empty directory of the same file system for the
// hard links met on the way, and is empty again after success. No link is followed and nothing outside is touched, whatever happens in `from` meanwhile.
// 0, or -1 with errno; ELOOP: too deep.
int copy_tree(int from, int to, int links);

#endif
