"""A fresh box for grading, with only the named files of the one that was worked in.

What the workload touched is never cloned: the grader begins with the spec's own stages, and gets bytes. They come over the channel
from a box that may lie about everything, so whatever it says is checked and bounded here, and written so that no link in
the fresh box leads a file anywhere but to its own name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from untax.channel import actions
from untax.channel.replies import Entry
from untax.core.errors import IsDirectory, NotDirectory, NotFound, PermissionDenied, ProtocolError, TooLarge, UsageError

if TYPE_CHECKING:
    from untax.box import Box
    from untax.leases import Request
    from untax.leasing import Leasing

T = TypeVar("T")

_EFBIG = 27
MOST_FILES = 10_000
MOST_BYTES = 256 << 20
# Entries looked at and levels gone down on the way to them: a tree that has more was not made to be graded.
_MOST_ENTRIES = 200_000
_DEEPEST = 64
_AT_ONCE = 128  # actions in one frame
_BYTES_AT_ONCE = 4 << 20


@dataclass(frozen=True, slots=True)
class Pattern:
    """A glob below the working directory, part by part; None stands for `**`, any number of directories."""

    text: str
    parts: tuple[re.Pattern[str] | None, ...]

    def is_match(self, path: Sequence[str]) -> bool:
        return _matches(self.parts, tuple(path), whole=True)

    def may_lie_below(self, directory: Sequence[str]) -> bool:
        """Whether something in that directory, however deep, could match."""
        return _matches(self.parts, tuple(directory), whole=False)


@dataclass(frozen=True, slots=True)
class Taken:
    path: tuple[str, ...]
    data: bytes
    mode: int


def checked(take: Sequence[str]) -> tuple[Pattern, ...]:
    """The patterns, read; `UsageError` for one that could name anything outside the working directory."""
    if isinstance(take, (str, bytes)) or not isinstance(take, Sequence):
        raise UsageError("take must be a tuple of patterns, not one string: write take=('src/**',)")
    return tuple(_pattern(text) for text in take)


def _pattern(text: object) -> Pattern:
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"take: {text!r} is not a pattern")
    parts = text.split("/")
    if text.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"take: {text!r} must be relative to the working directory, without '.', '..' or empty parts")
    if any("**" in part and part != "**" for part in parts):
        raise UsageError(f"take: in {text!r}, '**' must be a part of its own")
    if parts[-1] == "**":
        parts.append("*")  # everything below, and not the directory itself
    return Pattern(text, tuple(None if part == "**" else _part(part) for part in parts))


def _part(text: str) -> re.Pattern[str]:
    """`*`, `?` and `[…]` within one name; as in a shell they do not stand for a leading dot."""
    pieces = ["(?!\\.)"] if text[0] in "*?[" else []
    at = 0
    while at < len(text):
        char = text[at]
        end = text.find("]", at + 2) if char == "[" else -1
        if char == "*":
            pieces.append("[^/]*")
        elif char == "?":
            pieces.append("[^/]")
        elif end > 0:
            inside = text[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            pieces.append(f"[{'^/' + inside[1:] if inside[0] == '!' else inside}]")
            at = end
        else:
            pieces.append(re.escape(char))
        at += 1
    try:
        return re.compile("".join(pieces), re.DOTALL)
    except re.error as exc:
        raise UsageError(f"take: {text!r} is not a pattern: {exc}") from exc


def _matches(parts: tuple[re.Pattern[str] | None, ...], path: tuple[str, ...], *, whole: bool) -> bool:
    """Whether the parts match the path; without `whole`, whether they match it with more behind it."""
    places = {0}
    for name in path:
        places = set(_after(parts, places, name))
        if not places:
            return False
    return any((at == len(parts)) is whole for at in places)


def _after(parts: tuple[re.Pattern[str] | None, ...], places: set[int], name: str) -> Iterator[int]:
    """Where in the parts one can be after one more name."""
    for place in places:
        at = place
        while at < len(parts) and parts[at] is None:
            if not name.startswith("."):
                yield at  # `**` takes this name too
            at += 1
        if at < len(parts) and (part := parts[at]) is not None and part.fullmatch(name):
            yield at + 1


# ---- out of the one ----


async def graded(engine: Leasing, box: Box, patterns: Sequence[Pattern], request: Request) -> Box:
    """The fresh box with the files in it. Nothing is left of it when that fails."""
    taken = await take_files(box, patterns)
    fresh = await engine.fulfil(request)
    try:
        await place_files(fresh, taken)
    except BaseException:
        await engine.finish(engine.chore(fresh.release()))
        raise
    return fresh


async def take_files(box: Box, patterns: Sequence[Pattern]) -> list[Taken]:
    """The bytes of every regular file in the working directory that matches; links are neither followed nor taken."""
    found: list[_Found] = []
    total = seen = 0
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        directory = waiting.pop()
        for entry in await _listed(box, directory):
            seen += 1
            path = (*directory, _checked_name(entry))
            if entry.is_dir and any(pattern.may_lie_below(path) for pattern in patterns):
                waiting.append(path)
            elif entry.is_file and any(pattern.is_match(path) for pattern in patterns):
                found.append(_Found(path, entry.size, 0o755 if entry.mode & 0o100 else 0o644))
                total += entry.size
            if len(found) > MOST_FILES or total > MOST_BYTES or seen > _MOST_ENTRIES or len(path) > _DEEPEST:
                raise _too_large(path)
    found.sort(key=lambda one: one.path)
    return await _read_all(box, found)


@dataclass(frozen=True, slots=True)
class _Found:
    path: tuple[str, ...]
    size: int
    mode: int


async def _read_all(box: Box, found: Sequence[_Found]) -> list[Taken]:
    """What was found, as far as it is still there. The box may say one size and send another: what counts is what came."""
    taken: list[Taken] = []
    total = 0
    for some in _in_portions(found, lambda one: one.size):
        batch = box.batch()
        for one in some:
            batch.read("/".join(one.path), limit=min(one.size + 1, actions.READ_MAX))
        for one, data in zip(some, await batch.send(), strict=True):
            if isinstance(data, (NotFound, NotDirectory, IsDirectory, PermissionDenied)):
                continue  # gone, replaced or closed since it was seen
            if isinstance(data, BaseException):
                raise data
            if len(data) > one.size:  # it grew, or it is so large that one read does not bring it
                data = await box.read("/".join(one.path))
            total += len(data)
            if total > MOST_BYTES:
                raise _too_large(one.path)
            taken.append(Taken(one.path, data, one.mode))
    return taken


def _too_large(path: Sequence[str]) -> TooLarge:
    most = f"a grader takes at most {MOST_FILES} files, {MOST_BYTES >> 20} MiB, {_DEEPEST} levels deep: name fewer in take="
    return TooLarge(_EFBIG, most, "/".join(path))


async def _listed(box: Box, directory: tuple[str, ...]) -> list[Entry]:
    try:
        return await box.list("/".join(directory) or ".")
    except (NotFound, NotDirectory, PermissionDenied):
        return []  # gone or closed since it was seen


def _checked_name(entry: Entry) -> str:
    if not entry.name or "/" in entry.name or "\0" in entry.name or entry.name in (".", ".."):
        raise ProtocolError(f"a directory entry is named {entry.name!r}")
    return entry.name


# ---- into the other ----


async def place_files(box: Box, taken: Sequence[Taken]) -> None:
    """Write each file under its own name and nowhere else: what is in its way is removed, links above all."""
    parents = sorted({one.path[:depth] for one in taken for depth in range(1, len(one.path))})
    await _clear(box, parents, lambda entry: not entry.is_dir)
    await _clear(box, [one.path for one in taken], lambda _: True)
    for some in _in_portions(taken, lambda one: len(one.data)):
        batch = box.batch()
        for one in some:
            batch.add(actions.write("/".join(one.path), one.data, mode=one.mode, exclusive=True))
        _raise_first(await batch.send(stop=True))


async def _clear(box: Box, paths: Sequence[tuple[str, ...]], is_in_the_way: Callable[[Entry], bool]) -> None:
    """Higher names first: what a link led to is out of reach once the link is gone."""
    for some in _in_portions(paths, lambda _: 0):
        batch = box.batch()
        for path in some:
            batch.stat("/".join(path), follow=False)
        in_the_way = [
            path for path, entry in zip(some, await batch.send(), strict=True) if isinstance(entry, Entry) and is_in_the_way(entry)
        ]
        removing = box.batch()
        for path in in_the_way:
            removing.remove("/".join(path), recursive=True)
        _raise_first(value for value in await removing.send() if not isinstance(value, (NotFound, NotDirectory)))


def _in_portions(things: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """As many as one frame should carry."""
    portion: list[T] = []
    total = 0
    for thing in things:
        if portion and (len(portion) >= _AT_ONCE or total + size(thing) > _BYTES_AT_ONCE):
            yield portion
            portion, total = [], 0
        portion.append(thing)
        total += size(thing)
    if portion:
        yield portion


def _raise_first(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, BaseException):
            raise value
