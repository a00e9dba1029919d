"""How a layer says that something below it is gone or replaced: the marks that overlay reads and writes.

Root's layers carry them in `trusted.` attributes, an ordinary user's in `user.` ones. A chain never mixes the two: the
kernel reads one kind only, and what the other kind had hidden would come back.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal

Marks = Literal["trusted", "user"]
KINDS: tuple[Marks, ...] = ("trusted", "user")

OPAQUE_VALUE = b"y"
"""On a directory: nothing of the same name in lower layers is seen through it."""


def prefix(marks: Marks) -> str:
    """What the names of all of overlay's own attributes begin with."""
    return f"{marks}.overlay."


def of_this_process() -> Marks:
    """The kind that this process can read: `trusted` is for root of the machine, not for root of a user namespace."""
    try:
        is_root = os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    except OSError:
        is_root = False
    return "trusted" if is_root else "user"


def opaque(marks: Marks) -> str:
    """The attribute of a directory that hides what lower layers have in it."""
    return f"{marks}.overlay.opaque"


def redirect(marks: Marks) -> str:
    """The attribute of a directory whose lower part lies elsewhere: a name beside it, or a path from the top of the layers."""
    return f"{marks}.overlay.redirect"


def metacopy(marks: Marks) -> str:
    """The attribute of a file whose contents are in a lower layer. We mount without it, so a layer that has one is not ours."""
    return f"{marks}.overlay.metacopy"


WHITEOUT_DEVICE = os.makedev(0, 0)


def is_whiteout(st: os.stat_result) -> bool:
    """A character device 0:0, which any user may make, stands for "no longer there"."""
    return stat.S_ISCHR(st.st_mode) and st.st_rdev == WHITEOUT_DEVICE


def make_whiteout(name: str | bytes, *, dir_fd: int | None = None) -> None:
    os.mknod(name, stat.S_IFCHR, WHITEOUT_DEVICE, dir_fd=dir_fd)


# What overlay notes for itself about where a copy came from. It differs between two layers of the same content.
_VOLATILE = frozenset(f"{kind}.overlay.{name}" for kind in KINDS for name in ("origin", "impure", "nlink", "uuid", "upper"))
# Labels that the host's own policy puts on every file by where it lies.
_OF_THE_HOST = frozenset({"security.selinux", "security.ima", "security.evm", "security.SMACK64"})


def is_volatile(attribute: str) -> bool:
    """Whether an attribute says something about this copy or this host, and nothing about the content."""
    return attribute in _VOLATILE or attribute in _OF_THE_HOST
