"""What a sandbox uses, read off its own /proc without starting more than one program. For people and their graphs, not for limits."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from untax.core.errors import UntaxError
from untax.core.result import CommandResult
from untax.service.e2b.sandbox import Sample

if TYPE_CHECKING:
    from untax.service.e2b.sandbox import Sandbox

_PROCESSES_MAX = 512
_STAT_MAX = 4096
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


async def sample(sandbox: Sandbox) -> Sample:
    """One more, kept with those before it; processor time is since the last one."""
    box = sandbox.box
    pids = [entry.name for entry in await box.list("/proc") if entry.name.isdigit()][:_PROCESSES_MAX]
    batch = box.batch()
    for pid in pids:
        batch.read(f"/proc/{pid}/stat", limit=_STAT_MAX)
    batch.run(["df", "-B1", "--output=used,size", "/"], timeout_s=5.0)
    *stats, disk = await batch.send()
    ticks = pages = 0
    for stat in stats:
        if not isinstance(stat, UntaxError):
            used, resident = _read(stat)
            ticks, pages = ticks + used, pages + resident
    now = time.time()
    last: Sample | None = sandbox.samples[-1] if sandbox.samples else None
    since, before = (last.at, last.cpu_ticks) if last is not None else (sandbox.holding.began, 0)
    pct = 100.0 * max(0, ticks - before) / _TICKS / max(now - since, 0.001)
    disk_used, disk_total = _disk(disk, sandbox.holding.box.spec.limits.disk_mib << 20)
    taken = Sample(now, ticks, pct, pages * _PAGE, disk_used, disk_total)
    sandbox.samples.append(taken)
    return taken


def _read(stat: bytes) -> tuple[int, int]:
    """Ticks of a process and its reaped children, and its resident pages, from /proc/PID/stat."""
    fields = stat.rpartition(b")")[2].split()
    try:
        return sum(int(one) for one in fields[11:15]), max(0, int(fields[21]))
    except (IndexError, ValueError):
        return 0, 0


def _disk(found: object, limit: int) -> tuple[int, int]:
    if isinstance(found, CommandResult) and found.exit_code == 0:
        numbers = found.stdout.split()[-2:]
        if len(numbers) == 2 and all(one.isdigit() for one in numbers):
            return int(numbers[0]), min(int(numbers[1]), limit)
    return 0, limit
