"""Control groups for sandboxes that are ordinary processes of this machine: made, held to limits, emptied and removed from here.

A version 2 tree where it has the controllers, those of version 1 for the rest; without either a limit is said not to hold. Groups of an engine
lie below one of its own, which carries the name of its holding, so that whoever sweeps finds them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from untax.core.spec import Limits
from untax.core.substrate import Unenforced
from untax.substrates._host import is_host_root

# Not as the launcher of the namespace substrate has it, which sweeps what it takes for its own.
_PREFIX = "untax.groups-"
_MIB = 1 << 20
_PERIOD_US = 100_000
_CONTROLLERS = {"memory": "memory_mib", "cpu": "cpus"}
_EMPTY_S = 5.0  # the kernel needs a millisecond for each process that dies
_LOOK_AGAIN_S = 0.002  # version 1 tells nobody when a group is empty


@dataclass(frozen=True, slots=True)
class _Tree:
    """One hierarchy, and what of it is ours to use."""

    parent: Path
    controllers: frozenset[str]
    is_unified: bool


class Groups:
    """Of one engine. `room_mib` is what a sandbox needs besides its own memory."""

    def __init__(self, owner: str, room_mib: int) -> None:
        self._name = _PREFIX + owner
        self._room_mib = room_mib
        self._trees = [tree for tree in _trees() if self._is_made(tree)]
        held = frozenset().union(*(tree.controllers for tree in self._trees))
        remedy = (
            "mount the cgroup controllers (cgroup v2, or v1 with memory and cpu)"
            if is_host_root()
            else "run the engine as root, or under `systemd-run --user --scope -p Delegate=yes`"
        )
        self.unenforced = tuple(
            Unenforced(limit, "no writable control group with this controller", remedy)
            for controller, limit in _CONTROLLERS.items()
            if controller not in held
        )

    def _is_made(self, tree: _Tree) -> bool:
        own = tree.parent / self._name
        try:
            own.mkdir(exist_ok=True)
            if tree.is_unified and tree.controllers:
                for place in (tree.parent, own):
                    (place / "cgroup.subtree_control").write_text(" ".join(f"+{one}" for one in sorted(tree.controllers)))
        except OSError:
            with contextlib.suppress(OSError):
                own.rmdir()
            return False
        return True

    def make(self, sandbox_id: str, limits: Limits) -> Group:
        """`OSError` when the kernel refuses; nothing is left of it then."""
        group = Group([(tree.parent / self._name / sandbox_id, tree) for tree in self._trees], self._room_mib)
        try:
            for path, _ in group.places:
                path.mkdir()
            group.bind(limits)
        except OSError:
            group.remove()
            raise
        return group

    def close(self) -> None:
        for tree in self._trees:
            with contextlib.suppress(OSError):
                (tree.parent / self._name).rmdir()


class Group:
    """Of one sandbox, in each tree."""

    def __init__(self, places: Sequence[tuple[Path, _Tree]], room_mib: int = 0) -> None:
        self.places = places
        self._room_mib = room_mib

    @property
    def joins(self) -> list[str]:
        """Where a process writes itself to be in it."""
        return [str(path / "cgroup.procs") for path, _ in self.places]

    @property
    def memory(self) -> tuple[Path, bool] | None:
        """Where its memory is counted, and whether as in version 2."""
        return next(((path, tree.is_unified) for path, tree in self.places if "memory" in tree.controllers), None)

    def bytes_for(self, limits: Limits) -> int:
        return (limits.memory_mib + self._room_mib) * _MIB

    def bind(self, limits: Limits) -> None:
        quota = max(1000, round(limits.cpus * _PERIOD_US))
        for path, tree in self.places:
            if "memory" in tree.controllers:
                self.allow(self.bytes_for(limits))
            if "cpu" in tree.controllers and tree.is_unified:
                (path / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
            elif "cpu" in tree.controllers:
                (path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (path / "cpu.cfs_quota_us").write_text(str(quota))

    def allow(self, size: int) -> None:
        """That many bytes of memory, and none elsewhere."""
        where = self.memory
        if where is None:
            return
        path, is_unified = where
        swap, value = (path / "memory.swap.max", "0") if is_unified else (path / "memory.memsw.limit_in_bytes", str(size))
        with contextlib.suppress(OSError):  # absent without swap accounting; then there is no swap to use
            swap.write_text(value)  # first, for a larger limit …
        (path / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text(str(size))
        with contextlib.suppress(OSError):
            swap.write_text(value)  # … and afterwards, for a smaller one

    def kill(self) -> None:
        """Whoever is in it."""
        for path, tree in self.places:
            with contextlib.suppress(OSError):
                if tree.is_unified:
                    (path / "cgroup.kill").write_text("1")

    def remove(self) -> bool:
        """Blocking: once it is empty. False: somebody in it does not die."""
        end = time.monotonic() + _EMPTY_S
        left = [path for path, tree in self.places if not _removed(path, tree.is_unified, end)]
        return not left


def sweep_groups(owner: str) -> bool:
    """Kill and remove what an engine that is no more left. False: something is still there."""
    is_clean = True
    for tree in _trees():
        own = tree.parent / (_PREFIX + owner)
        if own.is_dir():
            left = Group([(path, tree) for path in own.iterdir() if path.is_dir()])
            left.kill()
            for path, _ in left.places:
                _kill_each(path)
            is_clean &= left.remove()
            with contextlib.suppress(OSError):
                own.rmdir()
    return is_clean


def _kill_each(path: Path) -> None:
    """Where there is no kill of a whole group. Numbers are read and used at once; only members of the group are named there."""
    with contextlib.suppress(OSError):
        for number in map(int, (path / "cgroup.procs").read_text().split()):
            with contextlib.suppress(OSError):
                if number:  # 0: of another pid namespace, and to kill() our own group
                    os.kill(number, signal.SIGKILL)


def _removed(path: Path, is_unified: bool, end: float) -> bool:
    while True:
        try:
            path.rmdir()
            return True
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > end:
                return False
        if is_unified:
            _wait_empty(path, end)
        else:
            time.sleep(_LOOK_AGAIN_S)


def _wait_empty(path: Path, end: float) -> None:
    with contextlib.suppress(OSError), (path / "cgroup.events").open() as events:
        waiting = select.poll()
        waiting.register(events, select.POLLPRI)
        if "populated 1" in events.read():
            waiting.poll(max(0.0, end - time.monotonic()) * 1000)
        else:
            time.sleep(_LOOK_AGAIN_S)  # empty, and still refused: those who died are not forgotten yet


# ---- where ----


def _trees() -> list[_Tree]:
    """Those that this process may make groups in, the unified one first."""
    mounts = list(_mounts())
    own = _own_groups()
    found: list[_Tree] = []
    held: frozenset[str] = frozenset()
    for kind, _, inside, at in mounts:
        if kind == "cgroup2" and "" in own and (tree := _unified(at, inside, own[""])) is not None:
            found.append(tree)
            held = tree.controllers
            break
    for controller in sorted(_CONTROLLERS):
        for kind, options, inside, at in mounts:
            if kind == "cgroup" and controller in options and controller not in held and controller in own:
                place = _below(at, inside, own[controller])
                if os.access(place, os.W_OK):
                    found.append(_Tree(place, frozenset({controller}), False))
                break
    return found


def _unified(at: str, inside: str, group: str) -> _Tree | None:
    """The nearest that lets us write and has the controllers to give; a group with processes in it gives none, but still can be killed."""
    nearest: _Tree | None = None
    place, top = _below(at, inside, group), Path(at)
    while True:
        if os.access(place, os.W_OK) and os.access(place / "cgroup.procs", os.W_OK):
            has = _words(place / "cgroup.controllers") & frozenset(_CONTROLLERS)
            if nearest is None:
                nearest = _Tree(place, frozenset(), True)
            if has and (place == top or not _words(place / "cgroup.procs") or has <= _words(place / "cgroup.subtree_control")):
                return _Tree(place, has, True)
        if place == top or top not in place.parents:
            return nearest
        place = place.parent


def _words(path: Path) -> frozenset[str]:
    try:
        return frozenset(path.read_text().split())
    except OSError:
        return frozenset()


def _below(at: str, inside: str, group: str) -> Path:
    inner = group[len(inside) :] if inside != "/" and group.startswith(inside) else group
    return Path(at + "/" + inner.strip("/")) if inner.strip("/") else Path(at)


def _mounts() -> Iterator[tuple[str, frozenset[str], str, str]]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            fields = left.split()
            yield kind, frozenset(options.split(",")), fields[3], fields[4]


def _own_groups() -> dict[str, str]:
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        for name in names.split(","):
            if name or number == "0":
                own[name] = path
    return own
