"""What sandboxes stand on, and who still needs it.

A *support* is one thing below sandboxes: the pin on a stage's layers, a frozen layer of a snapshot. It is counted, and goes
when the last of its users lets go: snapshots, leases, and each sandbox until it is proven gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from untax.core.root import Root
from untax.core.stage import Stage


class Support:
    """Counted from one: whoever makes it is its first user."""

    __slots__ = ("_give_back", "_users")

    def __init__(self, give_back: Callable[[], object]) -> None:
        self._give_back = give_back
        self._users = 1

    @property
    def users(self) -> int:
        return self._users

    def hold(self) -> None:
        if self._users == 0:
            raise AssertionError("held after it was given back")
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._give_back()


@dataclass(frozen=True, slots=True)
class Own:
    """One layer above the stages."""

    directory: str
    """As the substrate names it."""
    tree: Path
    """Where this process can read it."""
    support: Support | None
    """What keeps it; None for one that the supports of the stages keep too."""
    level: int = 0
    """How often what is in it was flattened."""


@dataclass(frozen=True, slots=True)
class Ground:
    """A root with all that keeps it in place. `hold` and `release` are called in pairs, once per user."""

    root: Root
    stages: tuple[Stage, ...]
    """The rungs in it, lowest first; what lies above them is a snapshot's own."""
    stage_layers: int
    """How many of the root's layers are theirs."""
    supports: tuple[Support, ...]
    """What keeps these."""
    own: tuple[Own, ...] = ()
    """The layers above, bottom first."""

    def hold(self) -> Ground:
        for support in self._all():
            support.hold()
        return self

    def release(self) -> None:
        for support in self._all():
            support.release()

    def raised(self, root: Root, tree: Path, support: Support) -> Ground:
        """The same with one more layer on top, as `root` has it."""
        return replace(self, root=root, own=(*self.own, Own(root.layers[-1], tree, support)))

    def with_own(self, own: tuple[Own, ...]) -> Ground:
        """The same stages with other layers above them."""
        below = replace(self.root, layers=self.root.layers[: self.stage_layers])
        return replace(self, root=below.with_layers(*(one.directory for one in own)), own=own)

    def readable(self, count: int | None = None) -> Root:
        """The root by the names under which this process can read it, with the first `count` of the layers above the stages, or all."""
        own = (str(one.tree) for one in self.own[:count])
        return replace(self.root, layers=(*self.root.layers[: self.stage_layers], *own))

    def _all(self) -> list[Support]:
        return [*self.supports, *(one.support for one in self.own if one.support is not None)]
