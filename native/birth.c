#define _GNU_SOURCE
#include "birth.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096

static struct birth *map(int fd, int flags) {
    void *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

struct birth *birth_new(void) { return map(-1, MAP_ANONYMOUS); }

int birth_file(void) {
    int fd = memfd_create("birth", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && !ftruncate(fd, PAGE) && !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

struct birth *birth_map(int fd) {
    struct stat st;
    // A shorter file would kill whoever reads the map.
    if (fd < 0 || fstat(fd, &st) || st.st_size != PAGE || !(fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK)) return NULL;
    return map(fd, 0);
}

void birth_free(struct birth *b) {
    if (b) munmap(b, PAGE);
}
