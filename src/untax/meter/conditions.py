"""Under which conditions a run was made: how quiet the machine was, whether its clocks can be trusted, what a span costs.

Everything here takes a fraction of a second, before the first trial and again after the last.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from untax.core.span import PARTS, Clock, Stopwatch, now_ns

_PROBE_SAMPLES = 400
_PROBE_LOOPS = 2_000  # about 0.1 ms of work: a neighbour's time slice is many times that
_SPANS = 20_000
_COARSE_NS = 1_000  # a clock that steps further than this cannot time an action of a tenth of a millisecond
_APART = 200e-6  # of elapsed time: two clocks of one machine that disagree by more are being corrected hard
_TOLD_APART_NS = 100_000
# What the substrates of this machine are made of; each says its version in a line.
_ENGINES: Sequence[Sequence[str]] = (
    ("git", "--version"),
    ("docker", "--version"),
    ("podman", "--version"),
    ("runsc", "--version"),
    ("kubectl", "version", "--client"),
    ("qemu-system-x86_64", "--version"),
)


def noise_probe(samples: int = _PROBE_SAMPLES) -> dict[str, int]:
    """The same small work again and again: on a quiet machine every time takes as long as the last. Nanoseconds."""
    times = []
    for _ in range(samples):
        begin = now_ns()
        total = 0
        for number in range(_PROBE_LOOPS):
            total += number
        times.append(now_ns() - begin)
    times.sort()
    return {
        "p50_ns": times[len(times) // 2],
        "p95_ns": times[int(len(times) * 0.95)],
        "p99_ns": times[int(len(times) * 0.99)],
        "max_ns": times[-1],
        "steal_ticks": _steal_ticks(),
    }


def span_cost_ns(spans: int = _SPANS, clock: Clock = now_ns) -> int:
    """What the harness adds for each part that it cuts: the clock's reading and the entry in the account. The best of five."""
    best = None
    for _ in range(5):
        watch, parts = Stopwatch(clock), dict.fromkeys(PARTS, 0)
        begin = now_ns()
        for _number in range(spans):
            start, end = watch.part()
            parts["action"] += end - start
        cost = (now_ns() - begin) // spans
        best = cost if best is None else min(best, cost)
    return max(1, best or 1)


class ClockCheck:
    """Watches the measuring clock beside the wall clock from its making on. `report()` says whether anything was odd meanwhile."""

    def __init__(self) -> None:
        self._mono_ns = time.monotonic_ns()
        self._wall_ns = time.time_ns()
        self.step_ns = _step_ns()

    def report(self) -> dict[str, Any]:
        mono_ns = time.monotonic_ns() - self._mono_ns
        apart_ns = (time.time_ns() - self._wall_ns) - mono_ns
        reasons = []
        if self.step_ns > _COARSE_NS:
            reasons.append(f"the measuring clock moves in steps of {self.step_ns} ns")
        if abs(apart_ns) > max(_TOLD_APART_NS, mono_ns * _APART):
            reasons.append(f"the wall clock went {apart_ns / 1e6:+.3f} ms apart from the measuring clock in {mono_ns / 1e9:.1f} s")
        if time.get_clock_info("monotonic").adjustable:
            reasons.append("the measuring clock can be set")
        found: dict[str, Any] = {"ok": not reasons, "source": _clock_source(), "step_ns": self.step_ns, "wall_apart_ns": apart_ns}
        return {**found, "reason": "; ".join(reasons)} if reasons else found


def engine_versions() -> dict[str, str]:
    """The first line of what each tool that a substrate may use says about its version."""
    found = {}
    for argv in _ENGINES:
        if shutil.which(argv[0]) is None:
            continue
        try:
            said = subprocess.run(argv, capture_output=True, timeout=5, text=True, errors="replace", stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired):
            found[argv[0]] = "does not answer"
            continue
        found[argv[0]] = (said.stdout.strip() or said.stderr.strip()).partition("\n")[0][:200]
    return found


def _step_ns() -> int:
    """The smallest difference between two readings that differ."""
    best = 1 << 62
    for _ in range(200):
        first = later = time.monotonic_ns()
        while later == first:
            later = time.monotonic_ns()
        best = min(best, later - first)
    return best


def _clock_source() -> str:
    try:
        return Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _steal_ticks() -> int:
    """What a hypervisor has taken from all processors since the machine started."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
        return int(words[8])
    except (OSError, IndexError, ValueError):
        return 0
