"""One server for a state directory and a substrate: two would have two pools and two budgets for one machine, and neither would know.

Engines that a program embeds need not ask: they share the store of layers with a server, and each has a directory of its own for what runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from untax.core.errors import BackendError, UsageError
from untax.substrates._host import chosen_state_dir, ensure_private_dir

_ADDRESS_BYTES = 4096


@contextlib.contextmanager
def only_server(state_dir: str | None, substrate: str) -> Iterator[Callable[[str], None]]:
    """Hold the place for as long as the block or this process lasts; what is given takes the address for others to be told.

    `UsageError` names the server that has it. A dead one has nothing: the kernel lets go of its lock.
    """
    state = chosen_state_dir(state_dir)
    ensure_private_dir(state)
    path = state / f"serve-{substrate}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise BackendError("", f"{path}: {exc.strerror}; make it writable, or name another --state-dir") from exc
    try:
        _lock(fd, state, substrate)
        yield lambda address: _write(fd, address)
        _write(fd, "")
    finally:
        os.close(fd)


def _lock(fd: int, state: Path, substrate: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.pread(fd, _ADDRESS_BYTES, 0).decode("utf-8", "replace").strip()
        raise UsageError(
            f"a server of substrate {substrate!r} runs on {state} already{f': {said}' if said else ''}; "
            "connect to it, or give this one a --state-dir of its own"
        ) from None
    _write(fd, "")  # of one that was killed


def _write(fd: int, address: str) -> None:
    with contextlib.suppress(OSError):  # only for the words of a refusal
        os.ftruncate(fd, 0)
        os.pwrite(fd, address.encode()[:_ADDRESS_BYTES], 0)
