"""A Ray cluster on this machine that Ray's own autoscaler makes larger and smaller: `with AutoscaledCluster(workers=2) as cluster`.

Its head runs in a process of its own: which autoscaler a process takes for its cluster's is one for all of it, and so is the connection that this
is asked over. The *provider* is what a cloud is to the autoscaler: it starts raylets at loopback addresses, and kills them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[1]
WORKER_CPUS = 2
_TYPE, _HEAD_TYPE = "worker", "ray.head.default"
_LISTS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)
_FIRST = 32  # last byte of the head's address; the workers' follow


def config(head_id: str, workers: int, idle_s: float) -> dict[str, Any]:
    nothing: dict[str, Any] = {"node_config": {}}
    return {
        "cluster_name": "untax-test",
        "max_workers": workers,
        "idle_timeout_minutes": idle_s / 60,
        "upscaling_speed": 1.0,
        "provider": {
            "type": "external",
            "module": "tests.autoscaled.Provider",
            "head_node_id": head_id,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            _HEAD_TYPE: {"resources": {"CPU": WORKER_CPUS}, "max_workers": 0, **nothing},
            _TYPE: {"resources": {"CPU": WORKER_CPUS}, "min_workers": 0, "max_workers": workers, **nothing},
        },
        "head_node_type": _HEAD_TYPE,
        # What a file for `ray up` says about machines, of which there are none.
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in _LISTS},
    }


class AutoscaledCluster:
    """A head, and up to so many workers for which somebody has to ask. `idle_s` is how long Ray leaves a node that is idle."""

    def __init__(self, workers: int, *, idle_s: float = 1.0, is_v2: bool = True) -> None:
        self._given = [str(workers), str(idle_s)]
        self._env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
            "RAY_enable_autoscaler_v2": str(int(is_v2)),
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }

    def __enter__(self) -> AutoscaledCluster:
        argv = [sys.executable, "-m", "tests.autoscaled", *self._given]
        self._process = subprocess.Popen(argv, cwd=ROOT, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:  # Ray has words of its own
            if line.startswith("{"):
                said = json.loads(line)
                self.address, self.head_id, self.place = str(said["address"]), str(said["head"]), Path(said["place"])
                return self
        raise RuntimeError(f"the cluster did not come up: {self._process.wait()}")

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate("", timeout=60)
        assert self._process.returncode == 0


def _provider() -> Any:
    """The class, which is Ray's but for where its nodes are. Only where Ray is."""
    import ray
    from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
    from ray.autoscaler.tags import NODE_KIND_WORKER, STATUS_UP_TO_DATE, TAG_RAY_NODE_KIND, TAG_RAY_NODE_NAME, TAG_RAY_NODE_STATUS

    class Provider(FakeMultiNodeProvider):  # type: ignore[misc]
        def _next_hex_node_id(self) -> str:
            self._next_node_id += 1
            return str(ray.NodeID.from_random().hex())

        def _create_node_with_resources_and_labels(self, node_config: Any, tags: Any, count: int, resources: Any, labels: Any) -> None:
            with self.lock:
                node_id = self._next_hex_node_id()
                given = dict(resources)
                said = dict(
                    one.removeprefix("--").split("=", 1) for one in sys.argv if one.startswith("--")
                )  # to the autoscaler, which this is in
                params = ray._private.parameter.RayParams(
                    node_ip_address=f"127.0.0.{_FIRST + self._next_node_id}",
                    temp_dir=str(Path(said["logs-dir"]).parents[1]),
                    min_worker_port=0,
                    max_worker_port=0,
                    dashboard_agent_listen_port=0,
                    include_log_monitor=False,
                    num_cpus=given.pop("CPU", 0),
                    object_store_memory=150 << 20,
                    resources=given,
                    labels=labels,
                    redis_address=said["gcs-address"],
                    gcs_address=said["gcs-address"],
                    env_vars={"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id, "RAY_CLOUD_INSTANCE_ID": node_id, "RAY_NODE_TYPE_NAME": _TYPE},
                )
                node = ray._private.node.Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
                kept = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_NODE_NAME: node_id, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}
                self._nodes[node_id] = {"tags": {**kept, **tags}, "node": node}

    return Provider


def __getattr__(name: str) -> Any:
    if name == "Provider":
        return _provider()
    raise AttributeError(name)


def main(workers: int, idle_s: float) -> None:
    import ray
    from tests.raycluster import RayCluster

    head_id = str(ray.NodeID.from_random().hex())
    with tempfile.NamedTemporaryFile("w", prefix="untax-autoscaling-", suffix=".json") as file:
        json.dump(config(head_id, workers, idle_s), file)
        file.flush()
        env = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": head_id, "RAY_CLOUD_INSTANCE_ID": head_id, "RAY_NODE_TYPE_NAME": _HEAD_TYPE}
        head = {"autoscaling_config": file.name, "env_vars": env}
        with RayCluster(1, cpus=WORKER_CPUS, first=_FIRST, head=head) as cluster:
            print(json.dumps({"address": cluster.address, "head": head_id, "place": str(cluster.place)}), flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
