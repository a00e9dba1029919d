"""Feeds the host's unpacker many tar headers: hostile names, links, sizes and extended headers, mostly with a right sum.

A header counts as a frame when the unpacker has read it. Only `ProtocolError`, `TooLarge` and `FileError` may come out, nothing may
appear beside the tree, and no descriptor may stay open. `python tests/fuzz/count_tar.py 10000000 [--seed 1]`
"""

import os
import random
import shutil
import tempfile

from tests.fuzz import counting, grammar

from untax.channel import tree
from untax.core.errors import FileError, ProtocolError

FILES = (b"a", b"b", b"d/a", b"d/e/f", b"./c", b"x" * 100, b"\xff\xfe", b"sub/g")
NAMES = {b"0": FILES, b"5": (b"d/", b"d/e", b"sub", b"sub/deep/er/"), b"2": (b"l", b"d/l", b"sub/l"), b"1": (b"h", b"d/h")}
HOSTILE = (
    b"", b".", b"..", b"/abs", b"../beside", b"d/../../beside", b"a/", b"a//b", b"d/" * 90, b"n\0m", b"./../beside", b"l/x", b"l", b"d/l/x",
    b"l/../../beside", b"d", b"a", b"sub/l/a",
)  # fmt: skip
TARGETS = (b"a", b"d", b"d/a", b".", b"e", b"l", b"..", b"../beside", b"/etc/passwd", b"d/../..", b"", b"../d/a")
ODD_KINDS = (b"\0", b"7", b"3", b"4", b"6", b"g", b"L", b"K", b"S", b"\xff")
SIZES = (0, 1, 5, 511, 512, 513)
ODD_SIZES = (1 << 20, 8**11 - 1, 70_000)
KEYS = (b"path", b"linkpath", b"size", b"mtime", b"")
ODD = 0.02  # of all entries


def header(choose, kind, name, size, target):
    head = b"%b%07o\0000000000\0000000000\0%011o\0%011o\0" % (name[:100].ljust(100, b"\0"), choose.choice((0o644, 0o7777, 0)), size, 5)
    tail = tree._tail(kind, target[:100], b"")
    return b"%b%06o\0 %b" % (head, sum(head) + sum(tail) + 256, tail)


def extended(choose, odd):
    """An extended header with its contents."""
    if odd:
        key = choose.choice(KEYS)
        body = tree._pax(key, choose.choice((*HOSTILE, *TARGETS, b"0", b"5", b"9" * 20, b"-1", b"x")))
        if choose.random() < 0.5:
            body = grammar.spoil_payload(choose, body)
    else:
        body = tree._pax(b"mtime", b"1.5") + tree._pax(b"path", b"long/" + bytes((97 + choose.randrange(9),)) * 150)
    return header(choose, b"x", b"pax", len(body), b"") + tree._padded(body)


def one_entry(choose):
    kind = choose.choice((b"0", b"0", b"0", b"0", b"5", b"2"))
    odd = choose.random() < ODD
    name = choose.choice(HOSTILE if odd else NAMES[kind])
    target = choose.choice(TARGETS) if kind == b"2" else b""
    if odd and choose.random() < 0.3:
        kind, target = choose.choice((*ODD_KINDS, b"1")), choose.choice(FILES + TARGETS)
    size = choose.choice(ODD_SIZES if odd and choose.random() < 0.3 else SIZES) if kind == b"0" else 0
    out = header(choose, kind, name, size, target)
    if odd and choose.random() < 0.3:  # the sum is then wrong, or a number
        out = bytearray(out)
        out[choose.randrange(512)] = choose.randrange(256)
    if size < 1000:
        out += bytes(size + -size % tree.BLOCK)
    return extended(choose, odd) + out if kind == b"0" and choose.random() < 0.1 else out


class Counted(tree.Unpacker):
    headers = 0

    def _header(self, block):
        self.headers += 1
        super()._header(block)


def target(seed):
    choose = random.Random(seed)
    around = tempfile.mkdtemp(prefix="untax-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    beside, local = os.path.join(around, "beside"), os.path.join(around, "tree")
    os.mkdir(beside)
    fds = len(os.listdir("/proc/self/fd"))
    streams = 0

    def step():
        nonlocal streams
        streams += 1
        stream = b"".join((header(choose, b"5", b"./", 0, b""), *[one_entry(choose) for _ in range(100)], tree._END))
        unpack = Counted(local, max_bytes=1 << 20, max_entries=200)
        try:
            at = 0
            while at < len(stream):
                size = choose.choice((100, 512, 1000, 5000, 65536))
                unpack.feed(stream[at : at + size])
                at += size
            unpack.finish()
        except (ProtocolError, FileError):
            pass
        finally:
            unpack.close()
        if streams % 20 == 0:
            assert sorted(os.listdir(around)) == ["beside", "tree"], os.listdir(around)
            assert not os.listdir(beside)
            assert len(os.listdir("/proc/self/fd")) == fds
            os.chmod(local, 0o700)
            shutil.rmtree(local)
        return unpack.headers

    return step, lambda: shutil.rmtree(around)


if __name__ == "__main__":
    counting.run({"unpacker": target})
