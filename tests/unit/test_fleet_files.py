"""The manifests of docs/fleet are what their readers take: Ray's own check, and the command line they start."""

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from untax import __version__
from untax.cli import _parser
from untax.pool.simulation import POLICIES, drawn, read_fleet, simulate

_PLACE = Path(__file__).parents[2] / "docs" / "fleet"


def _read(name):
    return yaml.safe_load((_PLACE / name).read_text())


def test_ray_takes_its_cluster_file():
    util = pytest.importorskip("ray.autoscaler._private.util", reason="ray: not installed")
    config = util.prepare_config(_read("cluster.yaml"))
    util.validate_config(config)
    assert config["available_node_types"]["local.cluster.node"]["max_workers"] == 3
    with pytest.raises(Exception, match=r"Additional properties"):
        util.validate_config({**config, "no_such_key": 1})


def test_the_daemonset_starts_a_server_that_there_is():
    (container,) = _read("daemonset.yaml")["spec"]["template"]["spec"]["containers"]
    program, *words = [*container["command"], *container["args"]]
    arguments = _parser().parse_args(words)
    assert program == "untax" and arguments.drain < _read("daemonset.yaml")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert (arguments.socket, arguments.port) == ("/run/untax/s.sock", container["ports"][0]["containerPort"])
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    paths = (arguments.socket, arguments.token_file, arguments.tls_cert, arguments.tls_key)
    assert {str(Path(path).parent) for path in paths} | {arguments.state_dir} == mounts


def test_every_node_of_a_ray_cluster_has_the_same_image_and_release():
    spec = _read("kuberay.yaml")["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    images = {container["image"] for group in groups for container in group["template"]["spec"]["containers"]}
    assert images == {f"untax-ray:{__version__}"}
    for said in (_image(), " ".join(_read("cluster.yaml")["setup_commands"])):
        assert f"untax[ray]=={__version__}" in said and spec["rayVersion"] in said


def _image():
    """What the manifest says of its image, in words before it."""
    return "\n".join(line for line in (_PLACE / "kuberay.yaml").read_text().splitlines() if line.startswith("#   "))


def test_every_node_has_what_strict_limits_need():
    """Which is the default of `untax fleet up`: root, and the programs by which a disk is limited and repositories are had."""
    assert _parser().parse_args(["fleet", "up"]).limits == "strict"
    for said in (_image(), " ".join(_read("cluster.yaml")["setup_commands"])):
        assert "apt-get install" in said and " btrfs-progs git" in said
    assert _read("cluster.yaml")["auth"]["ssh_user"] == "root"
    spec = _read("kuberay.yaml")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        # Of the pod: the autoscaler's container is added to it, and shares a directory with Ray's.
        assert pod["securityContext"] == {"runAsUser": 0}
        (container,) = pod["containers"]
        assert container["securityContext"]["privileged"] and "runAsUser" not in container["securityContext"]
        assert [one["mountPath"] for one in container["volumeMounts"]] == ["/var/lib/untax"]  # where root's engines keep their state


def _commands(name):
    """The command lines that its words have, and the program that each is of. Those between backticks are only spoken of."""
    found = re.findall(r"(?<!`)((?:/\S+/)?untax) (fleet [^'&`\n]+)", (_PLACE / name).read_text())
    return [(program, _parser().parse_args(shlex.split(words))) for program, words in found]


def test_what_the_manifests_say_to_run_is_there_to_be_run():
    (venv,) = re.findall(r"-m venv (\S+)", " ".join(_read("cluster.yaml")["setup_commands"]))
    assert [program for program, _ in _commands("cluster.yaml")] == [f"{venv}/bin/untax"]
    (_, up), (_, drain) = _commands("kuberay.yaml")
    spec = _read("kuberay.yaml")["spec"]
    (worker,) = spec["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert up.memory_mib < int(worker["resources"]["limits"]["memory"].removesuffix("Gi")) * 1024
    assert up.max_nodes == spec["workerGroupSpecs"][0]["maxReplicas"] + 1  # and the head,
    assert drain.node == "$(hostname -i)"  # which is too small for that


def test_the_file_on_sizing_has_an_answer_for_every_policy():
    description = read_fleet(_PLACE / "sizing.toml").with_rollouts(400)
    trace = drawn(description, 1)
    found = {policy: simulate(description, trace, policy, 1) for policy in POLICIES}
    assert {policy: one.rollouts for policy, one in found.items()} == dict.fromkeys(POLICIES, 200), (
        "the other half brings the nodes to what is usual"
    )
    for one in found.values():
        assert 0 < one.p50_s <= one.p95_s <= one.p99_s < math.inf and one.queue_s < one.mean_s and one.builds > 0
        assert sum(one.shares.values()) == pytest.approx(1)


def test_where_there_is_room_to_choose_the_nearest_state_is_quicker_than_any_node_and_builds_less():
    """As the page says of the same load on twelve nodes."""
    description = read_fleet(_PLACE / "sizing.toml").with_rollouts(2000)
    load = description.arrivals.utilisation * description.fleet.nodes
    description = replace(
        description, fleet=replace(description.fleet, nodes=12), arrivals=replace(description.arrivals, utilisation=load / 12)
    )
    trace = drawn(description, 1)
    near, random = (simulate(description, trace, policy, 1) for policy in ("state-distance", "random"))
    assert near.mean_s < random.mean_s
    assert near.builds < random.builds / 2
