"""The services inside a sandbox, as envd offers them on its port: Connect calls, files over HTTP, health.

They run here and act through the sandbox's channel; nothing of envd is in the sandbox. Whoever asks proves it by the sandbox's token, in constant
time; a sandbox that is no more, or is paused, answers 502 in the words that SDKs look for.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from untax.core.errors import ActionTimeout, DiskFull, FileError, IsDirectory, NotFound, SandboxLost, UntaxError, UsageError
from untax.service.e2b import connect, files
from untax.service.e2b.connect import Message, RpcError, rpc_error
from untax.service.e2b.filesystem import Filesystem
from untax.service.e2b.models import Account, whole
from untax.service.e2b.sandbox import Sandbox
from untax.service.e2b.signature import Operation
from untax.service.e2b.usage import sample
from untax.service.errors import Refused, status_of
from untax.service.hosting import Hosting

log = logging.getLogger("untax.service.e2b")

PORT = 49983
_PING_S = 90.0  # where the client names no interval
_TIMEOUT_MAX_S = 1e9

Unary = Callable[[Sandbox, Account, Message], Awaitable[Message]]
Streamed = Callable[[Sandbox, Account, Message, float | None, float], Awaitable[AsyncIterator[Message]]]


def _files(call: Callable[[Filesystem, Message], Awaitable[Message]]) -> Unary:
    return lambda sandbox, account, message: call(Filesystem(sandbox, account), message)


_UNARY: dict[str, Unary] = {
    "process.Process/List": lambda sandbox, _, message: sandbox.processes.list(message),
    "process.Process/SendInput": lambda sandbox, _, message: sandbox.processes.send_input(message),
    "process.Process/SendSignal": lambda sandbox, _, message: sandbox.processes.send_signal(message),
    "process.Process/CloseStdin": lambda sandbox, _, message: sandbox.processes.close_stdin(message),
    "process.Process/Update": lambda sandbox, _, message: sandbox.processes.update(message),
    "filesystem.Filesystem/Stat": _files(Filesystem.stat),
    "filesystem.Filesystem/MakeDir": _files(Filesystem.make_dir),
    "filesystem.Filesystem/Move": _files(Filesystem.move),
    "filesystem.Filesystem/ListDir": _files(Filesystem.list_dir),
    "filesystem.Filesystem/Remove": _files(Filesystem.remove),
    "filesystem.Filesystem/CreateWatcher": lambda sandbox, account, message: sandbox.watchers.create(Filesystem(sandbox, account), message),
    "filesystem.Filesystem/GetWatcherEvents": lambda sandbox, _, message: sandbox.watchers.events(message),
    "filesystem.Filesystem/RemoveWatcher": lambda sandbox, _, message: sandbox.watchers.remove(message),
}
_STREAMED: dict[str, Streamed] = {
    "process.Process/Start": lambda sandbox, account, message, timeout_s, ping_s: sandbox.processes.start(
        message, account, timeout_s, ping_s
    ),
    "process.Process/Connect": lambda sandbox, _, message, timeout_s, ping_s: sandbox.processes.connect(message, timeout_s, ping_s),
    "filesystem.Filesystem/WatchDir": lambda sandbox, account, message, _, ping_s: sandbox.watchers.stream(
        Filesystem(sandbox, account), message, ping_s
    ),
}
_INPUT = "process.Process/StreamInput"


class Envd:
    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting

    async def __call__(self, sandbox: Sandbox, request: Request) -> Response:
        """Answer one request to envd's port of a sandbox that runs."""
        path = request.url.path.strip("/")
        if path == "health":
            return Response(status_code=204)
        try:
            if path == "files" and request.method in ("GET", "POST"):
                return await self._files(sandbox, request)
            if not self._has_token(sandbox, request):
                raise Refused(
                    401, "Unauthorized", "unauthorized access, please provide a valid access token or method signing if supported"
                )
            if path == "metrics":
                return await self._metrics(sandbox)
            if path == "envs":
                return _json(dict(sandbox.env))
            if request.method == "POST" and (path in _UNARY or path in _STREAMED or path == _INPUT):
                with self._hosting.acting(sandbox.holding.tenant):
                    return await self._call(sandbox, request, path)
            raise Refused(404, "NotFound", "there is nothing at this path")
        except UntaxError as exc:
            return said(exc)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception:  # a bug here: the log says where, the client that it was one
            log.exception("%s /%s failed", request.method, path)
            return _json({"code": "internal", "message": "the service failed; its log says where"}, 500)

    def _has_token(self, sandbox: Sandbox, request: Request) -> bool:
        given = request.headers.get("x-access-token", "")
        return hmac.compare_digest(given.encode(), sandbox.token.encode())

    # ---- calls ----

    async def _call(self, sandbox: Sandbox, request: Request, path: str) -> Response:
        is_streamed = path in _STREAMED or path == _INPUT
        try:
            try:
                account = await self._account(sandbox, _username(request))
                if path in _UNARY:
                    message = connect.load(await _body(request))
                    return Response(connect.dump(await _UNARY[path](sandbox, account, message)), media_type=connect.UNARY)
                messages = _messages(request)
                if path == _INPUT:
                    done = await sandbox.processes.stream_input(messages)
                    return Response(connect.envelope(done) + connect.end(), media_type=connect.STREAM)
                message = await anext(messages, Message())
                events = await _STREAMED[path](sandbox, account, message, _timeout_s(request), _ping_s(request))
                return StreamingResponse(_enveloped(events), media_type=connect.STREAM)
            except SandboxLost as exc:
                if not is_streamed:
                    return gone(sandbox.id)  # it ended while it was asked: as whoever asks a moment later is told
                raise rpc_error(exc) from None
            except UntaxError as exc:
                raise rpc_error(exc) from None
        except RpcError as exc:
            if is_streamed:  # a stream says even this in its last envelope
                return Response(connect.end(exc), media_type=connect.STREAM)
            return Response(connect.dump(exc.body), exc.status, media_type=connect.UNARY)
        except ClientDisconnect:
            return Response(status_code=400)

    async def _account(self, sandbox: Sandbox, name: str | None) -> Account:
        account = await sandbox.account(name)
        if account is None:
            raise RpcError("unauthenticated", f"invalid username: {name!r} is no user of the sandbox")
        return account

    # ---- files and measures ----

    async def _files(self, sandbox: Sandbox, request: Request) -> Response:
        operation: Operation = "read" if request.method == "GET" else "write"
        if not self._has_token(sandbox, request) and not files.signed(sandbox, request, operation):
            raise Refused(401, "Unauthorized", "missing signature query parameter")
        with self._hosting.acting(sandbox.holding.tenant):
            account = await sandbox.account(request.query_params.get("username"))
            if account is None:
                raise Refused(401, "Unauthorized", f"error looking up user {request.query_params.get('username')!r}: unknown user")
            try:
                service = Filesystem(sandbox, account)
                return await (files.download(service, sandbox, request) if operation == "read" else files.upload(service, request))
            except RpcError as exc:
                raise Refused(exc.status, exc.code, exc.message) from None

    async def _metrics(self, sandbox: Sandbox) -> Response:
        taken, limits = await sample(sandbox), sandbox.holding.box.spec.limits
        document = {
            "ts": int(taken.at), "cpu_count": max(1, round(limits.cpus)), "cpu_used_pct": round(taken.cpu_pct, 2),
            "mem_total": limits.memory_mib << 20, "mem_used": taken.memory, "mem_cache": 0,
            "mem_total_mib": limits.memory_mib, "mem_used_mib": taken.memory >> 20,
            "disk_used": taken.disk, "disk_total": taken.disk_total,
        }  # fmt: skip
        return _json(document)


# ---- requests ----


def _username(request: Request) -> str | None:
    """`Authorization: Basic` with a name and no password says as whom; None: the template's user."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[0] or None
    except (ValueError, binascii.Error):
        raise RpcError("unauthenticated", "the authorization is not a user's name") from None


def _timeout_s(request: Request) -> float | None:
    """The client's deadline, which ends what it starts; none: it may last as long as the sandbox."""
    text = request.headers.get("connect-timeout-ms")
    if text is None:
        return None
    if (number := whole(text)) is None or number < 0:
        raise RpcError("invalid_argument", "connect-timeout-ms is not a number")
    return min(max(number, 1) / 1000, _TIMEOUT_MAX_S)


def _ping_s(request: Request) -> float:
    number = whole(request.headers.get("keepalive-ping-interval", ""))
    return _PING_S if number is None or number < 0 else float(min(max(number, 1), 3600))


async def _body(request: Request) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > connect.MESSAGE_MAX:
            raise RpcError("resource_exhausted", f"a message of more than {connect.MESSAGE_MAX} bytes")
        pieces.append(piece)
    return b"".join(pieces)


async def _messages(request: Request) -> AsyncIterator[Message]:
    envelopes = connect.Envelopes()
    async for piece in request.stream():
        for message in envelopes.feed(piece):
            yield message
    envelopes.finish()


# ---- answers ----


async def _enveloped(events: AsyncIterator[Message]) -> AsyncIterator[bytes]:
    error: RpcError | None = None
    try:
        async for event in events:
            yield connect.envelope(event)
    except RpcError as exc:
        error = exc
    except UntaxError as exc:
        error = rpc_error(exc)
    except Exception as exc:
        log.exception("a stream broke")
        error = RpcError("internal", type(exc).__name__)
    yield connect.end(error)


def _json(document: object, status: int = 200) -> Response:
    return Response(json.dumps(document), status, media_type="application/json")


_STATUS: tuple[tuple[type[UntaxError], int], ...] = (
    (NotFound, 404), (IsDirectory, 400), (DiskFull, 507), (FileError, 409), (UsageError, 400), (ActionTimeout, 504), (SandboxLost, 502),
)  # fmt: skip


def said(exc: UntaxError) -> Response:
    """An error of envd's HTTP routes."""
    if isinstance(exc, SandboxLost):
        return gone(exc.sandbox_id)
    status = status_of(exc) if isinstance(exc, Refused) else next((status for kind, status in _STATUS if isinstance(exc, kind)), 500)
    message = f"{exc.filename}: {exc.strerror}" if isinstance(exc, FileError) and exc.filename else str(exc)
    return _json({"code": status, "message": message}, status)


def gone(sandbox_id: str) -> Response:
    return _json({"sandboxId": sandbox_id[:100], "message": "The sandbox was not found", "code": 502}, 502)


def closed(sandbox_id: str, port: int) -> Response:
    return _json({"sandboxId": sandbox_id, "message": "The sandbox is running but port is not open", "port": port, "code": 502}, 502)
