"""The part of Daytona's REST and toolbox API that its SDK calls for our adapter, over sandboxes of an engine of our own.

Written from the SDK's generated clients. Commands, files and terminals are real; `faults` has it answer as a provider in trouble does.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

import untax

KEY = "dtn_" + "5" * 64
PAGE = 2  # sandboxes of a listing's page, so that every listing of more has several


@dataclass
class Fault:
    """One answer instead of the real one."""

    on: str
    """The beginning of "METHOD /path"."""
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    is_carried_out: bool = False
    """The answer is lost, not the request."""


@dataclass
class Hosting:
    id: str
    asked: dict[str, Any]
    state: str = "creating"
    box: Any = None
    dirs: tuple[str, str] = ("/", "/")
    activity: int = 0


class Facade:
    def __init__(self, engine: untax.Engine, spec: untax.EnvSpec) -> None:
        self.engine = engine
        self.spec = spec
        self.url = ""
        self.sandboxes: dict[str, Hosting] = {}
        self.faults: list[Fault] = []
        self.log: list[str] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self._number = 0
        self._starting: set[asyncio.Task[None]] = set()

    # ---- the control plane ----

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._checked], client_max_size=64 << 20)
        app.add_routes(
            [
                web.post("/api/sandbox", self._create),
                web.get("/api/sandbox", self._list),
                web.get("/api/sandbox/{id}", self._get),
                web.delete("/api/sandbox/{id}", self._delete),
                web.post("/api/sandbox/{id}/last-activity", self._active),
                web.get("/toolbox/{id}/work-dir", self._dir),
                web.get("/toolbox/{id}/user-home-dir", self._dir),
                web.post("/toolbox/{id}/files/bulk-upload", self._upload),
                web.post("/toolbox/{id}/process/execute", self._execute),
                web.get("/toolbox/{id}/process/pty/create-connect", self._terminal),
            ]
        )
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        line = f"{request.method} {request.path}"
        if "socket.io" in line:
            return web.Response(status=404)  # the SDK then asks for states instead of being told
        self.log.append(line)
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return _no(401, "Invalid credentials")
        for fault in self.faults:
            if line.startswith(fault.on):
                self.faults.remove(fault)
                if fault.is_carried_out:
                    await handler(request)
                return _no(fault.status, "as a provider in trouble says", headers=fault.headers)
        return await handler(request)

    async def _create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked.get("snapshot") == "missing":
            return _no(404, "Snapshot missing not found")
        self._number += 1
        one = self.sandboxes[f"{self._number:08x}"] = Hosting(f"{self._number:08x}", asked)
        starting = asyncio.ensure_future(self._start(one))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        if self.may_start.is_set():
            await starting
        return web.json_response(self._said(one))

    async def _start(self, one: Hosting) -> None:
        await self.may_start.wait()
        if one.id not in self.sandboxes:
            return
        one.box = await self.engine.acquire(self.spec)
        told = await one.box.shell('pwd; echo "$HOME"')
        one.dirs = tuple(told.text.split())
        one.state = "started"

    async def _list(self, request: web.Request) -> web.Response:
        wanted = json.loads(request.query.get("labels", "{}")).items()
        all_of_them = [one for one in self.sandboxes.values() if wanted <= one.asked["labels"].items()]
        start = int(request.query.get("cursor") or 0)
        page = all_of_them[start : start + PAGE]
        following = str(start + PAGE) if len(all_of_them) > start + PAGE else None
        return web.json_response({"items": [self._said(one) for one in page], "nextCursor": following})

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._said(self._of(request)))

    async def _delete(self, request: web.Request) -> web.Response:
        one = self._of(request)
        await self.end(one.id)
        return web.json_response(self._said(one))

    async def end(self, sandbox_id: str) -> None:
        """As the provider does at its own wish, too."""
        one = self.sandboxes.pop(sandbox_id)
        one.state = "destroyed"
        if one.box is not None:
            await one.box.release()

    async def _active(self, request: web.Request) -> web.Response:
        self._of(request).activity += 1
        return web.Response()

    def _of(self, request: web.Request) -> Hosting:
        one = self.sandboxes.get(request.match_info["id"])
        if one is None:
            raise web.HTTPNotFound(text=json.dumps({"message": "Sandbox not found", "statusCode": 404}), content_type="application/json")
        return one

    def _said(self, one: Hosting) -> dict[str, Any]:
        asked = one.asked
        return {
            "id": one.id, "organizationId": "org", "name": one.id, "user": asked.get("user") or "user", "env": {}, "labels": asked["labels"],
            "public": False, "networkBlockAll": bool(asked.get("networkBlockAll")), "kvm": False, "target": asked.get("target") or "here",
            "cpu": asked.get("cpu") or 1, "gpu": 0, "memory": asked.get("memory") or 1, "disk": asked.get("disk") or 3, "state": one.state,
            "daemonVersion": "facade", "toolboxProxyUrl": f"{self.url}/toolbox",
        }  # fmt: skip

    # ---- the toolbox ----

    async def _dir(self, request: web.Request) -> web.Response:
        workdir, home = self._of(request).dirs
        return web.json_response({"dir": workdir if request.path.endswith("work-dir") else home})

    async def _upload(self, request: web.Request) -> web.Response:
        one, path = self._of(request), ""
        async for part in await request.multipart():
            if part.name.endswith(".path"):
                path = await part.text()
            else:
                await one.box.write(path, bytes(await part.read()))
        return web.json_response({})

    async def _execute(self, request: web.Request) -> web.Response:
        one, asked = self._of(request), await request.json()
        # As the daemon does it: one pipe for both outputs.
        done = await one.box.shell(f"exec 2>&1; {asked['command']}", cwd=asked.get("cwd"), timeout_s=asked.get("timeout") or None)
        if done.timed_out:
            return _no(408, "command execution timeout", code="PROCESS_EXECUTION_TIMEOUT", source="DAYTONA_DAEMON")
        return web.json_response({"exitCode": done.exit_code, "result": done.stdout.decode(errors="replace")})

    async def _terminal(self, request: web.Request) -> web.WebSocketResponse:
        one, query = self._of(request), request.query
        ws = web.WebSocketResponse(protocols=("X-Daytona-Pty-Exit-Control",), max_msg_size=16 << 20)
        await ws.prepare(request)
        size = {"rows": int(query["rows"]), "cols": int(query["cols"])}
        process = await one.box.start(["bash", "-i"], pty=True, cwd=query.get("cwd"), env={"TERM": "xterm-256color"}, **size)
        await ws.send_json({"type": "control", "status": "connected"})

        async def shown() -> None:
            async for output in process:
                await ws.send_bytes(output.data)
            done = await process.wait()
            said = {"exitCode": done.exit_code}
            await ws.send_json({"type": "control", "status": "exited", **said})
            await ws.close(message=json.dumps(said).encode())

        showing = asyncio.ensure_future(shown())
        try:
            with contextlib.suppress(untax.SandboxLost, BrokenPipeError):
                async for message in ws:
                    if message.type == WSMsgType.BINARY:
                        await process.write(message.data)
        finally:
            process.kill()
            with contextlib.suppress(untax.UntaxError, ConnectionError, asyncio.CancelledError):
                await showing
        return ws


def _no(status: int, message: str, *, headers: dict[str, str] | None = None, **more: str) -> web.Response:
    return web.json_response({"statusCode": status, "message": message, **more}, status=status, headers=headers)


@contextlib.asynccontextmanager
async def facade(state_dir: Any, image: str = "host") -> AsyncIterator[Facade]:
    """On a port of loopback, for as long as it is wanted; `image` is what every snapshot stands for."""
    async with untax.Engine("namespace", state_dir=state_dir, limits="warn") as engine:
        made = Facade(engine, untax.EnvSpec(image=image))
        runner = web.AppRunner(made.app(), shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            made.url = f"http://127.0.0.1:{port}"
            yield made
        finally:
            for sandbox_id in list(made.sandboxes):
                await made.end(sandbox_id)
            await runner.cleanup()


def environment(_: Facade) -> dict[str, str]:
    """How the SDK finds it is all in the options."""
    return {}


def options(made: Facade) -> dict[str, Any]:
    """What `Engine("hosted:daytona", …)` is given to use it."""
    return {"api_url": f"{made.url}/api", "api_key": KEY, "isolation": "namespace", "creates_per_s": 100.0}
