"""An engine in a process of its own, so that a test can kill, freeze, starve or trace it.

`python -m tests.enginehost OPTIONS` serves one JSON object per line: `{"id", "op", …}` in, `{"id", "ok"}` or
`{"id", "error", "message"}` out. `EngineHost` is the other end.
"""

import asyncio
import base64
import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent


class Refused(Exception):
    """The engine in the other process raised; `kind` is the name of the class."""

    def __init__(self, kind: str, message: str, families: Sequence[str]) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.families = families  # names of all its classes, to ask "is it a SubstrateError?"


class EngineHost:
    def __init__(self, process: asyncio.subprocess.Process, engine_pid: int) -> None:
        self.process = process
        self.pid = engine_pid
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self._reader = asyncio.create_task(self._read())

    async def call(self, op: str, **fields: Any) -> Any:
        """Do one thing in the engine's process; raises `Refused` where that raised, EOFError when the process ends."""
        self._last += 1
        answer = self._waiting[self._last] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(json.dumps({"id": self._last, "op": op, **fields}).encode() + b"\n")
            await self.process.stdin.drain()
        return await answer

    async def run(self, box: str, argv: Sequence[str], **options: Any) -> dict[str, Any]:
        result = await self.call("run", box=box, argv=list(argv), options=options)
        result["stdout"] = base64.b64decode(result["stdout"])
        result["stderr"] = base64.b64decode(result["stderr"])
        return result

    async def lease(self, name: str, spec: dict[str, Any] | None = None, **options: Any) -> None:
        await self.call("lease", box=name, spec=spec or {}, options=options)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self._reader.cancel()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            answer = json.loads(line)
            future = self._waiting.pop(answer["id"], None)
            if future is None or future.done():
                continue
            if "error" in answer:
                future.set_exception(Refused(answer["error"], answer["message"], answer["families"]))
            else:
                future.set_result(answer["ok"])
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EOFError("the engine's process has ended"))


@contextlib.asynccontextmanager
async def engine_host(
    state_dir: str | os.PathLike[str],
    *,
    substrate: str = "namespace",
    prefix: Sequence[str] = (),
    env: dict[str, str] | None = None,
    hosts: dict[str, str] | None = None,
    options: dict[str, Any] | None = None,
    stderr: int | None = None,
) -> AsyncIterator[EngineHost]:
    """A started engine in another process; whatever happened to it, the process is gone at the end."""
    settings = json.dumps({"state_dir": str(state_dir), "substrate": substrate, "hosts": hosts or {}, "options": options or {}})
    paths = [str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    process = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        "-m",
        "tests.enginehost",
        settings,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **(env or {})},
        start_new_session=True,
        limit=16 << 20,
    )
    assert process.stdin is not None and process.stdout is not None
    host: EngineHost | None = None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        first = json.loads(line) if line else {"error": "EOFError", "message": "the engine's process ended at once", "families": []}
        if "error" in first:
            raise Refused(first["error"], first["message"], first["families"])
        host = EngineHost(process, first["pid"])
        yield host
        if process.returncode is None:
            process.stdin.close()  # end of input: the engine closes
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGKILL)  # the engine, and what a prefix started beside it
        await process.wait()
        if host is not None:
            host.close()
        process._transport.close()  # or its pipes are closed when the loop is no more


class _Server:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._boxes: dict[str, Any] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        tasks = set()
        while line := await reader.readline():
            task = asyncio.create_task(self._answer(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            value = await getattr(self, "op_" + request["op"])(request)
            _say({"id": request["id"], "ok": value})
        except Exception as exc:
            _say({"id": request["id"], **_described(exc)})

    async def op_lease(self, request: dict[str, Any]) -> None:
        spec = spec_from(request["spec"])
        self._boxes[request["box"]] = await self._engine.acquire(spec, **request["options"])

    async def op_warm(self, request: dict[str, Any]) -> None:
        await self._engine.warm(spec_from(request["spec"]), request["n"])

    async def op_pools(self, _request: dict[str, Any]) -> Any:
        return self._engine.pools().as_dict()

    async def op_release(self, request: dict[str, Any]) -> None:
        await self._boxes.pop(request["box"]).release()

    async def op_reset(self, request: dict[str, Any]) -> None:
        await self._boxes[request["box"]].reset()

    async def op_run(self, request: dict[str, Any]) -> dict[str, Any]:
        result = await self._boxes[request["box"]].run(request["argv"], **request["options"])
        return {
            "exit_code": result.exit_code,
            "outcome": result.outcome,
            "stdout": base64.b64encode(result.stdout).decode(),
            "stderr": base64.b64encode(result.stderr).decode(),
            "elapsed_s": result.elapsed_s,
            "round_trip_s": result.round_trip_s,
        }

    async def op_write(self, request: dict[str, Any]) -> None:
        await self._boxes[request["box"]].write(request["path"], request["text"].encode())

    async def op_ledger(self, request: dict[str, Any]) -> Any:
        return json.loads(self._boxes[request["box"]].ledger.to_json())

    async def op_ping(self, request: dict[str, Any]) -> dict[str, int]:
        return {"pid": os.getpid(), "descriptors": len(os.listdir("/proc/self/fd"))}


def spec_from(fields: dict[str, Any]) -> Any:
    import untax

    fields = dict(fields)
    if "limits" in fields:
        fields["limits"] = untax.Limits(**fields["limits"])
    if isinstance(fields.get("network"), list):
        fields["network"] = tuple(fields["network"])
    return untax.EnvSpec(**fields)


def _described(exc: BaseException) -> dict[str, Any]:
    return {
        "error": type(exc).__name__,
        "message": str(exc),
        "families": [c.__name__ for c in type(exc).__mro__],
    }


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _name_hosts(names: dict[str, str]) -> None:
    """Names of the test's own, without a resolver: the engine asks the C library through this function."""
    real = socket.getaddrinfo

    def lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        text = host.decode() if isinstance(host, bytes) else host
        if text in names:
            return real(names[text], *args, **kwargs)
        if isinstance(text, str) and text.endswith(".test"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *args, **kwargs)

    socket.getaddrinfo = lookup


async def _main(settings: dict[str, Any]) -> None:
    import untax

    _name_hosts(settings["hosts"])
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=16 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        engine = untax.Engine(settings["substrate"], state_dir=settings["state_dir"], **settings["options"])
        await engine.start()
    except Exception as exc:
        _say(_described(exc))
        return
    try:
        _say({"pid": os.getpid()})
        await _Server(engine).serve(reader)
    finally:
        await engine.aclose()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asyncio.run(_main(json.loads(sys.argv[1])))
