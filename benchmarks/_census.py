"""What an engine holds on this machine: processes, namespaces, mounts, control groups, loop devices, descriptors, directories.

Other programs come and go meanwhile, so only what can be traced to one engine is counted: the processes below this one
and what they are members of, and whatever names the engine's state directory.
"""

from __future__ import annotations

import os
import select
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Census:
    processes: int
    namespaces: int
    mounts: int
    cgroups: int
    loops: int
    descriptors: int
    directories: int

    def less(self, before: Census) -> dict[str, int]:
        """How many more (or fewer) of each there are than `before`; empty when it is exactly as before."""
        changes = {name: getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__}
        return {name: change for name, change in changes.items() if change}


def take(state_dir: Path, run_mark: str = "") -> Census:
    """Count. `run_mark` is the name that the engine's control groups carry (see `group_mark`)."""
    tree = [os.getpid(), *descendants(os.getpid())]
    links = {link for pid in tree for link in namespaces(pid)}
    return Census(
        processes=len(tree),
        namespaces=len(links),
        mounts=sum(_mounts(pid, state_dir) for pid in tree),
        cgroups=len(list(_groups(run_mark))) if run_mark else 0,
        loops=sum(str(state_dir) in name for name in _loops()),
        descriptors=sum(descriptors(pid) for pid in tree),
        directories=sum(len(names) for _, names, _ in os.walk(state_dir)),
    )


def descendants(root: int) -> list[int]:
    """Every process below `root`, zombies too."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    parent = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def namespaces(pid: int) -> set[str]:
    try:
        return {os.readlink(f"/proc/{pid}/ns/{name}") for name in os.listdir(f"/proc/{pid}/ns")}
    except OSError:
        return set()


def descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _mounts(pid: int, state_dir: Path) -> int:
    """Mounts that name the state directory, and all mounts of a process that has a mount namespace of its own."""
    try:
        own = os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
        with open(f"/proc/{pid}/mountinfo") as mounts:
            return sum(own or str(state_dir) in line for line in mounts)
    except OSError:
        return 0


def mounts_naming(state_dir: Path) -> int:
    with open("/proc/self/mountinfo") as mounts:
        return sum(str(state_dir) in line for line in mounts)


def _loops() -> Iterable[str]:
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            yield device.read_text()
        except OSError:
            continue


def group_mark(pids: Iterable[int]) -> str:
    """The engine's part of the control-group path of its sandboxes: the component that begins with "untax-"."""
    for pid in pids:
        try:
            with open(f"/proc/{pid}/cgroup") as lines:
                for line in lines:
                    for part in line.strip().partition("::")[2].split("/") + line.strip().split(":")[-1].split("/"):
                        if part.startswith("untax-"):
                            return part
        except OSError:
            continue
    return ""


def _groups(mark: str) -> Iterable[str]:
    for where, _, _ in os.walk(CGROUP_ROOT):
        if mark in where:
            yield where


def groups_named(mark: str) -> int:
    return len(list(_groups(mark))) if mark else 0


class Doomed:
    """Processes that are expected to end; a descriptor of each tells when, whatever happens to their numbers."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._fds: dict[int, int] = {}
        for pid in pids:
            try:
                self._fds[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                continue

    def __len__(self) -> int:
        return len(self._fds)

    def wait_gone(self, within_s: float) -> float | None:
        """Seconds until the last one had ended, or None when some have not by then. Closes the descriptors."""
        begin = time.perf_counter()
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        left = set(self._fds)
        while left and (rest := begin + within_s - time.perf_counter()) > 0:
            for fd, _ in poll.poll(rest * 1e3):
                poll.unregister(fd)
                left.discard(fd)
        took = time.perf_counter() - begin
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        return None if left else took


def settled(state_dir: Path, mark: str) -> Census:
    """The census once it stays the same: an engine that has just given its first sandbox still prepares for the next ones."""
    last = take(state_dir, mark)
    while True:
        time.sleep(0.2)
        now = take(state_dir, mark)
        if now == last:
            return now
        last = now


def wait_like(state_dir: Path, mark: str, before: Census, within_s: float) -> dict[str, int]:
    """Count again until it is exactly as before, or the time is up; gives what differs then."""
    end = time.perf_counter() + within_s
    while (differs := take(state_dir, mark).less(before)) and time.perf_counter() < end:
        time.sleep(0.02)  # mounts, groups and directories announce nothing that could be waited for
    return differs


def commands(pids: Iterable[int]) -> Counter[str]:
    """Names of processes, for a message about what is left."""
    names: Counter[str] = Counter()
    for pid in pids:
        try:
            names[Path(f"/proc/{pid}/comm").read_text().strip()] += 1
        except OSError:
            continue
    return names
