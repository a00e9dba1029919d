"""A process that streams, over a WebSocket of its own: for clients in any language, one process for each connection.

The first message is text: `{"argv": […], "cwd", "env", "user", "timeout_s", "pty", "rows", "cols", "stdin"}`. Then binary messages are standard input, and text
ones `{"eof": true}`, `{"signal": 15}` or `{"rows": 40, "cols": 120}`. The server sends `{"pid": …}`, binary messages whose first byte is 1 for stdout and 2 for
stderr, and at the end `{"result": {…}}` or `{"error": {…}}`. A connection that ends kills the process.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from untax.channel.process import Process
from untax.core.errors import UntaxError
from untax.service.bodies import parse_json
from untax.service.errors import Refused, error_body, error_response
from untax.service.hosting import Hosting
from untax.service.native.actions import TIMEOUT_MAX_S
from untax.service.native.fields import Field, bad, read
from untax.service.native.values import result_data

_FIRST_S = 10.0
_STREAMS = {"stdout": b"\1", "stderr": b"\2"}
START = {
    "argv": Field("texts", "the program and its arguments", is_needed=True),
    "cwd": Field("text", "where it runs", is_nullable=True, most=4096),
    "env": Field("variables", "over the lease's", is_nullable=True),
    "user": Field("text", "as whom", is_nullable=True, most=256),
    "timeout_s": Field("number", "seconds", is_nullable=True, most=TIMEOUT_MAX_S),
    "stdin": Field("truth", "whether it gets any", default=True),
    "pty": Field("truth", "a terminal of its own", default=False),
    "rows": Field("whole", "of the terminal", default=24, least=1, most=10_000),
    "cols": Field("whole", "of the terminal", default=80, least=1, most=10_000),
}
_SAID = {
    "eof": Field("truth", "no more input"),
    "signal": Field("whole", "to the process", least=1, most=64),
    "rows": Field("whole", "of the terminal", least=1, most=10_000),
    "cols": Field("whole", "of the terminal", least=1, most=10_000),
}


async def stream(websocket: WebSocket) -> None:
    hosting: Hosting = websocket.scope["hosting"]
    tenant = websocket.scope["tenant"]
    try:
        holding = hosting.find(tenant, websocket.path_params["lease"])
    except Refused as exc:
        await websocket.send_denial_response(error_response(exc))
        return
    await websocket.accept()
    try:
        with hosting.acting(tenant):
            async with asyncio.timeout(_FIRST_S):
                asked = read(START, parse_json((await websocket.receive_text()).encode()))
            process = await holding.box.start(asked.pop("argv"), **asked)
            async with process:
                await websocket.send_text(json.dumps({"pid": process.pid}))
                await _carried(websocket, process)
    except WebSocketDisconnect:
        return
    except (UntaxError, TimeoutError, KeyError) as exc:
        said = exc if isinstance(exc, UntaxError) else bad("the first message says what to start, as text")
        await _last(websocket, error_body(said))


async def _carried(websocket: WebSocket, process: Process) -> None:
    """Output one way, input the other, until the process or the connection has ended."""
    taking = asyncio.ensure_future(_taken(websocket, process))
    giving = asyncio.ensure_future(_given(websocket, process))
    try:
        await asyncio.wait((taking, giving), return_when=asyncio.FIRST_COMPLETED)
        if giving.done():
            await _last(websocket, {"result": result_data(giving.result())})
        else:
            taking.result()
    finally:
        for task in (taking, giving):
            task.cancel()
        await asyncio.gather(taking, giving, return_exceptions=True)


async def _given(websocket: WebSocket, process: Process) -> Any:
    async for stream, data in process:
        await websocket.send_bytes(_STREAMS[stream] + data)  # waits while nobody reads, and so does the process
    return await process.wait()


async def _taken(websocket: WebSocket, process: Process) -> None:
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code") or 1005)
        if message.get("bytes") is not None:
            try:
                await process.write(message["bytes"])
            except BrokenPipeError:
                pass  # it reads no more; its end says how it went
            continue
        said = read(_SAID, parse_json((message.get("text") or "").encode()))
        if said["eof"]:
            process.close_stdin()
        if said["signal"] is not None:
            await process.signal(said["signal"])
        if said["rows"] is not None and said["cols"] is not None:
            await process.resize(said["rows"], said["cols"])


async def _last(websocket: WebSocket, body: dict[str, Any]) -> None:
    try:
        await websocket.send_text(json.dumps(body))
        await websocket.close()
    except (WebSocketDisconnect, RuntimeError):
        pass  # nobody is there any more
