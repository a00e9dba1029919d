// The socket between agent and worker: frames both ways, with descriptors attached where a frame needs them.
//
// Nothing here blocks except link_recv when asked to. What cannot be sent yet is queued with its descriptors.
#ifndef UNTAX_LINK_H
#define UNTAX_LINK_H

#include "io.h"
#include "wire.h"

#define LINK_FDS_HELD 64  // received and not taken yet; more is a broken peer

struct link_mark {
    size_t at;  // the descriptors travel with the byte at this place in `out`
    size_t count;
    int fds[FDS_MAX];
};

struct link {
    int fd;
    bool broken;
    struct wr out;  // frames are appended here with frame_begin … frame_end
    size_t sent;
    struct link_mark *marks;
    size_t marks_count, marks_room;
    struct wr in;
    size_t taken;
    int fds[LINK_FDS_HELD];
    size_t fds_count;
};

void link_init(struct link *l, int fd);
void link_free(struct link *l);
// These descriptors go with the frame that is appended next. They belong to the link, which closes them once sent.
bool link_attach(struct link *l, const int *fds, size_t count);
// Sends what the socket takes. False: the other side is gone.
bool link_flush(struct link *l);
static inline size_t link_queued(const struct link *l) { return l->out.size - l->sent; }

// Receives once. 1: something came, 0: nothing there (never when waiting), -1: ended or broken.
int link_recv(struct link *l, bool wait);
// The next whole frame; its bytes are valid until the next link_recv. NULL: none; `broken` may be set.
uint8_t *link_next(struct link *l, struct frame *f, size_t *size);
// Takes descriptors in the order of their arrival; false (and none taken) when there are fewer.
bool link_take_fds(struct link *l, int *fds, size_t count);

#endif
