"""Archives that must be refused, made on demand: `archives(around)` gives them all, each with a name that says what it tries.

A *trick* writes one hostile tar stream in one dialect. Every trick is packed in several ways: plain, gzip or xz, as a root file
system (`tar:`), as a layer of an OCI layout (`oci:`) or of what `docker save` writes (`docker-archive:`). Further ones are hostile
in what is around the layers. `around` is a directory with files that nothing may touch; the tricks aim at it.
"""

import gzip
import hashlib
import io
import json
import lzma
import os
import platform
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = 512
DIALECTS = ("ustar", "gnu", "pax")
SCHEMES = ("tar", "oci", "docker-archive")
FILE, HARD, LINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


# ---- a tar writer that writes anything ----


def pax_record(key: bytes, value: bytes) -> bytes:
    size = len(key) + len(value) + 3
    while size != len(str(size)) + len(key) + len(value) + 3:
        size = len(str(size)) + len(key) + len(value) + 3
    return b"%d %b=%b\n" % (size, key, value)


def octal(value: int, width: int) -> bytes:
    if 0 <= value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return (b"\xff" if value < 0 else b"\x80") + (value & (256 ** (width - 1) - 1)).to_bytes(width - 1, "big")


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


class Unsuitable(Exception):
    """The dialect cannot say that."""


class Tar:
    """Collects entries of one dialect. What the dialect cannot say raises `Unsuitable`."""

    def __init__(self, dialect: str, aim: bytes) -> None:
        self.dialect = dialect
        self.aim = aim  # a directory outside, absolute
        self.out = bytearray()
        self.end = bytes(2 * BLOCK)

    def header(self, name=b"", kind=FILE, size=0, target=b"", mode=0o644, uid=0, gid=0, mtime=1_600_000_000, device=(0, 0), magic=None, tail=b"") -> bytes:  # fmt: skip
        magic = magic if magic is not None else (b"ustar  \0" if self.dialect == "gnu" else b"ustar\00000")
        prefix = b""
        if len(name) > 100 and self.dialect == "ustar":
            cut = name.rfind(b"/", 0, 156)
            if cut < 1 or len(name) - cut - 1 > 100:
                raise Unsuitable
            prefix, name = name[:cut], name[cut + 1 :]
        if len(target) > 100 and self.dialect == "ustar":
            raise Unsuitable
        block = name[:100].ljust(100, b"\0") + octal(mode, 8) + octal(uid, 8) + octal(gid, 8) + octal(size, 12) + octal(mtime, 12)
        block += b" " * 8 + kind + target[:100].ljust(100, b"\0") + magic + bytes(64) + octal(device[0], 8) + octal(device[1], 8)
        block += tail or prefix
        block = block.ljust(BLOCK, b"\0")
        return block[:148] + b"%06o\0 " % sum(block) + block[156:]

    def add(self, name: bytes, kind=FILE, data=b"", target=b"", **fields) -> "Tar":
        """One entry; names that do not fit are written the way the dialect has for it."""
        if b"\0" in name and self.dialect == "ustar":
            raise Unsuitable
        long = [(b"path", b"L", name), (b"linkpath", b"K", target)]
        records = b""
        for key, letter, value in long:
            if len(value) > 100 or b"\0" in value:
                if self.dialect == "gnu":
                    self.raw(self.header(b"././@LongLink", letter, len(value) + 1) + padded(value + b"\0"))
                elif self.dialect == "pax":
                    records += pax_record(key, value)
        if records:
            self.extended(records)
        fields.setdefault("size", len(data))
        return self.raw(self.header(name, kind, target=target, **fields) + padded(data))

    def extended(self, records: bytes, kind=b"x") -> "Tar":
        if self.dialect != "pax":
            raise Unsuitable
        return self.raw(self.header(b"PaxHeader", kind, len(records)) + padded(records))

    def long(self, value: bytes, letter=b"L") -> "Tar":
        if self.dialect != "gnu":
            raise Unsuitable
        return self.raw(self.header(b"././@LongLink", letter, len(value)) + padded(value))

    def raw(self, data: bytes) -> "Tar":
        self.out += data
        return self

    def only(self, *dialects: str) -> "Tar":
        if self.dialect not in dialects:
            raise Unsuitable
        return self

    def bytes(self) -> bytes:
        return bytes(self.out) + self.end


# ---- tricks ----

TRICKS: dict[str, Callable[[Tar], object]] = {}


def trick(name: str) -> Callable[[Callable[[Tar], object]], Callable[[Tar], object]]:
    def keep(function: Callable[[Tar], object]) -> Callable[[Tar], object]:
        assert name not in TRICKS, name
        TRICKS[name] = function
        return function

    return keep


def simple(name: str, function: Callable[[Tar], object]) -> None:
    trick(name)(function)


# names that lead out
for label, path in {
    "up": b"../canary",
    "up-many": b"../" * 20 + b"tmp/canary",
    "up-inside": b"a/../../canary",
    "up-after-dot": b"./../canary",
    "up-alone": b"..",
    "up-last": b"a/..",
    "up-in-the-middle": b"a/../b",
    "up-long": b"a/" * 60 + b"../" * 70 + b"canary",
}.items():
    simple(f"file-{label}", lambda tar, path=path: tar.add(path, data=b"owned"))
    simple(f"directory-{label}", lambda tar, path=path: tar.add(path + b"/", DIRECTORY, mode=0o777))
simple("file-absolute", lambda tar: tar.add(tar.aim + b"/canary", data=b"owned"))
simple("file-absolute-twice", lambda tar: tar.add(b"/" + tar.aim + b"/canary", data=b"owned"))
simple("directory-absolute", lambda tar: tar.add(tar.aim + b"/made/", DIRECTORY))
simple("link-absolute-name", lambda tar: tar.add(tar.aim + b"/made", LINK, target=b"x"))
simple("fifo-absolute-name", lambda tar: tar.add(tar.aim + b"/made", FIFO))

# ways through links
simple("through-a-link", lambda tar: tar.add(b"l", LINK, target=tar.aim).add(b"l/canary", data=b"owned"))
simple("through-a-link-with-its-directory", lambda tar: tar.add(b"l", LINK, target=tar.aim).add(b"l/", DIRECTORY).add(b"l/canary", data=b"owned"))  # fmt: skip
simple("through-a-link-deeper", lambda tar: tar.add(b"d/e/l", LINK, target=tar.aim).add(b"d/e/l/canary", data=b"owned"))
simple("through-two-links", lambda tar: tar.add(b"m", LINK, target=b"l").add(b"l", LINK, target=tar.aim).add(b"m/canary", data=b"owned"))
simple("through-a-link-to-the-inside", lambda tar: tar.add(b"d/", DIRECTORY).add(b"l", LINK, target=b"d").add(b"l/x", data=b"x"))
simple("through-a-link-a-directory", lambda tar: tar.add(b"l", LINK, target=tar.aim).add(b"l/made/", DIRECTORY))
simple("through-a-link-a-link", lambda tar: tar.add(b"l", LINK, target=tar.aim).add(b"l/made", LINK, target=b"x"))
simple("through-a-link-a-hard-link", lambda tar: tar.add(b"f", data=b"x").add(b"l", LINK, target=tar.aim).add(b"l/made", HARD, target=b"f"))
simple("through-a-link-a-fifo", lambda tar: tar.add(b"l", LINK, target=tar.aim).add(b"l/made", FIFO))
simple("through-a-file", lambda tar: tar.add(b"f", data=b"x").add(b"f/x", data=b"x"))
simple("through-a-fifo", lambda tar: tar.add(b"p", FIFO).add(b"p/x", data=b"x"))
simple("through-a-hard-link-of-a-link", lambda tar: tar.add(b"l", LINK, target=tar.aim).add(b"h", HARD, target=b"l").add(b"h/canary", data=b"x"))  # fmt: skip
simple("through-a-device", lambda tar: tar.add(b"dev/null", CHARACTER, device=(1, 3)).add(b"dev/null", data=b"x").add(b"dev/null/x", data=b"x"))  # fmt: skip

# one name, two kinds
_KINDS: dict[str, Callable[[Tar], object]] = {
    "file": lambda tar: tar.add(b"x", data=b"one"),
    "directory": lambda tar: tar.add(b"x/", DIRECTORY),
    "full-directory": lambda tar: tar.add(b"x/y", data=b"one"),
    "link": lambda tar: tar.add(b"x", LINK, target=tar.aim + b"/canary"),
    "fifo": lambda tar: tar.add(b"x", FIFO),
}
for first, write_first in _KINDS.items():
    for second, write_second in _KINDS.items():
        if first != second and {first, second} != {"directory", "full-directory"}:
            simple(f"{first}-then-{second}", lambda tar, one=write_first, two=write_second: (one(tar), two(tar)))
simple("hard-link-of-a-link-then-file", lambda tar: tar.add(b"l", LINK, target=tar.aim + b"/canary").add(b"h", HARD, target=b"l").add(b"h", data=b"owned"))  # fmt: skip

# links out, hard links to what is not there
simple("link-climbs", lambda tar: tar.add(b"l", LINK, target=b"../canary"))
simple("link-climbs-deeper", lambda tar: tar.add(b"a/b/l", LINK, target=b"../../../canary"))
simple("link-climbs-after-going-down", lambda tar: tar.add(b"l", LINK, target=b"a/../../canary"))
simple("link-climbs-above-an-absolute-root", lambda tar: tar.add(b"l", LINK, target=b"/../canary"))
simple("link-climbs-many", lambda tar: tar.add(b"l", LINK, target=b"../" * 30 + b"etc/passwd"))
simple("link-to-nothing", lambda tar: tar.add(b"l", LINK))
simple("link-longer-than-a-path", lambda tar: tar.only("gnu", "pax").add(b"l", LINK, target=b"a/" * 3000))
simple("hard-link-absolute", lambda tar: tar.add(b"h", HARD, target=tar.aim + b"/canary"))
simple("hard-link-up", lambda tar: tar.add(b"h", HARD, target=b"../canary"))
simple("hard-link-through-a-link", lambda tar: tar.add(b"l", LINK, target=tar.aim).add(b"h", HARD, target=b"l/canary"))
simple("hard-link-to-missing", lambda tar: tar.add(b"h", HARD, target=b"missing"))
simple("hard-link-to-missing-directory", lambda tar: tar.add(b"h", HARD, target=b"missing/file"))
simple("hard-link-to-later", lambda tar: tar.add(b"h", HARD, target=b"f").add(b"f", data=b"x"))
simple("hard-link-to-directory", lambda tar: tar.add(b"d/", DIRECTORY).add(b"h", HARD, target=b"d"))
simple("hard-link-to-root", lambda tar: tar.add(b"h", HARD, target=b"."))
simple("hard-link-to-itself", lambda tar: tar.add(b"f", data=b"x").add(b"f", HARD, target=b"f"))
simple("hard-link-to-nothing", lambda tar: tar.add(b"h", HARD))
simple("hard-link-below-a-file", lambda tar: tar.add(b"f", data=b"x").add(b"h", HARD, target=b"f/x"))

# names that are none
simple("name-empty", lambda tar: tar.add(b"", data=b"x"))
simple("name-dot-file", lambda tar: tar.add(b".", data=b"x"))
simple("name-dot-link", lambda tar: tar.add(b"./", LINK, target=tar.aim))
simple("name-dot-fifo", lambda tar: tar.add(b".", FIFO))
simple("name-ends-in-dot", lambda tar: tar.add(b"a/.", data=b"x"))
simple("name-of-a-link-ends-in-slash", lambda tar: tar.add(b"l/", LINK, target=b"x"))
simple("name-of-a-full-file-ends-in-slash", lambda tar: tar.add(b"f/", data=b"x"))
simple("name-with-nul", lambda tar: tar.add(b"a\0b", data=b"x"))
simple("name-part-too-long", lambda tar: tar.only("gnu", "pax").add(b"n" * 256, data=b"x"))
simple("name-part-too-long-in-the-middle", lambda tar: tar.only("gnu", "pax").add(b"a/" + b"n" * 300 + b"/b", data=b"x"))
simple("name-too-long", lambda tar: tar.only("gnu", "pax").add(b"abcdefgh/" * 500, DIRECTORY))
simple("name-too-deep", lambda tar: tar.only("gnu", "pax").add(b"a/" * 200 + b"f", data=b"x"))
simple("names-each-one-deeper", lambda tar: [tar.only("gnu", "pax").add(b"a/" * depth, DIRECTORY) for depth in range(1, 200)])

# devices
for label, fields in {
    "disk": (b"dev/sda", BLOCK_DEVICE, (8, 0)),
    "memory": (b"dev/mem", CHARACTER, (1, 1)),
    "kernel-log": (b"dev/kmsg", CHARACTER, (1, 11)),
    "fuse": (b"dev/fuse", CHARACTER, (10, 229)),
    "null-elsewhere": (b"etc/null", CHARACTER, (1, 3)),
    "null-below-another-dev": (b"srv/dev/null", CHARACTER, (1, 3)),
    "null-as-a-disk": (b"dev/null", BLOCK_DEVICE, (1, 3)),
    "overlay-whiteout": (b"etc/passwd", CHARACTER, (0, 0)),
    "overlay-whiteout-in-dev": (b"dev/x", CHARACTER, (0, 0)),
    "block-whiteout": (b"x", BLOCK_DEVICE, (0, 0)),
}.items():
    simple(f"device-{label}", lambda tar, f=fields: tar.add(f[0], f[1], device=f[2], mode=0o666))

# owners and times
simple("uid-above", lambda tar: tar.add(b"f", data=b"x", uid=65_536))
simple("gid-above", lambda tar: tar.add(b"f", data=b"x", gid=65_536))
simple("uid-of-a-directory-above", lambda tar: tar.add(b"d/", DIRECTORY, uid=100_000))
simple("gid-of-a-link-above", lambda tar: tar.add(b"l", LINK, target=b"x", gid=100_000))
simple("uid-enormous", lambda tar: tar.only("gnu", "ustar").add(b"f", data=b"x", uid=1 << 40))
simple("uid-negative", lambda tar: tar.only("gnu", "ustar").add(b"f", data=b"x", uid=-1))
simple("uid-extended-above", lambda tar: tar.extended(pax_record(b"uid", b"4294967295")).add(b"f", data=b"x"))
simple("uid-extended-negative", lambda tar: tar.extended(pax_record(b"uid", b"-1")).add(b"f", data=b"x"))
simple("time-beyond-clocks", lambda tar: tar.only("gnu", "ustar").add(b"f", data=b"x", mtime=1 << 62))
simple("time-extended-beyond-clocks", lambda tar: tar.extended(pax_record(b"mtime", b"9" * 18)).add(b"f", data=b"x"))
simple("time-extended-not-a-number", lambda tar: tar.extended(pax_record(b"mtime", b"now")).add(b"f", data=b"x"))

# kinds that are none, contents where there are none
for letter in (b"Z", b"M", b"D", b"N", b"X", b"A", b"\xff", b"8"):
    simple(f"kind-{letter.hex()}", lambda tar, letter=letter: tar.add(b"x", letter))
simple("label-with-contents", lambda tar: tar.add(b"label", b"V", b"x" * 600))
simple("directory-with-contents", lambda tar: tar.add(b"d/", DIRECTORY, tar.header(b"hidden")))
simple("link-with-contents", lambda tar: tar.add(b"l", LINK, b"x" * 512, target=b"f"))
simple("hard-link-with-contents", lambda tar: tar.add(b"f", data=b"x").add(b"h", HARD, b"y" * 512, target=b"f"))
simple("fifo-with-contents", lambda tar: tar.add(b"p", FIFO, b"x" * 512))
simple("device-with-contents", lambda tar: tar.add(b"dev/null", CHARACTER, b"x" * 512, device=(1, 3)))


# broken headers and streams
def _spoilt(tar: Tar, at: int, value: bytes, *, fix_sum: bool) -> None:
    block = bytearray(tar.header(b"f", FILE, 0))
    block[at : at + len(value)] = value
    if fix_sum:
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    tar.raw(bytes(block))


simple("sum-wrong", lambda tar: _spoilt(tar, 0, b"g", fix_sum=False))
simple("sum-missing", lambda tar: _spoilt(tar, 148, bytes(8), fix_sum=False))
simple("size-not-a-number", lambda tar: _spoilt(tar, 124, b"zzzzzzzzzzz\0", fix_sum=True))
simple("size-negative", lambda tar: _spoilt(tar, 124, b"\xff" * 12, fix_sum=True))
simple("size-enormous", lambda tar: _spoilt(tar, 124, b"\x80" + b"\x7f" * 11, fix_sum=True))
simple("size-beyond-the-end", lambda tar: _spoilt(tar, 124, b"00077777777\0", fix_sum=True))
simple("size-four-exabytes", lambda tar: _spoilt(tar, 124, b"\x80\0\0\0" + (1 << 62).to_bytes(8, "big"), fix_sum=True))
simple("mode-not-a-number", lambda tar: _spoilt(tar, 100, b"rwxrwxr\0", fix_sum=True))
simple("dialect-unknown", lambda tar: _spoilt(tar, 257, b"xxtar\00000", fix_sum=True))
simple("end-missing", lambda tar: (tar.add(b"f", data=b"x"), setattr(tar, "end", b"")))
simple("end-in-a-header", lambda tar: (tar.add(b"f", data=b"x"), setattr(tar, "end", tar.header(b"g")[:300])))
simple("end-in-contents", lambda tar: (tar.raw(tar.header(b"f", FILE, 5000) + b"x" * 1000), setattr(tar, "end", b"")))
simple("end-in-padding", lambda tar: (tar.raw(tar.header(b"f", FILE, 5) + b"x" * 100), setattr(tar, "end", b"")))
simple("end-then-something", lambda tar: (tar.add(b"f", data=b"x"), setattr(tar, "end", bytes(1024) + b"x" + bytes(511))))
simple(
    "end-then-another-archive", lambda tar: (tar.add(b"f", data=b"x"), setattr(tar, "end", bytes(1024) + tar.header(b"g") + bytes(1024)))
)
simple("zeros-in-the-middle", lambda tar: tar.add(b"f", data=b"x").raw(bytes(512)).add(b"g", data=b"x"))
simple("nothing-at-all", lambda tar: (tar.only("ustar"), setattr(tar, "end", b"")))
simple("less-than-a-block", lambda tar: (tar.only("ustar"), setattr(tar, "end", b"tar")))
simple("text", lambda tar: (tar.only("ustar"), setattr(tar, "end", b"#!/bin/sh\necho this is not a tar\n" * 100)))
simple("noise", lambda tar: (tar.only("ustar"), setattr(tar, "end", hashlib.shake_256(b"noise").digest(20_480))))

# extended headers
_x = {
    "too-long": pax_record(b"comment", b"x" * (2 << 20)),
    "length-not-a-number": b"xx path=a\n",
    "length-beyond": b"99 path=a\n",
    "length-zero": b"0 path=a\n",
    "length-enormous": b"9" * 19 + b" path=a\n",
    "without-newline": b"9 path=aa",
    "without-equals": b"8 patha\n",
    "noise": hashlib.shake_256(b"pax").digest(512),
    "path-up": pax_record(b"path", b"../canary"),
    "path-twice": pax_record(b"path", b"a") + pax_record(b"path", b"../canary"),
    "path-empty": pax_record(b"path", b""),
    "size-twice": pax_record(b"size", b"1") + pax_record(b"size", b"0"),
    "size-negative": pax_record(b"size", b"-1"),
    "size-not-a-number": pax_record(b"size", b"0x10"),
    "size-beyond-the-end": pax_record(b"size", b"99999999"),
    "size-enormous": pax_record(b"size", b"9" * 25),
    "attribute-too-large": pax_record(b"SCHILY.xattr.user.large", b"x" * 100_000),
    "sparse-without-size": pax_record(b"GNU.sparse.map", b"0,1"),
    "sparse-half-a-map": pax_record(b"GNU.sparse.map", b"0,1,2") + pax_record(b"GNU.sparse.size", b"10"),
    "sparse-overlaps": pax_record(b"GNU.sparse.map", b"0,1,0,0") + pax_record(b"GNU.sparse.size", b"10") + pax_record(b"GNU.sparse.map", b"5,1"),
    "sparse-backwards": pax_record(b"GNU.sparse.map", b"5,1,0,0") + pax_record(b"GNU.sparse.size", b"10"),
    "sparse-beyond-its-file": pax_record(b"GNU.sparse.map", b"10,1") + pax_record(b"GNU.sparse.size", b"10"),
    "sparse-more-than-stored": pax_record(b"GNU.sparse.map", b"0,5") + pax_record(b"GNU.sparse.size", b"10"),
    "sparse-petabyte": pax_record(b"GNU.sparse.map", b"0,1") + pax_record(b"GNU.sparse.size", b"%d" % (1 << 50)),
    "sparse-name-up": pax_record(b"GNU.sparse.map", b"0,1") + pax_record(b"GNU.sparse.size", b"1") + pax_record(b"GNU.sparse.name", b"../canary"),
    "sparse-of-unknown-version": pax_record(b"GNU.sparse.major", b"9") + pax_record(b"GNU.sparse.size", b"1"),
    "sparse-map-in-contents-does-not-end": b"".join(pax_record(b"GNU.sparse." + k, v) for k, v in ((b"major", b"1"), (b"minor", b"0"), (b"realsize", b"1"))),
}  # fmt: skip
for label, records in _x.items():
    simple(f"extended-{label}", lambda tar, records=records: tar.extended(records).add(b"f", data=b"x"))
simple("extended-path-absolute", lambda tar: tar.extended(pax_record(b"path", tar.aim + b"/canary")).add(b"f", data=b"x"))
simple("extended-link-out", lambda tar: tar.extended(pax_record(b"linkpath", tar.aim + b"/canary")).add(b"h", HARD, target=b"f"))
simple("extended-link-up", lambda tar: tar.extended(pax_record(b"linkpath", b"../canary")).add(b"l", LINK, target=b"f"))
simple("extended-of-nothing", lambda tar: tar.add(b"f", data=b"x").extended(pax_record(b"path", b"g")))
simple(
    "extended-twice", lambda tar: tar.extended(pax_record(b"path", b"a")).extended(pax_record(b"path", b"../canary")).add(b"f", data=b"x")
)
simple("extended-contents-for-a-directory", lambda tar: tar.extended(pax_record(b"size", b"512")).add(b"d/", DIRECTORY).raw(bytes(512)))
simple("extended-sparse-directory", lambda tar: tar.extended(pax_record(b"GNU.sparse.size", b"5")).add(b"d/", DIRECTORY))
simple("extended-sparse-count-enormous", lambda tar: tar.extended(b"".join(pax_record(b"GNU.sparse." + k, v) for k, v in ((b"major", b"1"), (b"minor", b"0"), (b"realsize", b"1")))).add(b"f", data=padded(b"999999999999\n")))  # fmt: skip
for key, value in {
    b"path": b"../canary",
    b"linkpath": b"../canary",
    b"size": b"0",
    b"GNU.sparse.size": b"5",
    b"SCHILY.xattr.user.a": b"b",
}.items():
    simple(f"global-{key.decode()}", lambda tar, key=key, value=value: tar.extended(pax_record(key, value), b"g").add(b"f", data=b"x"))
simple("long-name-up", lambda tar: tar.long(b"../canary\0").add(b"f", data=b"x"))
simple("long-name-absolute", lambda tar: tar.long(tar.aim + b"/canary\0").add(b"f", data=b"x"))
simple("long-name-empty", lambda tar: tar.long(b"\0").add(b"f", data=b"x"))
simple("long-name-twice", lambda tar: tar.long(b"a\0").long(b"../canary\0").add(b"f", data=b"x"))
simple("long-name-of-nothing", lambda tar: tar.add(b"f", data=b"x").long(b"g\0"))
simple("long-name-enormous", lambda tar: tar.long(b"a/" * 600_000).add(b"f", data=b"x"))
simple("long-target-out", lambda tar: tar.long(tar.aim + b"/canary\0", b"K").add(b"h", HARD, target=b"f"))
simple("long-and-extended", lambda tar: tar.only("gnu").long(b"a\0").raw(tar.header(b"p", b"x", 19)).raw(padded(pax_record(b"path", b"../canary"))).add(b"f", data=b"x"))  # fmt: skip


def _old_sparse(tar: Tar, pieces: list[tuple[int, int]], whole: int, stored: int, *, goes_on: bool = False) -> None:
    table = b"".join(octal(offset, 12) + octal(size, 12) for offset, size in pieces).ljust(96, b"\0")
    tail = bytes(41) + table + (b"\1" if goes_on else b"\0") + octal(whole, 12)
    tar.only("gnu").raw(tar.header(b"f", b"S", stored, tail=tail))
    more = octal(1, 12) + octal(0, 12)
    tar.raw((more * 21 + b"\1" + bytes(7)) * (10 if goes_on else 0)).raw(padded(b"x" * stored))


simple("old-sparse-overlaps", lambda tar: _old_sparse(tar, [(0, 5), (3, 5)], 20, 10))
simple("old-sparse-beyond-its-file", lambda tar: _old_sparse(tar, [(15, 10)], 20, 10))
simple("old-sparse-less-than-stored", lambda tar: _old_sparse(tar, [(0, 5)], 20, 10))
simple("old-sparse-petabyte", lambda tar: _old_sparse(tar, [(0, 5)], 1 << 50, 5))
simple("old-sparse-map-does-not-end", lambda tar: _old_sparse(tar, [(0, 1)], 20, 1, goes_on=True))

# deletions
for label, name in {
    "of-nothing": b".wh.",
    "of-dot": b".wh..",
    "of-dot-dot": b".wh...",
    "of-dot-dot-deeper": b"d/.wh...",
    "of-a-deletion": b".wh..wh.x",
    "of-a-deletion-deeper": b"d/.wh..wh.aufs",
    "with-something-in-it": b".wh.x/y",
    "with-an-opaque-in-it": b".wh.x/.wh..wh..opq",
    "in-opaque": b".wh..wh..opq/x",
    "outside": b"../.wh.canary",
    "of-opaque-outside": b"../.wh..wh..opq",
}.items():
    simple(f"deletion-{label}", lambda tar, name=name: tar.add(name))
simple("deletion-absolute", lambda tar: tar.add(tar.aim + b"/.wh.canary"))
simple("deletion-through-a-link", lambda tar: tar.add(b"l", LINK, target=tar.aim).add(b"l/.wh.canary"))
simple("deletion-opaque-through-a-link", lambda tar: tar.add(b"l", LINK, target=tar.aim).add(b"l/.wh..wh..opq"))
simple("deletion-opaque-below-a-file", lambda tar: tar.add(b"f", data=b"x").add(b"f/.wh..wh..opq"))
for label, kind in {"directory": DIRECTORY, "link": LINK, "hard-link": HARD, "fifo": FIFO, "device": CHARACTER}.items():
    simple(
        f"deletion-as-a-{label}",
        lambda tar, kind=kind: tar.add(b"f", data=b"x").add(b".wh.x", kind, target=b"f" if kind in (LINK, HARD) else b""),
    )
    simple(f"deletion-opaque-as-a-{label}", lambda tar, kind=kind: tar.add(b"f", data=b"x").add(b"d/.wh..wh..opq", kind, target=b"f" if kind in (LINK, HARD) else b""))  # fmt: skip
simple("deletion-with-contents", lambda tar: tar.add(b".wh.x", data=b"x"))
simple("deletion-opaque-with-contents", lambda tar: tar.add(b"d/.wh..wh..opq", data=b"x"))
simple("deletion-twice", lambda tar: tar.add(b".wh.x").add(b".wh.x"))
for first, write_first in _KINDS.items():
    simple(f"deletion-then-{first}", lambda tar, one=write_first: (tar.add(b".wh.x"), one(tar)))
    simple(f"{first}-then-deletion", lambda tar, one=write_first: (one(tar), tar.add(b".wh.x")))
simple("hard-link-to-a-deletion", lambda tar: tar.add(b".wh.x").add(b"h", HARD, target=b"x"))
simple("hard-link-to-the-name-of-a-deletion", lambda tar: tar.add(b".wh.x").add(b"h", HARD, target=b".wh.x"))


# ---- packing ----


def gz(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {"plain": bytes, "gzip": gz, "xz": xz}


def _xz_wanting(data: bytes, dictionary: int) -> bytes:
    """An xz stream whose header says that four gigabytes of memory are needed."""
    packed = bytearray(xz(data))
    size = (packed[12] + 1) * 4
    assert packed[14] == 0x21
    packed[16] = dictionary
    packed[12 + size - 4 : 12 + size] = struct.pack("<I", zlib.crc32(bytes(packed[12 : 12 + size - 4])))
    return bytes(packed)


def _bomb(pack: Callable[[bytes], bytes], mebibytes: int) -> bytes:
    """A file of so many zeros: one compressed piece, over and over, as both gzip and xz allow."""
    tar = Tar("gnu", b"")
    head = tar.header(b"zeros", FILE, mebibytes << 20)
    return pack(head) + pack(bytes(16 << 20)) * (mebibytes // 16) + pack(bytes(1024))


def _compressed(good: bytes) -> dict[str, bytes]:
    """Hostile in how they are compressed; what is inside is good."""
    packed, squeezed = gz(good), xz(good)
    return {
        "gzip-then-garbage": packed + b"garbage",
        "gzip-then-half-a-member": packed + packed[: len(packed) // 2],
        "gzip-cut": packed[: len(packed) // 2],
        "gzip-cut-in-the-sum": packed[:-4],
        "gzip-wrong-sum": packed[:-8] + bytes(4) + packed[-4:],
        "gzip-wrong-length": packed[:-4] + b"\xff\xff\xff\x7f",
        "gzip-header-only": packed[:10],
        "gzip-noise": packed[:10] + hashlib.shake_256(b"gz").digest(1000),
        "gzip-in-gzip": gz(packed),
        "gzip-bomb": _bomb(gz, 2048),
        "xz-then-garbage": squeezed + b"garbage!",
        "xz-cut": squeezed[: len(squeezed) // 2],
        "xz-wrong-sum": squeezed[:-30] + bytes(4) + squeezed[-26:],
        "xz-wants-four-gigabytes": _xz_wanting(good, 40),
        "xz-bomb": _bomb(xz, 2048),
        "xz-old-format": lzma.compress(good, format=lzma.FORMAT_ALONE, preset=0),
        "bzip2": b"BZh91AY&SY" + bytes(100),
        "zstd-noise": b"\x28\xb5\x2f\xfd" + hashlib.shake_256(b"zstd").digest(1000),
        "zip": b"PK\x03\x04" + bytes(1000),
    }


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def plain_tar(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return out.getvalue()


def good_layer(name: bytes = b"etc/good") -> bytes:
    return Tar("pax", b"").add(b"etc/", DIRECTORY, mode=0o755).add(name, data=b"good\n").bytes()


def image_config(layers: list[bytes], **config: object) -> dict[str, object]:
    diff_ids = [digest_of(layer) for layer in layers]
    return {"architecture": MACHINE, "os": "linux", "config": config, "rootfs": {"type": "layers", "diff_ids": diff_ids}}


def docker_members(layers: list[bytes], plain: list[bytes] | None = None, **config: object) -> dict[str, bytes]:
    """What `docker save` writes; `plain` are the layers before they were compressed."""
    document = json.dumps(image_config(plain or layers, **config)).encode()
    name = hashlib.sha256(document).hexdigest() + ".json"
    members = {name: document, **{f"{number}/layer.tar": layer for number, layer in enumerate(layers)}}
    manifest = [{"Config": name, "RepoTags": ["test:latest"], "Layers": [f"{number}/layer.tar" for number in range(len(layers))]}]
    return members | {"manifest.json": json.dumps(manifest).encode()}


@dataclass
class Layout:
    """An OCI layout in parts, so that a test can spoil one."""

    layers: list[bytes]
    plain: list[bytes]
    config: object = None
    media_type: str = "application/vnd.oci.image.layer.v1.tar"

    def __post_init__(self) -> None:
        if self.config is None:
            self.config = image_config(self.plain)
        self.config_bytes = self.config if isinstance(self.config, bytes) else json.dumps(self.config).encode()

    def descriptor(self, data: bytes, kind: str) -> dict[str, object]:
        return {"mediaType": kind, "digest": digest_of(data), "size": len(data)}

    def manifest(self) -> dict[str, object]:
        return {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.descriptor(self.config_bytes, "application/vnd.oci.image.config.v1+json"),
            "layers": [self.descriptor(layer, self.media_type) for layer in self.layers],
        }

    def members(self, manifest: object = None, index: object = None) -> dict[str, bytes]:
        manifest = self.manifest() if manifest is None else manifest
        body = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
        if index is None:
            index = {"schemaVersion": 2, "manifests": [self.descriptor(body, "application/vnd.oci.image.manifest.v1+json")]}
        blobs = {"blobs/" + digest_of(blob).replace(":", "/"): blob for blob in (body, self.config_bytes, *self.layers)}
        encoded = index if isinstance(index, bytes) else json.dumps(index).encode()
        return {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": encoded, **blobs}


def good_layout(**config: object) -> Layout:
    layer = good_layer()
    return Layout([layer], [layer], image_config([layer], **config))


# ---- hostile in what is around the layers ----


def _configs() -> dict[str, object]:
    layer = good_layer()
    base = image_config([layer])
    wrong: dict[str, object] = {
        "env-an-object": {"Env": {"A": "B"}},
        "env-of-numbers": {"Env": [1, 2]},
        "env-of-lists": {"Env": [["A=B"]]},
        "env-text": {"Env": "A=B"},
        "env-ten-thousand": {"Env": [f"A{n}=B" for n in range(10_000)]},
        "env-enormous": {"Env": ["A=" + "x" * 200_000]},
        "env-half-a-pair": {"Env": ["A=\ud800"]},
        "cmd-text": {"Cmd": "rm -rf /"},
        "cmd-an-object": {"Cmd": {"0": "sh"}},
        "entrypoint-number": {"Entrypoint": 7},
        "workdir-a-list": {"WorkingDir": ["/"]},
        "user-a-number": {"User": 0},
        "labels-a-list": {"Labels": ["a=b"]},
        "labels-of-objects": {"Labels": {"a": {"b": "c"}}},
        "labels-ten-thousand": {"Labels": {f"l{n}": "x" for n in range(10_000)}},
    }
    found: dict[str, object] = {name: base | {"config": part} for name, part in wrong.items()}
    return found | {
        "a-list": [base],
        "text": "config",
        "not-json": b"{",
        "nested": b"[" * 100_000,
        "not-text": b"\xff\xfe\xfd",
        "digits": b'{"architecture": ' + b"9" * 10_000 + b"}",
        "enormous": json.dumps(base | {"comment": "x" * (9 << 20)}).encode(),
        "another-machine": base | {"architecture": "vax"},
        "another-system": base | {"os": "windows"},
        "machine-a-list": base | {"architecture": ["amd64"]},
        "config-a-list": base | {"config": ["Env"]},
        "rootfs-text": base | {"rootfs": "layers"},
        "layers-not-digests": base | {"rootfs": {"diff_ids": ["../../canary"]}},
        "layers-numbers": base | {"rootfs": {"diff_ids": [1]}},
        "layers-missing": base | {"rootfs": {"diff_ids": []}},
        "layers-too-many": base | {"rootfs": {"diff_ids": [digest_of(b"x")] * 600}},
        "layers-others": base | {"rootfs": {"diff_ids": [digest_of(b"something else")]}},
    }


def _layouts(around: bytes) -> dict[str, dict[str, bytes]]:
    good = good_layout()
    members, manifest = good.members(), good.manifest()
    blobs = [name for name in members if name.startswith("blobs/")]
    body = json.dumps(manifest).encode()
    deep: object = manifest
    chained: dict[str, bytes] = {}
    for _ in range(6):
        encoded = json.dumps(deep).encode()
        chained["blobs/" + digest_of(encoded).replace(":", "/")] = encoded
        kind = "application/vnd.oci.image.index.v1+json" if "manifests" in deep else "application/vnd.oci.image.manifest.v1+json"
        deep = {"schemaVersion": 2, "manifests": [good.descriptor(encoded, kind)]}

    def named(digest: object) -> dict[str, bytes]:
        return good.members(index={"schemaVersion": 2, "manifests": [{"digest": digest, "size": 1, "mediaType": "x"}]})

    def layered(**changed: object) -> dict[str, bytes]:
        return good.members(manifest | {"layers": [manifest["layers"][0] | changed]})

    return {
        "no-layout-file": {name: data for name, data in members.items() if name != "oci-layout"},
        "no-index": {name: data for name, data in members.items() if name != "index.json"},
        "index-not-json": members | {"index.json": b"<xml/>"},
        "index-nested": members | {"index.json": b"[" * 200_000},
        "index-a-list": members | {"index.json": b"[]"},
        "index-enormous": members | {"index.json": b" " * (5 << 20)},
        "index-of-nothing": good.members(index={"manifests": []}),
        "index-manifests-text": good.members(index={"manifests": "all"}),
        "digest-a-path": named("sha256:../../../canary"),
        "digest-absolute": named("sha256:" + os.fsdecode(around) + "/canary"),
        "digest-a-number": named(7),
        "digest-of-md5": named("md5:" + "0" * 32),
        "digest-missing-blob": named("sha256:" + "0" * 64),
        "manifest-changed": members | {blobs[0]: body + b" "},
        "config-changed": members | {blobs[1]: members[blobs[1]] + b" "},
        "layer-changed": members | {blobs[2]: members[blobs[2]] + bytes(512)},
        "layer-missing": {name: data for name, data in members.items() if name != blobs[2]},
        "layer-encrypted": layered(mediaType="application/vnd.oci.image.layer.v1.encrypted"),
        "layer-elsewhere": layered(mediaType="application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", urls=["http://127.0.0.1/x"]),
        "layer-digest-a-path": layered(digest="sha256:../../canary"),
        "layer-size-negative": layered(size=-1),
        "layer-size-true": layered(size=True),
        "layers-an-object": good.members(manifest | {"layers": {}}),
        "layers-too-many": good.members(manifest | {"layers": manifest["layers"] * 600}),
        "layers-one-more": good.members(manifest | {"layers": manifest["layers"] * 2}),
        "config-a-list": good.members(manifest | {"config": []}),
        "config-of-another-kind": good.members(manifest | {"config": manifest["config"] | {"mediaType": "application/vnd.helm.config"}}),
        "list-and-image": good.members(manifest | {"manifests": []}),
        "lists-of-lists": good.members(index=deep) | chained,
    }  # fmt: skip


def _dockers(around: bytes) -> dict[str, dict[str, bytes]]:
    members = docker_members([good_layer()])
    entry = json.loads(members["manifest.json"])[0]

    def with_entry(**changed: object) -> dict[str, bytes]:
        return members | {"manifest.json": json.dumps([entry | changed]).encode()}

    outside = os.fsdecode(around)
    return {
        "no-manifest": {name: data for name, data in members.items() if name != "manifest.json"},
        "manifest-not-json": members | {"manifest.json": b"{"},
        "manifest-nested": members | {"manifest.json": b"[" * 200_000},
        "manifest-an-object": members | {"manifest.json": json.dumps(entry).encode()},
        "manifest-of-numbers": members | {"manifest.json": b"[1, 2]"},
        "manifest-of-nothing": members | {"manifest.json": b"[]"},
        "manifest-of-two": members | {"manifest.json": json.dumps([entry, entry]).encode()},
        "manifest-enormous": members | {"manifest.json": b" " * (5 << 20)},
        "config-up": with_entry(Config="../canary"),
        "config-absolute": with_entry(Config=outside + "/canary"),
        "config-missing": with_entry(Config="missing.json"),
        "config-a-number": with_entry(Config=1),
        "config-with-nul": with_entry(Config="a\0b"),
        "config-half-a-pair": with_entry(Config="\ud800"),
        "layers-up": with_entry(Layers=["../canary"]),
        "layers-absolute": with_entry(Layers=[outside + "/canary"]),
        "layers-missing": with_entry(Layers=["missing/layer.tar"]),
        "layers-text": with_entry(Layers="0/layer.tar"),
        "layers-numbers": with_entry(Layers=[0]),
        "layers-none": with_entry(Layers=[]),
        "layers-twice": with_entry(Layers=entry["Layers"] * 2),
        "layer-is-the-config": with_entry(Layers=[entry["Config"]]),
    }


def _outer(around: bytes) -> dict[str, bytes]:
    """Hostile in the archive around an image that is good."""
    members = docker_members([good_layer()])
    good = plain_tar(members)
    body = good[: good.rindex(b"manifest.json")]
    without = {name: data for name, data in members.items() if name != "0/layer.tar"}
    tar = Tar("gnu", around)
    return {
        "manifest-twice": body + tar.header(b"manifest.json", FILE, 2) + padded(b"[]") + good[len(body) :],
        "member-up": tar.header(b"../canary", FILE, 5) + padded(b"owned") + good,
        "member-absolute": tar.header(b"/canary", FILE, 5) + padded(b"owned") + good,
        "member-device": tar.header(b"disk", BLOCK_DEVICE, device=(8, 0)) + good,
        "member-fifo": tar.header(b"pipe", FIFO) + good,
        "layer-a-link-out": plain_tar(without, {"0/layer.tar": os.fsdecode(around) + "/canary"}),
        "layer-a-link-up": plain_tar(without, {"0/layer.tar": "../../canary"}),
        "layer-a-link-to-itself": plain_tar(without, {"0/layer.tar": "layer.tar"}),
        "layer-a-link-to-a-link": plain_tar(without, {"0/layer.tar": "../1/layer.tar", "1/layer.tar": "../0/layer.tar"}),
        "layer-a-link-to-nothing": plain_tar(without, {"0/layer.tar": "missing"}),
        "cut": good[: len(good) // 2],
        "then-something": good + b"x" * 512,
        "gzip-then-garbage": gz(good) + b"garbage",
        "gzip-cut": gz(good)[:-20],
        "gzip-bomb": _bomb(gz, 2048),
    }


# ---- all of them ----


@dataclass(frozen=True)
class Archive:
    name: str
    image: str
    """What `find` is asked for."""


def streams(aim: bytes) -> Iterator[tuple[str, str, bytes]]:
    """Every trick in every dialect that can say it: name, dialect, bytes."""
    for name, write in TRICKS.items():
        for dialect in DIALECTS:
            tar = Tar(dialect, aim)
            try:
                write(tar)
            except Unsuitable:
                continue
            yield name, dialect, tar.bytes()


def archives(around: Path, place: Path) -> Iterator[Archive]:
    """Write all of them one after the other to `place`; `around` is what they aim at. Each is good for one look."""
    for group in GROUPS.values():
        yield from group(around, place)


def _tricks(around: Path, place: Path) -> Iterator[Archive]:
    base = good_layer(b"etc/below")
    for number, (name, dialect, data) in enumerate(streams(os.fsencode(around))):
        compression, scheme = list(COMPRESSIONS)[number // 3 % 3], SCHEMES[number % 3]
        yield _packed(f"{name}-{dialect}-{compression}-{scheme}", scheme, COMPRESSIONS[compression](data), data, base, place)


def _badly_compressed(_around: Path, place: Path) -> Iterator[Archive]:
    base, plain = good_layer(b"etc/below"), good_layer()
    for number, (name, data) in enumerate(_compressed(plain).items()):
        yield _packed(f"{name}-{SCHEMES[number % 3]}", SCHEMES[number % 3], data, plain, base, place)


def _badly_configured(_around: Path, place: Path) -> Iterator[Archive]:
    layer = good_layer()
    for name, config in _configs().items():
        yield _as_tar(f"config-{name}-oci", "oci", Layout([layer], [layer], config).members(), place)
        encoded = config if isinstance(config, bytes) else json.dumps(config).encode()
        manifest = [{"Config": "c.json", "RepoTags": None, "Layers": ["l.tar"]}]
        members = {"c.json": encoded, "l.tar": layer, "manifest.json": json.dumps(manifest).encode()}
        yield _as_tar(f"config-{name}-docker-archive", "docker-archive", members, place)


def _bad_layouts(around: Path, place: Path) -> Iterator[Archive]:
    for name, members in _layouts(os.fsencode(around)).items():
        yield _as_tar(f"layout-{name}-tar", "oci", members, place)
        yield _as_directory(f"layout-{name}-directory", members, place)
    yield from _links_in_a_layout(place)


def _bad_docker_archives(around: Path, place: Path) -> Iterator[Archive]:
    for name, members in _dockers(os.fsencode(around)).items():
        yield _as_tar(f"docker-{name}", "docker-archive", members, place)
    for name, data in _outer(os.fsencode(around)).items():
        yield _written(f"outer-{name}", "docker-archive", data, place)


GROUPS: dict[str, Callable[[Path, Path], Iterator[Archive]]] = {
    "tricks": _tricks,
    "compression": _badly_compressed,
    "configs": _badly_configured,
    "layouts": _bad_layouts,
    "docker archives": _bad_docker_archives,
}


def _links_in_a_layout(place: Path) -> Iterator[Archive]:
    members = good_layout().members()
    for name in ("index.json", "oci-layout", *(blob for blob in members if blob.startswith("blobs/"))):
        archive = _as_directory(f"layout-{name.replace('/', '-')[:30]}-a-link", members, place)
        path = Path(archive.image.partition(":")[2]) / name
        elsewhere = place / "elsewhere"
        elsewhere.write_bytes(members[name])
        path.unlink()
        path.symlink_to(elsewhere)
        yield archive
    for name in ("index.json", "oci-layout"):
        archive = _as_directory(f"layout-{name}-a-pipe", members, place)
        path = Path(archive.image.partition(":")[2]) / name
        path.unlink()
        os.mkfifo(path)
        yield archive
    archive = _as_directory("layout-blobs-a-link", members, place)
    path = Path(archive.image.partition(":")[2])
    (path / "blobs").rename(place / "elsewhere-blobs")
    (path / "blobs").symlink_to(place / "elsewhere-blobs")
    yield archive


def _packed(name: str, scheme: str, data: bytes, plain: bytes, base: bytes, place: Path) -> Archive:
    """The stream alone, or as the second layer of an image."""
    if scheme == "tar":
        return _written(name, "tar", data, place)
    if scheme == "oci":
        return _as_tar(name, scheme, Layout([base, data], [base, plain]).members(), place)
    return _as_tar(name, scheme, docker_members([base, data], [base, plain]), place)


def _as_tar(name: str, scheme: str, members: dict[str, bytes], place: Path) -> Archive:
    return _written(name, scheme, plain_tar(members), place)


def _written(name: str, scheme: str, data: bytes, place: Path) -> Archive:
    path = place / "hostile.tar"
    path.unlink(missing_ok=True)  # a new file each time: what is remembered of one is not said of another
    path.write_bytes(data)
    return Archive(name, f"{scheme}:{path}")


def _as_directory(name: str, members: dict[str, bytes], place: Path) -> Archive:
    path = place / f"{len(list(place.iterdir()))}-layout"
    for member, data in members.items():
        (path / member).parent.mkdir(parents=True, exist_ok=True)
        (path / member).write_bytes(data)
    return Archive(name, f"oci:{path}")
