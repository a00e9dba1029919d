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
import tempfile
import time
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
_GONE_S = 20.0  # for processes of a node that was ended


def unavailable_reason() -> str | None:
    try:
        import ray  # noqa: F401
    except ImportError:
        return "ray: not installed; pip install 'untax[ray]'"
    return None


class RayCluster:
    """Up between `start` and `close`; a driver connects with `ray.init(address=cluster.address)`, several of them one after the other."""

    def __init__(self, nodes: int = 2, *, cpus: int = 16) -> None:
        self._count = nodes
        self._cpus = cpus
        self._next = 2  # of the last byte of an address
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
        more: dict[str, Any] = {} if self.nodes else {"include_dashboard": False, "include_log_monitor": False, "_system_config": _NOTICE}
        node = self._cluster.add_node(
            wait=False, num_cpus=self._cpus, temp_dir=str(self.place), node_ip_address=f"127.0.0.{self._next}", **more
        )
        self._next += 1
        self.nodes.append(node)
        assert self._reaper.stdin is not None
        self._reaper.stdin.write("".join(f"{pid}\n" for pid in self._roots(str(node.node_id))).encode())
        self._reaper.stdin.flush()
        return node

    def add(self) -> str:
        """One more; its id, once the cluster knows it."""
        node = self._add()
        self._cluster.wait_for_nodes()
        return str(node.node_id)

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

    def close(self) -> None:
        """Also ends what the driver of this process still has. Everything that was started is gone afterwards."""
        import ray

        ray.shutdown()
        pids = [pid for node in self.nodes for pid in self.processes(str(node.node_id))]
        self._cluster.shutdown()  # type: ignore[no-untyped-call]
        self.nodes.clear()
        _wait_gone(pids)
        self._reaper.communicate(b"end\n")
        shutil.rmtree(self.place, ignore_errors=True)
        for name, value in self._before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


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
