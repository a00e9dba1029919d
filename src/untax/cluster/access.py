"""How a process gets at Ray: connecting to a cluster that is there, and finding or starting the one who keeps a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from untax.cluster.terms import checked_name, down
from untax.core.errors import BackendError, SubstrateUnavailable, UntaxError, UsageError

if TYPE_CHECKING:
    from untax.cluster.plan import Plan

log = logging.getLogger("untax.cluster")

T = TypeVar("T")

_REACH_S = 5.0
_ASK_S = 60.0
_START = "start one with `ray start --head`, or name another address"


def require_ray() -> Any:
    """The package; `UsageError` where it is not installed."""
    try:
        import cryptography  # noqa: F401
        import ray
        import starlette  # noqa: F401
    except ImportError as exc:
        raise UsageError(f"a fleet needs the package {exc.name}: pip install 'untax[ray]'") from exc
    return ray


class _Users:
    """Who uses the connection that was made here; the last one ends it. One that the program made is its own to end."""

    count = 0
    is_ours = False
    lock = threading.RLock()
    """Fleets of several event loops begin and end in threads of their own."""


def connect(address: str) -> str:
    """Blocks. Gives the address of the cluster's head. `SubstrateUnavailable` when there is none; none is ever started."""
    ray = require_ray()
    if not isinstance(address, str) or not address:
        raise UsageError(f"address must be 'auto' or HOST:PORT of a Ray cluster's head, not {address!r}")
    if address.startswith("ray://"):
        raise UsageError(
            f"{address}: a fleet's clients are part of the cluster; give HOST:PORT of its head (`ray start` prints it), not ray://"
        )
    with _Users.lock:
        return _connect(ray, address)


def _connect(ray: Any, address: str) -> str:
    if not ray.is_initialized():
        _reach(address)
        logging.getLogger("ray._private.worker").addFilter(_is_worth_saying)
        try:
            ray.init(address=address, namespace="untax", log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, OSError) as exc:
            raise SubstrateUnavailable("", f"no Ray cluster at {address!r} ({_first_line(exc)}); {_START}") from exc
        except RuntimeError as exc:
            if "ersion" in str(exc):
                raise UsageError(
                    f"the Ray cluster at {address!r} is of another version: {' '.join(str(exc).split())}; install the same ray and Python here"
                ) from exc
            raise BackendError("", f"Ray at {address!r}: {_first_line(exc)}") from exc
        _Users.is_ours = True
    _Users.count += 1
    there = str(ray.get_runtime_context().gcs_address)
    if address != "auto" and there != address:
        disconnect()
        raise UsageError(
            f"this process is connected to the Ray cluster at {there}, not {address}: ray.shutdown() first, or leave address='auto'"
        )
    return there


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Ray would take SIGTERM over from the program, and says that it cannot from this thread."""
    return "SIGTERM handler is not set" not in record.getMessage()


def disconnect() -> None:
    with _Users.lock:
        _Users.count -= 1
        if _Users.count == 0 and _Users.is_ours:
            _Users.is_ours = False
            require_ray().shutdown()


def own_node() -> str | None:
    """Of this process, where it is part of a cluster."""
    ray = require_ray()
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else None


def _reach(address: str) -> None:
    """Ray itself would try for a long time."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    host, colon, port = address.rpartition(":")
    if not address or not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except ValueError as exc:
        raise UsageError(f"{address!r} is not the address of a Ray cluster's head; write HOST:PORT") from exc
    except OSError as exc:
        raise SubstrateUnavailable("", f"no Ray cluster answers at {address} ({exc.strerror or exc}); {_START}") from exc


def find_keeper(name: str) -> Any | None:
    """Blocks. None where nobody keeps a fleet of this name."""
    from untax.cluster import actors

    with contextlib.suppress(ValueError):
        return require_ray().get_actor(actors.keeper_name(name), actors.NAMESPACE)
    return None


def ticket_of(name: str) -> str:
    """Blocks. What lets this process, which is part of the cluster, into its fleet."""
    ray = require_ray()
    if not ray.is_initialized():
        raise UsageError("this process is not part of a Ray cluster: use untax.Fleet(address=…)")
    keeper = find_keeper(checked_name(name))
    if keeper is None:
        raise UsageError(f"there is no fleet {name!r} on this cluster: bring one up with untax.Fleet() or `untax fleet up`")
    try:
        return str(keeper.ticket.remote().future().result(_ASK_S))
    except (ray.exceptions.RayError, TimeoutError) as exc:
        raise BackendError("", f"the fleet {name!r} does not say who is in it: {_first_line(exc)}") from exc


def start_keeper(plan: Plan, ray_address: str, *, is_lasting: bool) -> tuple[Any, bool]:
    """Blocks. Whoever keeps the fleet, and whether it was this call that brought it up. One that does not last goes with this process."""
    from untax.cluster import actors
    from untax.cluster.trust import Trust

    found = find_keeper(plan.name)
    if found is not None:
        return found, False
    made = (
        require_ray()
        .remote(actors.Keeper)
        .options(
            name=actors.keeper_name(plan.name),
            namespace=actors.NAMESPACE,
            lifetime="detached" if is_lasting else "non_detached",
            num_cpus=0,
            scheduling_strategy=_beside_the_head(),
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=actors._CALLS,
        )
    )
    try:
        return made.remote(plan, Trust.new(plan.name), ray_address), True
    except ValueError:
        found = find_keeper(plan.name)  # somebody was faster
        if found is None:
            raise
        return found, False


def _beside_the_head() -> Any:
    """Where it can be: a node on which an actor lives is busy to Ray's autoscaler, and the head stays anyway."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from untax.cluster.known import HEAD

    for node in require_ray().nodes():
        if node["Alive"] and HEAD in node["Resources"]:
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
    return "DEFAULT"


async def asked(name: str, call: Awaitable[T]) -> T:
    """What a call to whoever keeps the fleet gives; its death is the fleet's end."""
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        return await call
    except RayActorError as exc:
        raise down(name) from exc
    except RayTaskError as exc:
        if isinstance(exc.cause, UntaxError):
            raise exc.cause from exc
        raise BackendError("", f"the fleet {name!r} could not be asked: {exc.cause!r}") from exc
    except RayError as exc:
        raise BackendError("", f"the fleet {name!r} could not be asked: {_first_line(exc)}") from exc


def found(name: str) -> Any:
    """Blocks. Whoever keeps the fleet; False where nobody does any more, None while Ray does not say."""
    try:
        return find_keeper(name) or False
    except Exception:  # its head is away
        return None


async def take_down(keeper: Any) -> None:
    """End every agent of a fleet, then who keeps it."""
    from ray.exceptions import RayError

    try:
        await keeper.down.remote()
    except RayError as exc:
        log.warning("the fleet was not taken down in order: %s", _first_line(exc))
    await kill(keeper)


async def kill(actor: Any) -> None:
    await asyncio.to_thread(require_ray().kill, actor)


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
