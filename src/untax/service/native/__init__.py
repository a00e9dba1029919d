"""The native dialect: `/v1`, and what the service says about itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from untax.service import dashboard
from untax.service.auth import authenticate
from untax.service.errors import Refused, error_response
from untax.service.native import about, actions, files, leases, process, snapshots
from untax.service.native.endpoint import Endpoint, Operation
from untax.service.native.idempotency import Answers
from untax.service.native.openapi import document

if TYPE_CHECKING:
    from untax.service.hosting import Hosting

OPERATIONS: tuple[Operation, ...] = (*actions.OPERATIONS, *files.OPERATIONS, *leases.OPERATIONS, *snapshots.OPERATIONS)


def routes(hosting: Hosting) -> Sequence[BaseRoute]:
    answers = Answers(hosting.engine.chore)

    async def openapi(_: Request) -> Response:
        return JSONResponse(document(OPERATIONS, hosting.settings.public_url))

    inner = [
        *_routes(answers),
        Route("/about", about.about, methods=["GET"]),
        Route("/node", about.node, methods=["GET"]),
        Route("/fleet", about.fleet, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/events", dashboard.events, methods=["GET"]),
        WebSocketRoute("/leases/{lease}/process", process.stream),
    ]
    return [
        *dashboard.routes(hosting),
        Route("/health", about.health, methods=["GET"]),
        Route("/metrics", about.prometheus, methods=["GET"]),
        Route("/fleet/metrics", about.prometheus_of_all, methods=["GET"]),
        Mount("/v1", Authenticated(hosting, Router(inner, redirect_slashes=False))),
    ]


def _routes(answers: Answers) -> list[Route]:
    """One route for each path, because Starlette asks the routes one after the other."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = Endpoint(operation, answers)
    return [Route(path, _by_method(endpoints), methods=list(endpoints)) for path, endpoints in paths.items()]


def _by_method(endpoints: dict[str, Endpoint]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return answer


class Authenticated:
    """Asks for the token first, whatever the path: who has none learns nothing about what is there."""

    def __init__(self, hosting: Hosting, inner: ASGIApp) -> None:
        self._hosting = hosting
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope["tenant"] = authenticate(self._hosting.tenants, scope["headers"])
        except Refused as exc:
            if scope["type"] != "websocket":
                raise
            await WebSocket(scope, receive, send).send_denial_response(error_response(exc))
            return
        scope["hosting"] = self._hosting
        await self._inner(scope, receive, send)
