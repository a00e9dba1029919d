"""Sandboxes that were put down with their memory: a directory each, from which any number of others go on.

runsc writes what its kernel holds: processes, their memory, and the files above the image. Beside that lie the description that the sandbox was
made with, which a copy must have too, and a link to the image. Each sandbox has such a link beside its own description: the image stays as long as
one stands on it, or can be made to.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from untax._remove import remove_tree
from untax.channel import wire
from untax.core.errors import BackendError, CreateError, UsageError
from untax.core.root import Root
from untax.core.spec import Limits
from untax.substrates._gvisor_runsc import Runsc

IMAGE, _CONFIG, _ABOUT = "image.erofs", "config.json", "about.json"
_CHECKPOINT_S = 120.0
_GONE = "the live snapshot is there no more"
_FIXED = ("pids", "disk_mib")  # which the kernel that was put down enforces itself


class RememberedSandbox:
    def __init__(self, root: Root, place: Path) -> None:
        self.root = root
        self._place = place

    async def discard(self) -> None:
        await asyncio.to_thread(remove_tree, self._place)


async def put_down(runsc: Runsc, sandbox_id: str, bundle: Path, root: Root, user: str, limits: Limits) -> RememberedSandbox:
    """`BackendError` when it cannot be; the sandbox is as it was."""
    place = bundle.parent / f"live-{secrets.token_hex(6)}"
    try:
        place.mkdir(mode=0o700)
        await runsc.call(
            "checkpoint", "--leave-running", "--compression=none", f"--image-path={place / 'memory'}", sandbox_id, timeout_s=_CHECKPOINT_S
        )
        await asyncio.to_thread(_add, place, bundle, user, limits)
    except OSError as exc:
        await asyncio.to_thread(remove_tree, place)
        raise BackendError(sandbox_id, f"snapshot: {exc.strerror}; free space in the state directory") from exc
    except BaseException:
        await asyncio.to_thread(remove_tree, place)
        raise
    return RememberedSandbox(replace(root, memory=str(place)), place)


def _add(place: Path, bundle: Path, user: str, limits: Limits) -> None:
    os.link(bundle / IMAGE, place / IMAGE)
    shutil.copyfile(bundle / _CONFIG, place / _CONFIG)
    (place / _ABOUT).write_text(json.dumps({"user": user, "limits": asdict(limits)}))


def lay_out(memory: str, bundle: Path, user: str, limits: Limits) -> Sequence[str]:
    """Blocking: the bundle of a copy. Gives the words for runsc that go on from `memory`.

    `UsageError` for what was settled when the first one was made.
    """
    place = Path(memory)
    try:
        about = json.loads((place / _ABOUT).read_text())
        description = json.loads((place / _CONFIG).read_text())
    except FileNotFoundError as exc:
        raise CreateError("", _GONE) from exc
    if about["user"] != user:
        raise UsageError(f"user {user!r}: processes of a live snapshot go on as {about['user']!r}; leave user= out, or name it in run()")
    for name in _FIXED:
        if about["limits"][name] != getattr(limits, name):
            raise UsageError(f"limits: {name} is {about['limits'][name]} in a live snapshot and cannot be changed; memory_mib and cpus can")
    try:
        os.link(place / IMAGE, bundle / IMAGE)
    except FileNotFoundError as exc:
        raise CreateError("", _GONE) from exc
    description["annotations"]["dev.gvisor.spec.rootfs.source"] = str(bundle / IMAGE)
    (bundle / _CONFIG).write_text(json.dumps(description))
    return ["restore", f"--bundle={bundle}", f"--image-path={place / 'memory'}"]


def first_words(sandbox_id: str) -> bytes:
    """What a copy's agent is told before anything else: that it is another, and its name."""
    payload = b"".join(len(part).to_bytes(4, "little") + part for part in (sandbox_id.encode(), secrets.token_hex(16).encode() + b"\n"))
    return wire.frame(0, wire.REBORN, payload)
