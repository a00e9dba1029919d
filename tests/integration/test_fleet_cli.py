"""`untax fleet` on a real Ray cluster, and what a fleet leaves on its nodes when it goes, whichever way it goes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from tests import raycluster
from tests.leftovers import traces
from tests.serving import PATIENCE_S

import untax
from untax.cli import main

if reason := raycluster.unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

_OF_A_FLEET = {"ray::Keeper", "ray::NodeActor", "untax-agent", "memfd:cell", "cell-maker", "sh"}
"""Its keeper; of a node the actor, the agent, the launcher, who makes sandboxes ahead, and who cleans up after the agent: a child of process 1."""


@pytest.fixture(scope="module")
def cluster(ray_nodes):
    return ray_nodes


@pytest.fixture
def told(cluster, capsys):
    """A command line of `untax fleet`, and the document that it prints."""

    def tell(*words, code=0):
        assert main(["fleet", *words, "--json", "--address", cluster.address]) == code
        return json.loads(capsys.readouterr().out)

    yield tell
    with contextlib.suppress(AssertionError):
        tell("down")


def _is_rays(name: str, words: list[str]) -> bool:
    """Whether a process of a node's is Ray's own. Workers that wait for a task are, actors of ours are not."""
    if name.startswith("ray::"):
        return not name.startswith(("ray::Keeper", "ray::NodeActor"))
    return any(word.startswith("/") and "/site-packages/ray/" in word for word in words)


def _left(cluster, state: Path, groups: list[str]) -> dict[str, list[str]]:
    """What there is of the fleet on any node, by kind; nothing of a kind that there is nothing of."""
    found = traces(state, mark=cluster.mark, groups=groups, is_other=_is_rays)
    return {kind: names for kind, names in found.items() if names}


def _seen(cluster, state: Path, processes: set[str]) -> list[str]:
    """Everything that is looked for afterwards is found now, or nothing would be left whatever happened: the marks of the agents' control groups."""
    groups = _groups(cluster)
    found = _left(cluster, state, groups)
    assert processes <= {one.rpartition(" ")[0] for one in found["processes"]}, found["processes"]
    kinds = {"processes", "mounts", "entries"}
    if os.geteuid() == 0:
        kinds |= {"groups"}
        # The memory controller's group need not be at the top of its tree, and others' are.
        assert any("/memory/" in one or not os.path.exists("/sys/fs/cgroup/memory") for one in found["groups"]), found["groups"]
    if list(state.glob("*/disks/*.btrfs")):
        kinds |= {"loops"}
    assert kinds <= set(found), found
    return groups


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _wait_nothing_left(cluster, state: Path, groups: list[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while left := _left(cluster, state, groups):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def _groups(cluster, *node_ids: str) -> list[str]:
    """The marks of the agents' control groups, which have the agent's process id in their names; of all nodes where none is given."""
    pids = [pid for node_id in node_ids or cluster.ids() for pid in cluster.processes(node_id)]
    return [f"untax-engine-{pid}-" for pid in pids if _comm(pid) == "untax-agent"]


def _of_node(cluster, state: Path, groups: list[str]) -> list[str]:
    """What there is of one node's agent. Ray's processes and the fleet's on other nodes go on."""
    found = traces(state, mark="nothing", groups=groups, is_other=_is_rays)
    return [*(one for names in found.values() for one in names), *map(str, (*state.glob("fleet-*"), *state.glob("*/*engine-*")))]


def _join(cluster, work: str, **popen) -> subprocess.Popen:
    """A program of its own that joins the fleet."""
    program = f"import asyncio, sys, untax\nasync def main():\n  async with untax.Fleet({cluster.address!r}) as fleet:\n    {work}\nasyncio.run(main())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True, **popen)


@contextlib.contextmanager
def _watching(cluster):
    """`untax fleet status --watch`, line by line; interrupted at the end, as a person does it."""
    argv = [sys.executable, "-m", "untax.cli", "fleet", "status", "--watch", "--json", "--address", cluster.address]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as watch:
        try:
            yield lambda: json.loads(watch.stdout.readline())
        finally:
            watch.send_signal(signal.SIGINT)
            code = watch.wait(30)
    assert code == 130


_HOLD = "box = await fleet.acquire(); print(box._engine.member.name, flush=True); sys.stdin.readline(); await box.release(); print(box.ledger.verdict)"

_ACT = """boxes = [await node.acquire() for node in fleet._nodes.values()]
    for box in boxes: await box.run(["true"])
    print("held", flush=True); sys.stdin.readline()
    for box in boxes:
        try: await box.run(["true"])
        except untax.SandboxLost as exc: print(type(exc).__name__, box.ledger.verdict)"""


def test_a_fleet_is_brought_up_looked_at_drained_and_taken_down(cluster, told, tmp_path):
    state = str(tmp_path / "{node}")
    assert "untax fleet up" in told("status", code=2)["message"]
    given = ("--state-dir", state, "--limits", "warn", "--sandboxes", "64", "--idle-s", "600", "--node-resources", '{"CPU": 4}')
    assert "max_nodes=1 is less than min_nodes=2" in told("up", *given, "--min-nodes", "2", "--max-nodes", "1", code=2)["message"]
    up = told("up", *given)
    assert up["wanted"] == 0
    assert up["is_new"] and {one["node_id"] for one in up["nodes"]} == set(cluster.ids())
    assert {one["state"] for one in up["nodes"]} == {"in"} and up["substrate"] == "namespace"

    again = told("up", *given)
    assert not again["is_new"]
    assert "take it down first" in told("up", "--substrate", "process", code=2)["message"]

    with _watching(cluster) as watched, _join(cluster, _HOLD) as program:
        assert {one["state"] for one in watched()["nodes"]} == {"in"}
        name = program.stdout.readline().strip()
        status = told("status")
        assert {one["name"]: one["leases"] for one in status["nodes"]} == {one["name"]: int(one["name"] == name) for one in up["nodes"]}
        assert (
            "no node is named 'nobody'" in told("drain", "nobody", code=2)["message"] and name in told("drain", "nobody", code=2)["message"]
        )
        meant = next(one["node_id"] for one in up["nodes"] if one["name"] == name)
        groups, its_groups, its_state = _seen(cluster, tmp_path, _OF_A_FLEET), _groups(cluster, meant), tmp_path / meant[:12]
        assert len(groups) == 2 and len(its_groups) == 1
        assert all(any(part in one for one in _of_node(cluster, its_state, its_groups)) for part in ("untax-agent", "/engine-", "/fleet-"))
        drained = told("drain", meant[:8], "--no-wait")
        assert drained == {"fleet": "untax", "node": name, "node_id": meant, "drained": False}
        assert {one["name"]: one["state"] for one in told("status")["nodes"]}[name] == "draining"
        while {one["name"]: one["state"] for one in watched()["nodes"]}[name] != "draining":
            pass
        assert "trusted" in program.communicate("\n", timeout=60)[0]  # what is held goes on
    assert told("drain", name)["drained"]
    states = {one["name"]: (one["state"], one["trouble"]) for one in told("status")["nodes"]}
    assert states[name] == ("out", "it was drained")

    end = time.monotonic() + PATIENCE_S
    while left := _of_node(cluster, its_state, its_groups):
        assert time.monotonic() < end, left
        time.sleep(0.05)
    assert len(_seen(cluster, tmp_path, _OF_A_FLEET)) == 1, "the other node's stays"
    assert told("down")["nodes"] == [one for one in states if one != name]
    _wait_nothing_left(cluster, tmp_path, groups)
    assert "no fleet 'untax' is up" in told("down", code=2)["message"]


def test_prometheus_is_given_what_it_needs(cluster, told, tmp_path, free_tcp_port):
    up = told("up", "--state-dir", str(tmp_path / "{node}"), "--limits", "warn", "--port", str(free_tcp_port))
    assert [one["url"] for one in up["nodes"]] == [f"https://127.0.0.{last}:{free_tcp_port}" for last in (2, 3)]
    written = told("access", str(tmp_path / "access"))["written"]
    assert {Path(one).name: os.stat(one).st_mode & 0o777 for one in written} == {"token": 0o600, "ca.pem": 0o600, "prometheus.yml": 0o600}

    import ssl

    import yaml

    (job,) = yaml.safe_load((tmp_path / "access" / "prometheus.yml").read_text())["scrape_configs"]
    context = ssl.create_default_context(cafile=job["tls_config"]["ca_file"])
    token = Path(job["authorization"]["credentials_file"]).read_text()
    (target,) = job["static_configs"][0]["targets"]
    assert target == f"127.0.0.2:{free_tcp_port}"  # the head
    assert f"# others that were there: 127.0.0.3:{free_tcp_port}" in (tmp_path / "access" / "prometheus.yml").read_text()
    url = f"{job['scheme']}://{target}{job['metrics_path']}"
    end = time.monotonic() + PATIENCE_S
    while True:  # agents are told who else there is a moment after the command returns
        said = httpx.get(url, headers={"authorization": f"Bearer {token}"}, verify=context, trust_env=False).text
        up = [line for line in said.splitlines() if line.startswith("untax_node_up{")]
        if len(up) == 2 or time.monotonic() > end:
            break
        time.sleep(0.05)
    assert len(up) == 2 and all(line.endswith(" 1") for line in up)


def _kill_all(cluster, told):
    """Who keeps it and every agent at once."""
    import ray

    ray.init(address=cluster.address, namespace="untax", log_to_driver=False, configure_logging=False)
    actors = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["name"].startswith("untax:")]
    assert len(actors) == 3
    for name in actors:  # the keeper, `untax:untax`, is the first
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, "untax"))
    ray.shutdown()


@pytest.mark.parametrize("ended", [lambda cluster, told: told("down"), _kill_all], ids=["taken down", "killed"])
def test_a_fleet_leaves_nothing_on_any_node_whichever_way_it_goes(cluster, told, tmp_path, ended):
    """With a lease held on each node. Where everybody is killed nobody of them can tidy up, and all the same nothing stays."""
    told("up", "--state-dir", str(tmp_path / "{node}"), "--limits", "warn")
    with _join(cluster, _ACT, stderr=subprocess.PIPE) as program:
        program.stdout.readline()
        groups = _seen(cluster, tmp_path, {*_OF_A_FLEET, "cell"})  # a ferry to the node that the client is not on, and what is in sandboxes
        ended(cluster, told)
        _wait_nothing_left(cluster, tmp_path, groups)
        said, complained = program.communicate("\n", timeout=60)
    assert said == "SandboxLost infra\n" * 2, complained


def test_nodes_that_cannot_enforce_limits_which_are_strict_are_out_with_the_words_of_a_lease(cluster, told, tmp_path):
    said = told("up", "--state-dir", str(tmp_path / "{node}"), "--substrate", "process", code=125)["message"]
    for name in ("127.0.0.2", "127.0.0.3"):
        assert f"node {name}: SubstrateUnavailable: cpus cannot be enforced: the process substrate enforces nothing" in said
    _wait_nothing_left(cluster, tmp_path, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_leaves_nothing(cluster, told, tmp_path, number):
    """Ray's own handler of SIGTERM would end it after 3 s, and says so with a trace."""
    argv = [sys.executable, "-m", "untax.cli", "fleet", "up", "--address", cluster.address, "--state-dir", str(tmp_path / "{node}")]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as up:
        assert "bringing" in up.stderr.readline()
        end = time.monotonic() + PATIENCE_S
        while not any(_comm(pid).startswith("ray::NodeActor") for node_id in cluster.ids() for pid in cluster.processes(node_id)):
            if up.poll() is not None or time.monotonic() > end:
                up.kill()
                pytest.fail(f"it has no actor: {up.communicate()}")
            time.sleep(0.005)
        up.send_signal(number)
        complained = up.communicate(timeout=60)[1]
        assert up.returncode in (0, 128 + number), complained
        assert "***" not in complained
    if up.returncode == 0:
        pytest.fail("it was up before it could be interrupted")
    assert "no fleet" in told("status", code=2)["message"]
    _wait_nothing_left(cluster, tmp_path, [])


def test_what_a_person_sees(cluster, told, tmp_path, capsys):
    told("up", "--state-dir", str(tmp_path / "{node}"), "--limits", "warn")
    assert main(["fleet", "status", "--address", cluster.address]) == 0
    first, _, *nodes = capsys.readouterr().out.splitlines()
    assert f"fleet untax on {cluster.address} (untax {untax.__version__}, namespace): 2 nodes (2 in), 0 leases" in first
    assert [line.split()[0] for line in nodes] == ["127.0.0.2", "127.0.0.3"]
