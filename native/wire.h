// Frames of the channel protocol (docs/protocol.md): constants, a bounded reader and a growing writer.
//
// Neither the reader nor the writer ever touches memory outside its buffer, whatever the bytes say. Both carry
// their failure along (`bad`, `failed`), so that a run of calls is checked once at its end.
#ifndef UNTAX_WIRE_H
#define UNTAX_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WIRE_MAGIC 0x31787475u  // "utx1"
#define WIRE_MAJOR 1
#define WIRE_MINOR 0

#define FRAME_HEADER 12u                    // length, id, kind, flags, zero
#define FRAME_MAX_IN (4u << 20)             // host to cell, counted after the length field
#define FRAME_MAX_OUT ((256u + 8u) << 10)   // cell to host
#define DATA_MAX (256u << 10)               // data in one OUT frame
#define STREAM_WINDOW (1u << 20)
#define REQUESTS_MAX 1024u
#define EGRESS_BIT 0x80000000u

enum frame_flags { FLAG_DEADLINE = 1, FLAG_KEY = 2 };
#define KEY_SIZE 16

enum frame_kind {
    K_HELLO = 0x01, K_CONFIGURE = 0x02, K_CANCEL = 0x03, K_BATCH = 0x04, K_PING = 0x05, K_CREDIT = 0x06, K_DATA = 0x07,
    K_QUIESCE = 0x08, K_GO_ON = 0x09, K_REBORN = 0x0a,
    K_SPAWN = 0x10, K_SIGNAL = 0x12, K_RESIZE = 0x13, K_PROCESSES = 0x14, K_ATTACH = 0x15,
    K_SESSION_OPEN = 0x18, K_SESSION_RUN = 0x19, K_SESSION_CLOSE = 0x1a,
    K_READ = 0x20, K_WRITE = 0x21, K_LIST = 0x23, K_STAT = 0x24, K_MKDIR = 0x25, K_REMOVE = 0x26, K_MOVE = 0x27,
    K_UPLOAD = 0x28, K_DOWNLOAD = 0x29, K_SEARCH = 0x2a, K_EDIT = 0x2b, K_PATCH = 0x2c, K_WATCH = 0x2d,
    K_MARK = 0x2e, K_MARKS = 0x2f,
    K_CONNECT = 0x30, K_EGRESS_OK = 0x31, K_EGRESS_DENY = 0x32,
    // between agent and worker only
    K_EXEC = 0x70, K_EXECED = 0x71, K_KILL = 0x72, K_KILLED = 0x73, K_PROBE = 0x74, K_PROBED = 0x75,
    // cell to host
    K_DONE = 0x80, K_STARTED = 0x81, K_OUT = 0x82, K_ITEMS = 0x83, K_ERROR = 0x8f, K_EGRESS = 0x90,
};

enum spawn_options { SPAWN_MERGE = 1, SPAWN_STREAM = 2, SPAWN_STDIN = 4, SPAWN_PTY = 8, SPAWN_SHELL = 16 };
enum outcome { OUTCOME_EXITED = 0, OUTCOME_SIGNALED = 1, OUTCOME_TIMEOUT = 2, OUTCOME_CANCELLED = 3 };
enum error_code {
    E_REJECTED = 1, E_OS = 2, E_SPAWN_FAILED = 3, E_GONE = 4, E_TOO_LARGE = 5, E_UNSUPPORTED = 6, E_VERSION = 7,
    E_CANCELLED = 8, E_DEADLINE = 9, E_CONFLICT = 10, E_BUSY = 11, E_NO_WORKER = 12,
};

// Bytes that belong to somebody else's buffer.
struct span {
    const uint8_t *at;
    uint32_t size;
};

// ---- reading ----

struct rd {
    const uint8_t *at, *end;
    bool bad;  // something was missing; everything read since is zero
};

struct rd rd_of(const void *data, size_t size);
uint8_t rd_u8(struct rd *r);
uint16_t rd_u16(struct rd *r);
uint32_t rd_u32(struct rd *r);
uint64_t rd_u64(struct rd *r);
int32_t rd_i32(struct rd *r);
struct span rd_bytes(struct rd *r);
struct span rd_rest(struct rd *r);
bool rd_done(const struct rd *r);  // read to the end and nothing was missing
// As rd_bytes, but bad when there is a NUL inside: for paths, arguments and variables.
struct span rd_name(struct rd *r);
// Skips over `strs`, checking every element with rd_name; gives the whole field for a second pass with rd_of.
struct span rd_strs(struct rd *r, uint32_t *count);

// The header of a frame that lies whole in memory, and its payload with deadline and key taken off.
struct frame {
    uint32_t id;
    uint8_t kind, flags;
    uint32_t deadline_ms;       // 0: none
    const uint8_t *key;         // NULL: none
    struct rd payload;
};

// How many bytes the frame at `data` takes: 0 when more are needed, -1 when it breaks the rules.
int64_t frame_size(const uint8_t *data, size_t size, uint32_t max);
// `data` must hold a whole frame as told by frame_size. False: a malformed header of a well-delimited frame.
bool frame_open(const uint8_t *data, size_t size, struct frame *out);

// ---- writing ----

// A growing buffer. When memory runs out it says so in `failed` and ignores what follows.
struct wr {
    uint8_t *data;
    size_t size, room;
    bool failed;
};

void wr_free(struct wr *w);
void wr_u8(struct wr *w, uint8_t v);
void wr_u16(struct wr *w, uint16_t v);
void wr_u32(struct wr *w, uint32_t v);
void wr_u64(struct wr *w, uint64_t v);
void wr_raw(struct wr *w, const void *data, size_t size);
void wr_bytes(struct wr *w, const void *data, size_t size);
// Room for `size` bytes at the end, or NULL; wr_commit says how many were used.
uint8_t *wr_reserve(struct wr *w, size_t size);
void wr_commit(struct wr *w, size_t size);

// A frame is begun, filled with the calls above, and ended, which fills in its length. Frames follow each other in one buffer.
size_t frame_begin(struct wr *w, uint32_t id, uint8_t kind);
void frame_end(struct wr *w, size_t begun);
void frame_error(struct wr *w, uint32_t id, uint16_t code, int error, const char *message);

#endif
