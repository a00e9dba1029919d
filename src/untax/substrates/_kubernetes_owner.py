"""What an engine has in a cluster besides its pods, and the sweep of what dead engines left.

An engine says that it lives by renewing a Lease; the cell lies in a ConfigMap; a NetworkPolicy forbids its pods the network. All
carry the engine's name as a label. The pods hang on the Lease, so that the cluster's own collector takes them with it.
"""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from untax.core.errors import BackendError, SubstrateUnavailable, UsageError
from untax.substrates._kubernetes_api import Api, ApiError, path_of
from untax.substrates._kubernetes_pod import MANAGED_BY, OWNER_LABEL

log = logging.getLogger("untax.kubernetes")

_RENEW_S = 20.0
_LEASE_S = 60
_DEAD_AFTER_S = 180.0  # three leases: an engine may have been suspended, or cut off from the server
_CONFIG_MAP_MAX = 1 << 20

Kind = tuple[str, ...]
PODS: Kind = ("api", "v1", "pods")
CONFIG_MAPS: Kind = ("api", "v1", "configmaps")
LEASES: Kind = ("apis", "coordination.k8s.io", "v1", "leases")
POLICIES: Kind = ("apis", "networking.k8s.io", "v1", "networkpolicies")


def cell_too_large_reason(cell: Path) -> str | None:
    size = cell.stat().st_size
    return (
        None
        if size < _CONFIG_MAP_MAX
        else f"the cell has {size} bytes, and a ConfigMap holds {_CONFIG_MAP_MAX}; build it with -s and without sanitizers"
    )


def explained(exc: ApiError, what: str) -> Exception:
    """A refusal as one of ours, with what to do about it."""
    if exc.status == 403 and "exceeded quota" in exc.message:
        return SubstrateUnavailable("", f"{what}: {exc}; ask for less, end other pods, or have the quota raised")
    if exc.status == 403 and "PodSecurity" in exc.message:
        return SubstrateUnavailable(
            "",
            f"{what}: {exc}; the namespace's Pod Security level forbids it: leave out user='root' and the template's additions, or use another namespace",
        )
    if exc.status in (401, 403):
        return SubstrateUnavailable("", f"{what}: {exc}; give this user the role in docs/kubernetes.md")
    if exc.status == 404:
        return SubstrateUnavailable("", f"{what}: {exc}; name a namespace that exists with namespace=…")
    if exc.status in (400, 422):
        return UsageError(f"{what}: {exc}; check template=… and the other options")
    return BackendError("", f"{what}: {exc}")


class Estate:
    """What belongs to one owner in one namespace."""

    def __init__(self, api: Api, namespace: str, owner: str) -> None:
        self._api = api
        self._namespace = namespace
        self.owner = owner
        self.name = f"untax-{owner}"
        self.reference: dict[str, Any] | None = None
        self.has_policy = False
        self._renewing: asyncio.Task[None] | None = None
        self._skew = 0.0  # leases are dated by the API server's clock, which all engines share

    def _path(self, kind: Kind, *more: str, query: Mapping[str, Any] | None = None) -> str:
        return path_of(*kind[:-1], "namespaces", self._namespace, kind[-1], *more, query=query)

    def _metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": self.name, "labels": {**MANAGED_BY, OWNER_LABEL: self.owner}}
        if self.reference is not None:
            metadata["ownerReferences"] = [self.reference]
        return metadata

    async def open(self, cell: Path) -> None:
        """Say that we live, then bring the cell and the policy. What fails is undone."""
        try:
            lease = await self._make(
                LEASES, {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": self._metadata(), "spec": self._renewal()}
            )
            self._skew = _seconds(lease["metadata"].get("creationTimestamp")) - time.time()
            self.reference = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "name": self.name, "uid": lease["metadata"]["uid"]}
            data = base64.b64encode(await asyncio.to_thread(cell.read_bytes)).decode()
            await self._make(
                CONFIG_MAPS,
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self._metadata(), "immutable": True, "binaryData": {"cell": data}},
            )
            await self._forbid_network()
        except BaseException:
            await self.aclose()
            raise
        self._renewing = asyncio.ensure_future(self._renew())

    async def _make(self, kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return await self._api.request("POST", self._path(kind), body)
        except ApiError as exc:
            raise explained(exc, f"{kind[-1]} in namespace {self._namespace!r}") from exc

    async def _forbid_network(self) -> None:
        policy = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": self._metadata(),
            "spec": {"podSelector": {"matchLabels": {OWNER_LABEL: self.owner}}, "policyTypes": ["Ingress", "Egress"]},
        }
        try:
            await self._api.request("POST", self._path(POLICIES), policy)
            self.has_policy = True
        except ApiError as exc:
            log.info("no NetworkPolicy: %s", exc)

    def _renewal(self) -> dict[str, Any]:
        now = dt.datetime.fromtimestamp(time.time() + self._skew, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {"holderIdentity": self.owner, "leaseDurationSeconds": _LEASE_S, "renewTime": now}

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                await self._api.request("PATCH", self._path(LEASES, self.name), {"spec": self._renewal()}, patch=True)
            except (ApiError, BackendError) as exc:
                log.warning("the engine's lease %s could not be renewed: %s", self.name, exc)

    async def aclose(self) -> None:
        """Remove all of it, pods that nobody knows of included. Safe to call twice."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        await self.remove(self.owner)

    # ---- the dead ----

    async def remove(self, owner: str) -> None:
        """Everything of an owner; its lease last, so that a removal that is cut off is taken up again."""
        mine = {"labelSelector": f"{OWNER_LABEL}={owner}"}
        try:
            pods = await self._api.request("GET", self._path(PODS, query=mine))
        except ApiError as exc:
            pods = {}
            log.warning("pods of %s cannot be listed: %s", owner, exc)
        for pod in pods.get("items") or ():
            await self._drop(PODS, pod["metadata"]["name"])
        for kind in (POLICIES, CONFIG_MAPS, LEASES):
            await self._drop(kind, f"untax-{owner}")

    async def _drop(self, kind: Kind, name: str) -> None:
        try:
            await self._api.request(
                "DELETE", self._path(kind, name), {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
            )
        except ApiError as exc:
            if exc.status != 404:
                log.warning("%s %s cannot be removed: %s", kind[-1], name, exc)

    async def sweep(self) -> list[str]:
        """Remove what engines left that have stopped renewing their lease, or have none. Gives their names."""
        query = {"labelSelector": ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())}
        leases = (await self._api.request("GET", self._path(LEASES, query=query))).get("items") or []
        pods = (await self._api.request("GET", self._path(PODS, query=query))).get("items") or []
        alive = {_owner_of(lease) for lease in leases if not _is_over(lease, time.time() + self._skew)} | {self.owner}
        dead = {_owner_of(thing) for thing in [*leases, *pods]} - alive - {""}
        for owner in sorted(dead):
            log.info("removing what the engine %s left", owner)
            await self.remove(owner)
        return sorted(dead)


def _owner_of(thing: Mapping[str, Any]) -> str:
    return str(((thing.get("metadata") or {}).get("labels") or {}).get(OWNER_LABEL, ""))


def _is_over(lease: Mapping[str, Any], now: float) -> bool:
    return now - _seconds((lease.get("spec") or {}).get("renewTime")) > _DEAD_AFTER_S


def _seconds(timestamp: object) -> float:
    """Since the epoch; 0 for what is no time."""
    try:
        return dt.datetime.fromisoformat(str(timestamp)).timestamp()
    except ValueError:
        return 0.0


# ---- engines of this machine, whose death the kernel tells at once ----

_NOTE = "cluster.json"


def write_note(holding: Path, server: str, namespace: str, owner: str) -> None:
    (holding / _NOTE).write_text(json.dumps({"server": server, "namespace": namespace, "owner": owner}))


def read_note(holding: Path, server: str, namespace: str) -> tuple[bool, str | None]:
    """Whether a dead engine's holding may go, and whose estate goes with it: only that of the cluster we speak to."""
    try:
        note = json.loads((holding / _NOTE).read_text())
        same = note["server"] == server and note["namespace"] == namespace
        return same, str(note["owner"]) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return True, None
