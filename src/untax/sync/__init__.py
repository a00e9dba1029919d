"""The same names, blocking: for programs without an event loop, from any number of threads, and inside a running loop.

Lifecycles are carried out by an event loop in a thread of the engine's own. The actions of a sandbox without network go
straight over its socket, in the caller's thread, because two hops between threads would cost more than the action; with a
network the loop has to serve it and carries the actions too.
"""

from __future__ import annotations

import untax
from untax.sync.box import Batch, Box
from untax.sync.engine import Engine, connect
from untax.sync.lease import Lease
from untax.sync.snapshot import Snapshot
from untax.sync.streams import Connection, Process, Session, Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from untax.sync.fleet import Fleet

__all__ = ["Batch", "Box", "Connection", "Engine", "Fleet", "Lease", "Process", "Session", "Snapshot", "Watch", "connect"]


def __getattr__(name: str) -> object:
    """Specs, limits, results and errors are the same ones."""
    if name == "Fleet":
        from untax.sync.fleet import Fleet

        return Fleet
    return getattr(untax, name)
