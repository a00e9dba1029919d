"""The service as one ASGI application: the native dialect under `/v1`, the others beside it, all over one `Hosting`.

A dialect is a package here with `make(hosting)`. What it gives has `routes`, which stand at the root; `wrap`, which may take requests
before anything else looks at them (by their host name or a header of their own); and `start` and `aclose` around its life.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from untax.core.errors import UntaxError
from untax.service import native
from untax.service.errors import Refused, error_response
from untax.service.hosting import Hosting

log = logging.getLogger("untax.service")

DIALECTS = ("e2b",)


class Dialect(Protocol):
    @property
    def routes(self) -> Sequence[BaseRoute]:
        """From the root of the service on. They say who may use them by `untax.service.auth.authenticate`."""

    def wrap(self, inner: ASGIApp) -> ASGIApp:
        """What sees every request first; `inner` is for those that are not its own."""

    async def start(self) -> None: ...

    async def aclose(self) -> None:
        """Holdings are given back by `Hosting.aclose`, not here."""


def build(hosting: Hosting) -> ASGIApp:
    """Entered by the server's lifespan; `hosting` is its maker's to close."""
    dialects = [_made(name, hosting) for name in DIALECTS if importlib.util.find_spec(f"untax.service.{name}") is not None]

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for dialect in dialects:
                await dialect.start()
                stack.push_async_callback(dialect.aclose)
            yield

    app = Starlette(
        routes=[*native.routes(hosting), *(route for dialect in dialects for route in dialect.routes)],
        exception_handlers={UntaxError: _failed, HTTPException: _refused, Exception: _broken},
        lifespan=lifespan,
    )
    app.state.hosting = hosting
    app.router.redirect_slashes = False
    wrapped: ASGIApp = app
    for dialect in dialects:
        wrapped = dialect.wrap(wrapped)
    return wrapped


def _made(name: str, hosting: Hosting) -> Dialect:
    make = cast("Callable[[Hosting], Dialect]", importlib.import_module(f"untax.service.{name}").make)
    return make(hosting)


async def _failed(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, UntaxError)
    return error_response(exc)


async def _refused(_: Request, exc: Exception) -> Response:
    """Starlette's own: no such path, no such method."""
    assert isinstance(exc, HTTPException)
    return error_response(Refused(exc.status_code, "NotFound" if exc.status_code == 404 else "Refused", exc.detail), exc.headers)


async def _broken(request: Request, exc: Exception) -> Response:
    """A bug here. The server logs it with where it is; the client is told no more than that."""
    log.error("%s %s failed: %s", request.method, request.url.path, type(exc).__name__)
    return error_response(Refused(500, "Bug", "the service failed; its log says where"))
