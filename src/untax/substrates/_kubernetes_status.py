"""What a pod's status says, in our words: is it up, will it ever be, is it gone, and what took how long. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from untax.substrates._kubernetes_pod import CONTAINER

State = Literal["waiting", "ready", "failed", "lost"]

# The kubelet tries these again for ever; nothing that waits will mend them.
_HOPELESS = {
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImagePullBackOff",
    "ImageInspectError",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
_PULL = {"ErrImagePull", "ErrImageNeverPull", "InvalidImageName", "ImagePullBackOff", "ImageInspectError"}
_FINAL_PULL = ("not found", "denied", "unauthorized", "no match for platform", "not present", "manifest unknown")


@dataclass(frozen=True, slots=True)
class Condition:
    """`state` and, unless it is `ready`, why."""

    state: State
    reason: str = ""


def condition(pod: Mapping[str, Any]) -> Condition:
    """What a pod amounts to. `lost` is one that was there and is ending by somebody's will, `failed` one that cannot come up."""
    status = pod.get("status") or {}
    disruption = _disruption(status)
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return Condition("lost", disruption or "the pod was deleted")
    phase = status.get("phase")
    own = _container(status, "containerStatuses", CONTAINER)
    if phase in ("Failed", "Succeeded"):
        state: State = "lost" if own.get("state", {}).get("terminated", {}).get("startedAt") else "failed"
        return Condition(state, disruption or _ended(status, own))
    if "running" in own.get("state", {}):
        return Condition("ready")
    if "terminated" in own.get("state", {}):  # another container of a template may still run
        return Condition("lost", _ended(status, own))
    for list_name in ("initContainerStatuses", "containerStatuses"):
        for one in status.get(list_name) or ():
            found = _waiting(one)
            if found is not None:
                return found
    for one in status.get("containerStatuses") or ():
        if ((one.get("state") or {}).get("terminated") or {}).get("exitCode"):
            return Condition("failed", _ended({}, one))
    return Condition("waiting", _unscheduled(status))


def _waiting(container: Mapping[str, Any]) -> Condition | None:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
    is_final = any(word in message for word in _FINAL_PULL)
    if reason in _HOPELESS or (reason == "ErrImagePull" and is_final):
        said = f"{reason}: {message}" if message else reason
        if reason in _PULL:
            return Condition(
                "failed", f"image {container.get('image')!r}: {said}; check its name, or give the nodes access to its registry"
            )
        return Condition("failed", said)
    return None


def _unscheduled(status: Mapping[str, Any]) -> str:
    """The scheduler's own words."""
    for one in status.get("conditions") or ():
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return f"{one.get('reason', '')}: {one.get('message', '')}"
    return ""


def _disruption(status: Mapping[str, Any]) -> str:
    """Eviction, preemption, a node that was drained or lost: who ended the pod and why."""
    for one in status.get("conditions") or ():
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True":
            return f"{one.get('reason', 'DisruptionTarget')}: {one.get('message', '')}".rstrip(": ")
    if status.get("reason") in ("Evicted", "Preempting", "NodeLost", "Shutdown", "Terminated", "NodeShutdown"):
        return f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
    return ""


def _ended(status: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    if status.get("reason"):
        said = f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
        return f"{said} (the pod's lifetime is the option lifetime_s)" if status["reason"] == "DeadlineExceeded" else said
    for one in [*(status.get("initContainerStatuses") or ()), own]:
        ended = (one.get("state") or {}).get("terminated") or {}
        code = ended.get("exitCode", 0)
        if ended and (code or one is own):
            message = str(ended.get("message", "")).strip()
            what = f"container {one.get('name')!r} ended: {ended.get('reason', '')} (exit code {code})"
            if "exec format error" in message:
                return f"{what}: {message}; the image or the cell is for another processor than the node's"
            return f"{what}: {message}" if message else what
    return f"the pod has {str(status.get('phase', 'ended')).lower()}"


def _container(status: Mapping[str, Any], list_name: str, name: str) -> Mapping[str, Any]:
    return next((one for one in status.get(list_name) or () if one.get("name") == name), {})


def has_node(pod: Mapping[str, Any]) -> bool:
    return bool((pod.get("spec") or {}).get("nodeName"))


# What events call the steps that a timeline has, besides asked, accepted and ready.
_EVENTS = {"Scheduled": "scheduled", "Pulling": "pulling", "Pulled": "pulled", "Created": "created", "Started": "started"}


class Timeline:
    """When each step of a pod's way was first seen, on the measuring clock.

    The pod's own timestamps have whole seconds, which is longer than most steps take; what is kept is when the API server told us.
    """

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.warnings: list[str] = []

    def note(self, step: str, at_ns: int) -> None:
        self.seen.setdefault(step, at_ns)

    def event(self, event: Mapping[str, Any], at_ns: int) -> None:
        """A Kubernetes event about the pod. The last of a kind counts: a first container may come before the sandbox's own."""
        reason = str(event.get("reason", ""))
        field_path = str((event.get("involvedObject") or {}).get("fieldPath", ""))
        step = _EVENTS.get(reason)
        if event.get("type") == "Warning":
            self.warnings.append(f"{reason}: {event.get('message', '')}")
        elif step is not None and ("{" not in field_path or f"{{{CONTAINER}}}" in field_path):
            self.note(step, at_ns)

    def parts_ns(self) -> dict[str, int]:
        """How long each step took that was seen: `api` the request, `schedule` finding a node, `image` pulling (0 where the node had it), `start` what the node
        did besides, `report` from the node's start until we knew.
        """
        seen = self.seen
        out: dict[str, int] = {}

        def span(name: str, begin: str, end: str) -> None:
            if begin in seen and end in seen:
                out[name] = max(0, seen[end] - seen[begin])

        span("api", "asked", "accepted")
        span("schedule", "accepted", "scheduled")
        span("image", "pulling", "pulled")
        if "pulled" in seen and "pulling" not in seen:
            out["image"] = 0  # the node had it, which it says with the same word
        up = "started" if "started" in seen else "ready"
        span("start", "scheduled", up)
        if "start" in out:
            out["start"] = max(0, out["start"] - out.get("image", 0))
        if up == "started":
            span("report", "started", "ready")
        return out

    @property
    def control_plane_ns(self) -> int:
        """The API server's and the scheduler's share of create and ready; the rest is the node's own work."""
        parts = self.parts_ns()
        return sum(parts.get(name, 0) for name in ("api", "schedule", "report"))
