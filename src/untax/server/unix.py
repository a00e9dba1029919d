"""The Unix socket: one file that only its user can open, and a look at who comes all the same.

The kernel says which process and user is at the other end. It also says when that process ends, which a closed connection alone would not: a
fork of it may have kept a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import secrets
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from untax.core.errors import BackendError, ProtocolError, UsageError
from untax.remote.address import checked_path, is_trusted
from untax.remote.messages import Body, error_data
from untax.remote.stream import UnixStream
from untax.server.owners import Owner
from untax.server.service import Service, Session

log = logging.getLogger("untax.server")

_GREETING_S = 5.0  # for whoever connects to say who it is
_BACKLOG = 1024
_SO_PEERPIDFD = 77  # Linux 6.5 and newer; no number of Python's own yet


class UnixListener:
    """Takes connections for `service` from `start` until `close`."""

    def __init__(self, service: Service, path: str | os.PathLike[str]) -> None:
        self.path = checked_path(path)
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._lock_fd = -1
        self._sock: socket.socket | None = None
        self._spare = -1

    def start(self) -> None:
        """Take the path and listen. `UsageError` when somebody else has it; a file that a dead server left is replaced."""
        self._lock_fd = _locked(self.path)
        try:
            _check_free(self.path)
            self._sock = _listening(self.path)
            self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self._unlock()
            raise
        self._loop.add_reader(self._sock, self._incoming)

    def close(self) -> None:
        """Take no more connections and remove the file. Safe to call twice."""
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock)
            sock.close()
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._spare)
            self._unlock()

    def _unlock(self) -> None:
        """The lock's file goes first, while nobody else can hold it."""
        with contextlib.suppress(OSError):
            _lock_path(self.path).unlink()
        os.close(self._lock_fd)

    # ---- who comes ----

    def _incoming(self) -> None:
        assert self._sock is not None
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
                return
            raise
        stream = UnixStream(sock)
        pid, uid = stream.peer
        if not is_trusted(uid):
            log.warning("a connection of user %d (process %d) was refused", uid, pid)
            stream.send(
                {"id": 0, "error": error_data(UsageError(f"this server serves user {os.geteuid()}, not user {uid}: start your own"))}
            )
            stream.close()
            return
        self._attend(sock, stream, pid)

    def _turn_away(self) -> None:
        """No descriptor is left, and the connection would wait for ever: take it with the one that was kept for this, and close it."""
        log.warning("out of descriptors: a connection was turned away; raise the limit (ulimit -n) and start the server anew")
        assert self._sock is not None
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self._sock.accept()[0].close()
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _attend(self, sock: socket.socket, stream: UnixStream, pid: int) -> None:
        def known(owner: Owner, _: Body) -> Body:
            if owner.gate.name:
                raise UsageError("this owner is a tenant's: connect over HTTP")
            late.cancel()
            stream.is_known = True
            owner.ahead.share()
            if owner.proof is not None:
                owner.proof.close()
            pidfd = _pidfd(sock, pid)
            owner.proof = None if pidfd is None else _Process(pidfd, lambda: service.owners.end(owner, f"process {pid} has ended"))
            return {}

        service = self._service
        session = Session(service, stream, f"process {pid}", proves_life=True, on_owner=known)
        late = self._loop.call_later(_GREETING_S, session.refuse, 0, ProtocolError(f"no greeting within {_GREETING_S:g} s"))
        stream.start(session)


class _Process:
    """Tells when a process has ended."""

    def __init__(self, pidfd: int, tell: Callable[[], None]) -> None:
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, tell)

    def close(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _pidfd(sock: socket.socket, pid: int) -> int | None:
    """Of the process at the other end; None where the kernel does not tell, and the connection alone has to do."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


# ---- the file ----


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _locked(path: Path) -> int:
    """The lock beside the socket, held until the descriptor is closed or this process is no more."""
    lock = _lock_path(path)
    while True:
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            raise UsageError(f"{path.parent}: there is no such directory; make it, or name another --socket") from None
        except OSError as exc:
            raise BackendError("", f"{lock}: {exc.strerror}; name another --socket") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise UsageError(f"{path}: a server listens there already; connect to it, or name another --socket") from None
        if _is_same(lock, fd):
            return fd
        os.close(fd)  # its holder removed it a moment ago


def _is_same(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _check_free(path: Path) -> None:
    """Whether what lies there may be replaced: a socket of our own at which nobody listens."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}; name another --socket") from exc
    if not stat.S_ISSOCK(found.st_mode):
        raise UsageError(f"{path}: something that is not a socket is in the way; remove it, or name another --socket")
    if found.st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to user {found.st_uid}; name another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            log.info("%s was left by a server that is no more, and is taken over", path)
            return
        except OSError:
            pass
    raise UsageError(f"{path}: somebody else listens there; name another --socket")


def _listening(path: Path) -> socket.socket:
    """Bound under another name and moved into place once it is closed to others and answers, so that nobody meets less than that."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    name = f".{secrets.token_hex(6)}"
    try:
        sock.bind(f"/proc/self/fd/{directory}/{name}")  # however long the path is
        os.chmod(name, 0o600, dir_fd=directory)
        sock.listen(_BACKLOG)
        os.rename(name, path.name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as exc:
        sock.close()
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)
        raise BackendError("", f"{path}: {exc.strerror}; name another --socket") from exc
    finally:
        os.close(directory)
    return sock
