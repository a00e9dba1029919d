"""Specs, results and entries as JSON."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from untax.core.ledger import as_dict
from untax.core.result import CommandResult
from untax.core.spec import EnvSpec, Limits, Repo
from untax.leases import DEFAULT_TTL_S
from untax.service.native.fields import Field
from untax.tenancy import Tenancy

if TYPE_CHECKING:
    from untax.box import Box
    from untax.channel.replies import Entry
    from untax.service.hosting import Holding
    from untax.snapshot import Snapshot

LIMITS = Field(
    "object",
    "what one sandbox may use",
    fields={
        "cpus": Field("number", "processors", default=1.0),
        "memory_mib": Field("whole", "memory", default=1024),
        "disk_mib": Field("whole", "disk", default=4096),
        "pids": Field("whole", "processes", default=512),
    },
)
REPO = Field(
    "object",
    "a repository at one commit",
    is_nullable=True,
    fields={
        "url": Field("text", "where it is", is_needed=True, most=4096),
        "commit": Field("text", "which commit", is_needed=True, most=256),
        "depth": Field("whole", "how many commits of history", is_nullable=True, least=1),
    },
)
SPEC = Field(
    "object",
    "what a rollout needs in place",
    fields={
        "image": Field("text", "the image; `host` is the server's own software", default="host", most=4096),
        "repo": REPO,
        "setup": Field("texts", "commands that put dependencies in place, once for all who ask"),
        "env": Field("variables", "environment variables"),
        "workdir": Field("text", "an absolute path inside", is_nullable=True, most=4096),
        "user": Field("text", "a name or a number", is_nullable=True, most=256),
        "limits": LIMITS,
        "network": Field("policy", "what programs inside may reach"),
        "isolation": Field("text", "the weakest boundary accepted", choices=("none", "namespace", "container", "gvisor", "vm")),
    },
)
LATE: Mapping[str, Field] = {
    "env": Field("variables", "over the spec's"),
    "user": Field("text", "over the spec's", is_nullable=True, most=256),
    "files": Field("files", "written before the lease is there"),
    "limits": LIMITS,
    "network": Field("policy", "over the spec's"),
    "wait_s": Field("number", "until the sandbox must be there", is_nullable=True),
    "ttl_s": Field("number", "until it ends by itself", default=DEFAULT_TTL_S),
}


def spec_of(given: Mapping[str, Any] | None, isolation: str) -> EnvSpec:
    """`UsageError` for what no spec can be."""
    given = given or {}
    repo, limits = given.get("repo"), given.get("limits")
    return EnvSpec(
        image=given.get("image") or "host",
        repo=Repo(**repo) if repo else None,
        setup=given.get("setup") or (),
        env=given.get("env") or {},
        workdir=given.get("workdir"),
        user=given.get("user"),
        limits=Limits(**limits) if limits else Limits(),
        network=given.get("network") or "none",
        isolation=given.get("isolation") or isolation,
    )


def bindings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    limits = given.get("limits")
    return {
        "env": given.get("env"),
        "user": given.get("user"),
        "files": given.get("files"),
        "limits": Limits(**limits) if limits else None,
        "network": given.get("network"),
        "wait_s": given.get("wait_s"),
    }


def spec_data(spec: EnvSpec) -> dict[str, Any]:
    return {
        "image": spec.image,
        "repo": None if spec.repo is None else dataclasses.asdict(spec.repo),
        "setup": list(spec.setup),
        "env": dict(spec.env),
        "workdir": spec.workdir,
        "user": spec.user,
        "limits": dataclasses.asdict(spec.limits),
        "network": spec.network if isinstance(spec.network, str) else list(spec.network),
        "isolation": spec.isolation,
    }


def holding_data(holding: Holding) -> dict[str, Any]:
    box = holding.box
    return {
        "lease": holding.id,
        "sandbox": box.id,
        "state": "lost" if box._over is not None else "live",
        "reason": box._over,
        "spec": spec_data(box.spec),
        "began": holding.began,
        "ends": holding.ends,
        **_where(box),
        "hit": None if box.ledger.hit is None else box.ledger.hit.kind,
    }


def _where(box: Box) -> dict[str, Any]:
    """What commands find there."""
    if isinstance(box, Tenancy) and box.is_live:
        facts = box.facts
        return {"workdir": facts.workdir, "home": facts.home, "user": facts.user, "path": facts.path}
    return {"workdir": box.spec.workdir or box.image.workdir, "home": None, "user": box.spec.user, "path": None}


def bytes_data(name: str, value: bytes) -> dict[str, Any]:
    """As text; beside it as base64 where the text does not say it all."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {name: value.decode("utf-8", "replace"), f"{name}_base64": base64.b64encode(value).decode()}


def result_data(result: CommandResult) -> dict[str, Any]:
    return {
        "exit_code": result.exit_code,
        "outcome": result.outcome,
        "limit_kind": result.limit_kind,
        **bytes_data("stdout", result.stdout),
        **bytes_data("stderr", result.stderr),
        "truncated": result.truncated,
        "dropped_stdout": result.dropped_stdout,
        "dropped_stderr": result.dropped_stderr,
        "elapsed_s": result.elapsed_s,
        "round_trip_s": result.round_trip_s,
        "user_s": result.user_s,
        "system_s": result.system_s,
        "peak_memory_kib": result.peak_memory_kib,
        "oom_kills": result.oom_kills,
    }


def text_of(name: str) -> str:
    """A name from inside that may not be UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def entry_data(entry: Entry) -> dict[str, Any]:
    return {
        "name": text_of(entry.name),
        "type": entry.type,
        "mode": entry.mode,
        "uid": entry.uid,
        "gid": entry.gid,
        "size": entry.size,
        "mtime_ns": str(entry.mtime_ns),
        "target": None if entry.target is None else text_of(entry.target),
    }


def snapshot_data(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "snapshot": snapshot.id,
        "spec": spec_data(snapshot.spec),
        "how": snapshot.how,
        "elapsed_s": snapshot.elapsed_s,
        "is_saved": snapshot.is_saved,
    }


def ledger_data(holding: Holding) -> dict[str, Any]:
    return as_dict(holding.box.ledger)
