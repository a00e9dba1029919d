"""A chain as an EROFS image: read-only, uncompressed, every file's content on whole pages, so that it can be mapped as it lies.

Written here, without a tool: nothing but the plain layouts of the format is used, which Linux and gVisor read alike. First comes the
superblock's page, then what files and directories hold, then the inodes.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from untax.core.errors import UsageError
from untax.layers.export import _tar
from untax.layers.export._tree import Item, Job, Kind, merged_items

XATTRS = "without extended attributes, which gVisor does not read from such an image"

_BLOCK = 4096
_SLOT = 32  # inodes are counted in these
_INODE = 64  # the long form
_DIRENT = 12
_SUPER_AT = 1024
_MAGIC = 0xE0F5E1E2
_PLAIN, _INLINE = 0 << 1 | 1, 2 << 1 | 1  # where the data lies, and that the inode has the long form
_LONGEST_INLINE = _BLOCK - _INODE
_TYPES: dict[Kind, tuple[int, int]] = {
    "file": (stat.S_IFREG, 1),
    "directory": (stat.S_IFDIR, 2),
    "fifo": (stat.S_IFIFO, 5),
    "link": (stat.S_IFLNK, 7),
}


@dataclass(slots=True)
class _Node:
    item: Item
    names: int = 1
    block: int = 0
    """Where its content begins, in blocks."""
    size: int = 0
    nid: int = 0
    parent: _Node | None = None
    entries: dict[bytes, _Node] = field(default_factory=dict)


def write_erofs(job: Job, target: Path) -> None:
    """Make the file `target`, which must not exist yet."""
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        _Image(fd, job).write()
    finally:
        os.close(fd)


class _Image:
    def __init__(self, fd: int, job: Job) -> None:
        self._fd = fd
        self._job = job
        self._next = 1  # block that nothing is in yet

    def write(self) -> None:
        nodes = self._take_content()
        slots = _number(nodes)
        for node in nodes:
            if node.item.kind == "directory":
                data = b"".join(_directory_blocks(node))
                node.block, node.size = self._next, len(data)
                self._put(data)
        meta = self._next
        self._put_inodes(nodes, slots)
        self._put_superblock(meta, len(nodes))

    def _take_content(self) -> list[_Node]:
        """All there is, the top first, with the files' content in place."""
        job = self._job
        nodes: list[_Node] = []
        by_path: dict[bytes, _Node] = {}
        several: dict[object, _Node] = {}
        for item in merged_items(job.root, job.marks, job.losses):
            if item.xattrs:
                job.losses.add(XATTRS)
            node = several.get(item.links) if item.links is not None else None
            if node is not None:
                node.names += 1
            else:
                node = _Node(item, size=item.size)
                nodes.append(node)
                if item.links is not None:
                    several[item.links] = node
                if item.kind == "file" and item.size:
                    node.block = self._next
                    self._put_content(item)
                elif item.kind == "link":
                    node.size = len(item.target)
            if item.path:
                above, _, name = item.path.rpartition(b"/")
                by_path[above].entries[name] = node
                if item.kind == "directory":
                    node.parent = by_path[above]
                    by_path[above].names += 1
            if item.kind == "directory":
                node.names += 1
                by_path[item.path] = node
        return nodes

    # ---- pieces ----

    def _put_content(self, item: Item) -> None:
        at = self._next * _BLOCK

        def write(data: bytes) -> None:
            nonlocal at
            if data.count(0) != len(data):
                _write_at(self._fd, data, at)
            at += len(data)

        _tar.copy_content(item, write, on_bytes=self._job.on_bytes)
        self._next += -(-item.size // _BLOCK)

    def _put(self, data: bytes) -> None:
        _write_at(self._fd, data, self._next * _BLOCK)
        self._next += -(-len(data) // _BLOCK)

    def _put_inodes(self, nodes: list[_Node], slots: int) -> None:
        area = bytearray(-(-slots * _SLOT // _BLOCK) * _BLOCK)
        for number, node in enumerate(nodes, 1):
            item, at = node.item, node.nid * _SLOT
            is_inline = item.kind == "link"
            seconds, nanoseconds = divmod(item.mtime_ns, 1_000_000_000)
            struct.pack_into(
                "<HHHHQIIIIQII", area, at,
                _INLINE if is_inline else _PLAIN, 0, _TYPES[item.kind][0] | item.mode, 0, node.size, node.block,
                number & 0xFFFFFFFF, item.uid, item.gid, seconds & 0xFFFFFFFFFFFFFFFF, nanoseconds, node.names,
            )  # fmt: skip
            if is_inline:
                area[at + _INODE : at + _INODE + len(item.target)] = item.target
        self._put(bytes(area))

    def _put_superblock(self, meta: int, inodes: int) -> None:
        if self._next >= 1 << 32:
            raise UsageError("the image would be larger than 16 TiB")
        os.ftruncate(self._fd, self._next * _BLOCK)
        head = struct.pack("<IIIBBHQQIIII", _MAGIC, 0, 0, 12, 0, 0, inodes, 0, 0, self._next, meta, 0)
        _write_at(self._fd, head.ljust(128, b"\0"), _SUPER_AT)


def _write_at(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def _number(nodes: list[_Node]) -> int:
    """Give each inode its place; gives how many slots they take. What lies behind an inode may not reach into the next block."""
    slot = 0
    for node in nodes:
        behind = len(node.item.target) if node.item.kind == "link" else 0
        if behind > _LONGEST_INLINE:
            raise UsageError(f"the link {os.fsdecode(node.item.path)} is {behind} bytes long, more than such an image can hold")
        if slot * _SLOT % _BLOCK + _INODE + behind > _BLOCK:
            slot = -(-slot * _SLOT // _BLOCK) * (_BLOCK // _SLOT)
        node.nid = slot
        slot += -(-(_INODE + behind) // _SLOT)
    return slot


def _directory_blocks(node: _Node) -> Iterator[bytes]:
    """Its entries, itself and what is above it among them, in the order of their bytes: readers search in halves. Blocks are full but the last."""
    entries = sorted([*node.entries.items(), (b".", node), (b"..", node.parent or node)], key=lambda one: one[0])
    taken: list[tuple[bytes, _Node]] = []
    room = _BLOCK
    for name, child in entries:
        if len(name) + _DIRENT > room:
            yield _block(taken).ljust(_BLOCK, b"\0")
            taken, room = [], _BLOCK
        taken.append((name, child))
        room -= len(name) + _DIRENT
    yield _block(taken)


def _block(entries: list[tuple[bytes, _Node]]) -> bytes:
    at = _DIRENT * len(entries)
    heads: list[bytes] = []
    for name, child in entries:
        heads.append(struct.pack("<QHBB", child.nid, at, _TYPES[child.item.kind][1], 0))
        at += len(name)
    return b"".join((*heads, *(name for name, _ in entries)))
