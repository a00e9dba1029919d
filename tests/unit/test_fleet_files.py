"""The manifests of docs/fleet are what their readers take: Ray's own check, and the command line they start."""

from pathlib import Path

import pytest
import yaml

from untax import __version__
from untax.cli import _parser
from untax.pool.simulation import read_fleet

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
    assert f"untax[ray]=={__version__}" in _read("cluster.yaml")["setup_commands"][0]
    assert spec["rayVersion"] in _read("cluster.yaml")["setup_commands"][0]


def test_the_simulator_reads_the_file_on_sizing():
    assert read_fleet(_PLACE / "sizing.toml").with_rollouts(10) is not None
