"""What the host sees of sandboxes: processes, their namespaces, memory. Only below a process that the test itself started."""

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

SPARES = 2  # that the launcher of a living engine may keep for the next sandbox (native/spare.c), under names that a sandbox made of one goes on with


@dataclass(frozen=True)
class Seen:
    pid: int
    ppid: int
    state: str
    comm: str
    started: int  # clock ticks after boot: with the pid, the identity of a process
    inner: tuple[int, ...]  # pids from the outermost namespace inwards

    @property
    def is_init(self) -> bool:
        """PID 1 of a pid namespace that is not ours."""
        return len(self.inner) > len(_own_pids()) and self.inner[-1] == 1

    @property
    def is_parked(self) -> bool:
        """The agent of a sandbox that the launcher made ahead of need (native/spare.c): nobody has spoken to it yet."""
        return self.is_init and self.comm in ("cell-waiting", "memfd:cell", "cell")


def _own_pids() -> tuple[int, ...]:
    return _inner_pids("self")


def _inner_pids(pid: int | str) -> tuple[int, ...]:
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("NSpid:"):
                return tuple(int(part) for part in line.split()[1:])
    return ()


def seen(pid: int) -> Seen | None:
    """One process, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read().decode(errors="replace")
        inner = _inner_pids(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    comm, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return Seen(pid, int(rest[1]), rest[0], comm, int(rest[19]), inner)


def everyone() -> dict[int, Seen]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := seen(int(name))):
            found[process.pid] = process
    return found


def below(root: int) -> list[Seen]:
    """Every descendant of `root`, not itself."""
    processes = everyone()
    children: dict[int, list[Seen]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process)
    found, queue = [], [root]
    while queue:
        for process in children.get(queue.pop(), []):
            found.append(process)
            queue.append(process.pid)
    return found


def agents(root: int | None = None) -> list[Seen]:
    """The agents (PID 1 inside) of every sandbox that somebody has or had below `root`, or below this process. `tests.sshd` is one too, and none of ours."""
    found = below(root if root is not None else os.getpid())
    return [p for p in found if p.is_init and not p.is_parked and p.state != "Z" and p.comm != "sshd"]


def parked(root: int | None = None) -> list[Seen]:
    """The agents of those that nobody has had yet."""
    return [p for p in below(root if root is not None else os.getpid()) if p.is_parked and p.state != "Z"]


def held(root: int) -> int:
    """How many sandboxes below the one engine at `root` are somebody's: those that wait for a holder count beyond what may wait.

    One that was lost before its first word looks as if it waited.
    """
    return len(agents(root)) + max(0, len(parked(root)) - SPARES)


def inside(agent: Seen) -> list[Seen]:
    """All processes in the same pid namespace as this agent."""
    namespace = _namespace(agent.pid)
    return [p for p in everyone().values() if namespace and _namespace(p.pid) == namespace]


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def resident_kib(pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    return 0


def wait_gone(pid: int, within_s: float) -> bool:
    """Wait on a pidfd until a process has ended; False when it has not by then."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], within_s)[0])
    finally:
        os.close(fd)


def eventually(condition: Callable[[], bool], within_s: float, step_s: float = 0.02) -> bool:
    """For facts of the kernel that no descriptor announces (mounts, groups, process states)."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(step_s)
    return True


async def until(what: Callable[[], T], within_s: float = 60.0) -> T:
    """The same beside other work, for what other processes bring about: what it gave, once that is something."""
    end = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < end, "it did not come to be"
        await asyncio.sleep(0.02)
    return found


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
