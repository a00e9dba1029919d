"""Sandboxes that were put down with their memory: a directory each, from which any number of others go on.

runsc writes what its kernel holds: processes, their memory, and the files above the image. Beside that lie the description that the sandbox was
made with, which a copy must have too, and a link to the image. Each sandbox has such a link beside its own description: the image stays as long as
one stands on it, or can be made to. Of what was saved both lie in the engine's store, and the directory has links to there.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from untax._remove import remove_tree
from untax.channel import wire
from untax.core.errors import BackendError, CreateError, StageUnavailable, UsageError
from untax.core.root import Root
from untax.core.spec import Limits
from untax.substrates._gvisor_runsc import Runsc

_BELOW, _STATE = "image", "state"  # the two parts: what several of the same chain have in common, and the rest
IMAGE = f"{_BELOW}/image.erofs"
_MEMORY, _CONFIG, _ABOUT = "memory", "config.json", "about.json"
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
    place = _place(bundle.parent)
    try:
        place.mkdir(mode=0o700)
        (place / _STATE).mkdir()
        await runsc.call(
            "checkpoint", "--leave-running", "--compression=none", f"--image-path={place / _STATE / _MEMORY}", sandbox_id, timeout_s=_CHECKPOINT_S
        )  # fmt: skip
        about = {"user": user, "limits": asdict(limits), "made_with": dict(runsc.made_with)}
        await asyncio.to_thread(_add, place, bundle, about)
    except OSError as exc:
        await asyncio.to_thread(remove_tree, place)
        raise BackendError(sandbox_id, f"snapshot: {exc.strerror}; free space in the state directory") from exc
    except BaseException:
        await asyncio.to_thread(remove_tree, place)
        raise
    return RememberedSandbox(replace(root, memory=str(place)), place)


def _add(place: Path, bundle: Path, about: Mapping[str, object]) -> None:
    _share_image(bundle, place)
    shutil.copyfile(bundle / _CONFIG, place / _STATE / _CONFIG)
    (place / _STATE / _ABOUT).write_text(json.dumps(about))


def _share_image(source: Path, target: Path) -> None:
    """A link to the file; of one in the store a link to its directory, because there a file has no second name."""
    if (source / _BELOW).is_symlink():
        (target / _BELOW).symlink_to(os.readlink(source / _BELOW))
    else:
        (target / _BELOW).mkdir()
        os.link(source / IMAGE, target / IMAGE)


def lay_out(memory: str, bundle: Path, user: str, limits: Limits) -> Sequence[str]:
    """Blocking: the bundle of a copy. Gives the words for runsc that go on from `memory`.

    `UsageError` for what was settled when the first one was made.
    """
    place = Path(memory)
    try:
        about = json.loads((place / _STATE / _ABOUT).read_text())
        description = json.loads((place / _STATE / _CONFIG).read_text())
    except FileNotFoundError as exc:
        raise CreateError("", _GONE) from exc
    if about["user"] != user:
        raise UsageError(f"user {user!r}: processes of a live snapshot go on as {about['user']!r}; leave user= out, or name it in run()")
    for name in _FIXED:
        if about["limits"][name] != getattr(limits, name):
            raise UsageError(f"limits: {name} is {about['limits'][name]} in a live snapshot and cannot be changed; memory_mib and cpus can")
    try:
        _share_image(place, bundle)
    except FileNotFoundError as exc:
        raise CreateError("", _GONE) from exc
    description["annotations"]["dev.gvisor.spec.rootfs.source"] = os.path.realpath(bundle / IMAGE)
    (bundle / _CONFIG).write_text(json.dumps(description))
    return ["restore", f"--bundle={bundle}", f"--image-path={os.path.realpath(place / _STATE / _MEMORY)}"]


def first_words(sandbox_id: str) -> bytes:
    """What a copy's agent is told before anything else: that it is another, and its name."""
    payload = b"".join(len(part).to_bytes(4, "little") + part for part in (sandbox_id.encode(), secrets.token_hex(16).encode() + b"\n"))
    return wire.frame(0, wire.REBORN, payload)


# ---- beyond the engine ----


def parts(memory: str) -> tuple[Path, Path]:
    """The directories that hold all of it."""
    below, state = (Path(os.path.realpath(Path(memory) / name)) for name in (_BELOW, _STATE))
    return below, state


def taken_up(holding: Path, stored: Sequence[Path], root: Root, runsc: Runsc) -> RememberedSandbox:
    """Blocking: one whose `parts` lie elsewhere. `StageUnavailable` when it was put down by something else than would go on with it now."""
    below, state = stored
    then, now = json.loads((state / _ABOUT).read_text())["made_with"], runsc.made_with
    if name := next((name for name in sorted({*then, *now}) if then.get(name) != now.get(name)), None):
        raise StageUnavailable(
            "snapshot",
            f"the live snapshot was put down with {name} {then.get(name)}, and here is {now.get(name)}: memory goes on only where it was "
            "left; take it again, or drop it",
        )
    place = _place(holding)
    place.mkdir(mode=0o700)
    try:
        (place / _BELOW).symlink_to(below)
        (place / _STATE).symlink_to(state)
    except BaseException:
        remove_tree(place)
        raise
    return RememberedSandbox(replace(root, memory=str(place)), place)


def _place(holding: Path) -> Path:
    return holding / f"live-{secrets.token_hex(6)}"
