"""The native dialect: `/v1`, and what the service says about itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from untax.service.auth import authenticate
from untax.service.native import about

if TYPE_CHECKING:
    from untax.service.hosting import Hosting


def routes(hosting: Hosting) -> Sequence[BaseRoute]:
    return [
        Route("/health", about.health, methods=["GET"]),
        Mount("/v1", Authenticated(hosting, Mount("", routes=[Route("/about", about.about, methods=["GET"])]))),
    ]


class Authenticated:
    """Asks for the token first, whatever the path: who has none learns nothing about what is there."""

    def __init__(self, hosting: Hosting, inner: ASGIApp) -> None:
        self._hosting = hosting
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["tenant"] = authenticate(self._hosting.tenants, scope["headers"])
        scope["hosting"] = self._hosting
        await self._inner(scope, receive, send)
