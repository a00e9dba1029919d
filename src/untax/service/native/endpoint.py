"""One operation of the native dialect: what it takes, who carries it out, and how that is answered.

The rule for a connection that ends while its request is carried out: the request ends with it, and a command is killed, unless it came with an
`Idempotency-Key`; then it goes on, and whoever asks again with the key gets its answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from untax.core.errors import UntaxError
from untax.service.bodies import JSON_MAX, parse_json, read_body
from untax.service.errors import Refused, error_body, error_headers, error_response, status_of
from untax.service.hosting import Holding, Hosting
from untax.service.native.fields import Field, bad, read
from untax.service.native.idempotency import Answered, Answers
from untax.service.tenants import Tenant


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, checked."""

    hosting: Hosting
    tenant: Tenant
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Mapping[str, Any]
    raw: bytes

    @property
    def holding(self) -> Holding:
        """That the path names; `Refused` with 404."""
        return self.hosting.find(self.tenant, self.path["lease"])


Handler = Callable[[Asked], Awaitable["Answered | dict[str, Any]"]]


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of the table that routes and the OpenAPI document are made of."""

    method: str
    path: str
    name: str
    about: str
    handler: Handler
    body: Mapping[str, Field] | None = None
    query: Mapping[str, Field] = field(default_factory=dict)
    takes_bytes: bool = False
    gives_bytes: bool = False
    status: int = 200
    errors: tuple[int, ...] = ()


class Endpoint:
    """An `Operation` as Starlette calls it."""

    def __init__(self, operation: Operation, answers: Answers) -> None:
        self._operation = operation
        self._answers = answers

    async def __call__(self, request: Request) -> Response:
        operation, scope = self._operation, request.scope
        hosting: Hosting = scope["hosting"]
        tenant: Tenant = scope["tenant"]
        started = asyncio.get_running_loop().time()
        status = 500
        try:
            with hosting.acting(tenant):
                most = hosting.settings.body_max if operation.takes_bytes else JSON_MAX  # as objects it is many times its size
                raw = await read_body(request, most) if operation.takes_bytes or operation.body is not None else b""
                asked = Asked(
                    hosting,
                    tenant,
                    request.path_params,
                    _query(operation, request),
                    read(operation.body, parse_json(raw)) if operation.body is not None else {},
                    raw,
                )
                answered = await self._answered(request, asked)
            status = answered.status
            return _response(answered)
        except UntaxError as exc:
            status = status_of(exc)
            return error_response(exc)
        finally:
            hosting.answered(tenant, operation.name, status, asyncio.get_running_loop().time() - started)

    async def _answered(self, request: Request, asked: Asked) -> Answered:
        key = request.headers.get("idempotency-key")
        if key is not None and self._operation.method == "POST":
            print_ = (request.url.path, asked.raw)
            return await self._answers.once(asked.tenant.name, key, print_, lambda: self._carried_out(asked))
        carrying = asyncio.ensure_future(self._carried_out(asked))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((carrying, gone), return_when=asyncio.FIRST_COMPLETED)
            if not carrying.done():
                carrying.cancel()
                await asyncio.wait((carrying,))
                raise Refused(499, "Disconnected", "the connection ended before its answer was there")
            return carrying.result()
        except asyncio.CancelledError:
            carrying.cancel()
            raise
        finally:
            gone.cancel()

    async def _carried_out(self, asked: Asked) -> Answered:
        try:
            answer = await self._operation.handler(asked)
        except UntaxError as exc:
            return Answered(status_of(exc), json.dumps(error_body(exc)).encode(), "application/json", error_headers(exc))
        if isinstance(answer, Answered):
            return answer
        return Answered(self._operation.status, json.dumps(answer, separators=(",", ":")).encode(), "application/json")


def _query(operation: Operation, request: Request) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        one = operation.query.get(name)
        if one is None:
            raise bad(f"{name[:40]!r} is not known here; {', '.join(operation.query) or 'nothing'} is")
        if name in given:
            raise bad(f"{name} stands there twice")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad(f"{name} is not text") from None
        given[name] = one.read_query(name, value)
    for name, one in operation.query.items():
        if name not in given:
            if one.is_needed:
                raise bad(f"{name} is missing: {one.about}")
            given[name] = one.default
    return given


def _response(answered: Answered) -> Response:
    return Response(answered.body, answered.status, dict(answered.headers), answered.media_type)


async def _disconnected(request: Request) -> None:
    """Return once nobody is there any more to answer to. The body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
