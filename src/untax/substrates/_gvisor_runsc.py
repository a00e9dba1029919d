"""The program `runsc`: which one, how it is called, and one sandbox's process of it from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from untax.core.errors import BackendError
from untax.substrates._host import cell_path

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OLDEST = 20250616  # the first release in which what lies above an image can be given a size
_WORDS_MAX = 4000
_HEARD_MAX = 1 << 20
_ASK_S = 10.0


def runsc_path(given: str | None) -> str | None:
    return shutil.which(given or "runsc", path=None if given and os.path.isabs(given) else f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}")


@functools.cache
def runsc_version(path: str) -> str | None:
    """As it says itself; None when it does not run."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_ASK_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"version (\S+)", said)
    return found.group(1) if found else None


def version_trouble(path: str) -> str | None:
    version = runsc_version(path)
    if version is None:
        return f"{path} does not run; install a current one: https://gvisor.dev/docs/user_guide/install"
    date = re.search(r"20\d{6}", version)
    if date is not None and int(date.group()) < _OLDEST:
        return f"{path} is of {date.group()}, too old to hold what is written to a size; install a current one: https://gvisor.dev/docs/user_guide/install"
    return None


def processor() -> str:
    """As far as programs can tell one from another: what they found out when they started is in their memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    said = dict(reversed([(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]))
    able = hashlib.sha256((said.get("flags") or said.get("Features") or "").encode()).hexdigest()[:8]
    return f"{said.get('model name') or said.get('CPU part') or 'unknown'} ({able})"


@dataclass(frozen=True, slots=True)
class Runsc:
    """One engine's way to call it. `place` is where it keeps what it knows of sandboxes."""

    path: str
    place: Path
    platform: str
    is_rootless: bool
    made_with: Mapping[str, str] = field(default_factory=dict)
    """What a sandbox that is put down has in it, and must find again where it goes on."""

    def argv(self, *words: str) -> list[str]:
        flags = [
            f"--root={self.place}",
            f"--platform={self.platform}",
            "--ignore-cgroups",  # ours are
            "--network=none",
            "--overlay2=none",  # the bundle says what lies above its root
            "--host-settings=ignore",
            # The description is the one that was put down with it, but for the name of its image, a link to the same file.
            *(["--restore-spec-validation=ignore"] if words[0] == "restore" else []),
        ]
        return [*self._as_root, self.path, *flags, *words]

    @property
    def _as_root(self) -> list[str]:
        """As an ordinary user: in a user namespace of ours, where runsc may do as root does. Its own rootless mode does not restore."""
        return [cell_path(), "confined", "--as-root", "--"] if self.is_rootless else []

    async def call(self, *words: str, timeout_s: float) -> None:
        """`BackendError` with its own words when it refuses or is not done in time."""
        process = await asyncio.create_subprocess_exec(
            *self.argv(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=_ENV,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                _, said = await process.communicate()
        except TimeoutError:
            raise BackendError("", f"runsc {words[0]} was not done within {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode != 0:
            raise BackendError("", f"runsc {words[0]}: {in_words(said)}")

    def forget(self, sandbox_id: str) -> None:
        """What a sandbox that was killed could not remove itself."""
        for path in self.place.glob(f"*{sandbox_id}*"):
            with contextlib.suppress(OSError):
                path.unlink()


_ENV = {"PATH": _SYSTEM_PATH, "LC_ALL": "C"}


class Started:
    """One sandbox's `runsc run` or `runsc restore`. The sandbox ends with it, and it with the thread that started it."""

    def __init__(self, runsc: Runsc, words: Sequence[str], sandbox_id: str, joins: Sequence[str]) -> None:
        """In the event loop's own thread, which must be the engine's to its end."""
        self.channel, its = socket.socketpair()
        confined = [cell_path(), "confined", "--parent", str(os.getpid()), *(part for one in joins for part in ("--join", one)), "--"]
        try:
            self.process = subprocess.Popen(
                [*confined, *runsc.argv(*words, sandbox_id)],
                stdin=its.fileno(),
                stdout=its.fileno(),
                stderr=subprocess.PIPE,
                cwd="/",
                env=_ENV,
            )
        except OSError as exc:
            self.channel.close()
            raise BackendError("", f"runsc cannot be started: {exc.strerror}") from exc
        finally:
            its.close()
        assert self.process.stderr is not None
        self._words = self.process.stderr
        os.set_blocking(self._words.fileno(), False)
        self.said = b""
        self._heard = 0
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # Held by runsc and by the sandbox itself: its end is the end of both.
        self._loop.add_reader(self._words, self._hear)

    def _hear(self) -> None:
        try:
            data = os.read(self._words.fileno(), 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.said = (self.said + data)[:_WORDS_MAX]
        self._heard += len(data)
        if self._heard > _HEARD_MAX:
            self.kill()  # an agent has a line to say before it greets, and nobody else has this pipe
        if not data:
            self._loop.remove_reader(self._words)
            self._words.close()
            self.process.wait()
            self.ended.set()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    @property
    def words(self) -> str:
        return in_words(self.said)


def in_words(said: bytes) -> str:
    """What it said, on one line and without anything a terminal would act on."""
    text = " ".join(said.decode(errors="replace").split())[-600:]
    return "".join(one if one.isprintable() else "?" for one in text) or "nothing was said"
