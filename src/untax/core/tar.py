"""The tar format as data: header blocks, extended headers, sparse maps, names. Nothing is read or written here.

What is malformed raises `TarError`; whoever reads the archive says what that means to its caller. Three dialects are known:
ustar with POSIX extended headers, GNU, and the oldest without a mark.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 512
_USTAR, _GNU, _OLD = b"ustar\000", b"ustar ", bytes(6)
_MAX = 1 << 63


class TarError(ValueError):
    """Not a tar archive, or one that no two programs would read alike."""


class Header:
    """One header block whose sum is right; its fields are read when they are asked for."""

    __slots__ = ("block", "kind")

    def __init__(self, block: bytes) -> None:
        if number(block[148:156]) != sum(block) - sum(block[148:156]) + 256:  # the sum counts its own field as blanks
            raise TarError("a tar header with a wrong sum")
        self.block = block
        self.kind = block[156:157]

    @property
    def name(self) -> bytes:
        block = self.block
        name = text(block[:100])
        if block[257:263] == _USTAR and block[345]:
            return text(block[345:500]) + b"/" + name
        return name

    @property
    def has_known_magic(self) -> bool:
        return self.block[257:263] in (_USTAR, _GNU, _OLD)

    @property
    def mode(self) -> int:
        return number(self.block[100:108])

    @property
    def uid(self) -> int:
        return number(self.block[108:116])

    @property
    def gid(self) -> int:
        return number(self.block[116:124])

    @property
    def size(self) -> int:
        return number(self.block[124:136])

    @property
    def mtime(self) -> int:
        """Seconds; before 1970 they are negative, which only the GNU dialect can write."""
        return number(self.block[136:148], is_signed=True)

    @property
    def target(self) -> bytes:
        return text(self.block[157:257])

    @property
    def device(self) -> tuple[int, int]:
        return number(self.block[329:337]), number(self.block[337:345])

    def sparse(self) -> tuple[list[tuple[int, int]], int, bool]:
        """Of a GNU sparse file: where its data lies, the whole size, and whether the map goes on in another block."""
        return sparse_entries(self.block[386:482]), number(self.block[483:495]), self.block[482] != 0


def text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def number(field: bytes, *, is_signed: bool = False) -> int:
    """Octal digits, or base 256 for what they cannot hold."""
    if field[0] & 0x80:
        if is_signed and field[0] == 0xFF:
            value = int.from_bytes(field, "big", signed=True)
        else:
            value = int.from_bytes(field[1:], "big") | (field[0] & 0x7F) << 8 * (len(field) - 1)
        if not -_MAX <= value < _MAX:
            raise TarError("a tar header with a number out of range")
        return value
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise TarError("a tar header with a malformed number")
    return int(digits, 8) if digits else 0


def decimal(value: bytes) -> int:
    if not value.isdigit() or len(value) > 19:
        raise TarError("a tar header with a malformed number")
    return int(value)


def nanoseconds(value: bytes) -> int:
    """A time as extended headers write it: seconds with a fraction, maybe negative."""
    whole, _, fraction = value.removeprefix(b"-").partition(b".")
    if fraction.strip(b"0123456789"):
        raise TarError("a tar header with a malformed time")
    ns = decimal(whole) * 10**9 + int(fraction[:9].ljust(9, b"0"))
    return -ns if value.startswith(b"-") else ns


def records(data: bytes) -> list[tuple[bytes, bytes]]:
    """The keys and values of an extended header, in its order."""
    found: list[tuple[bytes, bytes]] = []
    at, end = 0, len(data)
    while at < end:
        blank = data.find(b" ", at, at + 20)
        if blank < 0:
            raise TarError("a malformed extended tar header")
        size = decimal(data[at:blank])
        record = data[blank + 1 : at + size]
        key, equals, value = record.partition(b"=")
        if not equals or at + size > end or not value.endswith(b"\n"):
            raise TarError("a malformed extended tar header")
        found.append((key, value[:-1]))
        at += size
    return found


def components(name: bytes, *, deepest: int) -> list[bytes]:
    """The parts of a name, none of which leads anywhere but down."""
    if name.startswith(b"/"):
        raise TarError("an absolute name in a tar stream")
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in name:
        raise TarError("a name in a tar stream that leads out of it")
    if len(parts) > deepest:
        raise TarError(f"a name in a tar stream that goes more than {deepest} directories down")
    return parts


# ---- sparse files ----


def sparse_entries(field: bytes) -> list[tuple[int, int]]:
    """Pairs of offset and size; an empty one ends them."""
    found = []
    for at in range(0, len(field) - 23, 24):
        if not field[at + 12 : at + 24].strip(b"\0"):
            if field[at:].strip(b"\0"):
                raise TarError("a sparse map with something behind its end")
            break
        found.append((number(field[at : at + 12]), number(field[at + 12 : at + 24])))
    return found


def check_sparse(pieces: Sequence[tuple[int, int]], *, stored: int, whole: int) -> None:
    """The pieces follow each other, lie in the file and are as many bytes as the archive holds of it."""
    at = total = 0
    for offset, size in pieces:
        if offset < at or offset + size > whole:
            raise TarError("a sparse map that overlaps or leaves its file")
        at = offset + size
        total += size
    if total != stored:
        raise TarError("a sparse map that does not fit what is stored")
