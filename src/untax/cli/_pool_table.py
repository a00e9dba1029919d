"""A pool as a table for people."""

from __future__ import annotations

from collections.abc import Iterator

from untax.pool.record import Watched
from untax.pool.status import PoolStatus, StageStatus

_HEAD = ("stage", "idle", "target", "leased", "making", "waiting", "cost", "what")


def status_lines(one: Watched) -> Iterator[str]:
    pool = one.pool
    yield f"engine {one.pid} on {pool.substrate}: {_room(pool)}; {pool.starting} starting of at most {pool.most_starting}"
    yield (
        f"  {pool.leases} leases: {pool.exact} exact, {pool.partial} partial, {pool.cold} cold; waited {pool.waited_s:.3f} s in all; "
        f"{pool.refused} refused"
    )
    yield (
        f"  {pool.made} made, {pool.failed} failed, {pool.died} died idle, {pool.rejected} found unfit; "
        f"a creation {_time(pool.create_s)}, a hand-out {_time(pool.bind_s)}"
    )
    rows = [_HEAD, *(_row(stage) for stage in pool.stages)]
    if len(rows) > 1:
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        for row in rows:
            cells = [
                cell.ljust(width) if place in (0, 7) else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            yield "  " + "  ".join(cells).rstrip()


def _row(stage: StageStatus) -> tuple[str, ...]:
    counts = (stage.idle, stage.target, stage.leased, stage.making, stage.waiting)
    return (stage.name, *map(str, counts), _time(stage.cost_s), stage.label)


def _room(pool: PoolStatus) -> str:
    text = f"{pool.sandboxes} sandboxes of at most {pool.most_sandboxes}"
    if pool.most_memory_mib is not None:
        text += f", {pool.memory_mib:.0f} MiB of {pool.most_memory_mib:.0f}"
    return text


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
