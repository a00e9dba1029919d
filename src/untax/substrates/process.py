"""The cell in a private directory: no isolation, the floor the others are compared to.

Commands run as the caller and see the whole machine; no limit and no network policy holds. It is for comparison and
for trusted code, which is why it is refused unless `isolation="none"` is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from untax._remove import remove_tree
from untax.channel.stream import SocketStream
from untax.core.errors import BackendError, CreateError, SandboxLost, SubstrateUnavailable, UsageError
from untax.core.spec import EnvSpec
from untax.core.substrate import Facts, Typical, Unenforced
from untax.substrates._host import (
    Holding,
    cell_missing_reason,
    cell_path,
    chosen_state_dir,
    ensure_private_dir,
    sweep,
    wait_exit,
)

# The cell needs milliseconds to kill its commands at the end of its input; one that takes longer is stuck.
_EXIT_GRACE_S = 5.0
_SOCKET_ROOM = 1 << 20  # a stream window, as the launcher gives its sockets
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_REMEDY = "use a substrate with isolation, for example Engine('namespace')"
_UNENFORCED = tuple(
    Unenforced(name, "the process substrate enforces nothing", _REMEDY) for name in ("cpus", "memory_mib", "disk_mib", "pids", "network")
)


def make(state_dir: str | None = None) -> ProcessSubstrate:
    return ProcessSubstrate(chosen_state_dir(state_dir))


class ProcessSubstrate:
    name = "process"
    isolation = "none"
    sees_host_files = True
    typical = Typical(start_s=0.004, action_s=0.0002)
    binds_late: frozenset[Literal["limits", "disk", "user"]] = frozenset(("limits", "disk"))  # nobody is held to any

    unenforced = _UNENFORCED

    def __init__(self, state_dir: Path) -> None:
        self._root = state_dir / "process"
        self._holding: Holding | None = None
        self._removing: set[asyncio.Future[bool]] = set()
        self._remover: ThreadPoolExecutor | None = None

    def unavailable_reason(self) -> str | None:
        if not sys.platform.startswith("linux"):
            return "needs Linux; connect to a server that runs on it"
        return cell_missing_reason()

    def image_trouble(self, image: str) -> str | None:
        return None if image == "host" else f"image {image!r}: the process substrate has only the host's own files; {_REMEDY}"

    async def start(self) -> None:
        if self._holding is None:
            ensure_private_dir(self._root.parent)
            self._holding = Holding.take(self._root)
            # One thread of its own, beside which the loop's are free for whoever waits for them, however many trees are on their way out.
            self._remover = ThreadPoolExecutor(1, thread_name_prefix="untax-remove")
            await asyncio.to_thread(sweep, self._root, remove_tree)

    async def aclose(self) -> None:
        holding, self._holding = self._holding, None
        await self.wait_tidy()
        if holding is not None:
            await asyncio.to_thread(holding.close)
        if self._remover is not None:
            self._remover.shutdown(wait=False)

    async def wait_tidy(self) -> None:
        while self._removing:
            await asyncio.wait(self._removing)

    async def throw_away(self, home: Path) -> None:
        """The directory is gone from its place; its files go in the background, for a tree of any size takes as long as it has files."""
        gone = home.with_name(f"gone-{home.name}")
        try:
            home.rename(gone)
        except FileNotFoundError:
            return
        except OSError:  # a full file system may refuse even that
            await asyncio.to_thread(remove_tree, home)
            return
        removing = asyncio.get_running_loop().run_in_executor(self._remover, remove_tree, gone)
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)

    async def create(self, spec: EnvSpec) -> ProcessSandbox:
        if trouble := self.image_trouble(spec.image):
            raise UsageError(trouble)
        if spec.user not in (None, _user_name(), str(os.geteuid())):
            raise UsageError(f"user {spec.user!r}: the process substrate runs commands as its caller; {_REMEDY}")
        if self._holding is None:
            raise BackendError("", "the process substrate is not started, or closed")
        home = self._holding.path / f"sbx-{secrets.token_hex(6)}"
        try:
            home.mkdir(mode=0o700)
        except OSError as exc:
            raise CreateError("", f"{home}: {exc.strerror}; free space there, or name another state_dir") from exc
        return ProcessSandbox(home, self.throw_away)


class ProcessSandbox:
    unenforced = _UNENFORCED

    def __init__(self, home: Path, throw_away: Callable[[Path], Awaitable[None]]) -> None:
        self.id = home.name
        self._home = home
        self._throw_away = throw_away
        self._cell: subprocess.Popen[bytes] | None = None
        self._stream: SocketStream | None = None

    def facts(self) -> Facts:
        home = str(self._home)
        path = f"{Path(sys.prefix) / 'bin'}:{_SYSTEM_PATH}"
        return Facts(workdir=home, home=home, user=_user_name(), path=path, proxy_port=_free_port())

    async def wait_ready(self) -> None:
        pass  # the directory is there as soon as `create` returns

    async def open_channel(self) -> SocketStream:
        ours, its = socket.socketpair()
        for end in (ours, its):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_ROOM)
        with its:
            try:
                self._cell = subprocess.Popen(
                    [cell_path(), "agent", "--stdio", "--dir", str(self._home)],
                    cwd=self._home,
                    env={},  # nothing of the engine's own environment is for commands
                    stdin=its.fileno(),
                    stdout=its.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except FileNotFoundError as exc:
                ours.close()
                raise SandboxLost(self.id, "its directory is gone") from exc
            except OSError as exc:
                ours.close()
                raise SubstrateUnavailable(self.id, f"the cell cannot be started: {exc.strerror}") from exc
            except SubstrateUnavailable:
                ours.close()
                raise
        self._stream = SocketStream(ours)
        return self._stream

    async def destroy(self) -> None:
        if self._stream is not None:
            self._stream.close()  # end of input: the cell kills its commands and exits
        cell = self._cell
        if cell is not None and cell.returncode is None:
            await wait_exit(cell, _EXIT_GRACE_S, lambda: _kill_family(cell.pid))
        await self._throw_away(self._home)


def _kill_family(pid: int) -> None:
    """Stopped or stuck, it cannot clean up any more: its descendants go first, while they still hang below it."""
    for one in (*_descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in children for found in (*_descendants(int(child)), int(child))]


def _free_port() -> int:
    """The loopback is the host's own here, so every sandbox needs a port of its own for its proxy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _user_name() -> str:
    try:
        return getpass.getuser() if os.geteuid() == os.getuid() else str(os.geteuid())
    except (KeyError, OSError):
        return str(os.geteuid())
