"""Which nodes of a fleet were drained, kept where it outlives whoever keeps the fleet: in the store of Ray's head. All of it blocks."""

from __future__ import annotations

from ray.experimental import internal_kv

_SPACE = b"untax"


def note(fleet: str, instance: str, node_id: str) -> None:
    internal_kv._internal_kv_put(_prefix(fleet, instance) + node_id.encode(), b"1", namespace=_SPACE)


def noted(fleet: str, instance: str) -> set[str]:
    """Ids of nodes. What earlier fleets of this name noted is of use to nobody, and goes."""
    found: set[str] = set()
    ours = _prefix(fleet, instance)
    for key in internal_kv._internal_kv_list(_prefix(fleet), namespace=_SPACE):
        if key.startswith(ours):
            found.add(key.removeprefix(ours).decode())
        else:
            internal_kv._internal_kv_del(key, namespace=_SPACE)
    return found


def forget(fleet: str, instance: str) -> None:
    internal_kv._internal_kv_del(_prefix(fleet, instance), del_by_prefix=True, namespace=_SPACE)


def _prefix(*parts: str) -> bytes:
    return "".join(f"{part}:" for part in ("drained", *parts)).encode()
