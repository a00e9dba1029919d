"""Frozen upper directories: layers that sandboxes of this engine left, and others stand on.

The launcher keeps them below its own directory. One stays until whoever took it has let go and no sandbox stands on
it: the kernel would keep the files of a mounted layer, but not what is looked up in it later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from untax.core.errors import BackendError
from untax.core.root import Root
from untax.substrates._launcher import DROP_LAYER, Answer, Launcher, LauncherRefused, pack

log = logging.getLogger("untax.namespace")


class FrozenLayers:
    """Who uses which of an engine's frozen layers, by directory."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._uses: Counter[str] = Counter()
        self._ids: dict[str, str] = {}

    def add(self, layer_id: str, directory: str) -> None:
        """A layer that was just made, used once: by whoever took it."""
        self._ids[directory] = layer_id
        self._uses[directory] = 1

    def hold(self, root: Root) -> None:
        for directory in root.layers:
            if directory in self._ids:
                self._uses[directory] += 1

    def let_go(self, root: Root) -> None:
        for directory in root.layers:
            self.let_go_of(directory)

    def let_go_of(self, directory: str) -> None:
        if directory not in self._ids:
            return
        self._uses[directory] -= 1
        if self._uses[directory] == 0:
            del self._uses[directory]
            self._drop(self._ids.pop(directory))

    def _drop(self, layer_id: str) -> None:
        try:
            dropped = self._launcher.ask(DROP_LAYER, pack(layer_id))
        except BackendError:
            return  # the launcher is gone, and its directory goes with the engine
        dropped.add_done_callback(_said)


def _said(dropped: asyncio.Future[Answer]) -> None:
    if not dropped.cancelled() and isinstance(exc := dropped.exception(), LauncherRefused):
        log.warning("a frozen layer could not be removed: %s; it goes with the engine", exc)


class FrozenUpper:
    """What one sandbox had written up to one moment."""

    def __init__(
        self, layer_id: str, root: Root, tree: Path, how: Literal["swapped", "cloned"], taken_ns: int, discard: Callable[[], None]
    ) -> None:
        self.id = layer_id
        self.root = root
        self.tree = tree
        self.how = how
        self.taken_ns = taken_ns
        """How long the sandbox stood still."""
        self._discard: Callable[[], None] | None = discard

    async def discard(self) -> None:
        discard, self._discard = self._discard, None
        if discard is not None:
            discard()
