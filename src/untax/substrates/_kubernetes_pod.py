"""The pod of a sandbox, as data: what we ask of a cluster, and where the user's own template goes over it. Pure.

The defaults are Pod Security's "restricted" and more (THREATS 6.5). What makes a pod ours, its name, labels and what runs in it, a
template cannot change.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from untax.core.errors import UsageError
from untax.core.spec import EnvSpec

OWNER_LABEL = "untax/owner"
MANAGED_BY = {"app.kubernetes.io/managed-by": "untax"}
CONTAINER = "cell"
HELD_NAME = "untax"
CELL = "/untax/bin/cell"
HOME = "/untax/home"
WORKDIR = "/workspace"
DEFAULT_UID = 1000
NODE_LOST_S = 60
AGENT_PATIENCE_S = 600  # a pod whose engine is gone ends by itself, sweep or not

# Package installs as root need these, inside, and nothing else (THREATS 6.1). Only for those who ask for root.
_ROOT_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID", "KILL"]
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
_SCHEMES = ("dir", "tar", "oci", "docker-archive", "docker", "podman", "debian")
_MIB = 1 << 20


@dataclass(frozen=True)
class Wishes:
    """What an engine's options say about every pod it makes."""

    namespace: str
    node_selector: Mapping[str, str] = field(default_factory=dict)
    runtime_class: str | None = None
    service_account: str | None = None
    pull_policy: str = "IfNotPresent"
    request_cpus: float = 0.05
    request_memory_mib: int = 64
    lifetime_s: int = 86_400
    architecture: str = "amd64"
    cut: bool = True
    """Whether a container of our own takes the pod's network interfaces down before anything can be run."""
    template: Mapping[str, Any] = field(default_factory=dict)


def image_of(name: str) -> str:
    """The reference that a node pulls; `UsageError` for what only this machine has."""
    image = name.removeprefix("registry:")
    if image == "host":
        raise UsageError(
            "image 'host': a node of the cluster does not have this machine's files; name an image of a registry, for example EnvSpec(image='registry:host/name:tag')"
        )
    if image == name and image.partition(":")[0] in _SCHEMES and ":" in image:
        raise UsageError(
            f"image {name[:80]!r} is made on this machine, and nodes pull from a registry: push it there and write 'registry:host/name:tag'"
        )
    if not _REFERENCE.fullmatch(image) or "://" in image:
        raise UsageError(f"image {name[:80]!r} is not the name of an image in a registry: [host/]name[:tag] or name@sha256:…")
    return image


def uid_of(spec: EnvSpec) -> int:
    """As whom the pod runs. Names are in the image, which only the node has, so it is numbers, `user` and `root`."""
    user = spec.user
    if user in (None, "user"):
        return DEFAULT_UID
    if user == "root":
        return 0
    if user is not None and user.isdigit() and int(user) < 1 << 31:
        return int(user)
    raise UsageError(f"user {user!r}: a pod's user is given as a number (runAsUser), or as 'user' ({DEFAULT_UID}) or 'root'")


def manifest(
    spec: EnvSpec, wishes: Wishes, *, name: str, owner: str, config_map: str, owner_reference: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The pod that `create` posts."""
    image, uid = image_of(spec.image), uid_of(spec)
    pod = merged(_defaults(spec, wishes, image, uid, config_map), wishes.template)
    metadata = pod.setdefault("metadata", {})
    metadata["name"] = name
    metadata["namespace"] = wishes.namespace
    metadata.pop("generateName", None)
    metadata["labels"] = {**(metadata.get("labels") or {}), **MANAGED_BY, OWNER_LABEL: owner}
    if owner_reference is not None:
        metadata["ownerReferences"] = [dict(owner_reference)]
    inside = pod["spec"]
    inside["restartPolicy"] = "Never"  # what comes back after its end would be another sandbox
    cell = next(one for one in inside["containers"] if one["name"] == CONTAINER)
    cell["image"] = image
    cell["command"] = [CELL, "agent", "--held", HELD_NAME, "--patience", str(AGENT_PATIENCE_S), *(["--cut"] if wishes.cut else [])]
    cell.pop("args", None)
    return pod


def _defaults(spec: EnvSpec, wishes: Wishes, image: str, uid: int, config_map: str) -> dict[str, Any]:
    limits = spec.limits
    memory = limits.memory_mib * _MIB
    quantity = {"cpu": f"{max(1, round(limits.cpus * 1000))}m", "memory": str(memory), "ephemeral-storage": f"{limits.disk_mib}Mi"}
    requests = {
        "cpu": f"{max(1, round(min(wishes.request_cpus, limits.cpus) * 1000))}m",
        "memory": str(min(wishes.request_memory_mib, limits.memory_mib) * _MIB),
        "ephemeral-storage": "0",
    }
    bare = {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": {"drop": ["ALL"]}}
    own: dict[str, Any] = copy.deepcopy(bare)
    if uid == 0:
        own["capabilities"]["add"] = _ROOT_CAPABILITIES
    mounted = {"name": "untax-cell", "mountPath": "/untax/bin", "readOnly": True}
    inside: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "activeDeadlineSeconds": wishes.lifetime_s,
        # Names are resolved by the engine, at the other end of the channel; here a look-up fails at once.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"], "options": [{"name": "timeout", "value": "1"}, {"name": "attempts", "value": "1"}]},
        "nodeSelector": {"kubernetes.io/os": "linux", "kubernetes.io/arch": wishes.architecture, **wishes.node_selector},
        # The default of five minutes is for services that may come back. Not at once, though: a control plane that was away
        # itself takes its nodes for lost when it returns.
        "tolerations": [
            {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_LOST_S}
            for taint in ("not-ready", "unreachable")
        ],
        "securityContext": {
            "runAsNonRoot": uid != 0,
            "runAsUser": uid,
            "runAsGroup": uid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": image,
                "imagePullPolicy": wishes.pull_policy,
                "securityContext": own,
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "resources": {"limits": quantity, "requests": requests},
                "volumeMounts": [
                    mounted,
                    {"name": "untax-home", "mountPath": HOME},
                    {"name": "untax-workspace", "mountPath": WORKDIR},
                    {"name": "untax-tmp", "mountPath": "/tmp"},
                ],
            }
        ],
        "volumes": [
            {"name": "untax-cell", "configMap": {"name": config_map, "defaultMode": 0o555}},
            {"name": "untax-home", "emptyDir": {"sizeLimit": f"{limits.disk_mib}Mi"}},
            {"name": "untax-workspace", "emptyDir": {"sizeLimit": f"{limits.disk_mib}Mi"}},
            {"name": "untax-tmp", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(1, limits.memory_mib // 2)}Mi"}},
        ],
    }
    if wishes.runtime_class is not None:
        inside["runtimeClassName"] = wishes.runtime_class
    if wishes.service_account is not None:
        inside["serviceAccountName"] = wishes.service_account
    if wishes.cut:
        # Beside the cell and not an init container: a kubelet takes up to a second to notice that one has ended. The cell
        # itself waits until the interfaces are down.
        context: dict[str, Any] = {
            **copy.deepcopy(bare),
            "runAsUser": 0,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            "readOnlyRootFilesystem": True,
        }
        context["capabilities"]["add"] = ["NET_ADMIN"]
        few = {"cpu": "100m", "memory": "32Mi", "ephemeral-storage": "1Mi"}
        inside["containers"].insert(
            0,
            {
                "name": "cut",
                "image": image,
                "imagePullPolicy": wishes.pull_policy,
                "command": [CELL, "cut"],
                "securityContext": context,
                "resources": {"limits": few, "requests": {"cpu": "1m", "memory": "1Mi", "ephemeral-storage": "0"}},
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": [mounted],
            },
        )
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": inside}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`: mappings key by key, lists of named things by name, everything else replaced; None takes a key out."""
    out = dict(copy.deepcopy(below))
    for key, value in above.items():
        old = out.get(key)
        if value is None:
            out.pop(key, None)
        elif isinstance(old, dict) and isinstance(value, Mapping):
            out[key] = merged(old, value)
        elif isinstance(old, list) and _is_named(old) and _is_named(value):
            names = {one["name"]: dict(one) for one in old}
            for one in value:
                names[one["name"]] = merged(names.get(one["name"], {}), one)
            out[key] = list(names.values())
        else:
            out[key] = copy.deepcopy(value)
    return out


def _is_named(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, Mapping) and "name" in one for one in value)


def checked_template(template: object) -> Mapping[str, Any]:
    """A partial pod; `UsageError` for anything else, and for what would take the boundary away by a slip of the pen."""
    if template is None:
        return {}
    if not isinstance(template, Mapping) or set(template) - {"apiVersion", "kind", "metadata", "spec"}:
        raise UsageError(
            "template must be a partial Pod: a mapping with 'metadata' and 'spec', for example {'spec': {'priorityClassName': 'low'}}"
        )
    for key in ("metadata", "spec"):
        if not isinstance(template.get(key, {}), Mapping):
            raise UsageError(f"template: {key!r} must be a mapping, not {type(template[key]).__name__}")
    inside = template.get("spec", {})
    for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if inside.get(key):
            raise UsageError(f"template: {key} would join sandboxes with their node or with each other; leave it out")
    for key in ("containers", "initContainers", "volumes"):
        for one in inside.get(key) or ():
            if not isinstance(one, Mapping) or "name" not in one:
                raise UsageError(f"template: each of spec.{key} needs a name; the sandbox's own container is {CONTAINER!r}")
            if (one.get("securityContext") or {}).get("privileged"):
                raise UsageError(f"template: a privileged container ({one['name']!r}) is no sandbox; leave it out")
            if "hostPath" in one:
                raise UsageError(f"template: the volume {one['name']!r} is a directory of the node; use another kind of volume")
    return copy.deepcopy(dict(template))
