// Counts the frames that a fuzz target hands over. At UNTAX_FUZZ_FRAMES of them libFuzzer is asked to end: an input holds
// anything from none to hundreds, so a number of inputs says little.
#ifndef FRAMES_H
#define FRAMES_H

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static unsigned long frames_seen;
__attribute__((unused)) static bool frames_done;  // this input is the last, or nearly: libFuzzer leaves by _Exit, without atexit

static void frames_count(unsigned n) {
    static unsigned long most;
    static struct timespec begun;
    if (!frames_seen) {
        const char *given = getenv("UNTAX_FUZZ_FRAMES");
        most = given ? strtoul(given, NULL, 10) : 0;
        clock_gettime(CLOCK_MONOTONIC, &begun);
    }
    bool below = frames_seen < most;
    frames_seen += n;
    if (!below || frames_seen < most) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double seconds = (double)(now.tv_sec - begun.tv_sec) + (double)(now.tv_nsec - begun.tv_nsec) / 1e9;
    fprintf(stderr, "frames: %lu in %.0f s, %.0f a second\n", frames_seen, seconds, (double)frames_seen / seconds);
    frames_done = true;
    raise(SIGUSR1);  // libFuzzer ends after this input, with its statistics and status 0
}

#endif
