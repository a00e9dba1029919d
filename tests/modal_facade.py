"""The few calls of Modal's published protocol that its SDK makes for our adapter, over sandboxes of an engine of our own.

Written from the stubs that the SDK ships (`modal_proto`). Commands and their streams are real; `faults` has a call fail as the provider's would.
"""

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_grpc, api_pb2, task_command_router_grpc, task_command_router_pb2

import untax

TOKENS = ("ak-here", "as-here")
OK = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
ENDED = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED


@dataclass
class Hosting:
    id: str
    task: str
    asked: Any
    box: Any
    at: float
    execs: dict[str, "Exec"] = field(default_factory=dict)


class Exec:
    """A command, and all that it has printed."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.output = {"stdout": bytearray(), "stderr": bytearray()}
        self.result: Any = None
        self.failure: Exception | None = None
        self.changed = asyncio.Condition()
        self.taking = asyncio.ensure_future(self._take())

    async def _take(self) -> None:
        try:
            async for piece in self.process:
                async with self.changed:
                    self.output[piece.stream] += piece.data
                    self.changed.notify_all()
            self.result = await self.process.wait()
        except untax.UntaxError as exc:
            self.failure = exc
        async with self.changed:
            self.changed.notify_all()

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.failure is not None

    def check(self) -> None:
        if self.failure is not None:
            raise GRPCError(Status.NOT_FOUND, "the task is gone")


class Facade:
    def __init__(self, engine: untax.Engine, spec: untax.EnvSpec) -> None:
        self.engine = engine
        self.spec = spec
        self.url = ""
        self.sandboxes: dict[str, Hosting] = {}
        self.faults: list[tuple[str, Status]] = []
        self.log: list[str] = []
        self.withheld: dict[str, asyncio.Event] = {}
        """Calls that are carried out and not answered before that."""
        self._number = 0

    async def end(self, sandbox_id: str) -> None:
        """As the provider does at its own wish, too."""
        await self.sandboxes.pop(sandbox_id).box.release()

    def _of(self, sandbox_id: str) -> Hosting:
        if sandbox_id not in self.sandboxes:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox with ID {sandbox_id} not found")
        return self.sandboxes[sandbox_id]

    def _exec(self, asked: Any) -> Exec:
        for one in self.sandboxes.values():
            if one.task == asked.task_id and asked.exec_id in one.execs:
                return one.execs[asked.exec_id]
        raise GRPCError(Status.NOT_FOUND, "no such exec")

    # ---- the control plane: each is one call, its request in and its answer out ----

    async def AuthTokenGet(self, asked):  # noqa: N802
        return api_pb2.AuthTokenGetResponse(token="e30.e30.e30")

    async def AppGetOrCreate(self, asked):  # noqa: N802
        return api_pb2.AppGetOrCreateResponse(app_id="ap-1")

    async def EnvironmentGetOrCreate(self, asked):  # noqa: N802
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        return api_pb2.EnvironmentGetOrCreateResponse(
            environment_id="en-1", metadata=api_pb2.EnvironmentMetadata(name="main", settings=settings)
        )

    async def ImageGetOrCreate(self, asked):  # noqa: N802
        return api_pb2.ImageGetOrCreateResponse(image_id="im-1", result=api_pb2.GenericResult(status=OK))

    async def SandboxCreateV2(self, asked):  # noqa: N802
        self._number += 1
        # The SDK tells its two kinds of sandboxes apart by the last letter.
        one = Hosting(f"sb-{self._number:022d}V", f"ta-{self._number:022d}V", asked, await self.engine.acquire(self.spec), time.time())
        self.sandboxes[one.id] = one
        return api_pb2.SandboxCreateV2Response(sandbox_id=one.id, task_id=one.task)

    async def SandboxListV2(self, asked):  # noqa: N802
        def has_them(one):
            return {(tag.tag_name, tag.tag_value) for tag in asked.tags} <= {(tag.tag_name, tag.tag_value) for tag in one.asked.tags}

        page = [one for one in self.sandboxes.values() if has_them(one) and one.at < (asked.before_timestamp or time.time() + 1)]
        page.sort(key=lambda one: -one.at)
        return api_pb2.SandboxListResponse(sandboxes=[api_pb2.SandboxInfo(id=one.id, created_at=one.at) for one in page[:2]])

    async def SandboxTagsGetV2(self, asked):  # noqa: N802
        return api_pb2.SandboxTagsGetResponse(tags=self._of(asked.sandbox_id).asked.tags)

    async def SandboxTerminateV2(self, asked):  # noqa: N802
        self._of(asked.sandbox_id)
        await self.end(asked.sandbox_id)
        return api_pb2.SandboxTerminateResponse()

    async def SandboxWaitV2(self, asked):  # noqa: N802
        is_there = asked.sandbox_id in self.sandboxes
        return api_pb2.SandboxWaitResponse(result=None if is_there else api_pb2.GenericResult(status=ENDED))

    async def SandboxGetCommandRouterAccess(self, asked):  # noqa: N802
        self._of(asked.sandbox_id)
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=self.url, jwt="e30.e30.e30")

    # ---- the router of commands ----

    async def TaskExecStart(self, asked):  # noqa: N802
        one = next((one for one in self.sandboxes.values() if one.task == asked.task_id), None)
        if one is None:
            raise GRPCError(Status.NOT_FOUND, "the task is gone")
        process = await one.box.start(list(asked.command_args), timeout_s=asked.timeout_secs or None)
        one.execs[asked.exec_id] = Exec(process)
        return task_command_router_pb2.TaskExecStartResponse()

    async def TaskExecStdinWrite(self, asked):  # noqa: N802
        process = self._exec(asked).process
        if asked.data:
            await process.write(asked.data)
        if asked.eof:
            process.close_stdin()
        return task_command_router_pb2.TaskExecStdinWriteResponse()

    async def TaskExecStdioRead(self, asked):  # noqa: N802
        command = self._exec(asked)
        is_err = asked.file_descriptor == task_command_router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR
        kept, at = command.output["stderr" if is_err else "stdout"], asked.offset
        while True:
            async with command.changed:
                await command.changed.wait_for(lambda at=at: len(kept) > at or command.is_over)
            if len(kept) == at:
                command.check()
                return
            piece = bytes(kept[at : at + (1 << 20)])
            at += len(piece)
            yield task_command_router_pb2.TaskExecStdioReadResponse(data=piece)

    async def TaskExecWait(self, asked):  # noqa: N802
        command = self._exec(asked)
        async with command.changed:
            await command.changed.wait_for(lambda: command.is_over)
        command.check()
        done = command.result
        how = {"signal": 9} if done.timed_out else {"code": done.exit_code}
        return task_command_router_pb2.TaskExecWaitResponse(**how)

    # ---- as services ----

    def service(self, base: type) -> Any:
        """All that `base` has; what is not above is unimplemented, and says so."""
        return type("Service", (base,), {name: self._method(name) for name in base.__abstractmethods__})()

    def _method(self, name: str) -> Any:
        answer = getattr(self, name, None)

        async def method(_: Any, stream: Any) -> None:
            asked = await stream.recv_message()
            self.log.append(name)
            if answer is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"{name}: not of this facade")
            told = (stream.metadata.get("x-modal-token-id"), stream.metadata.get("x-modal-token-secret"))
            if "Task" not in name and told != TOKENS:
                raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed")
            for fault in self.faults:
                if fault[0] == name:
                    self.faults.remove(fault)
                    raise GRPCError(fault[1], "as a provider in trouble says")
            try:
                if inspect.isasyncgenfunction(answer):
                    async for piece in answer(asked):
                        await stream.send_message(piece)
                else:
                    reply = await answer(asked)
                    if name in self.withheld:
                        await self.withheld[name].wait()
                    await stream.send_message(reply)
            except untax.UntaxError as exc:
                raise GRPCError(Status.NOT_FOUND, str(exc)) from exc

        return method


@contextlib.asynccontextmanager
async def facade(state_dir: Any, image: str = "host") -> AsyncIterator[Facade]:
    """On a port of loopback, for as long as it is wanted; `image` is what every image stands for."""
    async with untax.Engine("namespace", state_dir=state_dir, limits="warn") as engine:
        made = Facade(engine, untax.EnvSpec(image=image))
        server = Server([made.service(api_grpc.ModalClientBase), made.service(task_command_router_grpc.TaskCommandRouterBase)])
        await server.start("127.0.0.1", 0)
        try:
            port = server._server.sockets[0].getsockname()[1]
            made.url = f"http://127.0.0.1:{port}"
            yield made
        finally:
            for sandbox_id in list(made.sandboxes):
                await made.end(sandbox_id)
            server.close()
            await server.wait_closed()


def environment(provider: Facade) -> dict[str, str]:
    """How the SDK finds it: that cannot be given to `Engine`."""
    return {"MODAL_SERVER_URL": provider.url}


def options(_: Facade) -> dict[str, Any]:
    """What `Engine("hosted:modal", …)` is given to use it."""
    return {"token_id": TOKENS[0], "token_secret": TOKENS[1], "isolation": "namespace", "creates_per_s": 100.0}
