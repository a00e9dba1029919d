"""Runs a fuzz target until it has taken so many frames, and checks what it holds on to meanwhile."""

import argparse
import gc
import os
import sys
import time

_GROWTH_MAX_MIB = 16  # the allocator's own noise over 10⁷ frames; one leaked byte for each of them would show
_WARM_SHARE = 0.1  # caches and arenas are filled by then


def run(targets):
    """`targets`: names to functions (seed) that give a step, which feeds some frames and returns how many were taken, and a clean-up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("frames", type=int)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", choices=targets)
    options = parser.parse_args()
    for name, target in targets.items():
        if options.only in (None, name):
            _one(name, target, options.frames, options.seed)


def _one(name, target, most, seed):
    step, clean_up = target(seed)
    frames, begun, warm = 0, time.monotonic(), None
    try:
        while frames < most:
            frames += step()
            if warm is None and frames >= most * _WARM_SHARE:
                warm = _held()
        seconds, after = time.monotonic() - begun, _held()
    except BaseException:
        print(f"{name}: failed after {frames} frames; again with --only {name} --seed {seed}", file=sys.stderr)
        raise
    finally:
        clean_up()
    print(
        f"{name}: {frames} frames in {seconds:.0f} s, {frames / seconds:.0f} a second; "
        f"resident {warm[0]:.1f} MiB after a tenth, {after[0]:.1f} MiB at the end; {warm[1]} and {after[1]} descriptors; seed {seed}",
        flush=True,
    )
    if after[0] > warm[0] + _GROWTH_MAX_MIB or after[1] > warm[1]:
        sys.exit(f"{name}: what is held grew")


def _held():
    """Resident memory in MiB and open descriptors."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / (1 << 20), len(os.listdir("/proc/self/fd"))
