"""What a sandbox may leave behind, and a comparison with how it was before.

Other programs on the host make and drop mounts, groups and processes all the time. Only what can be traced to this test is
compared: processes below this one (which is made their reaper, so that a daemon cannot hide by changing parents), groups and
mounts that carry one of the marks given, loop devices whose file lies below them.
"""

import contextlib
import ctypes
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests import hostview

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of whatever its children abandon."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True)
class Snapshot:
    mounts: frozenset[str] = frozenset()
    cgroups: frozenset[str] = frozenset()
    processes: frozenset[str] = frozenset()
    namespaces: frozenset[str] = frozenset()
    loops: frozenset[str] = frozenset()
    descriptors: frozenset[str] = frozenset()
    entries: frozenset[str] = frozenset()

    def more_than(self, before: "Snapshot") -> dict[str, list[str]]:
        """What there is now and was not before, by kind; empty when nothing is left over."""
        extra = {kind: sorted(getattr(self, kind) - getattr(before, kind)) for kind in self.__dataclass_fields__}
        extra["processes"] = [f"{name}: {hostview.seen(int(name.split()[0]))}" for name in extra["processes"]]
        return {kind: names for kind, names in extra.items() if names}


@dataclass
class Watch:
    """Marks of one test: strings that occur in the paths, groups and mounts it makes."""

    marks: tuple[str, ...]
    state_dir: Path | None = None
    spares: int = hostview.SPARES
    ignore_processes: Callable[[hostview.Seen], bool] = field(default=lambda process: False)

    def take(self) -> Snapshot:
        _reap_orphans()
        everyone = hostview.below(os.getpid())
        processes = [p for p in _without_parked(everyone, self.spares) if not self.ignore_processes(p)]
        waiting = sum(p.is_parked and p.state != "Z" for p in everyone) + 1 if self.spares else 0  # and one in the making
        return Snapshot(
            mounts=frozenset(line for line in _mounts() if self._is_ours(line)),
            cgroups=_without_spares((name for name in _cgroups() if self._is_ours(name)), waiting, self.spares),
            processes=frozenset(f"{p.pid} started {p.started}" for p in processes),
            namespaces=frozenset().union(*(_namespaces(p.pid) for p in processes), _namespaces("self")),
            loops=frozenset(line for line in _loops() if self._is_ours(line)),
            descriptors=frozenset(_descriptors()),
            entries=_without_spares(_entries(self.state_dir), waiting, self.spares),
        )

    def wait_like(self, before: Snapshot, within_s: float = 20.0) -> dict[str, list[str]]:
        """Look again until nothing is left over or the time is up; gives what is left over."""
        end = time.monotonic() + within_s
        while extra := self.take().more_than(before):
            if time.monotonic() > end:
                return extra
            time.sleep(0.02)
        return {}

    def _is_ours(self, text: str) -> bool:
        return any(mark in text for mark in self.marks)


def _without_spares(names: Iterable[str], waiting: int, parts: int) -> frozenset[str]:
    """What is made ahead of need comes and goes; only more of it than there may be is somebody's leftover.

    That is as many sandboxes as are `waiting`, and of each kind of part (`spare-1-blank`) as many as `parts`.
    """
    counts: Counter[str] = Counter()
    kept = set()
    for name in names:
        kind = re.sub(r"\bspare-\d+", "spare", name)
        counts[kind] += 1
        more = counts[kind] - (parts if re.search(r"\bspare-\d+-", name) else waiting)
        if kind == name:
            kept.add(name)
        elif more > 0:
            kept.add(f"{kind} #{more}")
    return frozenset(kept)


def _without_parked(processes: list[hostview.Seen], spares: int) -> list[hostview.Seen]:
    """Without as many sandboxes as may wait for a holder, and whatever works for one of them."""
    inits = {p.pid for p in sorted((p for p in processes if p.is_parked), key=lambda p: p.started, reverse=True)[:spares]}
    return [p for p in processes if p.pid not in inits and p.ppid not in inits]


def _reap_orphans() -> None:
    """Zombies that came to us only because we adopt orphans; init would have reaped them at once."""
    for process in hostview.below(os.getpid()):
        if process.state == "Z" and process.ppid == os.getpid() and process.pid not in _own_children:
            try:
                os.waitpid(process.pid, os.WNOHANG)
            except ChildProcessError:
                pass


_own_children: set[int] = set()  # pids that someone else here waits for


def _mounts() -> list[str]:
    with open("/proc/self/mountinfo") as mounts:
        # Field 0 is a mount id, which another program's mount may take next.
        return [line.split(" ", 2)[2].strip() for line in mounts]


def _cgroups() -> list[str]:
    return [where for where, _, _ in os.walk("/sys/fs/cgroup")]


def _namespaces(pid: int | str) -> frozenset[str]:
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/ns"):
            found.add(os.readlink(f"/proc/{pid}/ns/{name}"))
    except OSError:
        pass
    return frozenset(found)


def _loops() -> list[str]:
    found = []
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.append(f"{device.parts[3]} {device.read_text().strip()}")
        except OSError:
            pass
    return found


def _descriptors() -> list[str]:
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("/proc/"):
            continue
        kind = target.split(":")[0] if not target.startswith("/") else target
        found[kind] = found.get(kind, 0) + 1
    return [f"{kind} #{n}" for kind, count in found.items() for n in range(count)]


def _entries(state_dir: Path | None) -> list[str]:
    if state_dir is None or not state_dir.exists():
        return []
    found = []
    for where, directories, files in os.walk(state_dir):
        found += [os.path.relpath(os.path.join(where, name), state_dir) for name in directories + files]
    return found


def named(directory: Path, *prefixes: str) -> list[str]:
    """What lies below it under such a name. What goes meanwhile is gone."""
    return [os.path.join(place, name) for place, dirs, files in os.walk(directory) for name in (*dirs, *files) if name.startswith(prefixes)]


# ---- of whoever has a state directory, wherever they are: also children of process 1, and in other mount namespaces ----


def traces(state: Path, *, mark: str, groups: Iterable[str], is_other: Callable[[str, list[str]], bool]) -> dict[str, list[str]]:
    """What on this host belongs to the state directories below `state`, by kind.

    Processes are those with a path below it in their words, environment, descriptors or mounts, those in one of the control groups, and those
    that have `mark` in their environment, unless `is_other` says of its name and its words that it is somebody else's.
    """
    groups = tuple(groups)
    mounts: dict[str, list[str]] = {}
    processes = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid == os.getpid():
            continue
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in mounts:
                mounts[namespace] = [line for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines() if str(state) in line]
        except OSError:
            namespace = ""  # another user's, or gone by now
        is_elsewhere = namespace != os.readlink("/proc/self/ns/mnt") and bool(mounts.get(namespace))
        if is_elsewhere or _has_traces(pid, str(state), groups) or _is_marked(pid, mark, is_other):
            processes.append(f"{_text(pid, 'comm').strip()} {pid}")
    return {
        "processes": processes,
        "mounts": [line for lines in mounts.values() for line in lines],
        "groups": [name for name in _cgroups() if any(group in name for group in groups)],
        "loops": [line for line in _loops() if str(state) in line],
        "entries": [str(path) for pattern in ("*/fleet-*", "*/*/*engine-*") for path in state.glob(pattern)],
    }


def _has_traces(pid: int, state: str, groups: tuple[str, ...]) -> bool:
    if state in _text(pid, "cmdline") + _text(pid, "environ") or any(group in _text(pid, "cgroup") for group in groups):
        return True
    return any(target.startswith(state) for target in _links(pid))


def _is_marked(pid: int, mark: str, is_other: Callable[[str, list[str]], bool]) -> bool:
    if mark not in _text(pid, "environ").split("\0"):
        return False
    name, words = _text(pid, "comm").strip(), _text(pid, "cmdline").split("\0")
    return bool(name) and "".join(words) != "" and not is_other(name, words)  # neither gone nor about to be


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _links(pid: int) -> list[str]:
    """What it has open, and where it is."""
    found = []
    with contextlib.suppress(OSError):
        for path in (f"/proc/{pid}/cwd", *(f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd"))):
            with contextlib.suppress(OSError):
                found.append(os.readlink(path))
    return found
