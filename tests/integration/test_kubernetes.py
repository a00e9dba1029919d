"""Pods of a real cluster with two nodes: how they come up, how they are lost, who may do what, and that nothing is left."""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tests import kubehost

import untax
from untax.core.substrate import Orchestrated
from untax.substrates import _kubernetes_access, kubernetes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster():
    with kubehost.cluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def engine(cluster, tmp_path):
    """`async with engine(option=…)`: an engine on the cluster, with a namespace of the test's own when asked for."""

    @contextlib.asynccontextmanager
    async def made(**options):
        await asyncio.to_thread(cluster.wait_schedulable)  # after whatever the test before it did to a node
        options = {"kubeconfig": cluster.kubeconfig, "state_dir": str(tmp_path / "state"), **options}
        async with untax.Engine("kubernetes", **options) as engine:
            yield engine

    return made


@pytest.fixture(scope="module")
def one(cluster, _runner, tmp_path_factory):
    engine = untax.Engine("kubernetes", kubeconfig=cluster.kubeconfig, state_dir=tmp_path_factory.mktemp("state"))
    _runner.run(engine.start())
    _standing.update(left(cluster))
    yield engine
    _standing.clear()
    _runner.run(engine.aclose())
    assert left(cluster) == []


@pytest.fixture
def shared(cluster, one):
    """`async with shared()`: one engine for the tests that only want a pod of it."""

    @contextlib.asynccontextmanager
    async def given():
        await asyncio.to_thread(cluster.wait_schedulable)
        yield one

    return given


@pytest.fixture
def namespace(cluster, request):
    """A namespace of its own, with labels when the test names some."""
    name = f"untax-test-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}"
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": getattr(request, "param", {})}})
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


SPEC = untax.EnvSpec(image=kubehost.SMALL, isolation="container")


_standing: set[str] = set()
"""Of the engine that the tests share, as long as it lives."""


def left(cluster, namespace="default") -> list[str]:
    found = cluster.kubectl(
        "get", "pods,configmaps,leases,networkpolicies", "-n", namespace, "-l", "app.kubernetes.io/managed-by=untax", "-o", "name"
    )
    return [one for one in found.split() if one not in _standing]


def spec_of(**fields):
    import dataclasses

    return dataclasses.replace(SPEC, **fields)


# ---- coming up ----


async def test_the_parts_of_coming_up_are_told(shared):
    """Scheduling, image and start as the cluster told of them; the control plane's share lies within create and ready."""
    async with shared() as on, on.lease(SPEC) as box:
        sandbox = box._sandbox
        parts = sandbox.timeline.parts_ns()
        spans = box.ledger.metrics()

        assert isinstance(sandbox, Orchestrated)
        assert {"api", "schedule", "start"} <= set(parts)
        assert 0 < sandbox.control_plane_ns <= (spans["create_s"] + spans["ready_s"]) * 1e9


async def test_an_image_without_a_shell_or_tar_will_do(shared, tmp_path):
    """The cell comes by a ConfigMap; the image has one program."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox: apt install busybox-static")
    (tmp_path / "bare/bin").mkdir(parents=True)
    shutil.copy2(busybox, tmp_path / "bare/bin/true")
    kubehost.load(
        kubehost.docker_archive(
            tmp_path / "bare", f"untax.local/bare:{os.getpid()}", config={"Env": ["PATH=/bin", "FROM_IMAGE=1"], "WorkingDir": "/work"}
        )
    )
    async with shared() as on, on.lease(spec_of(image=f"untax.local/bare:{os.getpid()}")) as box:
        assert (await box.run(["true"])).exit_code == 0
        assert (await box.run(["sh", "-c", "true"])).exit_code == 127
        assert (await box.shell("true")).exit_code == 127
        await box.write("/workspace/f", b"x")
        assert await box.read("/workspace/f") == b"x"
        assert box._sandbox.facts().env == {"FROM_IMAGE": "1"}  # what the image sets is there
        assert box._sandbox.facts().workdir == "/work"


async def test_the_incumbent_runs_a_command_as_kubectl_does(shared):
    async with shared() as on, on.lease(SPEC) as box:
        sandbox = box._sandbox
        both = await sandbox.run_incumbent(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=20)
        missing = await sandbox.run_incumbent(["no-such-program"], timeout_s=20)
        cut = await sandbox.run_incumbent(["sh", "-c", "echo begun; sleep 5"], timeout_s=1)
        much = await sandbox.run_incumbent(["sh", "-c", "yes | head -c 3000000"], timeout_s=20)

    assert (both.exit_code, both.stdout, both.stderr) == (3, b"out\n", b"err\n")
    assert missing.exit_code == 127
    assert (cut.outcome, cut.stdout) == ("timeout", b"begun\n")
    assert (len(much.stdout), much.dropped_stdout) == (1 << 20, 3_000_000 - (1 << 20))


async def test_a_pod_may_be_root_s_when_that_is_asked_for(shared):
    """Then commands may also run as other users of the image."""
    async with shared() as on, on.lease(spec_of(user="root")) as box:
        assert (await box.run(["id", "-u"])).text == "0\n"
        assert (await box.run(["id", "-un"], user="other")).text == "other\n"


async def test_a_runtime_class_gives_another_boundary(engine):
    async with engine(runtime_class="gvisor", isolation="gvisor") as on:
        async with on.lease(spec_of(isolation="gvisor")) as box:
            assert b"gVisor" in (await box.run(["dmesg"])).stdout or "4.4.0" in (await box.run(["cat", "/proc/version"])).text
            assert (await box.shell("exit 3")).exit_code == 3
            assert (await box.run(["sleep", "9"], timeout_s=0.5)).timed_out
            async with box.session() as bash:
                await bash.run("cd /tmp")
                assert (await bash.run("pwd")).text == "/tmp\n"


async def test_a_level_that_the_runtime_class_does_not_give_is_refused(engine):
    with pytest.raises(untax.UsageError, match="handler"):
        async with engine(runtime_class="gvisor", isolation="vm"):
            pass
    with pytest.raises(untax.UsageError, match="no runtime class"):
        async with engine(runtime_class="no-such-class"):
            pass


async def test_a_template_goes_over_the_defaults_and_not_over_what_makes_a_pod_ours(engine, cluster):
    template = {
        "metadata": {"labels": {"team": "a", "untax/owner": "somebody-else"}},
        "spec": {"hostname": "mine", "containers": [{"name": "cell", "command": ["sleep"], "env": [{"name": "GIVEN", "value": "1"}]}]},
    }
    async with engine(template=template) as on, on.lease(SPEC) as box:
        pod = json.loads(cluster.kubectl("get", "pod", box.id, "-o", "json"))
        assert (await box.run(["cat", "/proc/sys/kernel/hostname"])).text == "mine\n"
        assert (await box.shell("echo $GIVEN")).text == "1\n"
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["untax/owner"] != "somebody-else"


@pytest.mark.parametrize("namespace", [{"pod-security.kubernetes.io/enforce": "restricted"}], indirect=True)
async def test_6_5_a_restricted_namespace_admits_our_pods(engine, namespace):
    """Without the container that cuts the network off, which is then said and not hidden."""
    async with engine(namespace=namespace) as on, on.lease(SPEC) as box:
        assert (await box.run(["id", "-u"])).text == "1000\n"
        assert "network" in {one.name for one in box.ledger.unenforced}
        with pytest.raises(untax.SubstrateUnavailable, match="Pod Security"):
            await on.acquire(spec_of(user="root"))


# ---- credentials ----


def kubeconfig(cluster, path: Path, user: dict, **context) -> str:
    config = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    config["users"] = [{"name": "u", "user": user}]
    config["contexts"] = [{"name": "c", "context": {"cluster": config["clusters"][0]["name"], "user": "u", **context}}]
    config["current-context"] = "c"
    path.write_text(yaml.safe_dump(config))
    return str(path)


ROLE = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create", "delete"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list", "watch"]},
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "list", "patch", "delete"]},
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["create", "delete"]},
]
EXEC = {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]}


def account(cluster, namespace, rules) -> str:
    """A service account with these rights, and its token."""
    meta = {"name": "worker", "namespace": namespace}
    rbac = "rbac.authorization.k8s.io"
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "worker"},
            "subjects": [{"kind": "ServiceAccount", **meta}],
        },
    )
    return cluster.kubectl("create", "token", "worker", "-n", namespace).strip()


async def test_the_role_in_the_documentation_is_enough_by_plugin_and_in_a_pod(engine, cluster, namespace, tmp_path, monkeypatch):
    """A service account with just those rights: by a credential plugin, and as a pod of the cluster sees itself."""
    documented = yaml.safe_load((Path(__file__).parents[2] / "docs/kubernetes.md").read_text().split("```yaml")[1].split("```")[0])
    assert documented["rules"] == [*ROLE, EXEC]
    token = account(cluster, namespace, [*ROLE, EXEC])
    plugin = tmp_path / "plugin"
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": token}}
    plugin.write_text(f"#!/bin/sh\n[ -n \"$KUBERNETES_EXEC_INFO\" ] || exit 1\ncat <<'E'\n{json.dumps(answer)}\nE\n")
    plugin.chmod(0o755)
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "interactiveMode": "Never"}}
    async with engine(kubeconfig=kubeconfig(cluster, tmp_path / "by-plugin", user, namespace=namespace)) as on, on.lease(SPEC) as box:
        assert (await box.run(["true"])).exit_code == 0

    mounted = tmp_path / "serviceaccount"
    mounted.mkdir()
    (mounted / "token").write_text(token)
    (mounted / "namespace").write_text(namespace)
    config = yaml.safe_load(Path(cluster.kubeconfig).read_text())["clusters"][0]["cluster"]
    (mounted / "ca.crt").write_bytes(base64.b64decode(config["certificate-authority-data"]))
    host, port = config["server"].removeprefix("https://").split(":")
    monkeypatch.setattr(_kubernetes_access, "_IN_CLUSTER", mounted)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    async with engine(kubeconfig=None) as on, on.lease(SPEC) as box:
        assert (await box.run(["true"])).exit_code == 0
    assert left(cluster, namespace) == []


async def test_a_role_without_exec_is_refused_with_the_right_that_is_missing(engine, cluster, namespace, tmp_path):
    token = account(cluster, namespace, ROLE)
    config = kubeconfig(cluster, tmp_path / "config", {"token": token}, namespace=namespace)
    async with engine(kubeconfig=config) as on:
        with pytest.raises(untax.SubstrateUnavailable, match="pods/exec"):
            await on.acquire(SPEC)
    assert left(cluster, namespace) == []


async def test_a_token_that_is_none_is_refused(engine, cluster, tmp_path):
    with pytest.raises(untax.SubstrateUnavailable, match="401"):
        async with engine(kubeconfig=kubeconfig(cluster, tmp_path / "config", {"token": "wrong"})):
            pass


# ---- what a cluster refuses ----


async def test_a_quota_that_is_used_up_says_so_and_leaks_nothing(engine, cluster, namespace):
    cluster.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q", "namespace": namespace}, "spec": {"hard": {"pods": "1"}}}
    )
    async with engine(namespace=namespace) as on, on.lease(SPEC) as box:
        with pytest.raises(untax.SubstrateUnavailable, match="exceeded quota"):
            await on.acquire(SPEC)
        assert (await box.run(["true"])).exit_code == 0
    assert left(cluster, namespace) == []


async def test_a_pod_that_fits_nowhere_ends_at_its_deadline_in_the_scheduler_s_words(engine, cluster):
    async with engine(node_selector={"no-such": "node"}, ready_timeout_s=1.5) as on:
        with pytest.raises(untax.ReadinessTimeout, match=r"0/2 nodes are available.*didn't match Pod's node affinity/selector"):
            await on.acquire(SPEC)
    assert left(cluster) == []


async def test_a_missing_image_is_an_error_of_its_own(engine, cluster):
    async with engine(pull_policy="Never") as on:
        with pytest.raises(untax.CreateError, match="ErrImageNeverPull"):
            await on.acquire(spec_of(image="untax.local/no-such:1"))
        for image in ("host", "dir:/", "debian:bookworm", "a b"):
            with pytest.raises(untax.UsageError, match="image"):
                await on.acquire(spec_of(image=image))
    assert left(cluster) == []


async def test_an_image_for_another_processor_is_refused(engine, cluster, tmp_path):
    """Its programs would not run; that is not a result of theirs."""
    import dataclasses

    arm = tmp_path / "arm/bin"
    arm.mkdir(parents=True)
    source = tmp_path / "x.c"
    source.write_text("int main(void) { return 0; }\n")
    if subprocess.run(["aarch64-linux-gnu-gcc", "-static", "-o", arm / "sh", source], capture_output=True).returncode != 0:
        pytest.skip("aarch64-linux-gnu-gcc: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    name = f"untax.local/arm:{os.getpid()}"
    kubehost.load(kubehost.docker_archive(tmp_path / "arm", name))  # with a label that lies, as many do
    async with engine() as on:
        with pytest.raises(untax.CreateError, match="another processor"):
            await on.acquire(dataclasses.replace(SPEC, image=name))
    assert left(cluster) == []


async def test_a_namespace_that_is_not_there_is_named(engine):
    with pytest.raises(untax.SubstrateUnavailable, match="no-such-namespace"):
        async with engine(namespace="no-such-namespace"):
            pass


# ---- being lost, and not ----


async def test_a_stream_that_breaks_while_the_pod_lives_is_opened_again(shared):
    """The command that runs meanwhile gives its result once; sessions go on."""
    async with shared() as on, on.lease(SPEC) as box:
        async with box.session() as bash:
            await bash.run("X=7")
            running = asyncio.ensure_future(box.shell("echo x >>ran; sleep 1; cat ran"))
            await asyncio.sleep(0.2)
            box._sandbox._stream._carrier._transport.abort()
            assert (await running).text == "x\n"
            assert (await bash.run("echo $X")).text == "7\n"
        assert box._sandbox._stream.reopened == 1
    assert box.ledger.verdict == "trusted"


async def test_x19_c9_a_pod_that_is_deleted_is_lost_at_once(shared, cluster):
    async with shared() as on:
        box = await on.acquire(SPEC)
        running = asyncio.ensure_future(box.run(["sleep", "60"]))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(cluster.kubectl, "delete", "pod", box.id, "--force", "--grace-period=0", "--wait=false")
        with pytest.raises(untax.SandboxLost, match="deleted"):
            await asyncio.wait_for(running, 10)
        await box.release()
        assert box.ledger.verdict == "infra"


async def test_an_eviction_is_a_lost_sandbox_with_its_reason(shared, cluster):
    async with shared() as on:
        box = await on.acquire(SPEC)
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": box.id, "namespace": "default"}}
        running = asyncio.ensure_future(box.run(["sleep", "60"]))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(
            cluster.kubectl, "create", "--raw", f"/api/v1/namespaces/default/pods/{box.id}/eviction", "-f", "-", stdin=json.dumps(eviction)
        )
        with pytest.raises(untax.SandboxLost, match=r"[Ee]vict"):
            await asyncio.wait_for(running, 10)
        await box.release()


async def test_a_preemption_is_a_lost_sandbox_with_its_reason(engine, cluster):
    """Somebody of higher priority takes the room of ours."""
    cluster.apply({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "untax-high"}, "value": 1000})
    node = json.loads(cluster.kubectl("get", "node", "node1", "-o", "json"))["status"]["allocatable"]["cpu"]
    most = f"{int(node) * 1000 - 200}m"
    other = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "untax-rival"},
        "spec": {
            "priorityClassName": "untax-high",
            "nodeSelector": {"kubernetes.io/hostname": "node1"},
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": kubehost.SMALL, "command": ["sleep", "600"], "resources": {"requests": {"cpu": most}}}],
        },
    }
    try:
        async with engine(node_selector={"kubernetes.io/hostname": "node1"}, request_cpus=1.0) as on:
            box = await on.acquire(SPEC)
            running = asyncio.ensure_future(box.run(["sleep", "60"]))
            await asyncio.to_thread(cluster.apply, other)
            with pytest.raises(untax.SandboxLost, match=r"[Pp]reempt"):
                await asyncio.wait_for(running, 20)
            await box.release()
    finally:
        cluster.kubectl("delete", "pod", "untax-rival", "--force", "--grace-period=0", "--ignore-not-found")
        cluster.kubectl("delete", "priorityclass", "untax-high", "--ignore-not-found")


async def test_an_agent_that_ends_is_a_lost_sandbox(shared, cluster):
    """The container is gone although the pod's object is there."""
    async with shared() as on:
        box = await on.acquire(SPEC)
        pid = (await box.run(["sh", "-c", "sleep 60 & echo $!"])).text
        assert pid
        inside = subprocess.run(["pgrep", "-f", "agent --held untax"], capture_output=True, text=True).stdout.split()
        agents = [one for one in inside if _is_of(one, box.id)]
        os.kill(int(agents[0]), signal.SIGKILL)
        with pytest.raises(untax.SandboxLost):
            await asyncio.wait_for(box.run(["true"], timeout_s=15), 20)
        await box.release()


def _is_of(pid: str, name: str) -> bool:
    with contextlib.suppress(OSError):
        return (
            f"HOSTNAME={name}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            and Path(f"/proc/{pid}/comm").read_text() == "cell-agent\n"
        )
    return False


async def test_x18_c8_an_api_server_that_hangs_fails_calls_by_their_deadline_and_is_used_again(engine, cluster):
    async with engine(request_timeout_s=2) as on:
        server = cluster.pid("kube-apiserver")
        os.kill(server, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(untax.BackendError, match="did not answer"):
                await on.acquire(SPEC)
            assert time.monotonic() - began < 8
        finally:
            os.kill(server, signal.SIGCONT)
        async with on.lease(SPEC) as box:
            assert (await box.run(["true"])).exit_code == 0
    assert left(cluster) == []


async def test_x18_an_api_server_that_is_restarted_costs_no_sandbox(engine, cluster):
    """Every stream and watch breaks; the pods live, and so do their boxes."""
    if os.environ.get("KUBECONFIG"):
        pytest.skip("user: the cluster is not ours to restart")
    async with engine(reopen_s=60) as on, on.lease(SPEC) as box:
        await box.write("kept", b"1")
        running = asyncio.ensure_future(box.shell("sleep 3; cat kept", timeout_s=90))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(cluster.end, "kube-apiserver")
        await asyncio.to_thread(cluster.start, 2)
        assert (await running).text == "1"
        assert box._sandbox._stream.reopened >= 1
        async with on.lease(SPEC) as another:  # the watch goes on too
            assert (await another.run(["true"])).exit_code == 0


async def test_a_node_that_is_lost_loses_its_sandboxes_and_no_others(engine, cluster):
    """A hung kubelet: its boxes are lost by their deadlines. A dead one: when their streams cannot be opened again."""
    if os.environ.get("KUBECONFIG"):
        pytest.skip("user: the nodes are not ours to end")
    async with (
        engine(reopen_s=3, node_selector={"kubernetes.io/hostname": "node2"}) as far,
        engine(node_selector={"kubernetes.io/hostname": "node1"}) as near,
    ):
        there, other, here = await far.acquire(SPEC), await far.acquire(SPEC), await near.acquire(SPEC)
        kubelet = cluster.pid("kubelet-2")
        os.kill(kubelet, signal.SIGSTOP)
        try:
            with pytest.raises(untax.SandboxLost):
                await asyncio.wait_for(there.run(["true"], timeout_s=1), 10)
        finally:
            os.kill(kubelet, signal.SIGCONT)
        await asyncio.to_thread(cluster.end, "kubelet-2")
        with pytest.raises(untax.SandboxLost, match="could not be opened again"):
            await asyncio.wait_for(other.run(["sleep", "30"], timeout_s=60), 30)
        assert (await here.run(["true"])).exit_code == 0
        await asyncio.to_thread(cluster.start, 2)  # a new kubelet, so that what is left there can go
        for box in (there, other, here):
            await box.release()
    assert left(cluster) == []


# ---- leaving nothing ----

_KILLED = """
import asyncio, sys, untax
async def main():
    engine = untax.Engine("kubernetes", kubeconfig=sys.argv[1], state_dir=sys.argv[2])
    await engine.start()
    spec = untax.EnvSpec(image=sys.argv[3], isolation="container")
    await asyncio.gather(*(engine.acquire(spec) for _ in range(3)))
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_what_a_killed_engine_left_is_swept_by_the_next(engine, cluster, tmp_path):
    """At once on its own machine, by a lock that the kernel dropped; the sandboxes of the living stay."""
    async with engine(state_dir=str(tmp_path / "living")) as living, living.lease(SPEC) as box:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _KILLED, cluster.kubeconfig, str(tmp_path / "state"), kubehost.SMALL, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert await asyncio.wait_for(process.stdout.readline(), 60) == b"up\n"
        finally:
            process.kill()
            await process.wait()
        assert len(left(cluster)) == 4 + 3 + 3
        async with engine():
            for _ in range(100):
                pods = [name for name in left(cluster) if name.startswith("pod/")]
                if len(pods) == 1:
                    break
                await asyncio.sleep(0.1)
            assert pods == [f"pod/{box.id}"]
        assert (await box.run(["true"])).exit_code == 0
    assert left(cluster) == []


async def test_an_owner_on_another_machine_is_dead_when_its_lease_is_old(engine, cluster):
    labels = {"app.kubernetes.io/managed-by": "untax"}

    def lease(owner, renewed):
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": f"untax-{owner}", "labels": {**labels, "untax/owner": owner}},
            "spec": {"holderIdentity": owner, "leaseDurationSeconds": 60, "renewTime": renewed},
        }

    now = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
    cluster.apply(lease("old", "2020-01-01T00:00:00.000000Z"), lease("new", now))
    async with engine():
        found = [name for name in left(cluster) if "old" in name or "new" in name]
    cluster.kubectl("delete", "lease", "untax-new")
    assert found == ["lease.coordination.k8s.io/untax-new"]


async def test_cycles_leave_nothing_behind(engine, cluster):
    """In the cluster, and on its nodes: processes, network namespaces, mounts. `python -m benchmarks.kubernetes` does fifty."""
    before = kubehost.on_nodes()
    async with engine() as on:

        async def cycle(n):
            async with on.lease(SPEC) as box:
                assert (await box.run(["echo", str(n)])).text == f"{n}\n"

        gate = asyncio.Semaphore(6)

        async def gated(n):
            async with gate:
                await cycle(n)

        await asyncio.gather(*(gated(n) for n in range(8)))
    assert left(cluster) == []
    for _ in range(100):  # the kubelets clear away behind the API server's back, and tell nobody
        after = kubehost.on_nodes()
        if after <= before:
            break
        await asyncio.sleep(0.2)
    assert after - before == set()


# ---- no cluster at all ----


async def test_no_cluster_is_told_with_a_remedy(tmp_path, monkeypatch, cluster):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "set KUBECONFIG" in kubernetes.make().unavailable_reason()

    config = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    assert "cannot be reached" in kubernetes.make(kubeconfig=str(tmp_path / "config")).unavailable_reason()
    with pytest.raises(untax.SubstrateUnavailable, match="cannot be reached"):
        async with untax.Engine("kubernetes", kubeconfig=str(tmp_path / "config"), state_dir=tmp_path / "state"):
            pass


def test_the_doctor_s_evidence_names_the_server_and_the_rights(cluster):
    lines = kubernetes.make(kubeconfig=cluster.kubeconfig).evidence()

    assert any("Kubernetes v1." in line for line in lines)
    assert any("RBAC: all that is needed is allowed" in line for line in lines)
    assert any("gvisor (runsc)" in line for line in lines)


def test_a_cluster_takes_the_daemonset_of_the_documentation(cluster, namespace):
    """As the API server checks it, defaults and admission included; nothing is made."""
    text = (
        (Path(__file__).parents[2] / "docs" / "fleet" / "daemonset.yaml").read_text().replace("namespace: untax", f"namespace: {namespace}")
    )
    said = cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    assert "daemonset.apps/untax created" in said
