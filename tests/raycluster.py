"""Several Ray nodes on this one machine, each at a loopback address of its own: `with RayCluster(4) as cluster`.

The head is at 127.0.0.2 and not at 127.0.0.1, which Ray would take for "this machine" and replace by the address that others reach. Nothing
listens off loopback, nothing is reported to anybody, and the file by which "auto" finds a cluster stays out of other people's way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns of a default that it is going to change
    "RAY_DEDUP_LOGS": "0",
}
# A node that does not answer is dead after some 3 s instead of 15; one that answers late is not.
_NOTICE = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
# When this process is killed its cluster goes too: end of input without the word. Some of a raylet's children do not notice its end.
_REAP = 'all=; while read -r pid; do [ "$pid" = end ] && exit; all="$all $pid"; done; for pid in $all; do all="$all $(cat /proc/$pid/task/*/children)"; done; kill -9 $all; rm -rf "$0"'
_ROOT = Path(__file__).parents[1]
_MARK = "UNTAX_TEST_CLUSTER"
_GONE_S = 20.0  # for processes of a node that was ended


def unavailable_reason() -> str | None:
    try:
        import ray  # noqa: F401
    except ImportError:
        return "ray: not installed; pip install 'untax[ray]'"
    return None


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The names of all that this process submits to Ray or asks of it meanwhile.

    But for the one question that every client has standing, whatever it does: who is in the fleet after what it knows (`Keeper.members`), anew each minute.
    """
    import ray
    from ray.actor import ActorClass, ActorMethod
    from ray.experimental import internal_kv
    from ray.remote_function import RemoteFunction

    calls: list[str] = []
    asked = ("get", "put", "wait", "kill", "cancel", "get_actor", "nodes", "cluster_resources", "available_resources")
    stored = ("get", "exists", "put", "del", "list")
    watched: list[tuple[Any, str]] = [(ray, name) for name in asked] + [(internal_kv, f"_internal_kv_{name}") for name in stored]
    watched += [(ray.util, "list_named_actors"), *((kind, "_remote") for kind in (ActorMethod, ActorClass, RemoteFunction))]
    before = {(home, name): getattr(home, name) for home, name in watched}

    def counting(name: str, function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            what = getattr(args[0], "_method_name", "") if name == "_remote" else ""
            if not (what == "members" and args[1][0] >= 0):
                calls.append(f"{name} {what}".strip())
            return function(*args, **kwargs)

        return called

    for (home, name), function in before.items():
        setattr(home, name, counting(name, function))
    try:
        yield calls
    finally:
        for (home, name), function in before.items():
            setattr(home, name, function)


class RayCluster:
    """Up between `start` and `close`; a driver connects with `ray.init(address=cluster.address)`, several of them one after the other."""

    def __init__(self, nodes: int = 2, *, cpus: int = 16, first: int = 2, head: Mapping[str, Any] | None = None) -> None:
        """`first` is the last byte of the head's address; `head` has more of Ray's parameters for it."""
        self._count = nodes
        self._cpus = cpus
        self._head = dict(head or {})
        self._next = first
        self.nodes: list[Any] = []
        """The head first; those that were killed are not in it."""

    def __enter__(self) -> RayCluster:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        self._before = {name: os.environ.get(name) for name in _QUIET}
        os.environ.update(_QUIET)
        from ray.cluster_utils import Cluster

        # Where Ray writes down a cluster's address whatever directory it is given; only its own command makes it.
        Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
        # Short: the paths of sockets below it have an end at 107 bytes.
        self.place = Path(tempfile.mkdtemp(prefix="uray-", dir="/tmp"))
        try:
            # Its own ending replaces handlers of signals.
            self._cluster = Cluster(shutdown_at_exit=False)
            self._reaper = subprocess.Popen(["sh", "-c", _REAP, str(self.place)], stdin=subprocess.PIPE, start_new_session=True)
            for _ in range(self._count):
                self._add()
            self._cluster.wait_for_nodes()
        except BaseException:
            self.close()
            raise
        self.address: str = self._cluster.address

    def _add(self) -> Any:
        more: dict[str, Any] = {}
        if not self.nodes:
            more = {"include_dashboard": False, "include_log_monitor": False, "_system_config": _NOTICE, **self._head}
        with self._marking():
            node = self._cluster.add_node(
                wait=False, num_cpus=self._cpus, temp_dir=str(self.place), node_ip_address=f"127.0.0.{self._next}", **more
            )
        self._next += 1
        self.nodes.append(node)
        self._tell_reaper(node)
        return node

    @property
    def mark(self) -> str:
        """In the environment of every process of its nodes, and of those that these start, whoever is their parent later."""
        return f"{_MARK}={self.place}"

    @contextlib.contextmanager
    def _marking(self) -> Iterator[None]:
        os.environ[_MARK] = str(self.place)
        try:
            yield
        finally:
            del os.environ[_MARK]

    def _tell_reaper(self, node: Any) -> None:
        assert self._reaper.stdin is not None
        self._reaper.stdin.write("".join(f"{pid}\n" for pid in self._roots(str(node.node_id))).encode())
        self._reaper.stdin.flush()

    def add(self) -> str:
        """One more; its id, once the cluster knows it."""
        node = self._add()
        self._cluster.wait_for_nodes()
        return str(node.node_id)

    @contextlib.contextmanager
    def confined(self, setup: str) -> Iterator[str]:
        """One more, in a user namespace of its own where this was done first: its id, for as long as it lasts."""
        with self._apart(self.address, ["unshare", "--user", "--map-root-user", "sh", "-c", f'{setup} && exec "$@"', "sh"]) as node_id:
            yield node_id

    @contextlib.contextmanager
    def joined_by(self, address: str) -> Iterator[str]:
        """One more, which knows the head by an address of the machine's own resolver, as others know it by the name of a service."""
        with self._apart(address, [], GRPC_DNS_RESOLVER="native") as node_id:
            yield node_id

    @contextlib.contextmanager
    def _apart(self, address: str, wrapped_in: list[str], **env: str) -> Iterator[str]:
        argv = [*wrapped_in, sys.executable, "-m", "tests.raycluster", address, str(self.place), f"127.0.0.{self._next}"]
        self._next += 1
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one), **env}
        with subprocess.Popen(argv, cwd=_ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield next(line.removeprefix("node ").strip() for line in process.stdout if line.startswith("node "))
            finally:
                process.communicate("", timeout=60)

    def ids(self) -> list[str]:
        return [str(node.node_id) for node in self.nodes]

    def processes(self, node_id: str) -> list[int]:
        """Everything that the node's raylet has started, and itself: those that go when a machine does."""
        return [pid for root in self._roots(node_id) for pid in (*_below(root), root)]

    def _roots(self, node_id: str) -> list[int]:
        node = self._node(node_id)
        return [one.process.pid for started in node.all_processes.values() for one in started if one.process.poll() is None]

    def _node(self, node_id: str) -> Any:
        return next(node for node in self.nodes if str(node.node_id) == node_id)

    def kill(self, node_id: str) -> None:
        """As when the power fails: raylet, workers and agent get SIGKILL at once, and nobody on the node can say good-bye."""
        node = self._node(node_id)
        pids = self.processes(node_id)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        _wait_gone(pids)

    def kill_head(self) -> None:
        """The head's own service (GCS), as when it crashes; the nodes stay. Only of use where what it knows is kept elsewhere."""
        self.nodes[0].kill_gcs_server()

    def start_head(self) -> None:
        """It again, at the same address."""
        self.nodes[0].start_gcs_server()
        self._tell_reaper(self.nodes[0])

    def kill_head_node(self) -> None:
        """The machine that the head is on: its service, its raylet and whatever runs there. No driver of this process may be connected."""
        self._gcs_port = int(self.address.rpartition(":")[2])
        self._head_address = self.nodes[0].node_ip_address
        self.kill(self.ids()[0])

    def start_head_node(self) -> str:
        """That machine again, at the same address; its new id."""
        others, self.nodes = self.nodes, []
        self._head["gcs_server_port"] = self._gcs_port
        following, self._next = self._next, int(self._head_address.rpartition(".")[2])
        try:
            node = self._add()
        finally:
            self._next = following
            self.nodes += others
        self._cluster.wait_for_nodes()
        return str(node.node_id)

    def close(self) -> None:
        """Also ends what the driver of this process still has. Everything that was started is gone afterwards."""
        import ray

        ray.shutdown()
        pids = [pid for node in self.nodes for pid in self.processes(str(node.node_id))]
        self._end_scaled()
        self._cluster.shutdown()  # type: ignore[no-untyped-call]
        self.nodes.clear()
        _wait_gone(pids)
        self._reaper.communicate(b"end\n")
        shutil.rmtree(self.place, ignore_errors=True)
        for name, value in self._before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    def _end_scaled(self) -> None:
        """Nodes that Ray's autoscaler has started are its children, and it would start others."""
        for process in self.nodes[0].all_processes.get("monitor", ()) if self.nodes else ():
            for pid in (process.process.pid, *_below(process.process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    """Children of a process and theirs."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_below(child)]
    return found


def _wait_gone(pids: list[int]) -> None:
    end = time.monotonic() + _GONE_S
    for pid in pids:
        while _is_there(pid):
            if time.monotonic() > end:
                raise RuntimeError(f"process {pid} of a Ray node does not end: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
            time.sleep(0.01)


def _is_there(pid: int) -> bool:
    try:
        return b"\nState:\tZ" not in Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False


def run_node(address: str, place: str, ip: str) -> None:
    """A node of a cluster that another process has, until the end of input."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    params = RayParams(
        gcs_address=address,
        redis_address=address,
        node_ip_address=ip,
        temp_dir=place,
        num_cpus=1,
        object_store_memory=150 << 20,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        dashboard_agent_listen_port=0,
        include_log_monitor=False,  # type: ignore[arg-type]  # as Ray itself gives it
    )
    node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
    try:
        print("node", node.node_id, flush=True)
        sys.stdin.read()
    finally:
        roots = [one.process.pid for started in node.all_processes.values() for one in started]
        pids = [pid for root in roots for pid in (*_below(root), root)]
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    run_node(*sys.argv[1:])
