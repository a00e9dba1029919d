#define _GNU_SOURCE
#include "input.h"

#include <errno.h>
#include <unistd.h>

#include "channel.h"
#include "io.h"

static size_t waiting_bytes;

size_t inputs_waiting(void) { return waiting_bytes; }

static void on_writable(struct source *s, uint32_t events) {
    (void)events;
    input_flush((struct input *)((char *)s - offsetof(struct input, source)));
}

void input_init(struct input *in, int fd, uint32_t id, void (*ended)(struct input *)) {
    *in = (struct input){.id = id, .ended = ended};
    source_init(&in->source, fd, on_writable);
}

static void credit(struct input *in, size_t written) {
    if (in->uncounted >= written) {
        in->uncounted -= written;
        return;
    }
    uint32_t bytes = (uint32_t)(written - in->uncounted);
    in->uncounted = 0;
    in->outstanding -= bytes;
    if (!in->id) return;
    size_t begun = frame_begin(&host, in->id, K_CREDIT);
    wr_u8(&host, 0);
    wr_u32(&host, bytes);
    frame_end(&host, begun);
}

bool input_data(struct input *in, struct span data, bool eof, bool counted) {
    if (counted) {
        if (data.size > STREAM_WINDOW - in->outstanding) return false;
        in->outstanding += data.size;
    } else {
        in->uncounted += data.size;
    }
    if (in->eof) return true;
    size_t before = in->waiting.size;
    wr_raw(&in->waiting, data.at, data.size);
    waiting_bytes += in->waiting.size - before;
    in->eof = eof;
    bool ok = !in->waiting.failed;
    input_flush(in);  // may end it, and free whoever holds it
    return ok;
}

void input_flush(struct input *in) {
    if (in->held) return;
    while (in->at < in->waiting.size) {
        size_t size = in->waiting.size - in->at;
        ssize_t n = in->discard || in->source.fd < 0 ? (ssize_t)size : write(in->source.fd, in->waiting.data + in->at, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            source_want(&in->source, EPOLLOUT);
            return;
        }
        if (n < 0) {  // nobody reads any more; what comes is still credited, so that the host does not wait for room
            in->discard = true;
            continue;
        }
        in->at += (size_t)n;
        credit(in, (size_t)n);
    }
    in->at = 0;
    waiting_bytes -= in->waiting.size;
    wr_free(&in->waiting);
    source_want(&in->source, 0);
    if ((in->eof || in->discard) && in->source.fd >= 0) in->ended(in);
}

void input_free(struct input *in) {
    source_close(&in->source);
    in->source.fd = -1;
    waiting_bytes -= in->waiting.size;
    wr_free(&in->waiting);
}
