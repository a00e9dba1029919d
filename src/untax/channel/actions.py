"""Each action as a `Call`: the bytes of its request, with its arguments checked, and how its answer is read. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any, Literal, TypeVar

from untax.channel import wire
from untax.channel.arguments import (
    ARGUMENT_MAX,
    Name,
    argv_bytes,
    body_bytes,
    check_command_size,
    env_bytes,
    path_bytes,
    text_bytes,
    whole_number,
)
from untax.channel.call import TIMEOUT_S as TIMEOUT_S  # noqa: PLC0414  the default of every action here, for callers too
from untax.channel.call import Call, CommandCall, ItemsCall, ReadCall, SessionCall
from untax.channel.replies import (
    Entry,
    Match,
    ProcessInfo,
    SearchResult,
    TreeSize,
    name_text,
    read_entry,
    read_match,
    read_process,
)
from untax.channel.wire import Reader, blob, blobs
from untax.core.errors import ProtocolError, UsageError

OUTPUT_CAP = 1 << 20  # bytes of each stream of a command: THREATS 6.1
READ_MAX = 64 << 20  # bytes of one read without a limit of its own; larger files are downloaded, or read in parts
INLINE_MAX = 1 << 20  # a body up to this goes in the request's own frame
CHUNK = 64 << 10  # of a longer body: four in flight in a window of 256 KiB
_CAP_MAX = 0xFFFFFFFF

AnyCall = TypeVar("AnyCall", bound=Call[Any])

_SPAWN = Struct("<HIHH")
_RUN_SESSION = Struct("<II")
_EMPTY = wire.u32(0)


# ---- commands ----


def run(
    argv: Sequence[Name],
    *,
    cwd: Name | None = None,
    env: Mapping[str, str | None] | None = None,
    stdin: bytes | None = None,
    user: str | None = None,
    timeout_s: float | None = TIMEOUT_S,
    merge: bool = False,
    cap: int = OUTPUT_CAP,
) -> CommandCall:
    """Run `argv` without a shell. `merge` puts stderr into stdout, in the order in which they were written."""
    payload, body = spawn_payload(argv_bytes(argv), wire.MERGE if merge else 0, cap, cwd, env, user, stdin)
    return in_directory(CommandCall(wire.SPAWN, payload, cap, timeout_s, body), cwd)


def shell(
    text: str | bytes,
    *,
    cwd: Name | None = None,
    env: Mapping[str, str | None] | None = None,
    stdin: bytes | None = None,
    user: str | None = None,
    timeout_s: float | None = TIMEOUT_S,
    merge: bool = False,
    cap: int = OUTPUT_CAP,
) -> CommandCall:
    """Run `text` by `bash -c`, or `sh -c` where there is no bash."""
    options = wire.SHELL | wire.MERGE if merge else wire.SHELL
    payload, body = spawn_payload(shell_argv(text), options, cap, cwd, env, user, stdin)
    return in_directory(CommandCall(wire.SPAWN, payload, cap, timeout_s, body), cwd)


def in_directory(call: AnyCall, cwd: Name | None) -> AnyCall:
    """The same call; an error about its working directory names it."""
    if cwd is not None:
        call.path = name_text(path_bytes(cwd, "cwd"))
    return call


def shell_argv(text: str | bytes) -> list[bytes]:
    if not isinstance(text, (str, bytes)):
        raise UsageError("the shell command is not a string: run() takes a list")
    return [text_bytes(text, "the shell command", ARGUMENT_MAX - 1, "; write() it to a file and run that")]


def spawn_payload(
    argv: list[bytes],
    options: int,
    cap: int,
    cwd: Name | None,
    env: Mapping[str, str | None] | None,
    user: str | None,
    stdin: bytes | None,
    rows: int = 0,
    cols: int = 0,
) -> tuple[bytes, Iterator[bytes] | None]:
    """The payload of SPAWN, and the rest of a standard input that is too long for it."""
    whole_number(cap, "cap", 0, _CAP_MAX)
    variables = env_bytes(env) if env else []
    check_command_size(argv, variables)
    body = None
    given = b"" if stdin is None else body_bytes(stdin, "stdin")
    if len(given) > INLINE_MAX:
        options |= wire.STDIN
        body, given = chunks(given), b""
    payload = b"".join((
        _SPAWN.pack(options, cap, rows, cols),
        _EMPTY if cwd is None else blob(path_bytes(cwd, "cwd")),
        _EMPTY if user is None else blob(text_bytes(user, "user")),
        blobs(argv),
        blobs(variables) if variables else _EMPTY,
        blob(given),
    ))  # fmt: skip
    return payload, body


def chunks(data: bytes) -> Iterator[bytes]:
    view = memoryview(data)
    for at in range(0, len(data), CHUNK):
        yield bytes(view[at : at + CHUNK])


def signal(pid: int, number: int, *, group: bool = False, timeout_s: float | None = TIMEOUT_S) -> Call[None]:
    """Send a signal to a started process, or to its whole process group and session."""
    whole_number(number, "signal", 1, 64)
    return Call(wire.SIGNAL, wire.u32(_pid(pid)) + wire.i32(number) + wire.u8(group), timeout_s=timeout_s)


def resize(pid: int, rows: int, cols: int, *, timeout_s: float | None = TIMEOUT_S) -> Call[None]:
    size = wire.u16(whole_number(rows, "rows", 1, 0xFFFF)) + wire.u16(whole_number(cols, "cols", 1, 0xFFFF))
    return Call(wire.RESIZE, wire.u32(_pid(pid)) + size, timeout_s=timeout_s)


def processes(*, timeout_s: float | None = TIMEOUT_S) -> Call[list[ProcessInfo]]:
    """The processes that were started with `start` or `pty`."""
    return Call(wire.PROCESSES, b"", timeout_s=timeout_s, decode=lambda reader: [read_process(reader) for _ in range(reader.u32())])


def _pid(pid: int) -> int:
    return whole_number(pid, "pid", 1, 0x7FFFFFFF)


# ---- sessions ----


def session_open(
    *,
    cwd: Name | None = None,
    user: str | None = None,
    env: Mapping[str, str | None] | None = None,
    timeout_s: float | None = TIMEOUT_S,
) -> Call[tuple[int, int]]:
    """Start a persistent bash; gives its session id and pid."""
    payload = (
        (_EMPTY if cwd is None else blob(path_bytes(cwd, "cwd")))
        + (_EMPTY if user is None else blob(text_bytes(user, "user")))
        + blobs(env_bytes(env))
    )
    call = Call(wire.SESSION_OPEN, payload, timeout_s=timeout_s, decode=lambda reader: (reader.u32(), reader.u32()))
    return in_directory(call, cwd)


def session_run(session: int, text: str | bytes, *, timeout_s: float | None = TIMEOUT_S, cap: int = OUTPUT_CAP) -> SessionCall:
    if not isinstance(text, (str, bytes)):
        raise UsageError("a session's command is not a string: pass what you would type")
    raw = text_bytes(text, "the session's command")
    payload = _RUN_SESSION.pack(session, whole_number(cap, "cap", 0, _CAP_MAX)) + blob(raw)
    return SessionCall(wire.SESSION_RUN, payload, cap, timeout_s)


def session_close(session: int, *, timeout_s: float | None = TIMEOUT_S) -> Call[None]:
    return Call(wire.SESSION_CLOSE, wire.u32(session), timeout_s=timeout_s)


# ---- files ----


def read_with_info(path: Name, *, offset: int = 0, limit: int | None = None, timeout_s: float | None = TIMEOUT_S) -> ReadCall:
    """The file's bytes from `offset`, at most `limit`. Without a limit, more than `READ_MAX` bytes are `TooLarge`."""
    raw = path_bytes(path)
    most = READ_MAX if limit is None else whole_number(limit, "limit", 0, READ_MAX)
    at = wire.u64(whole_number(offset, "offset", 0, (1 << 63) - 1))
    return ReadCall(blob(raw) + at + wire.u64(most) + wire.u8(limit is None), most, name_text(raw), timeout_s)


class _BytesCall(ReadCall):
    __slots__ = ()

    def result(self, sandbox_id: str = "", round_trip_ns: int = 0) -> bytes:  # type: ignore[override]
        return super().result(sandbox_id, round_trip_ns)[0]


def read(path: Name, *, offset: int = 0, limit: int | None = None, timeout_s: float | None = TIMEOUT_S) -> Call[bytes]:
    """As `read_with_info`, the bytes alone."""
    call = read_with_info(path, offset=offset, limit=limit, timeout_s=timeout_s)
    call.__class__ = _BytesCall
    return call  # type: ignore[return-value]


def write(
    path: Name,
    data: bytes,
    *,
    mode: int | None = None,
    append: bool = False,
    exclusive: bool = False,
    parents: bool = True,
    timeout_s: float | None = TIMEOUT_S,
) -> Call[int]:
    """Write a whole file, or append to one; `exclusive` refuses one that exists. Gives the bytes written.

    Without a `mode` a file that exists keeps its own, and a new one gets 0644.
    """
    raw = path_bytes(path)
    given = body_bytes(data, "data")
    flags = append | exclusive << 1 | parents << 2
    body = None
    if len(given) > INLINE_MAX:
        flags |= 8
        body, given = chunks(given), b""
    payload = blob(raw) + wire.u32(0 if mode is None else _mode(mode)) + wire.u8(flags) + blob(given)
    return Call(wire.WRITE, payload, timeout_s=timeout_s, path=name_text(raw), decode=Reader.u64, body=body)


def list_dir(path: Name = ".", *, most: int = 100_000, timeout_s: float | None = TIMEOUT_S) -> Call[list[Entry]]:
    """The entries of a directory, at most `most`, in no particular order."""
    raw = path_bytes(path)
    whole_number(most, "most", 1, 10_000_000)

    def finish(reader: Reader, take: Callable[[Reader], None]) -> Callable[[list[Entry]], list[Entry]]:
        reader.u8()
        take(reader)
        return lambda items: items

    payload = blob(raw) + wire.u32(most)
    return ItemsCall(wire.LIST, payload, most, read_entry, finish, timeout_s=timeout_s, path=name_text(raw))


def stat(path: Name, *, follow: bool = True, timeout_s: float | None = TIMEOUT_S) -> Call[Entry]:
    raw = path_bytes(path)
    return Call(wire.STAT, blob(raw) + wire.u8(follow), timeout_s=timeout_s, path=name_text(raw), decode=read_entry)


def mkdir(path: Name, *, mode: int = 0o755, parents: bool = True, timeout_s: float | None = TIMEOUT_S) -> Call[None]:
    raw = path_bytes(path)
    payload = blob(raw) + wire.u32(_mode(mode)) + wire.u8(parents)
    return Call(wire.MKDIR, payload, timeout_s=timeout_s, path=name_text(raw))


def remove(path: Name, *, recursive: bool = False, timeout_s: float | None = TIMEOUT_S) -> Call[int]:
    """Remove a file, an empty directory, or with `recursive` a tree. Gives how many names went."""
    raw = path_bytes(path)
    return Call(wire.REMOVE, blob(raw) + wire.u8(recursive), timeout_s=timeout_s, path=name_text(raw), decode=Reader.u64)


def move(source: Name, target: Name, *, overwrite: bool = True, timeout_s: float | None = TIMEOUT_S) -> Call[None]:
    raw = path_bytes(source, "source")
    payload = blob(raw) + blob(path_bytes(target, "target")) + wire.u8(overwrite)
    return Call(wire.MOVE, payload, timeout_s=timeout_s, path=name_text(raw))


def upload(dest: Name, tar: Iterator[bytes], *, max_bytes: int, max_entries: int, timeout_s: float | None = TIMEOUT_S) -> Call[TreeSize]:
    """Unpack a tar stream below the directory `dest`; `tree.pack` makes one of a local path."""
    raw = path_bytes(dest, "dest")
    payload = blob(raw) + wire.u64(max_bytes) + wire.u64(max_entries)
    return Call(wire.UPLOAD, payload, timeout_s=timeout_s, path=name_text(raw), decode=_tree_size, body=tar)


def _tree_size(reader: Reader) -> TreeSize:
    return TreeSize(reader.u64(), reader.u64())


SearchHow = Literal["text", "regex", "symbol"]
_SEARCH_HOW: tuple[SearchHow, ...] = ("text", "regex", "symbol")


def search(
    pattern: str | bytes,
    root: Name = ".",
    *,
    how: SearchHow = "text",
    ignore_case: bool = False,
    whole_words: bool = False,
    globs: Sequence[str] = (),
    most: int = 1000,
    max_file_bytes: int = 16 << 20,
    timeout_s: float | None = TIMEOUT_S,
) -> Call[SearchResult]:
    """Look for a text, a regular expression or a Python symbol in the files below `root` that match one of `globs`."""
    raw = path_bytes(root, "root")
    wanted = text_bytes(pattern, "pattern")
    if not wanted:
        raise UsageError("pattern is empty: every line would match")
    if how not in _SEARCH_HOW:
        raise UsageError(f"how={how!r} is not one of {', '.join(_SEARCH_HOW)}")
    if isinstance(globs, (str, bytes)):
        raise UsageError('globs is a string: pass a list such as ["*.py"]')
    payload = b"".join((
        blob(raw),
        blob(wanted),
        wire.u8(_SEARCH_HOW.index(how)),
        wire.u8(ignore_case | whole_words << 1),
        blobs(text_bytes(glob, "glob") for glob in globs),
        wire.u32(whole_number(most, "most", 1, 10_000_000)),
        wire.u64(whole_number(max_file_bytes, "max_file_bytes", 1, 1 << 40)),
    ))  # fmt: skip

    def finish(reader: Reader, take: Callable[[Reader], None]) -> Callable[[list[Match]], SearchResult]:
        files, skipped, more = reader.u64(), reader.u64(), bool(reader.u8())
        take(reader)
        return lambda items: SearchResult(tuple(items), files, skipped, more)

    return ItemsCall(wire.SEARCH, payload, most, read_match, finish, timeout_s=timeout_s, path=name_text(raw))


def edit(path: Name, old: str | bytes, new: str | bytes, *, count: int = 1, timeout_s: float | None = TIMEOUT_S) -> Call[int]:
    """Replace `old`, which must be there exactly `count` times (0: once or more), by `new`. Gives how often."""
    raw = path_bytes(path)
    before, after = _text(old, "old"), _text(new, "new")
    if not before:
        raise UsageError("old is empty: name the text to replace, or use write()")
    payload = blob(raw) + blob(before) + blob(after) + wire.u32(whole_number(count, "count", 0, 0xFFFFFFFF))
    return Call(wire.EDIT, payload, timeout_s=timeout_s, path=name_text(raw), decode=Reader.u32)


def apply_patch(
    diff: str | bytes,
    directory: Name = ".",
    *,
    strip: int = 1,
    dry_run: bool = False,
    timeout_s: float | None = TIMEOUT_S,
) -> Call[list[str]]:
    """Apply a unified diff to the files below `directory`, all of it or nothing. Gives the paths that changed."""
    raw = path_bytes(directory, "directory")
    payload = blob(raw) + blob(_text(diff, "diff")) + wire.u8(dry_run) + wire.u8(whole_number(strip, "strip", 0, 255))
    return Call(
        wire.PATCH,
        payload,
        timeout_s=timeout_s,
        path=name_text(raw),
        decode=lambda reader: [name_text(reader.blob()) for _ in range(reader.u32())],
    )


_OWNER_SAME = 0xFFFFFFFF
_MARKS_MOST = 8192


def mark(
    path: Name,
    *,
    uid: int | None = None,
    gid: int | None = None,
    prefix: str = "",
    attributes: Mapping[str, str] | None = None,
    timeout_s: float | None = TIMEOUT_S,
) -> Call[None]:
    """Give a file to another owner; with a `prefix`, replace its extended attributes of names that begin so by `attributes`."""
    raw = path_bytes(path)
    owners = (_OWNER_SAME if owner is None else whole_number(owner, "owner", 0, _OWNER_SAME - 1) for owner in (uid, gid))
    pairs = [text_bytes(f"{name}={value}", "attribute") for name, value in (attributes or {}).items()]
    payload = blob(raw) + b"".join(map(wire.u32, owners)) + blob(text_bytes(prefix, "prefix")) + blobs(pairs)
    return Call(wire.MARK, payload, timeout_s=timeout_s, path=name_text(raw))


def marks(paths: Sequence[Name], prefix: str, *, timeout_s: float | None = TIMEOUT_S) -> Call[list[dict[str, str]]]:
    """The extended attributes of each path whose names begin with `prefix`, which is taken off; none of what is not there."""
    whole_number(len(paths), "the number of paths", 0, _MARKS_MOST)
    payload = blob(text_bytes(prefix, "prefix")) + blobs(path_bytes(path) for path in paths)

    def decode(reader: Reader) -> list[dict[str, str]]:
        if reader.u32() != len(paths):
            raise ProtocolError("attributes of other paths than were asked for")
        return [{name_text(reader.blob()): name_text(reader.blob()) for _ in range(reader.u32())} for _ in paths]

    return Call(wire.MARKS, payload, timeout_s=timeout_s, decode=decode)


def _text(value: object, what: str) -> bytes:
    """A text that may hold any byte, NUL included."""
    if isinstance(value, str):
        try:
            return value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as exc:
            raise UsageError(f"{what} holds a lone surrogate: pass bytes instead") from exc
    return body_bytes(value, what)


def _mode(mode: int) -> int:
    return whole_number(mode, "mode", 1, 0o7777)  # 0 on the wire: not given


# ---- the channel itself ----


def configure(*, workdir: Name, env: Mapping[str, str], proxy_port: int = 0, timeout_s: float | None = TIMEOUT_S) -> Call[None]:
    """Replace the base environment and working directory of later actions; a port starts the proxy there."""
    payload = blob(path_bytes(workdir, "workdir")) + blobs(env_bytes(env))
    return Call(wire.CONFIGURE, payload + wire.u16(whole_number(proxy_port, "proxy_port", 0, 0xFFFF)), timeout_s=timeout_s)


def ping(*, timeout_s: float | None = TIMEOUT_S) -> Call[None]:
    return Call(wire.PING, b"", timeout_s=timeout_s)


def quiesce(*, timeout_s: float | None = TIMEOUT_S) -> Call[None]:
    """The cell sends nothing behind its answer until it is told to go on."""
    return Call(wire.QUIESCE, b"", timeout_s=timeout_s)
