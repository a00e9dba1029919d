"""What the page is told, as server-sent events: how things stand, once a second while they change, and each rollout that ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from untax.service.errors import Refused, error_response
from untax.service.fleet import NodeStatus, labels
from untax.service.observed import BOUNDS_S

if TYPE_CHECKING:
    from untax.service.hosting import Hosting
    from untax.service.tenants import Tenant

EVERY_S = 1.0
"""How often a person's eye gets something new. Nothing waits for it."""
_ALIVE_S = 15.0  # something has to come, or proxies close what is idle
_STREAMS_MAX = 16  # of one tenant


async def events(request: Request) -> Response:
    hosting: Hosting = request.scope["hosting"]
    tenant: Tenant = request.scope["tenant"]
    watching = hosting.watching
    if watching[tenant.name] >= _STREAMS_MAX:
        return error_response(Refused(429, "TooMany", f"{_STREAMS_MAX} pages are open already", retry_after_s=5.0))
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_told(hosting, tenant), media_type="text/event-stream", headers=headers)


async def _told(hosting: Hosting, tenant: Tenant) -> AsyncIterator[str]:
    hosting.watching[tenant.name] += 1
    last, last_at, seen = "", 0.0, 0
    try:
        while not hosting.is_draining:
            ended, seen = _ended(hosting, tenant, seen)
            for one in ended:
                yield f"event: rollout\ndata: {json.dumps(one)}\n\n"
            state = state_of(hosting, tenant)
            if hosting.fleet is not None:
                nodes = await hosting.fleet.statuses()
                called = labels(nodes)
                state["nodes"] = [_node(called[one.node_id], one) for one in nodes]
                state["wanted"] = hosting.fleet.wanted
            text = json.dumps(state)
            now = time.monotonic()
            if text != last:
                last, last_at = text, now
                yield f"event: state\ndata: {json.dumps({'at': time.time(), **state})}\n\n"
            elif now - last_at > _ALIVE_S:
                last_at = now
                yield ": still here\n\n"
            await asyncio.sleep(EVERY_S)
        yield "event: closing\ndata: {}\n\n"
    finally:
        hosting.watching[tenant.name] -= 1


def state_of(hosting: Hosting, tenant: Tenant) -> dict[str, Any]:
    pools = hosting.pools(tenant)
    return {
        "substrate": hosting.engine.substrate.name,
        "use": hosting.use(tenant),
        "leases": [
            {
                "lease": one.id,
                "sandbox": one.box.id,
                "dialect": one.dialect,
                "image": one.box.spec.image,
                "began": one.began,
                "ends": one.ends,
            }
            for one in hosting.holdings(tenant)[-100:]
        ]
        + [
            {
                "lease": lease_id,
                "sandbox": box.id,
                "dialect": "channel",
                "image": box.spec.image,
                "began": box.ledger.asked_at,
                "ends": None,
            }
            for owner in hosting.owners.owners
            if owner.gate.name == tenant.name
            for lease_id, box in list(owner.leases.items())[:100]
        ],
        "stages": pools["stages"],
        "pool": {
            name: pools[name]
            for name in ("sandboxes", "starting", "most_starting", "exact", "partial", "cold", "refused", "died", "failed")
        },
        "bounds_s": BOUNDS_S,
        "took": {name: one.buckets for name, one in sorted(hosting.observed.took.items())},
    }


def _node(name: str, one: NodeStatus) -> dict[str, Any]:
    """A line of the page's table."""
    return {
        "name": name,
        "state": one.state,
        "leases": one.leases,
        "idle": one.idle,
        "starting": one.pool.starting if one.pool is not None else 0,
        "waiting": one.waiting,
        "trouble": one.trouble,
    }


def _ended(hosting: Hosting, tenant: Tenant, seen: int) -> tuple[list[dict[str, Any]], int]:
    """The ledgers that are new since `seen` of them."""
    total = hosting.owners.ledgers_total
    new = min(total - seen, len(hosting.owners.ledgers))
    found = [json.loads(one.text) for one in list(hosting.owners.ledgers)[-new:] if one.tenant == tenant.name] if new else []
    return [_rollout(one) for one in found], total


def _rollout(ledger: dict[str, Any]) -> dict[str, Any]:
    """Enough for a line and for its waterfall."""
    metrics = ledger["metrics"]
    parts = {
        name.removesuffix("_s"): value
        for name, value in metrics.items()
        if name.endswith("_s") and name not in ("total_s", "tax_s", "holder_s")
    }
    return {
        "rollout": ledger["rollout"],
        "verdict": ledger["verdict"],
        "reasons": ledger["reasons"][:3],
        "at": ledger["asked_at"],
        "total_s": metrics["total_s"],
        "tax_s": metrics["tax_s"],
        "actions": int(metrics["actions"]),
        "parts": parts,
        "hit": (ledger.get("hit") or {}).get("kind"),
        "spans": [[name, start / 1e9, end / 1e9] for name, start, end in ledger["parts"]][:200],
        "acts": [[name, start / 1e9, end / 1e9, inside / 1e9, outcome] for name, start, _, end, inside, outcome in ledger["actions"][:200]],
    }
