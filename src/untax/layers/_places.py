"""Where things lie in a store's directory, and that this is a store of ours: private, of this format, for this kind of marks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from untax.core.errors import UsageError
from untax.layers import spares
from untax.layers._durable import read_json, replace_whole
from untax.layers._flock import open_lock
from untax.layers.marks import KINDS, Marks
from untax.layers.record import is_layer_id, require_layer_id

_log = logging.getLogger("untax.layers")
_FORMAT = 1


class Places:
    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.trees = self.root / "trees"
        self.stages = self.root / "stages"
        self.drafts = self.root / "drafts"
        self.damaged = self.root / "damaged"

    def make(self, marks: Marks) -> None:
        """What is not there yet. `UsageError` when it is somebody else's, or of another format or the other kind of marks."""
        _make_private(self.root)
        for path in (self.trees, self.stages, self.drafts, self.damaged, *(self.root / name for name in spares.PLACES)):
            path.mkdir(mode=0o700, exist_ok=True)
        with self.gate(fcntl.LOCK_EX):
            self._check_format(marks)

    @contextlib.contextmanager
    def gate(self, how: int) -> Iterator[None]:
        """Whoever begins something that a sweep might take for a leftover is in it, shared; a sweep has it alone."""
        fd = open_lock(self.root / ".gate")
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)

    def tree_of(self, layer_id: str) -> Path:
        return self.trees / require_layer_id(layer_id)

    def lock_of(self, layer_id: str) -> Path:
        return self.tree_of(layer_id) / "lock"

    def is_there(self, layer_id: str) -> bool:
        return (self.tree_of(layer_id) / "tree").is_dir()

    def layer_ids(self) -> list[str]:
        return sorted(name for name in os.listdir(self.trees) if is_layer_id(name))

    def free_bytes(self) -> int:
        """On the disk that holds it."""
        try:
            found = os.statvfs(self.root)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize

    def set_aside(self, path: Path, why: str) -> Path:
        """Take something damaged out of use without losing it; whoever stands on it keeps it."""
        aside = self.damaged / f"{path.name}-{secrets.token_hex(4)}"
        _log.warning("%s is damaged (%s): set aside as %s", path, why, aside)
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            pass  # another process found it at the same time
        return aside

    # ---- which format ----

    def _check_format(self, marks: Marks) -> None:
        path = self.root / "format"
        value: object = None
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            pass
        except ValueError as exc:
            self.set_aside(path, str(exc))
        if isinstance(value, dict) and value.get("marks") in KINDS and isinstance(value.get("version"), int):
            self._require_format(value["version"], value["marks"], marks)
            return
        if value is not None:
            self.set_aside(path, "it does not say which format this is")
        for layer_id in self.layer_ids():  # a lost file must not mix two kinds of marks
            facts = read_json(self.tree_of(layer_id) / "layer.json")
            if facts is not None and facts.get("marks") in KINDS:
                self._require_format(_FORMAT, facts["marks"], marks)
                break
        replace_whole(path, json.dumps({"version": _FORMAT, "marks": marks}).encode())

    def _require_format(self, version: int, found: object, marks: Marks) -> None:
        if version != _FORMAT:
            raise UsageError(f"the layers in {self.root} are of format {version}, and this release knows {_FORMAT}; name another state_dir")
        if found != marks:
            owner, other = ("root", "an ordinary user") if found == "trusted" else ("an ordinary user", "root")
            raise UsageError(f"the layers in {self.root} were made for {owner}; {other} needs a store of its own: name another state_dir")


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as exc:
        raise UsageError(f"the store {path}: something that is not a directory is in the way; name another state_dir") from exc
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"the store {path} is a link or not a directory; name another state_dir")
    if found.st_uid != os.geteuid():
        raise UsageError(f"the store {path} belongs to user {found.st_uid}; name another state_dir")
    if found.st_mode & 0o022:
        raise UsageError(f"the store {path} can be written by others; chmod 700 it, or name another state_dir")
