"""Pods of any Kubernetes cluster: the cell mounted into the user's image, one held exec stream as the channel.

Works with a kubeconfig or in a pod. The cell comes by a ConfigMap, so an image needs nothing of its own: no shell, no tar. Options:
docs/kubernetes.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import platform
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from untax._remove import remove_tree
from untax.core.errors import BackendError, SubstrateUnavailable, UntaxError, UsageError
from untax.core.span import now_ns
from untax.core.spec import ISOLATION_LEVELS, EnvSpec, require_duration, require_text
from untax.core.substrate import Typical, Unenforced
from untax.substrates._host import Holding, cell_missing_reason, cell_path, chosen_state_dir, ensure_private_dir, sweep
from untax.substrates._kubernetes_access import Access, find_access, missing_reason
from untax.substrates._kubernetes_api import REQUEST_S, Api, ApiError, path_of
from untax.substrates._kubernetes_owner import Estate, cell_too_large_reason, explained, read_note, write_note
from untax.substrates._kubernetes_pod import OWNER_LABEL, Wishes, checked_template, image_of, manifest
from untax.substrates._kubernetes_sandbox import REOPEN_S, Patience, PodSandbox
from untax.substrates._kubernetes_watch import Watch

log = logging.getLogger("untax.kubernetes")

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_REACH_S = 3.0
_PROBE_IMAGE = "untax.invalid/probe:1"  # for a dry run: never pulled
_HANDLERS = {"gvisor": ("runsc", "gvisor"), "vm": ("kata", "firecracker", "qemu", "cloud-hypervisor")}
_VERBS = (
    ("create", "pods", ""),
    ("watch", "pods", ""),
    ("delete", "pods", ""),
    ("create", "pods", "exec"),
    ("create", "configmaps", ""),
    ("create", "leases", ""),
)


def make(
    state_dir: str | None = None,
    kubeconfig: str | None = None,
    context: str | None = None,
    namespace: str | None = None,
    node_selector: Mapping[str, str] | None = None,
    runtime_class: str | None = None,
    isolation: str = "container",
    service_account: str | None = None,
    pull_policy: str = "IfNotPresent",
    request_cpus: float = 0.05,
    request_memory_mib: int = 64,
    lifetime_s: float = 86_400,
    ready_timeout_s: float = 120.0,
    request_timeout_s: float = REQUEST_S,
    reopen_s: float = REOPEN_S,
    cut_network: bool | None = None,
    node_pids_limit: int | None = None,
    template: Mapping[str, Any] | None = None,
) -> KubernetesSubstrate:
    if isolation not in ISOLATION_LEVELS[2:]:
        raise UsageError(f"isolation must be one of {', '.join(ISOLATION_LEVELS[2:])}, not {isolation!r}")
    if isolation != "container" and runtime_class is None:
        raise UsageError(f"isolation={isolation!r} needs the runtime class that gives it: runtime_class=…")
    if pull_policy not in ("Always", "IfNotPresent", "Never"):
        raise UsageError(f"pull_policy must be Always, IfNotPresent or Never, not {pull_policy!r}")
    for name, text in (("kubeconfig", kubeconfig), ("context", context), ("namespace", namespace), ("runtime_class", runtime_class)):
        if text is not None:
            require_text(name, text)
    wishes = Wishes(
        namespace="",
        node_selector=dict(node_selector or {}),
        runtime_class=runtime_class,
        service_account=service_account,
        pull_policy=pull_policy,
        request_cpus=require_duration("request_cpus", request_cpus),
        request_memory_mib=int(require_duration("request_memory_mib", request_memory_mib)),
        lifetime_s=max(1, int(require_duration("lifetime_s", lifetime_s))),
        architecture=_ARCHITECTURES.get(platform.machine(), platform.machine()),
        # gVisor's own network stack is the runtime's business: it takes no orders from inside a pod.
        cut=cut_network if cut_network is not None else isolation == "container",
        template=checked_template(template),
    )
    return KubernetesSubstrate(
        chosen_state_dir(state_dir),
        (kubeconfig, context, namespace),
        wishes,
        isolation,
        Patience(
            ready_s=require_duration("ready_timeout_s", ready_timeout_s),
            request_s=require_duration("request_timeout_s", request_timeout_s),
            reopen_s=require_duration("reopen_s", reopen_s),
        ),
        must_cut=cut_network is True,
        node_pids_limit=node_pids_limit,
    )


class KubernetesSubstrate:
    name = "kubernetes"
    typical = Typical(start_s=1.0, action_s=0.001)

    def __init__(
        self,
        state_dir: Path,
        where: tuple[str | None, str | None, str | None],
        wishes: Wishes,
        isolation: str,
        patience: Patience,
        *,
        must_cut: bool,
        node_pids_limit: int | None,
    ) -> None:
        self.isolation = isolation
        self._root = state_dir / "kubernetes"
        self._where = where
        self._wishes = wishes
        self._patience = patience
        self._must_cut = must_cut
        self._node_pids_limit = node_pids_limit
        self._holding: Holding | None = None
        self._api: Api | None = None
        self._estate: Estate | None = None
        self._watches: list[Watch] = []
        self._live: dict[str, PodSandbox] = {}

    # ---- whether it can be used ----

    def unavailable_reason(self) -> str | None:
        reason = cell_missing_reason() or missing_reason(self._where[0])
        if reason is not None:
            return reason
        if reason := cell_too_large_reason(Path(cell_path())):
            return reason
        try:
            access = find_access(*self._where)
            host, port = access.proxy or (access.host, access.port)
            socket.create_connection((host, port), timeout=_REACH_S).close()
        except UntaxError as exc:
            return str(exc)
        except OSError as exc:
            return f"no cluster: the API server {access.server} cannot be reached: {exc.strerror or exc}; check the kubeconfig and the way there"
        return None

    def image_trouble(self, image: str) -> str | None:
        try:
            image_of(image)
        except UsageError as exc:
            return str(exc)
        return None

    def evidence(self) -> Sequence[str]:
        """What the API server says about itself and about what we may do there."""
        if missing_reason(self._where[0]) is not None:
            return ()
        try:
            return asyncio.run(self._evidence())
        except (UntaxError, ApiError) as exc:
            return (f"the API server: {exc}",)

    async def _evidence(self) -> list[str]:
        access = find_access(*self._where)
        api = Api(access)
        try:
            version = await api.request("GET", "/version", timeout_s=_REACH_S)
            lines = [f"API server {access.server}: Kubernetes {version.get('gitVersion')}; namespace {access.namespace!r}"]
            denied = [verb for verb in _VERBS if not await _may(api, access.namespace, verb)]
            names = ", ".join(f"{verb} {kind}{'/' + sub if sub else ''}" for verb, kind, sub in denied)
            lines.append(
                f"RBAC: this user may not {names}; give it the role in docs/kubernetes.md"
                if denied
                else "RBAC: all that is needed is allowed"
            )
            with contextlib.suppress(ApiError):
                classes = await api.request("GET", path_of("apis", "node.k8s.io", "v1", "runtimeclasses"))
                found = [f"{one['metadata']['name']} ({one.get('handler')})" for one in classes.get("items") or ()]
                lines.append(f"runtime classes: {', '.join(found) or 'none'}")
            return lines
        finally:
            api.close()

    # ---- its life ----

    async def start(self) -> None:
        if self._holding is not None:
            return
        access = find_access(*self._where)
        self._wishes = replace(self._wishes, namespace=access.namespace)
        ensure_private_dir(self._root.parent)
        self._holding = Holding.take(self._root)
        self._api = api = Api(access, timeout_s=self._patience.request_s)
        owner = _owner_name(self._holding.path)
        self._estate = Estate(api, access.namespace, owner)
        write_note(self._holding.path, access.server, access.namespace, owner)
        await self._check_runtime_class(api)
        await self._estate.open(Path(cell_path()))
        await self._sweep(access)
        await self._decide_cut(api)
        await self._watch(api, access, owner)

    async def _watch(self, api: Api, access: Access, owner: str) -> None:
        pods = Watch(
            api,
            ("api", "v1", "namespaces", access.namespace, "pods"),
            {"labelSelector": f"{OWNER_LABEL}={owner}"},
            self._on_pod,
            self._on_listed,
        )
        events = Watch(
            api, ("api", "v1", "namespaces", access.namespace, "events"), {"fieldSelector": "involvedObject.kind=Pod"}, self._on_event
        )
        try:
            await pods.start()
        except ApiError as exc:
            raise explained(exc, "watching pods") from exc
        self._watches.append(pods)
        try:
            await events.start()
            self._watches.append(events)
        except ApiError as exc:
            log.info("events are not to be had, so image and start times are not told apart: %s", exc)

    async def _check_runtime_class(self, api: Api) -> None:
        """A level may be unavailable; it may not be silently weaker than its name."""
        name = self._wishes.runtime_class
        if name is None:
            return
        try:
            found = await api.request("GET", path_of("apis", "node.k8s.io", "v1", "runtimeclasses", name))
        except ApiError as exc:
            if exc.status == 404:
                raise UsageError(f"there is no runtime class {name!r} in this cluster; `kubectl get runtimeclass` lists them") from exc
            if self.isolation == "container":
                return
            raise SubstrateUnavailable("", f"isolation {self.isolation!r} cannot be shown: {exc}; allow get on runtimeclasses") from exc
        handler = str(found.get("handler", ""))
        wanted = _HANDLERS.get(self.isolation)
        if wanted is not None and not any(word in handler for word in wanted):
            raise UsageError(
                f"runtime class {name!r} has the handler {handler!r}, which is not known to give isolation={self.isolation!r} ({', '.join(wanted)})"
            )

    async def _decide_cut(self, api: Api) -> None:
        """Ask the admission controllers, by a dry run, whether a pod may have a container that takes its network away."""
        if not self._wishes.cut or self._must_cut:
            return
        probe = self._manifest(EnvSpec(image=_PROBE_IMAGE, isolation=self.isolation), "untax-probe")
        try:
            await api.request("POST", path_of("api", "v1", "namespaces", self._wishes.namespace, "pods", query={"dryRun": "All"}), probe)
        except ApiError as exc:
            if exc.status == 403 and "PodSecurity" in exc.message:
                self._wishes = replace(self._wishes, cut=False)

    async def _sweep(self, access: Access) -> None:
        estate = self._estate
        assert estate is not None
        loop = asyncio.get_running_loop()

        def remove(path: Path) -> None:
            may_go, owner = read_note(path, access.server, access.namespace)
            if owner is not None:
                asyncio.run_coroutine_threadsafe(estate.remove(owner), loop).result()
            if may_go:
                remove_tree(path)

        try:
            await asyncio.to_thread(sweep, self._root, remove)
            await estate.sweep()
        except ApiError as exc:
            log.warning("what dead engines left could not be looked for: %s", exc)

    async def aclose(self) -> None:
        holding, self._holding = self._holding, None
        api, self._api = self._api, None
        estate, self._estate = self._estate, None
        watches, self._watches = self._watches, []
        for watch in watches:
            await watch.aclose()
        try:
            if estate is not None:
                await estate.aclose()
        except (BackendError, ApiError) as exc:
            # The note stays with the holding, and whoever starts next on this machine takes it up.
            log.warning("what this engine has in the cluster could not be removed: %s", exc)
        finally:
            if api is not None:
                api.close()
        if holding is not None:
            await asyncio.to_thread(holding.close)

    # ---- what the watches tell ----

    def _on_pod(self, kind: str, pod: Mapping[str, Any]) -> None:
        sandbox = self._live.get(str((pod.get("metadata") or {}).get("name")))
        if sandbox is not None:
            sandbox.see(pod)
            if kind == "DELETED":
                sandbox.gone()

    def _on_listed(self, names: set[str]) -> None:
        for name, sandbox in list(self._live.items()):
            if name not in names and "accepted" in sandbox.timeline.seen:
                sandbox.gone()

    def _on_event(self, kind: str, event: Mapping[str, Any]) -> None:
        sandbox = self._live.get(str((event.get("involvedObject") or {}).get("name")))
        if sandbox is not None and kind == "ADDED":
            sandbox.hear(event)

    # ---- sandboxes ----

    async def create(self, spec: EnvSpec) -> PodSandbox:
        image_of(spec.image)
        api, estate = self._api, self._estate
        if api is None or estate is None:
            raise BackendError("", "the kubernetes substrate is not started, or closed")
        name = f"untax-{secrets.token_hex(8)}"
        pod = self._manifest(spec, name)
        sandbox = PodSandbox(
            api,
            self._wishes.namespace,
            name,
            architecture=self._wishes.architecture,
            patience=self._patience,
            unenforced=self._unenforced(spec),
            forget=self._forget,
        )
        self._live[name] = sandbox  # before the pod is there, so that nothing the watch says about it is missed
        try:
            sandbox.timeline.note("asked", now_ns())
            sandbox.accept(await self._post(api, name, pod))
        except BaseException:
            self._forget(name)
            raise
        return sandbox

    async def _post(self, api: Api, name: str, pod: Mapping[str, Any]) -> Mapping[str, Any]:
        pods = ("api", "v1", "namespaces", self._wishes.namespace, "pods")
        try:
            return await api.request("POST", path_of(*pods), pod)
        except ApiError as exc:
            if exc.status == 409 and exc.reason == "AlreadyExists":
                return await api.request("GET", path_of(*pods, name))  # ours: the answer to an earlier attempt was lost
            raise explained(exc, f"pod in namespace {self._wishes.namespace!r}") from exc
        except BackendError:
            with contextlib.suppress(ApiError, BackendError):  # it may be there all the same
                await api.request("DELETE", path_of(*pods, name), {"gracePeriodSeconds": 0}, timeout_s=_REACH_S)
            raise

    def _manifest(self, spec: EnvSpec, name: str) -> dict[str, Any]:
        assert self._estate is not None
        return manifest(
            spec, self._wishes, name=name, owner=self._estate.owner, config_map=self._estate.name, owner_reference=self._estate.reference
        )

    def _unenforced(self, spec: EnvSpec) -> list[Unenforced]:
        out = [
            Unenforced(
                "disk_mib",
                "Kubernetes evicts a pod some seconds after it has used more than its ephemeral storage, and stops no write",
                "watch for SandboxLost with Evicted in it, or use a substrate with disk quotas",
            )
        ]
        if self._node_pids_limit is None or self._node_pids_limit > spec.limits.pids:
            out.append(
                Unenforced(
                    "pids", "a pod has no limit of processes of its own", "set the kubelets' podPidsLimit and say so with node_pids_limit=…"
                )
            )
        if not self._wishes.cut:
            policy = self._estate is not None and self._estate.has_policy
            out.append(
                Unenforced(
                    "network",
                    "a NetworkPolicy forbids it, and whether the cluster's network plugin obeys is not known"
                    if policy
                    else "no NetworkPolicy could be made",
                    "use a plugin that enforces NetworkPolicy, or a namespace that admits a container with NET_ADMIN (cut_network=True)",
                )
            )
        return out

    def _forget(self, name: str) -> None:
        self._live.pop(name, None)


def _owner_name(holding: Path) -> str:
    """Unique among all machines that use the cluster, and a label's value."""
    host = hashlib.sha256(f"{socket.gethostname()}:{os.geteuid()}:{holding.parent}".encode()).hexdigest()[:8]
    return f"{host}-{holding.name.removeprefix('engine-')}"


async def _may(api: Api, namespace: str, verb: tuple[str, str, str]) -> bool:
    action, resource, sub = verb
    group = {"leases": "coordination.k8s.io"}.get(resource, "")
    attributes = {"namespace": namespace, "verb": action, "resource": resource, "subresource": sub, "group": group}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": attributes}}
    answer = await api.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review, timeout_s=_REACH_S)
    return bool((answer.get("status") or {}).get("allowed"))
