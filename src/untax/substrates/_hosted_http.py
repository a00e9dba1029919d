"""`untax serve` as a plain HTTP client sees it: one request for each thing, over connections that are kept.

The incumbent path of `hosted:untax`. What the service refuses is told apart by its status: what cannot be meant, what is gone, what may pass.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from untax.core.errors import BackendError, CreateError, DestroyError, SandboxLost, UntaxError, UsageError
from untax.core.result import CommandResult
from untax.core.spec import EnvSpec
from untax.core.substrate import Facts

if TYPE_CHECKING:
    from untax.remote.web import WebAddress

_KEPT_S = 30.0  # the service keeps a silent connection for 75 s
_HEAD_MAX = 64 << 10
_CONNECT_S = 10.0
_CALL_S = 120.0  # for what is no command
_LATE_S = 30.0  # for the answer to a command, after its deadline
_CAP = 16 << 20
_TTL_S = 7 * 86_400.0
_TREE = "/tmp/.untax-tree.tar"

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Refused(Exception):
    """The service answered no; `status` and its own words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{words} (HTTP {status})")
        self.status = status


class Api:
    """Requests to one service."""

    def __init__(self, address: WebAddress) -> None:
        self._address = address
        self._idle: list[tuple[_Connection, float]] = []

    async def ask(self, method: str, path: str, body: object = None, *, timeout_s: float = _CALL_S) -> dict[str, Any]:
        """One request. `Refused` with the service's words, `BackendError` when there is no answer; cancelling it ends it over there as well."""
        raw = isinstance(body, bytes)
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            async with asyncio.timeout(timeout_s):
                status, answer = await self._exchange(method, path, data, "application/octet-stream" if raw else "application/json")
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as exc:
            raise BackendError("", f"{self._address} did not answer {method} {path}: {exc or type(exc).__name__}") from exc
        try:
            found = json.loads(answer) if answer else {}
            if status >= 400:
                raise Refused(status, str(found["error"]["message"]))
        except (ValueError, KeyError, TypeError) as exc:
            raise BackendError("", f"{self._address} answered {method} {path} with {status} and no words of ours") from exc
        return dict(found)

    def close(self) -> None:
        for (_, writer), _ in self._idle:
            writer.close()
        self._idle.clear()

    async def _exchange(self, method: str, path: str, data: bytes, kind: str) -> tuple[int, bytes]:
        reader, writer = await self._connection()
        is_whole = False
        try:
            address = self._address
            lines = [f"{method} {address.path}{path} HTTP/1.1", f"Host: {address.host}:{address.port}", f"Content-Length: {len(data)}"]
            lines += [f"Content-Type: {kind}"] if data else []
            lines += [f"Authorization: Bearer {address.token}"] if address.token else []
            writer.write("\r\n".join([*lines, "", ""]).encode() + data)
            await writer.drain()
            status, headers = _head(await reader.readuntil(b"\r\n\r\n"))
            answer = await reader.readexactly(int(headers.get("content-length", "0")))
            is_whole = headers.get("connection", "").lower() != "close"
        finally:
            if is_whole:
                self._idle.append(((reader, writer), asyncio.get_running_loop().time()))
            else:
                writer.close()
        return status, answer

    async def _connection(self) -> _Connection:
        now = asyncio.get_running_loop().time()
        while self._idle:
            (reader, writer), since = self._idle.pop()
            if now - since < _KEPT_S and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        from untax.remote.web import tls_of

        address = self._address
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.open_connection(address.host, address.port, ssl=tls_of(address), limit=_HEAD_MAX)


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines if line)
    return int(first.split(" ", 2)[1]), {name.strip().lower(): value.strip() for name, _, value in fields}


class PostedSandbox:
    """A lease that was made by a `POST`, each command of which is another."""

    def __init__(self, api: Api, said: Mapping[str, Any]) -> None:
        self.id = str(said["sandbox"])
        self._api = api
        self._path = f"/v1/leases/{said['lease']}"
        self._facts = Facts(workdir=str(said["workdir"]), home=str(said["home"]), user=str(said["user"]), path=str(said["path"]))
        self._is_gone = False

    @classmethod
    async def make(cls, api: Api, spec: EnvSpec) -> PostedSandbox:
        limits = {name: getattr(spec.limits, name) for name in ("cpus", "memory_mib", "disk_mib", "pids")}
        network = spec.network if isinstance(spec.network, str) else list(spec.network)
        wanted = {"image": spec.image, "user": spec.user, "limits": limits, "network": network, "isolation": spec.isolation}
        try:
            return cls(api, await api.ask("POST", "/v1/leases", {"spec": wanted, "ttl_s": _TTL_S}))
        except Refused as exc:
            raise (UsageError(str(exc)) if exc.status in (400, 403) else CreateError("", str(exc))) from exc
        except KeyError as exc:
            raise BackendError("", f"a lease without its {exc}: install the same release on both sides") from exc

    def facts(self) -> Facts:
        return self._facts

    async def wait_ready(self) -> None:
        pass  # the service answers when it runs

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """One request, as any HTTP client makes it."""
        asked = {"argv": list(argv), "timeout_s": timeout_s, "cap": _CAP}
        said = await self._ask("POST", "/run", asked, timeout_s=timeout_s + _LATE_S)
        return CommandResult(
            int(said["exit_code"]), _bytes(said, "stdout"), _bytes(said, "stderr"), said["outcome"], elapsed_s=float(said["elapsed_s"])
        )

    async def furnish(self, trees: Mapping[str, Path]) -> None:
        for where, tree in trees.items():
            packed = await asyncio.to_thread(_packed, tree)
            await self._ask("PUT", f"/files?path={_TREE}", packed)
            unpack = f"mkdir -p {shlex.quote(where)} && tar -xf {_TREE} -C {shlex.quote(where)} && rm {_TREE}"
            (await self.run_incumbent(["sh", "-c", unpack], timeout_s=_CALL_S)).check()

    async def destroy(self) -> None:
        if self._is_gone:
            return
        try:
            await self._ask("DELETE", "", None)
        except SandboxLost:
            pass  # it ended by itself
        except UntaxError as exc:
            raise DestroyError(self.id, f"its lease may be held until its time: {exc}") from exc
        self._is_gone = True

    async def _ask(self, method: str, path: str, body: object, *, timeout_s: float = _CALL_S) -> dict[str, Any]:
        try:
            return await self._api.ask(method, self._path + path, body, timeout_s=timeout_s)
        except Refused as exc:
            raise (SandboxLost if exc.status in (404, 410) else BackendError)(self.id, str(exc)) from exc


def _bytes(said: Mapping[str, Any], name: str) -> bytes:
    exact = said.get(f"{name}_base64")
    return base64.b64decode(exact) if exact is not None else str(said[name]).encode()


def _packed(tree: Path) -> bytes:
    packed = io.BytesIO()
    with contextlib.closing(tarfile.open(fileobj=packed, mode="w")) as tar:
        tar.add(tree, arcname=".", filter=_anonymous)
    return packed.getvalue()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
