"""The page at `/`: what is live, how the pool is doing, where the time goes. One file, nothing fetched from elsewhere.

The page itself holds nothing and needs no token; what it shows comes from `/v1/events`, with the token of whoever looks, and is only theirs.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from untax.service.dashboard.events import events

if TYPE_CHECKING:
    from untax.service.hosting import Hosting

__all__ = ["events", "routes"]


def routes(hosting: Hosting) -> Sequence[BaseRoute]:  # noqa: ARG001  as every part's
    text = importlib.resources.files(__package__).joinpath("page.html").read_text()
    headers = {
        # Only what is in the page runs, wherever a label or a name came from.
        "content-security-policy": f"default-src 'none'; connect-src 'self'; img-src data:; script-src {_hash(text, 'script')}; style-src {_hash(text, 'style')};"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def page(_: Request) -> Response:
        return Response(text, 200, headers, "text/html; charset=utf-8")

    return [Route("/", page, methods=["GET"])]


def _hash(text: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
