"""A fleet as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from untax.cli._terminal import one_line
from untax.service.fleet import NodeStatus

_ID = 12  # characters: Ray's ids have 56
_LEFT = ("node", "id", "state")


def fleet_lines(title: str, nodes: Sequence[NodeStatus], wanted: int = 0) -> Iterator[str]:
    """A line about all, one for each node, and what is wrong with those that are out."""
    states = [one.state for one in nodes]
    leases = sum(one.leases for one in nodes)
    counted = ", ".join(f"{states.count(state)} {state}" for state in ("in", "draining", "out") if state in states)
    yield f"{title}: {len(nodes)} nodes ({counted or 'none'}), {leases} leases{f', {wanted} more nodes asked of Ray' if wanted else ''}"
    stages = list(dict.fromkeys(name for one in nodes for name in one.idle))
    head = (*_LEFT, "leases", *(f"idle {name}" for name in stages), "starting", "waiting", "sandboxes")
    rows = [head, *(_row(one, stages) for one in nodes)]
    if nodes:
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        for row in rows:
            cells = [c.ljust(w) if at < len(_LEFT) else c.rjust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True))]
            yield "  " + "  ".join(cells).rstrip()
    for one in nodes:
        if one.trouble:
            yield f"  node {one_line(one.name)}: {one_line(one.trouble)}"


def _row(one: NodeStatus, stages: Sequence[str]) -> tuple[str, ...]:
    told = one.pool is not None
    counts = (
        one.leases,
        *(one.idle.get(name, 0) for name in stages),
        one.pool.starting if one.pool is not None else 0,
        one.waiting,
        one.pool.sandboxes if one.pool is not None else 0,
    )
    return (one_line(one.name), one.node_id[:_ID], one.state, *(str(count) if told else "–" for count in counts))
