"""What is exported, entry by entry: a whole chain merged into one tree, or one layer by itself with what it deletes.

Owners come out as a sandbox sees them: for root as they are, since root's layers hold them; an ordinary user's layers can hold
none, so everything of that user's belongs to the user inside. Only files have a date: that of anything else is not part of what a
layer is, and would make two exports of one layer differ. What an export cannot carry is counted, never left out in silence.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from untax.core.root import Root
from untax.layers import marks as mark
from untax.layers import merged
from untax.layers._descent import Descent, walk
from untax.layers.marks import Marks

Kind = Literal["file", "directory", "link", "fifo", "whiteout"]

# Who an ordinary user's files belong to inside (docs/namespace.md).
USER_INSIDE = 1000
_MOUNT_POINTS = {b"dev": 0o755, b"proc": 0o755, b"sys": 0o755, b"tmp": 0o1777}
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NOW_AND_THEN = 1000  # entries: a tenth of a second
_NO_XATTRS = frozenset({errno.EOPNOTSUPP, errno.ENODATA, errno.EPERM, errno.EACCES})

CLOSED = "left out, closed to this user"
SPECIAL = "left out, a socket or a device"
OWNERS = "owned by 1000:1000, because an ordinary user's layers hold no owners"


class Losses:
    """What an export does not carry: reasons, and how many entries each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, reason: str) -> None:
        self._counts[reason] += 1

    def said(self) -> tuple[str, ...]:
        return tuple(f"{count} × {reason}" for reason, count in sorted(self._counts.items()))


@dataclass(frozen=True, slots=True)
class Job:
    """What is exported, and who is told about it."""

    root: Root
    marks: Marks
    losses: Losses
    on_bytes: Callable[[int], None] = lambda _: None
    """Called with the size of each piece of content that was written."""

    def uncounted(self) -> Job:
        """The same once more, for somebody who only looks."""
        return Job(self.root, self.marks, Losses())


@dataclass(frozen=True, slots=True)
class Item:
    """One entry. `open` gives a descriptor of a file's content; it works until the next item is asked for."""

    path: bytes
    """From the root, which is itself empty."""
    kind: Kind
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    target: bytes = b""
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    links: object = None
    """Equal for the names of one file that has several, None for a file with one."""
    is_opaque: bool = False
    open: Callable[[], int] | None = None


def merged_items(root: Root, marks: Marks, losses: Losses) -> Iterator[Item]:
    """The chain as one tree, the top first: names in order, each directory before what is in it."""
    items = _merged(root, marks, losses)
    return _with_mount_points(items) if root.views else items


def _merged(root: Root, marks: Marks, losses: Losses) -> Iterator[Item]:
    for entry in merged.walk(root, marks=marks):
        opened = entry.open if entry.place.parts else None  # the top of a layer or a view has no name to open it by
        if _is_carried(entry.stat, opened, marks, losses):
            yield _item(entry.path, entry.stat, entry.xattrs, marks, losses, entry.target, entry.link_group, opened)


def _with_mount_points(items: Iterator[Item]) -> Iterator[Item]:
    """The host's image has no places for what a sandbox brings itself; whatever else runs it needs them."""
    missing = deque(sorted(_MOUNT_POINTS.items()))
    for item in items:
        first = item.path.partition(b"/")[0]
        while missing and missing[0][0] < first:
            yield Item(missing[0][0], "directory", missing.popleft()[1])
        if missing and missing[0][0] == first:
            missing.popleft()
        yield item
    yield from (Item(name, "directory", mode) for name, mode in missing)


def own_items(directory: str, marks: Marks, losses: Losses) -> Iterator[Item]:
    """One layer by itself, in the same order, without what it stands on."""
    with Descent(directory) as descent:
        yield _own(b"", os.fstat(descent.fd), _xattrs(descent.fd), marks, losses)
        for visit in walk(descent, closed=lambda: None):
            if visit is None:
                continue
            name, st, within = visit
            path = b"/".join((*descent.names, name))
            opened = partial(os.open, name, _READ, dir_fd=within)
            if mark.is_whiteout(st):
                yield Item(path, "whiteout")
            elif _is_carried(st, opened, marks, losses):
                target = os.readlink(name, dir_fd=within) if stat.S_ISLNK(st.st_mode) else b""
                links = (st.st_dev, st.st_ino) if st.st_nlink > 1 else None
                yield _own(path, st, _xattrs(_at(within, name)), marks, losses, target, links, opened)


def _own(path: bytes, st: os.stat_result, xattrs: Mapping[str, bytes], marks: Marks, losses: Losses, *rest: Any) -> Item:
    """As overlay shows it: its own attributes kept to itself, and those that were put below them lifted again."""
    prefix = mark.prefix(marks)
    seen = {
        name.replace("overlay.overlay.", "overlay.", 1): value
        for name, value in xattrs.items()
        if not name.startswith(prefix) or name.startswith(f"{prefix}overlay.")
    }
    is_opaque = xattrs.get(mark.opaque(marks)) == mark.OPAQUE_VALUE
    return replace(_item(path, st, seen, marks, losses, *rest), is_opaque=is_opaque)


def has_redirect(directory: str, marks: Marks) -> bool:
    """Whether some directory of the layer stands for one elsewhere below it, which no image format can say."""
    attribute = mark.redirect(marks)
    with Descent(directory) as descent:
        return any(
            visit is not None and stat.S_ISDIR(visit[1].st_mode) and attribute in _xattrs(_at(visit[2], visit[0]))
            for visit in walk(descent, closed=lambda: None)
        )


def content_bytes(items: Iterator[Item]) -> Iterator[int]:
    """What their files hold so far, said now and then and at the end; one with several names counts once."""
    seen: set[object] = set()
    total = 0
    for number, item in enumerate(items):
        if item.links is None or item.links not in seen:
            total += item.size
            seen.add(item.links)
        if number % _NOW_AND_THEN == 0:
            yield total
    yield total


def _item(
    path: bytes,
    st: os.stat_result,
    xattrs: Mapping[str, bytes],
    marks: Marks,
    losses: Losses,
    target: bytes = b"",
    links: object = None,
    opened: Callable[[], int] | None = None,
) -> Item:
    uid, gid = st.st_uid, st.st_gid
    if marks == "user" and uid == os.geteuid():
        uid = gid = USER_INSIDE
        losses.add(OWNERS)
    mode = stat.S_IMODE(st.st_mode)
    kept = {name: value for name, value in xattrs.items() if not mark.is_volatile(name)}
    if stat.S_ISDIR(st.st_mode):
        return Item(path, "directory", mode, uid, gid, xattrs=kept)
    if stat.S_ISLNK(st.st_mode):
        return Item(path, "link", 0o777, uid, gid, target=target, xattrs=kept)
    if stat.S_ISFIFO(st.st_mode):
        return Item(path, "fifo", mode, uid, gid, xattrs=kept)
    return Item(path, "file", mode, uid, gid, st.st_mtime_ns, st.st_size, xattrs=kept, links=links, open=opened)


def _is_carried(st: os.stat_result, opened: Callable[[], int] | None, marks: Marks, losses: Losses) -> bool:
    kind = stat.S_IFMT(st.st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO):
        losses.add(SPECIAL)
        return False
    if marks == "user" and opened is not None and kind in (stat.S_IFREG, stat.S_IFDIR):
        try:
            os.close(opened())
        except PermissionError:
            losses.add(CLOSED)
            return kind == stat.S_IFDIR  # there, and empty as far as this user knows
    return True


def _at(within: int, name: bytes) -> bytes:
    """There are no xattr calls that take a directory and a name; this is one, and it follows nothing at its end."""
    return b"/proc/self/fd/%d/%s" % (within, name)


def _xattrs(at: int | bytes) -> dict[str, bytes]:
    follow = isinstance(at, int)
    try:
        return {name: os.getxattr(at, name, follow_symlinks=follow) for name in os.listxattr(at, follow_symlinks=follow)}
    except OSError as exc:
        if exc.errno in _NO_XATTRS:
            return {}
        raise
