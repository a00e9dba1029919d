"""How a process gets at Ray: connecting to a cluster that is there, and finding or starting the one who keeps a fleet."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import re
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
_INIT_S = 60.0  # for Ray to let a process in: a second or two, and many times that on a machine that is full
_ASK_S = 60.0
_DOWN_S = 60.0  # to end every agent, which have half of it each (resident.END_S), all at once
_MOST_PORT = 65_535
_PORT = re.compile("[0-9]{1,5}")
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
    left: concurrent.futures.Future[None] | None = None
    """Done once an earlier attempt to connect, which nobody waits for any more, has come to its end."""
    lock = threading.RLock()
    """Fleets of several event loops begin and end in threads of their own."""


class GivenUp:
    """Whoever wants a connection may want it no more: `say` ends a `connect` that waits for Ray."""

    def __init__(self) -> None:
        self.future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def say(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


def connect(address: str, *, anywhere: bool = False, given_up: GivenUp | None = None) -> str:
    """Blocks. Gives the address of the cluster's head. `SubstrateUnavailable` when there is none; none is ever started.

    A process that is part of a cluster already stays there: `UsageError` where that is another one, unless `anywhere` would do.
    """
    ray = require_ray()
    checked_address(address)
    with _Users.lock:
        there, is_new = _connect(ray, address, given_up or GivenUp())
    if anywhere or is_new or address == "auto" or not is_another(there, address):
        return there
    disconnect()
    raise UsageError(
        f"this process is connected to the Ray cluster at {there}, not {address}: ray.shutdown() first, or leave address='auto'"
    )


def checked_address(address: object, said_by: str = "address") -> tuple[str, int] | None:
    """Host and port; None for "auto". `UsageError` for whatever else Ray takes: it would start a cluster for some of it ("local")."""
    if address == "auto":
        return None
    if isinstance(address, str) and address.startswith("ray://"):
        raise UsageError(
            f"{address}: a fleet's clients are part of the cluster; give HOST:PORT of its head (`ray start` prints it), not ray://"
        )
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not _PORT.fullmatch(port) or not 0 < int(port) <= _MOST_PORT:
        raise UsageError(f"{said_by} must be 'auto' or HOST:PORT of a Ray cluster's head, not {address!r}")
    return host.strip("[]"), int(port)


def _connect(ray: Any, address: str, given_up: GivenUp) -> tuple[str, bool]:
    """The head's address, as this process has it, and whether it was this call that connected."""
    if _Users.left is not None:  # two at a time are one too many for Ray, and what that one still comes to is ended: it is nobody's to use
        _wait(_Users.left, address, given_up)
        _Users.left = None
    is_new = not ray.is_initialized()
    if is_new:
        _reach(address)
        logging.getLogger("ray._private.worker").addFilter(_is_worth_saying)
        try:
            _init(ray, address, given_up)
        except (ConnectionError, ValueError, OSError) as exc:
            raise SubstrateUnavailable("", f"no Ray cluster at {address!r} ({_first_line(exc)}); {_START}") from exc
        except (RuntimeError, AssertionError) as exc:
            if "ersion" in str(exc):
                raise UsageError(
                    f"the Ray cluster at {address!r} is of another version: {' '.join(str(exc).split())}; install the same ray and Python here"
                ) from exc
            raise BackendError("", f"Ray at {address!r}: {_first_line(exc)}") from exc
        _Users.is_ours = True
    _Users.count += 1
    return str(ray.get_runtime_context().gcs_address), is_new


def _init(ray: Any, address: str, given_up: GivenUp) -> None:
    """In a thread that nobody has to wait for: where something listens that is no Ray it tries for minutes, and cannot be told to stop."""
    found: concurrent.futures.Future[None] = concurrent.futures.Future()
    over: concurrent.futures.Future[None] = concurrent.futures.Future()
    guard, is_left = threading.Lock(), False

    def work() -> None:
        try:
            ray.init(address=address, namespace="untax", log_to_driver=False, configure_logging=False)
        except BaseException as exc:  # told to who waits
            found.set_exception(exc)
        else:
            with guard:
                found.set_result(None)
                is_nobodys = is_left
            if is_nobodys:
                ray.shutdown()
        finally:
            over.set_result(None)

    threading.Thread(target=work, name="untax-ray-init", daemon=True).start()
    try:
        _wait(found, address, given_up)
    except SubstrateUnavailable:
        with guard:
            is_left = not found.done()
        if is_left:
            _Users.left = over
            raise
    found.result()


def _wait(done: concurrent.futures.Future[None], address: str, given_up: GivenUp) -> None:
    concurrent.futures.wait((done, given_up.future), _INIT_S, concurrent.futures.FIRST_COMPLETED)
    if not done.done():
        said = "was given up" if given_up.future.done() else f"did not let this process in within {_INIT_S:g} s"
        raise SubstrateUnavailable("", f"Ray at {address!r} {said}: is it the port of a head (6379 as a rule) that lives? {_START}")


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
    place = checked_address(address)
    if place is None and (address := os.environ.get("RAY_ADDRESS", "")):
        place = checked_address(address, "the environment's RAY_ADDRESS")
    if place is None:
        return
    try:
        _dialled(*place)
    except OSError as exc:
        raise SubstrateUnavailable("", f"no Ray cluster answers at {address} ({exc.strerror or exc}); {_START}") from exc


def _dialled(host: str, port: int) -> str:
    """Where it answers, as a number; `OSError` where it does not."""
    failed: OSError | None = None
    for one in _as_ray_has_it(host):
        try:
            with socket.create_connection((one, port), timeout=_REACH_S) as connection:
                return str(connection.getpeername()[0])
        except OSError as exc:
            failed = failed or exc
    assert failed is not None
    raise failed


def _as_ray_has_it(host: str) -> tuple[str, ...]:
    """Ray takes these names for the machine's own address, at which its head listens, and at no other."""
    return (host, require_ray().util.get_node_ip_address()) if host in ("localhost", "127.0.0.1", "::1") else (host,)


# ---- which cluster ----


def is_another(there: str, address: str) -> bool:
    """Blocks. Whether two addresses lead to two clusters. One has many: names, those of a service before it, what Ray makes of "localhost"."""
    if there == address:
        return False
    if _leads_to(there) & _leads_to(address):
        return False
    ids = {_cluster_id(one) for one in (there, address)}
    return len(ids) > 1 or None in ids


def _leads_to(address: str) -> set[tuple[str, int]]:
    place = checked_address(address)
    assert place is not None
    found = set()
    for host in _as_ray_has_it(place[0]):
        with contextlib.suppress(OSError):  # a name that this machine does not know leads nowhere
            found |= {(str(one[4][0]), place[1]) for one in socket.getaddrinfo(host, place[1], type=socket.SOCK_STREAM)}
    return found


def _cluster_id(address: str) -> str | None:
    """What the head there says; None where it says nothing in time, or Ray is one that has no such question: it is none that Ray documents."""
    place = checked_address(address)
    assert place is not None
    said: concurrent.futures.Future[str] = concurrent.futures.Future()

    def ask() -> None:
        try:
            host = _dialled(*place)
            head = f"[{host}]:{place[1]}" if ":" in host else f"{host}:{place[1]}"
            said.set_result(str(require_ray()._raylet.GcsClient(address=head).cluster_id))
        except Exception as exc:  # told below
            said.set_exception(exc)

    threading.Thread(target=ask, name="untax-ray-ask", daemon=True).start()  # what listens and is no head is asked for most of a minute
    try:
        return said.result(_REACH_S)
    except Exception as exc:
        log.debug("the Ray cluster at %s does not say which it is: %s", address, exc)
        return None


# ---- who keeps a fleet ----


def find_keeper(name: str) -> Any | None:
    """Blocks, for a minute while Ray's head is away: `BackendError` then. None where nobody keeps a fleet of this name."""
    from untax.cluster import actors

    ray = require_ray()
    _check_connected(name)
    try:
        return ray.get_actor(actors.keeper_name(name), actors.NAMESPACE)
    except ValueError:
        return None
    except ray.exceptions.RayError as exc:
        raise away(exc) from exc


def _check_connected(name: str) -> None:
    """Before whatever of Ray's would start a cluster where this process is part of none: calls to actors and their cancelling do, too."""
    if not require_ray().is_initialized():
        raise BackendError(
            "", f"this process has left its Ray cluster (ray.shutdown()), so nobody says who is in the fleet {name!r}: connect anew"
        )


def away(exc: BaseException) -> BackendError:
    return BackendError(
        "", f"Ray's head does not answer ({_first_line(exc)}): leases that are held go on; see that it runs (`ray status`), and ask again"
    )


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

    ray = require_ray()
    found = find_keeper(plan.name)
    if found is not None:
        return found, False
    try:
        made = ray.remote(actors.Keeper).options(
            name=actors.keeper_name(plan.name),
            namespace=actors.NAMESPACE,
            lifetime="detached" if is_lasting else "non_detached",
            num_cpus=0,
            scheduling_strategy=_beside_the_head(),
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=actors.CALLS,
        )
        return made.remote(plan, Trust.new(plan.name), ray_address, actors.WAITING), True
    except ValueError:
        found = find_keeper(plan.name)  # somebody was faster
        if found is None:
            raise
        return found, False
    except ray.exceptions.RayError as exc:
        raise away(exc) from exc


def _beside_the_head() -> Any:
    """Where it can be: a node on which an actor lives is busy to Ray's autoscaler, and the head stays anyway."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from untax.cluster.known import HEAD

    for node in require_ray().nodes():
        if node["Alive"] and HEAD in node["Resources"]:
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
    return "DEFAULT"


def ask(name: str, method: Any, *args: Any, **kwargs: Any) -> Awaitable[Any]:
    """Ask whoever keeps the fleet, by a method of its handle. `BackendError` where this process has left its cluster."""
    _check_connected(name)
    called: Awaitable[Any] = method.remote(*args, **kwargs)
    return called


async def asked(name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    """What whoever keeps the fleet says to that; its death is the fleet's end."""
    return await answer(name, ask(name, method, *args, **kwargs))


async def answer(name: str, call: Awaitable[T]) -> T:
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


def cancel(call: Any) -> None:
    """Nobody waits for it any more. Where whoever keeps the fleet is not told, the call ends by itself a moment later."""
    try:
        if (ray := require_ray()).is_initialized():  # or it was ended with its connection, and Ray would start a cluster to cancel it there
            ray.cancel(call, recursive=False)
    except Exception as exc:
        log.debug("a call was not cancelled: %s", exc)


async def take_down(keeper: Any) -> None:
    """End every agent of a fleet, then who keeps it. One that does not answer is killed all the same, and its agents end by themselves.

    So they do where this process has left its cluster: whoever keeps a fleet that does not last went with it.
    """
    from ray.exceptions import RayError

    if not require_ray().is_initialized():  # Ray would start a cluster to ask it there
        return
    try:
        async with asyncio.timeout(_DOWN_S):
            await keeper.down.remote()
    except TimeoutError:
        log.warning("the fleet was not taken down within %g s: its keeper is killed, and the agents end by themselves", _DOWN_S)
    except RayError as exc:
        log.warning("the fleet was not taken down in order: %s", _first_line(exc))
    await kill(keeper)


async def kill(actor: Any) -> None:
    if require_ray().is_initialized():
        await asyncio.to_thread(require_ray().kill, actor)


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
