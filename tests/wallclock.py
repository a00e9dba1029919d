"""A wall clock that steps under one program only: a library that is loaded before all others answers for it."""

import shutil
import subprocess
from pathlib import Path

import pytest

SHIFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long shift(void) { return access(getenv("SHIFT_FLAG"), F_OK) == 0 ? atol(getenv("SHIFT_BY")) : 0; }
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int r = real(id, t);
    if (!r && id == CLOCK_REALTIME) t->tv_sec += shift();
    return r;
}
int gettimeofday(struct timeval *restrict t, void *restrict z) { (void)z; struct timespec s; clock_gettime(CLOCK_REALTIME, &s); t->tv_sec = s.tv_sec; t->tv_usec = s.tv_nsec / 1000; return 0; }
time_t time(time_t *t) { struct timespec s; clock_gettime(CLOCK_REALTIME, &s); if (t) *t = s.tv_sec; return s.tv_sec; }
"""


def shifted(place: Path, by_s: int) -> tuple[dict[str, str], Path]:
    """Variables to start a program with, and the file whose making steps its wall clock by so much."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (place / "shift.c").write_text(SHIFT)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", place / "shift.so", place / "shift.c", "-ldl"], check=True)
    flag = place / "flag"
    return {"LD_PRELOAD": str(place / "shift.so"), "SHIFT_FLAG": str(flag), "SHIFT_BY": str(by_s)}, flag
