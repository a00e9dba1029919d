"""A snapshot: the files of a box at one moment, and its processes when it is a live one, to begin other boxes from."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Literal

from untax.core.errors import UsageError
from untax.core.spec import EnvSpec

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.ground import Ground

How = Literal["swapped", "cloned", "stored", "live"]


class Snapshot:
    """Made by `box.snapshot()`. Lasts until `drop`, or as long as its engine; saved, until it is dropped.

    What boxes stand on stays in place while they do, whatever becomes of the snapshot.
    """

    def __init__(self, engine: Engine, spec: EnvSpec, ground: Ground, how: How, elapsed_s: float, snapshot_id: str | None = None) -> None:
        self.id = snapshot_id or f"snap-{secrets.token_hex(12)}"
        self.spec = spec
        """Of the box it was taken of, late bindings included: what is not said anew for a fork is as it was there."""
        self.how = how
        """`"swapped"`: nothing was copied. `"cloned"`: something was open for writing, so it was copied while frozen. `"stored"`: read back.
        `"live"`: processes and their memory are in it too."""
        self.elapsed_s = elapsed_s
        self._engine = engine
        self._ground: Ground | None = ground
        self._is_saved = snapshot_id is not None

    def __repr__(self) -> str:
        return f"<Snapshot {self.id} {'saved' if self._is_saved else 'kept'} of {self.spec.image!r}>"

    @property
    def is_saved(self) -> bool:
        return self._is_saved

    @property
    def is_live(self) -> bool:
        """Whether boxes that begin from it go on with its processes."""
        return self.how == "live"

    async def save(self) -> str:
        """Put it into the store, where it outlives the engine; gives its id, by which any engine of the same state directory finds it.

        `StageUnavailable` when the store is full. The spec is stored with it, its variables included; of a live one all that its processes
        have in memory, and it goes on only with the same software below it on the same kind of processor.
        """
        if not self._is_saved:
            await self._engine.warehouse.shelf.save(self)
        return self.id

    async def drop(self) -> None:
        """Let go of it, in the store too; no box can begin from it any more. Safe to call twice."""
        await self._engine.warehouse.shelf.drop(self)

    # ---- for the engine ----

    @property
    def engine(self) -> Engine:
        return self._engine

    def check_kept(self) -> None:
        """`UsageError` once it was dropped."""
        _ = self.ground

    @property
    def ground(self) -> Ground:
        """`UsageError` once it was dropped."""
        if self._ground is None:
            raise UsageError(f"snapshot {self.id} was dropped, or went with its engine; save() what is to last")
        return self._ground

    def moved_to(self, ground: Ground) -> None:
        """The same files at another place, held for it: what it stood on before is let go."""
        if self._ground is None:
            ground.release()  # dropped meanwhile
        else:
            self._ground.release()
            self._ground = ground

    def was_saved(self) -> None:
        self._is_saved = True

    def let_go(self) -> None:
        ground, self._ground = self._ground, None
        if ground is not None:
            ground.release()
