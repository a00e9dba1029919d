"""The layers of an image as a chain in the store, and those of them that another image which begins the same way has brought.

A layer in the store is made of its own archive and of those below it, so it is known by all their contents together. What
is noted here is a hint: the layer it names is looked at before it is used, and may be gone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.core.stage import key_of
from untax.layers.sources import Fetched, Progress
from untax.layers.sources._image import MOST_BYTES, PackedLayer
from untax.layers.sources.config import ReadConfig
from untax.layers.unpack import unpack

if TYPE_CHECKING:
    from untax.layers.store import Layer, LayerStore

_VERSION = 1  # raised when the same archive is unpacked to something else than before
_KEPT_S = 90 * 86_400  # notes about layers that nobody has asked for this long
_NAME_BYTES = 64
_MOST_NOTES = 1000


_EMPTY = "empty"


class Chain:
    """The layers of one image from the bottom up, as its config names them."""

    def __init__(self, store: LayerStore, what: str, config: ReadConfig) -> None:
        self._store, self._what, self._config = store, what, config
        self._directory = store.downloads / "chains"
        self._unpacked = 0
        self._known = [self._find(at) for at in range(len(config.diff_ids))]

    @property
    def missing(self) -> list[int]:
        """The heights at which a layer has to be brought."""
        return [at for at, known in enumerate(self._known) if known is None]

    def put(self, layers: Sequence[PackedLayer], *, check: Callable[[], None], progress: Progress) -> Fetched:
        """Unpack those that are missing, each over those below it and held to its digest in the config."""
        placed: dict[str, Path] = {}
        notes = list(self._config.notes)
        for at, layer in enumerate(layers):
            known = self._known[at]
            if known is None:
                known, left_out = self._unpack(at, layer, tuple(placed.values()), check, progress)
                notes += [f"left out of layer {at + 1}: {one}" for one in left_out]
                self._note(at, known)
            if not isinstance(known, str):
                placed.pop(known.id, None)  # one that comes twice counts where it comes last: overlay takes no directory twice
                placed[known.id] = known.tree
        if not placed:
            raise StageFailed("image", f"{self._what}: there is nothing in it")
        return Fetched(tuple(placed), self._config.config, tuple(notes[:_MOST_NOTES]))

    def _unpack(
        self, at: int, layer: PackedLayer, below: tuple[Path, ...], check: Callable[[], None], progress: Progress
    ) -> tuple[Layer | str, tuple[str, ...]]:
        def on_read(read: int) -> None:
            check()
            progress(f"unpack layer {at + 1} of {len(self._known)}", read, layer.size)

        with contextlib.closing(layer.open()) as file, self._store.draft() as draft:
            wanted = self._config.diff_ids[at]
            try:
                found = unpack(file, draft.tree, marks=self._store.marks, below=below, digest=layer.digest, diff_id=wanted, on_read=on_read)
            except StageFailed as exc:
                raise StageFailed("image", f"{self._what}, layer {at + 1}: {exc.message}", exc.log) from exc
            self._unpacked += found.bytes
            if self._unpacked > MOST_BYTES:
                raise StageFailed("image", f"{self._what}: its layers unpack to more than {MOST_BYTES} bytes")
            return draft.publish() if found.entries else _EMPTY, found.notes

    def _find(self, at: int) -> Layer | str | None:
        """The layer at this height if it is in the store, held there until a record names it."""
        path = self._path(at)
        try:
            noted = path.read_text(encoding="ascii")
            os.utime(path)
            return noted if noted == _EMPTY else self._store.reuse(noted)
        except (OSError, ValueError, UsageError, StageUnavailable):
            return None

    def _note(self, at: int, layer: Layer | str) -> None:
        """Remember it for the next image. Failing to is no failure."""
        path = self._path(at)
        making = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, exist_ok=True)
            try:
                making.write_text(layer if isinstance(layer, str) else layer.id, encoding="ascii")
                making.replace(path)
            finally:
                making.unlink(missing_ok=True)

    def _path(self, at: int) -> Path:
        return self._directory / key_of({"v": _VERSION, "marks": self._store.marks, "layers": self._config.diff_ids[: at + 1]})


def sweep(directory: Path) -> None:
    """Forget what nobody has asked about for long, and what a dead process left half written."""
    with contextlib.suppress(OSError):
        for path in (directory / "chains").iterdir():
            with contextlib.suppress(OSError):
                age_s = time.time() - path.lstat().st_mtime
                if age_s > (_KEPT_S if len(path.name) == _NAME_BYTES else 3600):
                    path.unlink()
