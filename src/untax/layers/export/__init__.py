"""A chain of layers as one file for other ways to run it: an image for container engines, a disk, an initramfs.

So that every substrate can be measured on the same software. One file for each format; here is what they share: what may be asked
for, that a target is whole or not there, and that what a format cannot carry is said.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, get_args

from untax.core.errors import StageUnavailable, UsageError
from untax.core.root import Root
from untax.core.spec import FrozenEnv
from untax.layers.export._tar import write_tar
from untax.layers.export._tree import Job, Losses, content_bytes, merged_items
from untax.layers.export.disk import write_ext4, write_squashfs
from untax.layers.export.initramfs import write_initramfs
from untax.layers.export.oci import checked_name, write_oci
from untax.layers.store import LayerStore

Format = Literal["oci", "ext4", "squashfs", "initramfs", "tar"]
FORMATS: tuple[Format, ...] = get_args(Format)
Progress = Callable[[str, int, int | None], None]
"""What, bytes done, bytes in all or None."""

REPRODUCIBLE_LABEL = "untax.reproducible"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """What may be said about an export; each belongs to one format."""

    name: str = "localhost/untax:latest"
    """oci: what engines call the image."""
    labels: Mapping[str, str] = field(default_factory=FrozenEnv)
    """oci: besides those that the image has."""
    is_portable: bool = True
    """oci: false for what exists on this machine only, which the image then says of itself."""
    init: bytes | None = None
    """initramfs: the program that the kernel starts, as /init."""
    packing: Literal["gzip", "lz4"] = "gzip"
    """squashfs: small, or quick to write and to read."""
    free_mib: int = 64
    """ext4: room to write."""


@dataclass(frozen=True, slots=True)
class Exported:
    bytes: int
    losses: tuple[str, ...]
    """What the format, or this user, could not carry over, in words."""


def export(
    store: LayerStore,
    root: Root,
    target: Path | BinaryIO,
    to: Format,
    options: Options | None = None,
    *,
    progress: Progress | None = None,
    has_total: bool = True,
) -> Exported:
    """Write `root` to `target`. A file of that name is replaced in one step once the new one is whole; a pipe gets a stream.

    The layers must stay meanwhile: the caller has them pinned. Without `has_total` progress has none, and nothing is gone through beforehand to find it. Blocking. `UsageError` names a tool that is missing here.
    """
    options = options or Options()
    if to not in FORMATS:
        raise UsageError(f"format {to!r}: use one of {', '.join(FORMATS)}")
    if options.free_mib < 0:
        raise UsageError(f"the room to write must not be negative, and is {options.free_mib} MiB")
    checked_name(options.name)
    job = Job(root, store.marks, Losses(), _counter(root, store, progress, has_total))
    with _told():
        if not isinstance(target, Path):
            size = _stream(job, target, to, options)
        elif target.exists() and not target.is_file():
            with target.open("wb") as out:
                size = _stream(job, out, to, options)
        else:
            with _whole_or_nothing(target) as partial:
                _write(job, partial, to, options, store)
                size = partial.stat().st_size
    return Exported(size, job.losses.said())


def _write(job: Job, path: Path, to: Format, options: Options, store: LayerStore) -> None:
    if to == "squashfs":
        write_squashfs(job, path, options.packing)
    elif to == "ext4":
        with store.draft() as draft:
            write_ext4(job, path, scratch=draft.tree, free_bytes=options.free_mib * _MIB)
    else:
        with path.open("xb") as out:
            _write_archive(job, out, to, options)


def _stream(job: Job, out: BinaryIO, to: Format, options: Options) -> int:
    counted = _Counted(out)
    _write_archive(job, counted, to, options)
    out.flush()
    return counted.written


def _write_archive(job: Job, out: BinaryIO | _Counted, to: Format, options: Options) -> None:
    if to == "oci":
        labels = dict(options.labels) if options.is_portable else {**options.labels, REPRODUCIBLE_LABEL: "false"}
        write_oci(job, out, name=checked_name(options.name), labels=labels)
    elif to == "initramfs":
        write_initramfs(job, out, init=options.init)
    elif to == "tar":
        write_tar(merged_items(job.root, job.marks, job.losses), out.write, job.losses, on_bytes=job.on_bytes)
    else:
        raise UsageError(f"{to} is written here and there, not from its beginning to its end: name a file")


class _Counted:
    """A stream that only goes forward. Not even a file that was opened by somebody else can be gone back in: it may append."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.written = 0

    def write(self, data: bytes) -> int:
        self.written += len(data)
        return self._out.write(data)


def _counter(root: Root, store: LayerStore, progress: Progress | None, has_total: bool) -> Callable[[int], None]:
    """What is called for each piece of content: adds up and says how far it is. Only who wants to know pays for finding out the total."""
    if progress is None:
        return lambda _: None
    total = done = 0
    for total in content_bytes(merged_items(root, store.marks, Losses())) if has_total else ():
        progress("look at the tree", total, None)

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress("export", done, max(done, total) if has_total else None)

    return on_bytes


@contextmanager
def _whole_or_nothing(target: Path) -> Iterator[Path]:
    """A name beside the target that becomes it at the end, or is gone."""
    partial = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}.part")
    try:
        yield partial
        with partial.open("rb") as done:
            os.fsync(done.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, UsageError):
        raise
    except OSError as exc:
        where = f"{os.fsdecode(exc.filename)}: " if exc.filename else ""
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StageUnavailable("export", f"{where}no space is left for the export; free some, or name another place") from exc
        raise UsageError(f"export: {where}{exc.strerror or exc}; name another file") from exc
