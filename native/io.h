// Descriptors and time: what every part of the cell needs from the kernel and nothing more.
#ifndef UNTAX_IO_H
#define UNTAX_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define FDS_MAX 8  // descriptors in one message

// `autoclose int fd = …;` closes at the end of its block; set it to -1 to keep it.
#define autoclose __attribute__((cleanup(io_autoclose)))
void io_autoclose(int *fd);
void io_close(int *fd);  // closes when open, and forgets

uint64_t io_now_ns(void);  // CLOCK_MONOTONIC
bool io_nonblocking(int fd);
// Room for a stream window in a socket, as far as the host allows: large transfers then need fewer turns of sender and receiver.
void io_roomy(int sock);

// One sendmsg/recvmsg with descriptors attached. Result as of write and read; EINTR is retried.
ssize_t io_send_fds(int sock, const void *data, size_t size, const int *fds, size_t count);
// Received descriptors are close-on-exec. When not all that were sent could be, because they are more than FDS_MAX or than this process may have, none is kept: -1 with EMFILE.
ssize_t io_recv_fds(int sock, void *data, size_t size, int *fds, size_t *count);

// Writes all of it to a blocking descriptor; false on any failure.
bool io_write_all(int fd, const void *data, size_t size);
// Opens, reads up to size-1 bytes, terminates with NUL; -1 on failure. `dir` as for openat.
ssize_t io_read_file(int dir, const char *path, char *out, size_t size);
// Opens an existing file for writing and writes the text in one call; 0, or -1 with errno.
int io_write_file(int dir, const char *path, const char *text);

#endif
