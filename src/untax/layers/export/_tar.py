"""Entries as a tar stream: the same bytes for the same entries, whoever writes them and whenever.

POSIX headers, with pax records for what they cannot say: long names, times below a second, large numbers, extended attributes.
Names and values are bytes as the file system has them; no locale is asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace

from untax.core.errors import StageUnavailable
from untax.layers.export._tree import Item, Losses

Write = Callable[[bytes], object]

BLOCK = 512
_CHUNK = 1 << 20
END = bytes(2 * BLOCK)
_TYPES = {"file": b"0", "link": b"2", "directory": b"5", "fifo": b"6"}
_HARD_LINK = b"1"
_PAX = b"x"
_MOST_OCTAL_7 = 8**7 - 1
_MOST_OCTAL_11 = 8**11 - 1
VALUELESS = "without an extended attribute that has no value, which tar takes for none at all"


def write_tar(items: Iterable[Item], write: Write, losses: Losses, *, on_bytes: Callable[[int], None] | None = None) -> None:
    """The whole archive. A file whose size is no longer what it was is a `StageUnavailable`."""
    first_of: dict[object, bytes] = {}
    for item in items:
        if b"" in item.xattrs.values():
            losses.add(VALUELESS)
        if item.links is not None and item.links in first_of:
            # With its attributes once more: engines change the owner of a link they made, and the kernel drops capabilities then.
            write(_header(replace(item, size=0), _HARD_LINK, first_of[item.links]))
            continue
        if item.links is not None:
            first_of[item.links] = item.path
        write(_header(item, _TYPES[item.kind], item.target))
        if item.size:
            copy_content(item, write, on_bytes=on_bytes)
            write(padding(item.size))
    write(END)


def copy_content(item: Item, write: Write, *, on_bytes: Callable[[int], None] | None = None) -> None:
    """A file's content, exactly as much of it as was announced."""
    assert item.open is not None
    left = item.size
    fd = item.open()
    try:
        while left and (data := os.read(fd, min(left, _CHUNK))):
            write(data)
            left -= len(data)
            if on_bytes is not None:
                on_bytes(len(data))
        if left or os.read(fd, 1):
            raise StageUnavailable("export", f"{os.fsdecode(item.path)} changed while it was read; try again when nobody writes to it")
    finally:
        os.close(fd)


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def plain_header(name: bytes, size: int, *, is_directory: bool = False) -> bytes:
    """One block, whatever the size, for a member that has no history: owned by root, of no date."""
    return _block(name, b"5" if is_directory else b"0", 0o755 if is_directory else 0o644, 0, 0, 0, size, b"")


def _header(item: Item, kind: bytes, target: bytes) -> bytes:
    name = (item.path or b".") + (b"/" if item.kind == "directory" else b"")
    size = item.size if item.kind == "file" else 0
    seconds, nanoseconds = divmod(item.mtime_ns, 1_000_000_000)
    records: dict[bytes, bytes] = {}
    if len(name) > 100:
        records[b"path"] = name
    if len(target) > 100:
        records[b"linkpath"] = target
    if nanoseconds or not 0 <= seconds <= _MOST_OCTAL_11:
        records[b"mtime"] = _decimal(item.mtime_ns)
    if size > _MOST_OCTAL_11:
        records[b"size"] = b"%d" % size
    for field, number in ((b"uid", item.uid), (b"gid", item.gid)):
        if number > _MOST_OCTAL_7:
            records[field] = b"%d" % number
    for attribute, value in sorted(item.xattrs.items()):
        if value:
            records[b"SCHILY.xattr." + os.fsencode(attribute)] = value
    short = _block(name, kind, item.mode, item.uid, item.gid, max(0, seconds), size, target)
    if not records:
        return short
    body = b"".join(_record(field, value) for field, value in sorted(records.items()))
    return _block(b"PaxHeaders/" + name, _PAX, 0o644, 0, 0, 0, len(body), b"") + body + padding(len(body)) + short


def _block(name: bytes, kind: bytes, mode: int, uid: int, gid: int, mtime: int, size: int, target: bytes) -> bytes:
    def octal(number: int, digits: int) -> bytes:
        return b"%0*o\0" % (digits, number) if number < 8**digits else b"0" * digits + b"\0"  # the real one is in a record

    def large(number: int) -> bytes:
        """In base 256 where octal digits do not reach: members without records have no other place for it."""
        return b"%011o\0" % number if number <= _MOST_OCTAL_11 else b"\x80" + number.to_bytes(11, "big")

    fields = (name[:100].ljust(100, b"\0"), octal(mode & 0o7777, 7), octal(uid, 7), octal(gid, 7), large(size), octal(mtime, 11),
              b" " * 8, kind, target[:100].ljust(100, b"\0"), b"ustar\00000", bytes(32), bytes(32), octal(0, 7), octal(0, 7), bytes(155 + 12))  # fmt: skip
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _record(field: bytes, value: bytes) -> bytes:
    """`LENGTH field=value` and a newline, where the length counts its own digits."""
    rest = len(field) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) != len(str(rest)):
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, field, value)


def _decimal(nanoseconds: int) -> bytes:
    sign, positive = (b"-", -nanoseconds) if nanoseconds < 0 else (b"", nanoseconds)
    seconds, rest = divmod(positive, 1_000_000_000)
    text = b"%d.%09d" % (seconds, rest)
    return sign + text.rstrip(b"0").rstrip(b".")
