"""What the service says about itself: whether its backend answers, and what it is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import untax
from untax.service.hosting import Hosting


async def health(request: Request) -> Response:
    """200 once the backend has answered, 503 when it does not, or while the server drains."""
    hosting: Hosting = request.app.state.hosting
    if hosting.is_draining:
        return JSONResponse({"status": "draining"}, 503, {"retry-after": "1"})
    try:
        pools = hosting.engine.pools()
    except untax.UntaxError as exc:
        return JSONResponse({"status": "failing", "reason": str(exc)}, 503, {"retry-after": "1"})
    return JSONResponse({"status": "ok", "idle": sum(stage.idle for stage in pools.stages)})


async def about(request: Request) -> Response:
    hosting: Hosting = request.scope["hosting"]
    substrate = hosting.engine.substrate
    return JSONResponse(
        {
            "release": untax.__version__,
            "substrate": {"name": substrate.name, "isolation": substrate.isolation},
            "tenant": request.scope["tenant"].name,
            "use": hosting.use(request.scope["tenant"]),
        }
    )
