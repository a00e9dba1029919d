"""What the service says about itself: whether its backend works, what it is, and how it is doing."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import untax
from untax.leases import usual_isolation
from untax.service import metrics
from untax.service.auth import authenticate
from untax.service.errors import Refused
from untax.service.fleet import Peers, own_status
from untax.service.hosting import Hosting


async def health(request: Request) -> Response:
    """200 when a command ran in a sandbox a moment ago, 503 when none does, or while the server drains. Needs no token and tells nothing."""
    hosting: Hosting = request.app.state.hosting
    if hosting.is_draining:
        return JSONResponse({"status": "draining"}, 503, {"retry-after": "1"})
    if await hosting.probe.trouble() is not None:
        return JSONResponse({"status": "failing"}, 503, {"retry-after": "1"})
    return JSONResponse({"status": "ok"})


async def prometheus(request: Request) -> Response:
    hosting: Hosting = request.app.state.hosting
    authenticate(hosting.tenants, request.headers.raw)
    return Response(metrics.text(hosting), media_type=metrics.CONTENT_TYPE)


async def prometheus_of_all(request: Request) -> Response:
    hosting: Hosting = request.app.state.hosting
    authenticate(hosting.tenants, request.headers.raw)
    return Response(await _peers(hosting).metrics(), media_type=metrics.CONTENT_TYPE)


async def fleet(request: Request) -> Response:
    hosting: Hosting = request.scope["hosting"]
    peers = _peers(hosting)
    return JSONResponse(
        {
            "fleet": peers.name,
            "release": untax.__version__,
            "substrate": hosting.engine.substrate.name,
            "nodes": [one.as_dict() for one in await peers.statuses()],
            "wanted": peers.wanted,
        }
    )


async def node(request: Request) -> Response:
    return JSONResponse(own_status(request.scope["hosting"]))


def _peers(hosting: Hosting) -> Peers:
    if hosting.fleet is None:
        raise Refused(404, "NotFound", "this server is no node of a fleet; its own metrics are at /metrics")
    return hosting.fleet


async def about(request: Request) -> Response:
    hosting: Hosting = request.scope["hosting"]
    substrate = hosting.engine.substrate
    return JSONResponse(
        {
            "release": untax.__version__,
            "substrate": {"name": substrate.name, "isolation": substrate.isolation, "usual": usual_isolation(substrate)},
            "tenant": request.scope["tenant"].name,
            "use": hosting.use(request.scope["tenant"]),
            "trouble": await hosting.probe.trouble(),
        }
    )
