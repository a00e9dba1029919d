"""A server of one's own on loopback: started for the first engine of this process that wants one there, ended with the last."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from untax.core.errors import SubstrateUnavailable
from untax.substrates._host import chosen_state_dir

_START_S = 60.0
_END_S = 30.0


@dataclass
class Served:
    """One that listens."""

    url: str
    token: str
    key: tuple[str, str]
    process: subprocess.Popen[bytes]
    users: int = 1

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None


_all: dict[tuple[str, str], Served] = {}
_changing = threading.Lock()


def take(substrate: str, state_dir: str | None) -> Served:
    """Blocking. `SubstrateUnavailable` when it does not start; it has then said why on standard error."""
    key = (str(chosen_state_dir(state_dir)), substrate)
    with _changing:
        found = _all.get(key)
        if found is not None and found.is_running:
            found.users += 1
            return found
        made = _all[key] = _started(key)
        return made


def give_back(served: Served) -> None:
    """Blocking; returns when it has ended, where nobody else has it."""
    with _changing:
        served.users -= 1
        if served.users:
            return
        if _all.get(served.key) is served:
            del _all[served.key]
        _end(served.process)


def _started(key: tuple[str, str]) -> Served:
    state, substrate = key
    argv = [sys.executable, "-P", "-m", "untax.cli", "serve", "--json", "--tied", "--port", "0", "--substrate", substrate]
    argv += ["--state-dir", state, "--limits", "warn", "--drain", "0", "--allow-image", "*", "--allow-network", "*"]
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,  # its end is the server's, also when this process is killed
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which then ends it
    )
    try:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], _START_S)[0]:
            raise TimeoutError
        said = json.loads(process.stdout.readline() or b"{}")
        return Served(str(said["url"]), Path(said["key_file"]).read_text().strip(), key, process)
    except BaseException as exc:
        _end(process)
        if isinstance(exc, (OSError, ValueError, KeyError, TypeError)):
            raise SubstrateUnavailable("", "the server on loopback did not start; its own words are above") from exc
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
