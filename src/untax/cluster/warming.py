"""What a client wants kept ready in all of its fleet: spread evenly over the nodes, and anew when one comes or goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from untax.cluster.elsewhere import named
from untax.core.errors import UntaxError
from untax.core.spec import EnvSpec

log = logging.getLogger("untax.fleet")


class Node(Protocol):
    label: str

    async def warm(self, spec: EnvSpec, n: int) -> None: ...


class Warming:
    """`usable` gives the nodes that take leases now. Belongs to one event loop."""

    def __init__(self, usable: Callable[[], Sequence[Node]]) -> None:
        self._usable = usable
        self._wanted: dict[EnvSpec, int] = {}
        self._over: frozenset[Node] = frozenset()  # that it was spread over last
        self._spreading: set[asyncio.Task[None]] = set()

    async def warm(self, spec: EnvSpec, n: int) -> None:
        """That many in all, from now on. The share of a node that cannot goes to the others; raises what the first said when none can, and
        then what was wanted before holds. That none are wanted any more has to reach every node, or is raised.
        """
        nodes = able = list(self._usable())
        if n == 0:
            self._wanted.pop(spec, None)
        while able:
            found = await asyncio.gather(*(node.warm(spec, share) for node, share in _shares(able, n)), return_exceptions=True)
            failed = [(node, exc) for node, exc in zip(able, found, strict=True) if exc is not None]
            for node, exc in failed:
                if not isinstance(exc, UntaxError):
                    raise exc
                if len(failed) == len(able) or n == 0:
                    raise named(node.label, exc) from exc
                log.warning("node %s keeps none of %s ready, the others have its share: %s", node.label, spec.image, exc)
            if not failed:
                break
            able = [node for node, exc in zip(able, found, strict=True) if exc is None]
        if n:
            self._wanted[spec] = n
        self._over = frozenset(nodes)
        self.changed()  # somebody may have come meanwhile

    def changed(self) -> None:
        """Nodes may have come or gone."""
        nodes = self._usable()
        now = frozenset(nodes)
        if not self._wanted or not nodes or now == self._over:
            return
        self._over = now
        for task in self._spreading:
            task.cancel()  # it was over other nodes
        for spec, n in self._wanted.items():
            task = asyncio.get_running_loop().create_task(self._spread(spec, n, nodes))
            self._spreading.add(task)
            task.add_done_callback(self._spreading.discard)

    async def aclose(self) -> None:
        tasks = list(self._spreading)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _spread(self, spec: EnvSpec, n: int, nodes: Sequence[Node]) -> None:
        async def on(node: Node, share: int) -> None:
            try:
                await node.warm(spec, share)
            except UntaxError as exc:  # nobody asked for it just now, and a lease that fails is told why
                log.warning("node %s keeps none of %s ready: %s", node.label, spec.image, exc)

        await asyncio.gather(*(on(node, share) for node, share in _shares(nodes, n)))


def _shares(nodes: Sequence[Node], n: int) -> list[tuple[Node, int]]:
    return [(node, n // len(nodes) + (index < n % len(nodes))) for index, node in enumerate(nodes)]
