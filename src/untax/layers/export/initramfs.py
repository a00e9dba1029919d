"""A chain as an initramfs: the cpio archive that a kernel unpacks into its first root, compressed with gzip.

The format (newc) has owners, modes, links and hard links, dates in whole seconds, and files below 4 GiB; it has no extended
attributes. Device files are not written: a kernel mounts its own on /dev, and brings the console it needs for its first program.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator

from untax.core.errors import UsageError
from untax.layers.export._tar import copy_content
from untax.layers.export._tree import Item, Job, merged_items
from untax.layers.export.oci import Output

XATTRS = "without extended attributes, for which an initramfs has no place"

_TYPES = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "link": stat.S_IFLNK, "fifo": stat.S_IFIFO}
_MOST = 2**32 - 1  # eight hexadecimal digits
_GZIP = 16 + zlib.MAX_WBITS  # with a header in which there is no date


def write_initramfs(job: Job, out: Output, *, init: bytes | None) -> None:
    """Write the archive to `out`. `init` is what the kernel starts, as /init, whatever the chain has of that name."""
    packer = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
    names = Counter(item.links for item in _items(job.uncounted(), init) if item.links is not None)
    cpio = _Cpio(lambda data: out.write(packer.compress(data)), names)
    for item in _items(job, init):
        if item.xattrs:
            job.losses.add(XATTRS)
        cpio.add(item, job.on_bytes)
    cpio.end()
    out.write(packer.flush())


def _items(job: Job, init: bytes | None) -> Iterator[Item]:
    for item in merged_items(job.root, job.marks, job.losses):
        if init is None or not (item.path == b"init" or item.path.startswith(b"init/")):
            yield item
    if init is not None:
        yield Item(b"init", "file", 0o755, size=len(init), open=lambda: _in_memory(init))


def _in_memory(content: bytes) -> int:
    fd = os.memfd_create("init")
    with os.fdopen(os.dup(fd), "wb") as writing:
        writing.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class _Cpio:
    """`names` has how many each file with several has: its content goes with the last of them, as every reader expects."""

    def __init__(self, write: Callable[[bytes], object], names: Counter[object]) -> None:
        self._write = write
        self._names = names
        self._left = Counter(names)
        self._inodes: dict[object, int] = {}
        self._last = 0

    def add(self, item: Item, on_bytes: Callable[[int], None]) -> None:
        if item.size > _MOST:
            raise UsageError(f"{os.fsdecode(item.path)} has 4 GiB or more, which an initramfs cannot hold; export to squashfs or ext4")
        inode, count = self._inode(item)
        if item.links is not None:
            self._left[item.links] -= 1
        size = 0 if item.links is not None and self._left[item.links] else item.size
        seconds = min(max(0, item.mtime_ns // 1_000_000_000), _MOST)
        mode = _TYPES[item.kind] | item.mode
        self._header(item.path or b".", inode, mode, item.uid, item.gid, count, seconds, size or len(item.target))
        if size:
            copy_content(item, self._write, on_bytes=on_bytes)
        self._write(item.target + bytes(-(size or len(item.target)) % 4))

    def end(self) -> None:
        self._header(b"TRAILER!!!", 0, 0, 0, 0, 1, 0, 0)

    def _inode(self, item: Item) -> tuple[int, int]:
        """A number for the file, and how many names it has. Readers tell files with several apart by it."""
        if item.links is None:
            self._last += 1
            return self._last, 2 if item.kind == "directory" else 1
        if item.links not in self._inodes:
            self._last += 1
            self._inodes[item.links] = self._last
        return self._inodes[item.links], self._names[item.links]

    def _header(self, name: bytes, inode: int, mode: int, uid: int, gid: int, count: int, mtime: int, size: int) -> None:
        fields = (inode, mode, uid, gid, count, mtime, size, 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % number for number in fields) + name + b"\0"
        self._write(head + bytes(-len(head) % 4))
