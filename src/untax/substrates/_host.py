"""What the adapters need from the machine they run on: the cell, a state directory, and a sweep of what was left.

A *holding* is a directory that belongs to one live engine and says so by a lock that the kernel drops when the engine
dies, however it dies. Whoever starts next can therefore tell what a dead engine left from what a live one uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from untax._remove import remove_tree
from untax.core.errors import BackendError, SubstrateUnavailable, UsageError
from untax.core.spec import require_text
from untax.core.substrate import Sandbox

_CELL = Path(__file__).resolve().parent.parent / "_native" / "cell"
_LOCK = "lock"
_GATE = ".gate"


def cell_path() -> str:
    """The static helper that is shipped with this package; `SubstrateUnavailable` where it is not."""
    reason = cell_missing_reason()
    if reason is not None:
        raise SubstrateUnavailable("", reason)
    return str(_CELL)


def cell_missing_reason() -> str | None:
    if not _CELL.is_file():
        return (
            "the cell is not part of this installation (a pure-Python wheel, or sources that were not built); "
            "install the wheel for this machine's processor, or build one with a C compiler: pip install ."
        )
    if not os.access(_CELL, os.X_OK):
        return f"the cell cannot be executed; restore its mode: chmod 755 {_CELL}"
    return None


_CAP_SYS_ADMIN = 21


def is_host_root() -> bool:
    """Root of the machine, and not of a container's user namespace or without the right to mount; as the launcher decides it."""
    if os.geteuid() != 0:
        return False
    try:
        id_map = Path("/proc/self/uid_map").read_text().split()
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    effective = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return id_map == ["0", "0", "4294967295"] and bool(effective >> _CAP_SYS_ADMIN & 1)


def default_state_dir() -> Path:
    """Where engines keep what must not be lost track of: UNTAX_STATE_DIR, or /var/lib/untax for root and the user's own state directory otherwise."""
    if named := os.environ.get("UNTAX_STATE_DIR"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/lib/untax")
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "untax"


def chosen_state_dir(given: str | None) -> Path:
    """The directory that was named, or the default; absolute, because the launcher works elsewhere than its engine."""
    if given is None:
        return default_state_dir().absolute()
    return Path(require_text("state_dir", given)).absolute()


def ensure_private_dir(path: Path) -> None:
    """Make `path` a directory that only this user can enter. One that somebody else prepared is refused."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except (FileExistsError, NotADirectoryError) as exc:
        raise UsageError(f"state directory {path}: something that is not a directory is in the way; name another state_dir") from exc
    except OSError as exc:
        raise BackendError("", f"state directory {path}: {exc.strerror}; name another with state_dir=…") from exc
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"state directory {path} is a link or not a directory; name another state_dir")
    if found.st_uid != os.geteuid():
        raise UsageError(f"state directory {path} belongs to user {found.st_uid}; name another state_dir")
    if found.st_mode & 0o022:
        raise UsageError(f"state directory {path} can be written by others; chmod 700 it, or name another state_dir")


class Holding:
    """A directory below `root` that is one engine's own until `close`, or until the engine is no more."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def take(cls, root: Path) -> Holding:
        """A fresh holding below `root`, which is made when it is missing."""
        ensure_private_dir(root)
        path = root / f"engine-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            # Behind the gate nobody sweeps, so nobody finds the directory before its lock is held.
            with _gate(root):
                path.mkdir(mode=0o700)
                fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise BackendError("", f"state directory {root}: {exc.strerror}; make it writable, or name another with state_dir=…") from exc
        return cls(path, fd)

    def close(self, *, is_clean: bool = True) -> None:
        """Give the directory up and remove it; one that is not clean is left for the next sweep. Safe to call twice."""
        if self._lock_fd >= 0:
            if is_clean:
                remove_tree(self.path)
            os.close(self._lock_fd)
            self._lock_fd = -1


async def destroy_all(sandboxes: Iterable[Sandbox]) -> list[BaseException]:
    """Each of them, whatever becomes of the others; gives what went wrong."""
    ended = await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes), return_exceptions=True)
    return [one for one in ended if one is not None]


async def wait_exit(child: subprocess.Popen[bytes], patience_s: float, kill: Callable[[], object]) -> None:
    """Return once `child` has ended and is reaped; it is killed, by `kill`, when that takes longer than `patience_s`."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(child.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(patience_s):
            await ended.wait()
    except TimeoutError:
        kill()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    if child.poll() is None:
        await asyncio.to_thread(child.wait)


def sweep(root: Path, remove: Callable[[Path], object]) -> int:
    """Call `remove` for each holding below `root` whose engine is dead; it must take the directory itself away too.

    A directory that cannot be removed now is left for the next sweep. Returns how many were removed.
    """
    removed = 0
    if not root.is_dir():
        return removed
    with _gate(root):
        for path in sorted(root.glob("engine-*")):
            if path.is_symlink() or not path.is_dir():
                continue
            with _lock_of_the_dead(path) as dead:
                if dead:
                    remove(path)
                    removed += not path.exists()
    return removed


@contextlib.contextmanager
def _gate(root: Path) -> Iterator[None]:
    fd = os.open(root / _GATE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _lock_of_the_dead(path: Path) -> Iterator[bool]:
    """True when nobody holds the lock; it is held by the caller meanwhile."""
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)
