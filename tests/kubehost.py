"""A real Kubernetes for the tests: the one that KUBECONFIG names, or one brought up for the run by the shared `k8s/up` (root only).

Images are made here and loaded into the nodes; nothing is pulled.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import hashlib
import io
import json
import os
import select
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

import pytest
from tests.images import KUBERNETES_IMAGE, small_directory, tools_directory

import untax

SMALL = KUBERNETES_IMAGE
TOOLS = "untax.local/tools:1"
_loaded: set[tuple[str, int, int]] = set()  # archives on all nodes of this very cluster, when there were so many
_SCHEDULABLE_S = 90.0  # a node that was thought lost is looked at again within a minute
_REPOSITORY = Path(__file__).resolve().parent.parent


def tools() -> Path | None:
    """Where `up`, `load` and `down` are: UNTAX_SHARED, or a folder `shared` beside the repository."""
    for base in (os.environ.get("UNTAX_SHARED"), _REPOSITORY.parent / "shared"):
        if base and (Path(base) / "k8s" / "up").exists():
            return Path(base) / "k8s"
    return None


def state_dir() -> Path:
    return Path(os.environ.get("UNTAX_K8S_DIR", "/var/tmp/untax-k8s"))


def missing_reason() -> str | None:
    if os.environ.get("KUBECONFIG"):
        return None
    if os.geteuid() != 0:
        return "kubernetes: bringing a cluster up needs root; set KUBECONFIG"
    if tools() is None:
        return "kubernetes: no KUBECONFIG, and no shared/k8s to bring a cluster up with"
    return None


class Cluster:
    """Up between `start` and `stop`; one that was up already stays so."""

    def __init__(self) -> None:
        self.kubeconfig: str | None = os.environ.get("KUBECONFIG")
        self.is_given = self.kubeconfig is not None
        self._is_ours = False
        self._nodes = 1
        self._ended: set[str] = set()  # on purpose
        self._starting = threading.Lock()
        self._keeper: threading.Thread | None = None
        self._is_over = threading.Event()
        self._lock: IO[str] | None = None

    def start(self, nodes: int = 1) -> None:
        """Also starts again what was ended of it."""
        if not self.is_given:
            place = tools()
            assert place is not None
            self._is_ours = self._is_ours or not (state_dir() / "pid" / "kube-apiserver").exists()
            self._nodes = max(nodes, self._nodes)
            self._lock_machine()
            with self._starting:
                self._ended.clear()
                said = subprocess.run([place / "up", "--nodes", str(self._nodes)], capture_output=True, text=True, timeout=150)
            if said.returncode != 0:
                raise RuntimeError(f"no cluster: {said.stderr.strip()}")
            self.kubeconfig = said.stdout.strip().splitlines()[-1]
            self.wait_schedulable()
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep_kubelets, daemon=True)
                self._keeper.start()
        load(docker_archive(small_directory(), SMALL))

    def _lock_machine(self) -> None:
        """One run at a time: addresses and names of the cluster's network are the machine's, and whoever ends first would take it from the others."""
        if self._lock is None:
            self._lock = open(f"{state_dir()}.lock", "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def wait_schedulable(self) -> None:
        """Until every node is ready and has no taint: the controller that takes them away is a little behind what the kubelet says."""
        until = time.monotonic() + _SCHEDULABLE_S
        while True:
            nodes = json.loads(self.kubectl("get", "nodes", "-o", "json"))["items"]
            if len(nodes) >= self._nodes and all(_is_schedulable(node) for node in nodes):
                return
            if time.monotonic() > until:
                raise RuntimeError(f"nodes that take no pods: {[node['spec'].get('taints') for node in nodes]}")
            time.sleep(0.1)

    def _keep_kubelets(self) -> None:
        """Start a kubelet again that ends by itself, as the service manager of a real node does.

        That of Kubernetes 1.34 panics now and then where it manages no pod-level control groups (doPodResizeAction, a nil pointer, when a pod's
        resources were forgotten before its last sync); its node is then tainted, and whatever wants to run there waits in vain.
        """
        place = tools()
        assert place is not None
        while not self._is_over.is_set():
            watched: dict[int, str] = {}
            for note in (state_dir() / "pid").glob("kubelet-*"):
                with contextlib.suppress(OSError, ValueError):
                    watched[os.pidfd_open(int(note.read_text()))] = note.name
            poll = select.poll()
            for fd in watched:
                poll.register(fd, select.POLLIN)
            poll.poll(1000)  # and look anew for those that were started meanwhile
            for fd in watched:
                os.close(fd)
            with self._starting:  # nobody else starts one now
                dead = [note for note in (state_dir() / "pid").glob("kubelet-*") if note.name not in self._ended and _is_dead(note)]
                if dead and not self._is_over.is_set():
                    for note in dead:
                        note.unlink(missing_ok=True)  # a zombie would pass for alive
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        subprocess.run([place / "up", "--nodes", str(self._nodes)], capture_output=True, timeout=150)

    def stop(self) -> None:
        self._is_over.set()
        if self._keeper is not None:
            self._keeper.join(160)
        if self._is_ours:
            place = tools()
            assert place is not None
            subprocess.run([place / "down", "--keep"], capture_output=True, timeout=150)
        if self._lock is not None:
            self._lock.close()

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        program = state_dir() / "bin" / "kubectl"
        argv = [str(program) if program.exists() else "kubectl", "--kubeconfig", str(self.kubeconfig), *arguments]
        said = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=60)
        if check and said.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {said.stderr}")
        return said.stdout

    def apply(self, *objects: dict) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))

    def pid(self, name: str) -> int:
        """Of `kubelet-1`, `kube-apiserver`, …, to stop it by."""
        return int((state_dir() / "pid" / name).read_text())

    def end(self, name: str) -> None:
        """Kill one of its processes; the next `start` starts it again."""
        pid = self.pid(name)
        self._ended.add(name)
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while not _is_over(pid) and time.monotonic() < until:
            time.sleep(0.02)
        (state_dir() / "pid" / name).unlink()


def _is_dead(note: Path) -> bool:
    try:
        return _is_over(int(note.read_text()))
    except (OSError, ValueError):
        return False  # being written, or gone


def _is_schedulable(node: dict) -> bool:
    conditions = {one["type"]: one["status"] for one in node["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and not node["spec"].get("taints")


_shared: Cluster | None = None


@contextlib.contextmanager
def cluster(nodes: int = 1):
    """A cluster of the whole run, brought up by the first who asks, with as many nodes as anybody has asked for; skips where there can be none."""
    global _shared
    if reason := missing_reason():
        pytest.skip(reason)
    if _shared is None:
        _shared = Cluster()
        atexit.register(_shared.stop)
    _shared.start(nodes)
    yield _shared


def load(archive: Path) -> None:
    place = tools()
    server = state_dir() / "pid" / "etcd"
    if place is None or not server.exists():
        return  # somebody else's cluster, which pulls
    mark = (str(archive), server.stat().st_mtime_ns, _shared._nodes if _shared is not None else 0)
    if mark not in _loaded:
        _loaded.add(mark)
        subprocess.run([place / "load", archive], check=True, capture_output=True, timeout=120)


def on_nodes() -> set[str]:
    """What pods leave on nodes that are this machine: tasks, network namespaces, mounts. Records of what has ended a kubelet keeps for a minute."""
    state = state_dir()
    found = {f"netns {name}" for name in os.listdir("/run/netns") if name.startswith("cni-")}
    found |= {f"mount {line.split()[4]}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(state) in line}
    for socket in state.glob("node*/run/containerd.sock"):
        listed = subprocess.run(["ctr", "-a", socket, "-n", "k8s.io", "tasks", "ls", "-q"], capture_output=True, text=True).stdout
        found |= {f"task {name}" for name in listed.split()}
    return found


def _is_over(pid: int) -> bool:
    """Gone, or dead and not buried: whoever adopted it may never look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def tools_image() -> str:
    """An image with git, curl and Python in it, on every node."""
    load(docker_archive(tools_directory(), TOOLS))
    return TOOLS


def docker_archive(root: Path, name: str, *, architecture: str = "amd64", config: dict | None = None) -> Path:
    """A directory as an image of one layer, in the form that `docker save` writes; made once for each content and name."""
    target = (
        Path(tempfile.gettempdir())
        / f"untax-test-archive-{os.geteuid()}-{hashlib.sha256(f'{root}{name}{architecture}{config}'.encode()).hexdigest()[:12]}.tar"
    )
    if target.exists():
        return target
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(root, arcname=".", filter=_as_root)
    data = layer.getvalue()
    about = json.dumps(
        {
            "architecture": architecture,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}"]},
        }
    ).encode()
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    making = target.with_suffix(f".{os.getpid()}")
    with tarfile.open(making, "w") as tar:
        for member, content in (("config.json", about), ("layer.tar", data), ("manifest.json", manifest)):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    making.rename(target)
    return target


def _as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


class Ahead:
    """The kubernetes substrate with some pods begun before they are asked for, and ended behind their holder's back.

    A pod takes a second to come up and half a second to go; a suite of some two hundred leases has better things to wait for. Every
    lease still gets a pod that nobody used. Between two tests the loop stands still while the clock goes on, so an end may run into a
    deadline that nobody missed: it is asked for again by `aclose`, which raises what goes wrong then.
    """

    def __init__(self, substrate, ahead: int = 3) -> None:
        self._substrate = substrate
        self._ahead = ahead
        self._spares: dict = {}
        self._tasks: set[asyncio.Task] = set()
        self._again: list = []

    def __getattr__(self, name):
        return getattr(self._substrate, name)

    async def start(self) -> None:
        await self._substrate.start()

    async def create(self, spec):
        key = (spec.image, spec.user, spec.limits)
        if spec.image != SMALL or spec.user is not None or spec.limits != untax.Limits():
            return self._ended_later(await self._substrate.create(spec))
        spares = self._spares.setdefault(key, [])
        while len(spares) <= self._ahead:
            spares.append(asyncio.ensure_future(self._substrate.create(spec)))
        return self._ended_later(await spares.pop(0))

    def _ended_later(self, sandbox):
        destroy = sandbox.destroy

        async def soon() -> None:
            task = asyncio.ensure_future(destroy())
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._note(done, destroy))

        sandbox.destroy = soon
        return sandbox

    def _note(self, task: asyncio.Task, destroy) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._again.append(destroy)

    async def aclose(self) -> None:
        for spares in self._spares.values():
            for spare in spares:
                await (await spare).destroy()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for destroy in self._again:
            await destroy()
        await self._substrate.aclose()
