"""Snapshots, what begins from them, pools and ledgers."""

from __future__ import annotations

import json
from typing import Any

from untax.core.spec import Limits
from untax.leases import usual_isolation
from untax.service.hosting import TTL_MAX_S, Holding
from untax.service.native.endpoint import Asked, Operation
from untax.service.native.fields import Field
from untax.service.native.idempotency import Answered
from untax.service.native.values import LATE, SPEC, bindings_of, holding_data, snapshot_data, spec_of

_FORKS_MAX = 256  # in one request


async def take(asked: Asked) -> dict[str, Any]:
    hosting = asked.hosting
    hosting.kept.check_room(asked.tenant)
    snapshot = await asked.holding.box.snapshot()
    await hosting.kept.own(asked.tenant, snapshot, save=asked.body["save"])
    return snapshot_data(snapshot)


async def list_all(asked: Asked) -> dict[str, Any]:
    return {"snapshots": asked.hosting.kept.ids(asked.tenant)}


async def look(asked: Asked) -> dict[str, Any]:
    return snapshot_data(await asked.hosting.kept.find(asked.tenant, asked.path["snapshot"]))


async def save(asked: Asked) -> dict[str, Any]:
    snapshot = await asked.hosting.kept.find(asked.tenant, asked.path["snapshot"])
    await asked.hosting.kept.own(asked.tenant, snapshot, save=True)
    return snapshot_data(snapshot)


async def drop(asked: Asked) -> Answered:
    await asked.hosting.kept.drop(asked.tenant, asked.path["snapshot"])
    return Answered(204)


async def fork(asked: Asked) -> dict[str, Any]:
    hosting, body, tenant = asked.hosting, asked.body, asked.tenant
    snapshot = await hosting.kept.find(tenant, asked.path["snapshot"])
    late = bindings_of(body)
    hosting.check_limits(late["limits"])
    hosting.check_network(snapshot.spec.network if late["network"] is None else late["network"])
    hosting.checked_ttl(body["ttl_s"])
    with hosting.starting(tenant, body["n"]):
        boxes = await hosting.engine.fork(snapshot, body["n"], ttl_s=TTL_MAX_S, **late)
        holdings: list[Holding] = [hosting.take_over(tenant, box, dialect="lease", ttl_s=body["ttl_s"]) for box in boxes]
    return {"leases": [holding_data(one) for one in holdings]}


async def pools(asked: Asked) -> dict[str, Any]:
    return asked.hosting.pools(asked.tenant)


async def warm(asked: Asked) -> dict[str, Any]:
    hosting, body = asked.hosting, asked.body
    spec = spec_of(body["spec"], usual_isolation(hosting.engine.offer))
    hosting.admit(asked.tenant, spec)
    limits = Limits(**body["limits"]) if body["limits"] else None
    hosting.check_limits(limits)
    with hosting.starting(asked.tenant, max(1, body["n"])):
        await hosting.engine.warm(spec, body["n"], limits=limits)
    return hosting.pools(asked.tenant)


async def ledgers(asked: Asked) -> dict[str, Any]:
    return {"ledgers": [json.loads(one) for one in asked.hosting.owners.latest_ledgers(asked.tenant.name)]}


_ONE = "/snapshots/{snapshot}"
_SAVE = {"save": Field("truth", "keep it in the store, where it outlives the server", default=False)}
_FORK = {"n": Field("whole", "how many, all or none", is_needed=True, least=1, most=_FORKS_MAX), **LATE}
_WARM = {"spec": SPEC, "n": Field("whole", "to keep ready; 0 ends that", is_needed=True, least=0, most=4096), "limits": LATE["limits"]}

OPERATIONS = (
    Operation(
        "POST",
        "/leases/{lease}/snapshots",
        "take_snapshot",
        "Freeze the files as they are now",
        take,
        body=_SAVE,
        status=201,
        errors=(429,),
    ),
    Operation("GET", "/snapshots", "list_snapshots", "The ids of your snapshots", list_all),
    Operation("GET", _ONE, "get_snapshot", "One snapshot", look),
    Operation("DELETE", _ONE, "drop_snapshot", "Let go of it, in the store too", drop, status=204),
    Operation("POST", f"{_ONE}/save", "save_snapshot", "Put it into the store", save, body={}),
    Operation("POST", f"{_ONE}/forks", "fork_snapshot", "Lease several sandboxes that begin with its files", fork, body=_FORK, status=201),
    Operation("GET", "/pools", "get_pools", "What is ready, leased and on its way", pools),
    Operation("POST", "/pools", "warm_pool", "Keep sandboxes of a spec ready", warm, body=_WARM, errors=(403, 422)),
    Operation("GET", "/ledgers", "list_ledgers", "The latest ledgers of your leases that are over", ledgers),
)
