// The byte stream to the host: whole frames in, a bounded queue of frames out.
#ifndef UNTAX_CHANNEL_H
#define UNTAX_CHANNEL_H

#include "loop.h"
#include "wire.h"

// `handle` gets each frame; its bytes are valid during the call. False from it closes the channel.
bool channel_open(int in, int out, bool (*handle)(const struct frame *, const uint8_t *raw, size_t size));
void channel_close(void);
bool channel_ended(void);
void channel_hang_up(void);  // after what is queued has been offered once
void channel_flush(void);

// Frames are appended here and sent before the next wait.
extern struct wr host;

// True while more is queued for the host than it has room for: whoever only passes data on should stop.
bool channel_congested(void);
// Watches `s` again (with `events`) once there is room.
void channel_resume_later(struct source *s, uint32_t events);
void channel_forget(struct source *s);
// What is queued now is still sent, and nothing behind it until channel_speak: a copy of this process then begins between two frames.
void channel_fall_silent(void);
bool channel_silent(void);
// `anew`: what waited was for somebody else and is dropped.
void channel_speak(bool anew);
// Stops taking requests for as long as `hold` is true (somebody else's queue is full).
void channel_hold(bool hold);

#endif
