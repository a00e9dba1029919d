"""A substrate without a machine and a clock without time.

`FakeSubstrate` keeps sandboxes in memory and speaks the real protocol from the cell's side, so everything above an adapter
runs as it does in earnest. It writes down each step that was taken, can be made to fail or wait at each of them, and
knows who was never given back.
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from untax.channel import wire
from untax.channel.wire import Reader
from untax.core.errors import SandboxLost
from untax.core.result import CommandResult
from untax.core.spec import EnvSpec, Limits
from untax.core.stream import Receiver
from untax.core.substrate import Facts, Unenforced
from untax.testing.files import Files, MemoryFiles

_HEADER = struct.Struct("<IIBBH")
_KINDS = {stat.S_IFREG: b"f", stat.S_IFDIR: b"d", stat.S_IFLNK: b"l", stat.S_IFIFO: b"p"}
_EXITED, _TIMEOUT, _CANCELLED = 0, 2, 3


class FakeClock:
    """A clock that stands still until it is told to go on; use it as `Engine(clock=FakeClock())`."""

    def __init__(self, start_ns: int = 0) -> None:
        self.ns = start_ns

    def __call__(self) -> int:
        return self.ns

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


@dataclass(frozen=True, slots=True)
class FakeExit:
    """How a command in a fake sandbox ends."""

    code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    wall_s: float = 0.0
    oom_kills: int = 0
    signal: int | None = None


HANGS = None
"""What a program returns that does not end by itself."""

Program = Callable[[Sequence[str], Mapping[str, str], bytes], FakeExit | None]


def _echo(argv: Sequence[str], env: Mapping[str, str], stdin: bytes) -> FakeExit:  # noqa: ARG001
    return FakeExit(stdout=" ".join(argv[1:]).encode() + b"\n")


def _env(argv: Sequence[str], env: Mapping[str, str], stdin: bytes) -> FakeExit:  # noqa: ARG001
    return FakeExit(stdout="".join(f"{name}={value}\n" for name, value in env.items()).encode())


PROGRAMS: Mapping[str, Program] = {
    "true": lambda argv, env, stdin: FakeExit(),  # noqa: ARG005
    "false": lambda argv, env, stdin: FakeExit(code=1),  # noqa: ARG005
    "echo": _echo,
    "env": _env,
    "cat": lambda argv, env, stdin: FakeExit(stdout=stdin),  # noqa: ARG005
    "sleep": lambda argv, env, stdin: HANGS,  # noqa: ARG005
}


class FakeSubstrate:
    """`log` has every step in order; `live` the sandboxes that were created and not destroyed.

    `failures[step]` is raised at a step (`create`, `wait_ready`, `open_channel`, `destroy`), `gates[step]` is waited for
    before it. With `incumbent`, sandboxes also have the incumbent path.
    """

    name = "fake"
    binds_late: frozenset[Literal["limits", "disk", "user"]] = frozenset(("limits", "disk", "user"))

    def __init__(
        self,
        *,
        isolation: str = "vm",
        programs: Mapping[str, Program] | None = None,
        unenforced: tuple[Unenforced, ...] = (),
        unavailable: str | None = None,
        incumbent: bool = False,
    ) -> None:
        self.isolation = isolation
        self.incumbent = incumbent
        self.programs = {**PROGRAMS, **(programs or {})}
        self.unenforced = unenforced
        self.unavailable = unavailable
        self.log: list[str] = []
        self.live: set[str] = set()
        self.sandboxes: list[FakeSandbox] = []
        self.failures: dict[str, Exception] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.specs: list[EnvSpec] = []

    def unavailable_reason(self) -> str | None:
        return self.unavailable

    async def start(self) -> None:
        await self.step("start")

    async def aclose(self) -> None:
        await self.step("aclose")

    async def create(self, spec: EnvSpec) -> FakeSandbox:
        await self.step("create")
        self.specs.append(spec)
        kind = FakeIncumbent if self.incumbent else FakeSandbox
        sandbox = kind(self, f"fake-{len(self.sandboxes)}", spec)
        self.sandboxes.append(sandbox)
        self.live.add(sandbox.id)
        return sandbox

    async def step(self, name: str) -> None:
        self.log.append(name)
        if (gate := self.gates.get(name)) is not None:
            await gate.wait()
        if (failure := self.failures.get(name)) is not None:
            raise failure


class FakeSandbox:
    def __init__(self, substrate: FakeSubstrate, sandbox_id: str, spec: EnvSpec) -> None:
        self.id = sandbox_id
        self.spec = spec
        self.files: Files = MemoryFiles()
        self.users = {""}
        self.cell: FakeCell | None = None
        self._substrate = substrate

    @property
    def unenforced(self) -> tuple[Unenforced, ...]:
        return self._substrate.unenforced

    def facts(self) -> Facts:
        return Facts(workdir="/workspace", home="/home/user", user="user")

    async def wait_ready(self) -> None:
        await self._substrate.step("wait_ready")

    async def open_channel(self) -> FakeCell:
        await self._substrate.step("open_channel")
        if self.id not in self._substrate.live:
            raise SandboxLost(self.id, "it was destroyed")
        self.cell = FakeCell(self, self._substrate)
        return self.cell

    async def destroy(self) -> None:
        if self.id in self._substrate.live:
            await self._substrate.step("destroy")
            self._substrate.live.discard(self.id)
        if self.cell is not None:
            self.cell.close()

    async def provide_worker(self, user: str) -> None:
        await self._substrate.step(f"provide_worker {user}")
        self.users.add(user)

    async def bind_limits(self, limits: Limits) -> tuple[Unenforced, ...]:
        await self._substrate.step("bind_limits")
        self.spec = replace(self.spec, limits=limits)
        return self.unenforced

    async def bind_user(self, user: str | None) -> None:
        await self._substrate.step(f"bind_user {user or ''}".rstrip())
        self.spec = replace(self.spec, user=user)

    async def pause(self) -> None:
        await self._substrate.step("pause")

    async def resume(self) -> None:
        await self._substrate.step("resume")

    def die(self) -> None:
        """As when the cell is killed: the stream ends without a word."""
        assert self.cell is not None
        self.cell.close()


class FakeIncumbent(FakeSandbox):
    """One that also takes commands one exec at a time. Its bash runs the command behind the meter's wrapper, and tells its time."""

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:  # noqa: ARG002
        words = list(argv[4:]) if argv[0] == "bash" else list(argv)
        await self._substrate.step(f"exec {' '.join(words)}")
        if self.id not in self._substrate.live:
            raise SandboxLost(self.id, "it was destroyed")
        program = self._substrate.programs.get(words[0])
        ended = program(words, {}, b"") if program else FakeExit(127)
        assert ended is not None, "a command that hangs has no incumbent form here"
        stderr = ended.stderr + f"\nuntax-inside 1000 {1000 + int(ended.wall_s * 1e6)}\n".encode()
        return CommandResult(ended.code, ended.stdout, stderr)


class FakeCell:
    """The cell's end of a channel, as the `ByteStream` that the host holds. Answers from the event loop, never at once."""

    def __init__(self, sandbox: FakeSandbox, substrate: FakeSubstrate) -> None:
        self.silent = False
        self._sandbox = sandbox
        self._substrate = substrate
        self._receiver: Receiver | None = None
        self._env: dict[str, str] = {}
        self._workdir = "/"
        self._kept = b""
        self._hanging: dict[int, asyncio.TimerHandle | None] = {}
        self._closed = False

    @property
    def is_running(self) -> bool:
        """Whether a command of it has not ended."""
        return bool(self._hanging)

    # ---- ByteStream ----

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.say(wire.hello("fake"))

    def write(self, data: bytes) -> None:
        self._kept += data
        while len(self._kept) >= 12:
            length = _HEADER.unpack_from(self._kept)[0]
            if len(self._kept) < 4 + length:
                return
            whole, self._kept = self._kept[: 4 + length], self._kept[4 + length :]
            self._take(whole)

    @property
    def write_buffer_size(self) -> int:
        return 0

    async def drain(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for timer in self._hanging.values():
                if timer is not None:
                    timer.cancel()
            if self._receiver is not None:
                asyncio.get_running_loop().call_soon(self._receiver.connection_lost, None)

    # ---- what a hostile or broken one may do ----

    def say(self, raw: bytes) -> None:
        """Send any bytes to the host."""
        if not self._closed and not self.silent:
            asyncio.get_running_loop().call_soon(self._deliver, raw)

    def _deliver(self, raw: bytes) -> None:
        if not self._closed and self._receiver is not None:
            self._receiver.data_received(raw)

    # ---- requests ----

    def _take(self, whole: bytes) -> None:
        _, request_id, kind, flags, _ = _HEADER.unpack_from(whole)
        reader = Reader(whole, _HEADER.size)
        deadline_ms = reader.u32() if flags & wire.HAS_DEADLINE else 0
        if flags & wire.HAS_KEY:
            for _ in range(2):
                reader.u64()
        match kind:
            case wire.CONFIGURE:
                self._configure(request_id, reader)
            case wire.PING:
                self._done(request_id)
            case wire.CANCEL:
                self._end_hanging(request_id, _CANCELLED)
            case wire.SPAWN:
                self._spawn(request_id, reader, deadline_ms)
            case wire.READ | wire.WRITE | wire.MKDIR | wire.LIST | wire.STAT | wire.REMOVE:
                try:
                    self._done(request_id, self._file_action(kind, reader))
                except OSError as exc:
                    self._error(request_id, wire.OS, exc.errno or errno.EIO, "open")
            case wire.BATCH:
                self._batch(request_id, reader)
            case wire.HELLO | wire.CREDIT | wire.DATA:
                pass
            case _:
                self._error(request_id, wire.UNSUPPORTED, 0, "the fake cell does not do this")

    def _configure(self, request_id: int, reader: Reader) -> None:
        self._substrate.log.append("configure")
        self._workdir = reader.blob().decode()
        self._env = dict(reader.blob().decode().split("=", 1) for _ in range(reader.u32()))
        self._done(request_id)

    def _spawn(self, request_id: int, reader: Reader, deadline_ms: int) -> None:
        options, *_ = reader.u16(), reader.u32(), reader.u16(), reader.u16()
        _cwd, user = reader.blob(), reader.blob().decode()
        argv = [reader.blob(wire.FRAME_MAX_OUT).decode() for _ in range(reader.u32())]
        env = dict(self._env)
        for _ in range(reader.u32()):
            name, has_value, value = reader.blob().decode().partition("=")
            env.pop(name, None)
            if has_value:
                env[name] = value
        stdin = reader.blob(wire.FRAME_MAX_OUT)
        if user not in self._sandbox.users:
            self._error(request_id, wire.NO_WORKER, 0, f"nobody acts for {user}")
            return
        if options & wire.SHELL:
            argv = argv[0].split()
        self._substrate.log.append(f"spawn {' '.join(argv)}")
        program = self._substrate.programs.get(argv[0])
        ended = program(argv, env, stdin) if program else FakeExit(127, stderr=f"{argv[0]}: not found\n".encode())
        if ended is HANGS:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(deadline_ms / 1000, self._end_hanging, request_id, _TIMEOUT) if deadline_ms else None
            self._hanging[request_id] = timer
        else:
            self._done(request_id, _command(ended))

    def _end_hanging(self, request_id: int, how: int) -> None:
        if request_id in self._hanging:
            timer = self._hanging.pop(request_id)
            if timer is not None:
                timer.cancel()
            self._substrate.log.append("killed")
            self._done(request_id, _command(FakeExit(), how))

    def _file_action(self, kind: int, reader: Reader) -> bytes:
        files = self._sandbox.files
        path = posixpath.normpath(posixpath.join(self._workdir, reader.blob().decode("utf-8", "surrogateescape")))
        match kind:
            case wire.READ:
                data = files.read(path)
                at, most = reader.u64(), reader.u64()
                return wire.u64(len(data)) + wire.u32(0o644) + struct.pack("<q", 0) + wire.blob(data[at : at + most])
            case wire.WRITE:
                mode, flags, data = reader.u32(), reader.u8(), reader.blob(wire.FRAME_MAX_OUT)
                files.write(path, data, mode, exclusive=bool(flags & 2))
                return wire.u64(len(data))
            case wire.MKDIR:
                files.mkdir(path)
                return b""
            case wire.REMOVE:
                files.remove(path, recursive=bool(reader.u8()))
                return wire.u64(1)
            case wire.STAT:
                return self._entry(path, posixpath.basename(path))
        names = files.list(path)
        return wire.u8(0) + wire.u32(len(names)) + b"".join(self._entry(posixpath.join(path, name), name) for name in names)

    def _entry(self, path: str, name: str) -> bytes:
        found = self._sandbox.files.stat(path)
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), b"?")
        target = self._sandbox.files.target(path).encode() if kind == b"l" else b""
        facts = struct.pack("<IIIQq", found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns or 0)
        return wire.blob(name.encode("utf-8", "surrogateescape")) + kind + facts + wire.blob(target)

    def _batch(self, request_id: int, reader: Reader) -> None:
        _, count = reader.u8(), reader.u32()
        rest = reader.rest()
        for _ in range(count):
            length = 4 + _HEADER.unpack_from(rest)[0]
            self._take(rest[:length])
            rest = rest[length:]
        self._done(request_id, wire.u32(count))

    def _done(self, request_id: int, payload: bytes = b"") -> None:
        self.say(wire.frame(request_id, wire.DONE, payload))

    def _error(self, request_id: int, code: int, number: int, message: str) -> None:
        self.say(wire.frame(request_id, wire.ERROR, wire.u16(code) + wire.i32(number) + wire.blob(message.encode())))


def _command(ended: FakeExit, how: int = _EXITED) -> bytes:
    if how == _EXITED and ended.signal is not None:
        how = 1
    code = ended.signal if ended.signal is not None else ended.code
    facts = struct.pack("<BiQQQQIIBQQ", how, code, int(ended.wall_s * 1e9), 0, 0, 0, ended.oom_kills, 0, 0, 0, 0)
    return facts + wire.blob(ended.stdout) + wire.blob(ended.stderr)
