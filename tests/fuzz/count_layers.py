"""Feeds the unpacker of layers many tar headers, mostly with a right sum: those of `count_tar.py`, and deletions, devices and owners.

A header counts as a frame when it was read. Only `StageFailed` may come out, nothing may appear beside the tree, and no descriptor may stay
open. `python tests/fuzz/count_layers.py 1000000 [--seed 1]`
"""

import io
import os
import shutil
import tempfile

from tests.fuzz import count_tar, counting
from tests.hostile_archives import BLOCK, CHARACTER, Tar

from untax._remove import remove_tree
from untax.channel import tree
from untax.core.errors import StageFailed
from untax.layers import tarball
from untax.layers.blob import Caps
from untax.layers.unpack import unpack

DELETIONS = (b".wh.a", b"d/.wh.x", b"d/.wh..wh..opq", b".wh.", b".wh...", b"sub/.wh.g", b".wh.d/x", b".wh..wh.plnk/1")


def one_entry(choose):
    luck = choose.random()
    tar = Tar("gnu", b"")
    if luck < 0.02:
        return tar.header(choose.choice(DELETIONS))
    if luck < 0.03:
        return tar.header(choose.choice((b"dev/null", b"d/null")), CHARACTER, device=choose.choice(((1, 3), (0, 0), (8, 1))))
    if luck < 0.04:
        return tar.header(
            choose.choice(count_tar.FILES), uid=choose.choice((0, 1000, 65_535, 65_536, -1)), mtime=choose.choice((0, -5, 1 << 50))
        )
    return count_tar.one_entry(choose)


def target(seed):
    choose = count_tar.random.Random(seed)
    around = tempfile.mkdtemp(prefix="untax-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    beside, below = os.path.join(around, "beside"), os.path.join(around, "below")
    os.mkdir(beside)
    os.makedirs(os.path.join(below, "d/e"))
    fds = len(os.listdir("/proc/self/fd"))
    marks = "trusted" if os.geteuid() == 0 else "user"
    headers = 0

    class Counted(tarball.Header):
        __slots__ = ()

        def __init__(self, block):
            nonlocal headers
            headers += 1
            super().__init__(block)

    tarball.Header = Counted

    def step():
        nonlocal headers
        headers = 0
        local = os.path.join(around, "tree")
        os.mkdir(local)
        entries = [one_entry(choose) for _ in range(choose.choice((3, 10, 40)))]
        stream = b"".join((tree._header(b"./", os.stat(local), b"5", 0), *entries, bytes(2 * BLOCK)))
        try:
            unpack(io.BytesIO(stream), local, marks=marks, below=choose.choice(((), (below,))), caps=Caps(bytes=1 << 20, entries=200))
        except StageFailed:
            pass
        assert sorted(os.listdir(around)) == ["below", "beside", "tree"], os.listdir(around)
        assert not os.listdir(beside)
        assert len(os.listdir("/proc/self/fd")) == fds
        remove_tree(local)
        return headers

    return step, lambda: shutil.rmtree(around)


if __name__ == "__main__":
    counting.run({"layers": target})
