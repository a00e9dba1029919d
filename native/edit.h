// Changing the content of files in place: what edit and patch share.
#ifndef UNTAX_EDIT_H
#define UNTAX_EDIT_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

// Reads a regular file whole; 0 or errno (EFBIG above FILE_WHOLE_MAX). The caller frees `*data`.
int load_file(int fd, const struct stat *st, uint8_t **data, size_t *size);
// Makes the new content out of the old one, in place, so that links, owner and mode stay. 0 or errno, and then the old content is back;
// EIO when that failed as well.
int replace_content(int fd, const uint8_t *old, size_t old_size, const uint8_t *new, size_t new_size);

#endif
