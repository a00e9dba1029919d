"""The dialect as the service holds it: routes of the control plane, and what takes the requests that are meant for sandboxes.

Those are known by a header (`E2b-Sandbox-Id`, one URL for all sandboxes) or by the name they were sent to (`PORT-ID.DOMAIN`, wildcard names and TLS).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from untax.core.errors import UntaxError
from untax.service.e2b.builds import Builder, Contexts
from untax.service.e2b.control import Control, answer
from untax.service.e2b.envd import PORT, Envd, gone, said
from untax.service.e2b.proxy import forward, forward_socket, is_allowed, refuse_socket
from untax.service.e2b.sandboxes import Sandboxes
from untax.service.e2b.templates import Templates
from untax.service.hosting import Hosting

_ID = re.compile(r"[a-z0-9]{1,64}")
_HOST = re.compile(r"([0-9]{1,5})-([a-z0-9]{1,64})")
_CONTROL = ("/sandboxes/", "/v2/sandboxes/")


class E2b:
    def __init__(self, hosting: Hosting) -> None:
        settings = hosting.settings
        place = hosting.engine.warehouse.state_dir / "e2b"
        self._domain = settings.domain.rpartition(":")[0] or settings.domain if settings.domain else None
        self._templates = Templates(
            place / "templates.json",
            str(settings.extra.get("e2b_image", "host")),
            settings.extra.get("e2b_images"),
            settings.admission.check,
        )
        hosting.kept.others.append(lambda tenant: self._templates.snapshots(tenant.name))
        self._sandboxes = Sandboxes(hosting, self._templates)
        self._contexts = Contexts(place / "files")
        self._builder = Builder(hosting, self._templates, self._contexts, self._sandboxes.hands)
        self._control = Control(hosting, self._sandboxes, self._templates, self._builder, self._contexts)
        self._envd = Envd(hosting)

    @property
    def routes(self) -> Sequence[BaseRoute]:
        return self._control.routes()

    async def start(self) -> None:
        self._templates.load()

    async def aclose(self) -> None:
        await self._builder.aclose()
        await self._sandboxes.aclose()

    def wrap(self, inner: ASGIApp) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            where = self._addressed(scope) if scope["type"] in ("http", "websocket") else None
            if where is None:
                await inner(scope, receive, send)
            else:
                await self._serve(*where, scope, receive, send)

        return app

    def _addressed(self, scope: Scope) -> tuple[str, int] | None:
        """Which sandbox's which port a request is for; None when it is for the service itself."""
        found: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in (b"e2b-sandbox-id", b"e2b-sandbox-port", b"host"):
                found.setdefault(name, value)
        if b"e2b-sandbox-id" in found:
            port = found.get(b"e2b-sandbox-port", b"")
            number = int(port) if port.isdigit() and len(port) < 6 else PORT
            if number == PORT and scope["path"].startswith(_CONTROL):
                return None  # SDKs of 2.10 name the sandbox and envd's port when they ask the control plane to connect, too
            return found[b"e2b-sandbox-id"].decode("latin-1"), number
        if self._domain is None or b"host" not in found:
            return None
        host = found[b"host"].decode("latin-1").rpartition(":")[0] or found[b"host"].decode("latin-1")
        if not host.endswith("." + self._domain):
            return None
        match = _HOST.fullmatch(host[: -len(self._domain) - 1])
        return (match[2], int(match[1])) if match else None

    async def _serve(self, sandbox_id: str, port: int, scope: Scope, receive: Receive, send: Send) -> None:
        is_socket = scope["type"] == "websocket"
        sandbox = self._sandboxes.find_any(sandbox_id) if _ID.fullmatch(sandbox_id) else None
        response: Response
        try:
            if sandbox is None or not await self._sandboxes.wake_for_request(sandbox):
                response = gone(sandbox_id)
            elif port == PORT and not is_socket:
                response = await self._envd(sandbox, Request(scope, receive))
            elif not 0 < port < 65536 or port == PORT:
                response = answer({"code": 400, "message": "that is not a port"}, 400)
            elif not is_allowed(sandbox, scope):
                response = answer({"code": 403, "message": "the sandbox takes traffic only with its token (e2b-traffic-access-token)"}, 403)
            else:
                await (forward_socket if is_socket else forward)(sandbox, port, scope, receive, send)
                return
        except UntaxError as exc:
            response = said(exc)
        if is_socket:
            await refuse_socket(receive, send, "the sandbox was not found, or does not take this")
        else:
            await response(scope, receive, send)


def make(hosting: Hosting) -> E2b:
    return E2b(hosting)
