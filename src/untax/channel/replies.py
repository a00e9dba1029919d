"""What actions return, and how it is read off the wire. Every field is bounded: the cell may be hostile."""

from __future__ import annotations

import stat as stat_bits
from dataclasses import dataclass
from typing import Literal

from untax.channel import wire
from untax.channel.wire import Reader
from untax.core.errors import (
    ActionTimeout,
    BackendError,
    EditConflict,
    Gone,
    NotRun,
    NoWorker,
    ProtocolError,
    SpawnFailed,
    TooLarge,
    UntaxError,
    UsageError,
    file_error,
)

NAME_MAX = 255
PATH_MAX = 4096
_EFBIG = 27
_MESSAGE_MAX = 2000  # characters of a cell's message that are believed

FileType = Literal["file", "directory", "link", "fifo", "socket", "character", "block", "unknown"]
_FILE_TYPES: dict[int, FileType] = {
    ord("f"): "file",
    ord("d"): "directory",
    ord("l"): "link",
    ord("p"): "fifo",
    ord("s"): "socket",
    ord("c"): "character",
    ord("b"): "block",
    ord("?"): "unknown",
}
MatchKind = Literal["text", "function", "async function", "class"]
_MATCH_KINDS: tuple[MatchKind, ...] = ("text", "function", "async function", "class")
EventType = Literal["created", "modified", "deleted", "moved", "attributes", "overflow"]
_EVENT_TYPES: tuple[EventType, ...] = ("created", "modified", "deleted", "moved", "attributes", "overflow")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, as `lstat` or `stat` saw it. Names that are not UTF-8 are escaped as by `os.fsdecode`."""

    name: str
    type: FileType
    mode: int  # permission bits, without the type
    uid: int
    gid: int
    size: int
    mtime_ns: int
    target: str | None  # where a link points

    @property
    def is_dir(self) -> bool:
        return self.type == "directory"

    @property
    def is_file(self) -> bool:
        return self.type == "file"


@dataclass(frozen=True, slots=True)
class Match:
    """One place that a search found; lines and columns count from 1. For a symbol `text` is its dotted name."""

    path: str
    line: int
    column: int
    kind: MatchKind
    text: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The matches, and how much was looked at. `more`: there were further matches than asked for."""

    matches: tuple[Match, ...]
    files: int
    skipped: int  # too large, binary or unreadable
    more: bool


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened below a watched path. After an `overflow` the caller has to look for itself."""

    type: EventType
    path: str
    to: str | None  # where it was moved


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that was started with `start` or `pty`."""

    pid: int
    running: bool
    pty: bool
    age_s: float
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What `read` says about the file beside its bytes."""

    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class TreeSize:
    """How much an upload or a download moved."""

    entries: int
    bytes: int
    skipped: tuple[str, ...] = ()  # of a download: links that lead out of the tree, and what is no file, directory or link


def name_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def read_entry(reader: Reader) -> Entry:
    name = name_text(reader.blob(PATH_MAX))
    kind = _FILE_TYPES.get(reader.u8())
    if kind is None:
        raise ProtocolError("an entry of a type that does not exist")
    mode, uid, gid = reader.u32(), reader.u32(), reader.u32()
    size, mtime_ns, target = reader.u64(), reader.i64(), reader.blob(PATH_MAX)
    return Entry(name, kind, stat_bits.S_IMODE(mode), uid, gid, size, mtime_ns, name_text(target) if kind == "link" else None)


def read_match(reader: Reader) -> Match:
    path, line, column, kind = name_text(reader.blob(PATH_MAX)), reader.u32(), reader.u32(), reader.u8()
    text = reader.blob().decode("utf-8", "replace")
    if kind >= len(_MATCH_KINDS):
        raise ProtocolError(f"a match of kind {kind}")
    return Match(path, line, column, _MATCH_KINDS[kind], text)


def read_event(reader: Reader) -> Event:
    kind, path, to = reader.u8(), reader.blob(PATH_MAX), reader.blob(PATH_MAX)
    if not 1 <= kind <= len(_EVENT_TYPES):
        raise ProtocolError(f"an event of type {kind}")
    return Event(_EVENT_TYPES[kind - 1], name_text(path), name_text(to) if to else None)


def read_process(reader: Reader) -> ProcessInfo:
    pid, running, pty, age_ns = reader.u32(), reader.u8(), reader.u8(), reader.u64()
    argv = tuple(name_text(reader.blob()) for _ in range(reader.u32()))
    return ProcessInfo(pid, bool(running), bool(pty), age_ns / 1e9, argv)


@dataclass(frozen=True, slots=True)
class Failure:
    """An ERROR frame."""

    code: int
    errno: int
    message: str

    @classmethod
    def read(cls, payload: bytes) -> Failure:
        reader = Reader(payload)
        code, number, message = reader.u16(), reader.i32(), reader.blob()
        reader.end()
        return cls(code, number, printable(message))

    def error(self, sandbox_id: str, path: str | None) -> UntaxError:
        """The exception that tells the caller."""
        message = self.message
        match self.code:
            case wire.OS:
                return file_error(self.errno, message, path)
            case wire.TOO_LARGE:
                return TooLarge(_EFBIG, message or "more than allowed", path)
            case wire.SPAWN_FAILED:
                return SpawnFailed(sandbox_id, message or "the command could not be started")
            case wire.BUSY:
                return BackendError(sandbox_id, message or "too many actions in flight")
            case wire.REJECTED | wire.UNSUPPORTED:
                return UsageError(message or "the request was refused")
            case wire.GONE:
                return Gone(message or "no such session, process or user")
            case wire.NO_WORKER:
                return NoWorker(message or "nobody inside acts for that user")
            case wire.CANCELLED:
                return NotRun(message or "cancelled")
            case wire.DEADLINE:
                return ActionTimeout(message or "the action passed its deadline")
            case wire.CONFLICT:
                return EditConflict(message or "the text to edit is not there")
            case wire.VERSION:
                return ProtocolError(message or "another version of the protocol")
        return ProtocolError(f"an error of code {self.code}: {message}")


def printable(raw: bytes) -> str:
    """A hostile text on one line: safe in a log and on a terminal."""
    text = raw.decode("utf-8", "replace")[:_MESSAGE_MAX]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
