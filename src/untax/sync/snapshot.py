"""A snapshot, blocking."""

from __future__ import annotations

from untax.snapshot import Snapshot as AsyncSnapshot
from untax.sync.loop import Loop


class Snapshot:
    """As `untax.Snapshot`, blocking."""

    def __init__(self, loop: Loop, inner: AsyncSnapshot) -> None:
        self._loop = loop
        self._inner = inner
        self.id = inner.id
        self.spec = inner.spec
        self.how = inner.how
        self.elapsed_s = inner.elapsed_s

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def is_saved(self) -> bool:
        return self._inner.is_saved

    def save(self) -> str:
        return self._loop.run(self._inner.save())

    def drop(self) -> None:
        self._loop.run(self._inner.drop())
