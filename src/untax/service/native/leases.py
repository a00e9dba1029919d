"""Leases: made, looked at, moved in time, changed and given back."""

from __future__ import annotations

from typing import Any

from untax.box import Box
from untax.leases import Lease, usual_isolation
from untax.service.hosting import TTL_MAX_S
from untax.service.native.endpoint import Asked, Operation
from untax.service.native.fields import Field
from untax.service.native.idempotency import Answered
from untax.service.native.values import LATE, SPEC, bindings_of, holding_data, ledger_data, spec_of, text_of


async def create(asked: Asked) -> dict[str, Any]:
    hosting, body = asked.hosting, asked.body
    spec = spec_of(body["spec"], usual_isolation(hosting.engine.offer))
    hosting.admit(asked.tenant, spec)
    late = bindings_of(body)
    hosting.check_limits(late["limits"])
    hosting.check_network(late["network"])
    snapshot_id = body["snapshot"]
    if snapshot_id is not None:
        snapshot = await hosting.kept.find(asked.tenant, snapshot_id)
        if late["network"] is None:
            hosting.check_network(snapshot.spec.network)
        take = lambda: _awaited(hosting.engine.restore(snapshot, ttl_s=TTL_MAX_S, **late))  # noqa: E731
    else:
        take = lambda: hosting.engine.acquire(spec, ttl_s=TTL_MAX_S, **late)  # noqa: E731
    return holding_data(await hosting.hold(asked.tenant, take, dialect="lease", ttl_s=body["ttl_s"]))


async def list_all(asked: Asked) -> dict[str, Any]:
    return {"leases": [holding_data(one) for one in asked.hosting.holdings(asked.tenant, "lease")]}


async def look(asked: Asked) -> dict[str, Any]:
    return holding_data(asked.holding)


async def extend(asked: Asked) -> dict[str, Any]:
    holding = asked.holding
    asked.hosting.extend(holding, asked.hosting.checked_ttl(asked.body["ttl_s"]))
    return holding_data(holding)


async def release(asked: Asked) -> dict[str, Any]:
    holding = asked.holding
    await asked.hosting.release(holding)
    return ledger_data(holding)


async def reset(asked: Asked) -> dict[str, Any]:
    holding = asked.holding
    await holding.box.reset()
    return holding_data(holding)


async def pause(asked: Asked) -> Answered:
    await asked.holding.box.pause()
    return Answered(204)


async def resume(asked: Asked) -> Answered:
    await asked.holding.box.resume()
    return Answered(204)


async def diff(asked: Asked) -> dict[str, Any]:
    return {"changes": [{"path": text_of(one.path), "kind": one.kind} for one in await asked.holding.box.diff()]}


async def ledger(asked: Asked) -> dict[str, Any]:
    return ledger_data(asked.holding)


async def grader(asked: Asked) -> dict[str, Any]:
    hosting, box = asked.hosting, asked.holding.box
    lease = hosting.engine.grader(box, asked.body["take"], wait_s=asked.body["wait_s"], ttl_s=TTL_MAX_S)
    return holding_data(await hosting.hold(asked.tenant, lambda: _awaited(lease), dialect="lease", ttl_s=asked.body["ttl_s"]))


async def _awaited(lease: Lease[Box]) -> Box:
    return await lease


_NEW = {"spec": SPEC, "snapshot": Field("text", "begin from this one, with its spec", is_nullable=True, most=256), **LATE}
_TTL = {"ttl_s": Field("number", "from now", is_needed=True)}
_ONE = "/leases/{lease}"
_GRADER = {
    "take": Field("texts", "patterns of the files that are carried over", is_needed=True),
    "wait_s": LATE["wait_s"],
    "ttl_s": LATE["ttl_s"],
}

OPERATIONS = (
    Operation("POST", "/leases", "create_lease", "Lease a sandbox", create, body=_NEW, status=201, errors=(403, 404, 422)),
    Operation("GET", "/leases", "list_leases", "Your leases", list_all),
    Operation("GET", _ONE, "get_lease", "One lease", look),
    Operation("DELETE", _ONE, "release_lease", "Give a lease back; its ledger is the answer", release),
    Operation("POST", f"{_ONE}/ttl", "extend_lease", "Move the deadline of a lease", extend, body=_TTL),
    Operation("POST", f"{_ONE}/reset", "reset_lease", "Back to what the lease began with", reset, body={}),
    Operation("POST", f"{_ONE}/pause", "pause_lease", "Stop every process inside", pause, body={}, status=204),
    Operation("POST", f"{_ONE}/resume", "resume_lease", "Let them go on", resume, body={}, status=204),
    Operation(
        "POST",
        f"{_ONE}/grader",
        "create_grader",
        "Lease a fresh sandbox of the same spec with only these files",
        grader,
        body=_GRADER,
        status=201,
    ),
    Operation("GET", f"{_ONE}/diff", "diff_lease", "What differs from what the lease began with", diff),
    Operation("GET", f"{_ONE}/ledger", "get_ledger", "Where the time went so far", ledger),
)
