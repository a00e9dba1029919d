"""`untax fleet`: what people see of a fleet, and what they are told when there is none."""

import json

import pytest

from untax.cli import main
from untax.cli._fleet_table import fleet_lines
from untax.pool.status import PoolStatus, StageStatus
from untax.service.fleet import NodeStatus


def _pool(**idle: int) -> PoolStatus:
    stages = tuple(StageStatus(name, name, "", count, 1, 0, 2, 0, 0.0) for name, count in idle.items())
    return PoolStatus("namespace", stages, 9, 100, 0.0, None, 4, 8, *(0 for _ in range(8)), 0.0, 0.0, 0.0)


NODES = (
    NodeStatus("a" * 56, "one", "https://10.0.0.1:1", leases=2, release="1", pool=_pool(image=3, deps=1)),
    NodeStatus("b" * 56, "two", "https://10.0.0.2:1", is_draining=True, leases=1, release="1", pool=_pool(image=5)),
    NodeStatus("c" * 56, "three", trouble="its clock is 90 s ahead: set it\x1b[2J"),
)


def test_every_node_has_a_line_with_what_is_idle_by_stage():
    first, head, one, two, three, *_ = fleet_lines("fleet x", NODES)

    assert first == "fleet x: 3 nodes (1 in, 1 draining, 1 out), 3 leases"
    assert head.split() == ["node", "id", "state", "leases", "idle", "image", "idle", "deps", "starting", "waiting", "sandboxes"]
    assert one.split() == ["one", "a" * 12, "in", "2", "3", "1", "4", "4", "9"]
    assert two.split() == ["two", "b" * 12, "draining", "1", "5", "0", "4", "2", "9"]
    assert three.split() == ["three", "c" * 12, "out", *["–"] * 6]


def test_a_node_that_is_out_is_named_with_the_reason_and_cannot_write_to_the_terminal():
    last = list(fleet_lines("fleet x", NODES))[-1]

    assert last.startswith("  node three: its clock is 90 s ahead: set it")
    assert "\x1b" not in last


def test_a_fleet_of_nobody_is_one_line():
    assert list(fleet_lines("fleet x", ())) == ["fleet x: 0 nodes (none), 0 leases"]


def test_the_document_has_what_the_table_has():
    found = NODES[0].as_dict()

    assert (found["state"], found["leases"], found["idle"], found["waiting"]) == ("in", 2, {"image": 3, "deps": 1}, 4)
    assert found["pool"]["starting"] == 4
    assert json.loads(json.dumps(NODES[2].as_dict()))["trouble"]


def test_without_a_cluster_it_says_how_to_start_one(capsys, free_tcp_port):
    for action in (["up"], ["status"], ["drain", "x"], ["down"]):
        assert main(["fleet", *action, "--json", "--address", f"127.0.0.1:{free_tcp_port}"]) == 125
        said = json.loads(capsys.readouterr().out)
        assert said["error"] == "SubstrateUnavailable" and "ray start" in said["message"]


def test_an_address_that_is_none_is_wrong_usage(capsys):
    assert main(["fleet", "status", "--json", "--address", "ray://x:1"]) == 2
    assert "HOST:PORT" in json.loads(capsys.readouterr().out)["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--store-budget-mib", "-5"], "--store-budget-mib must be a whole number of MiB from 1 on, not -5"),
        (["up", "--name", "a b"], "unlike 'a b'"),
        (["status", "--name", "a b"], "unlike 'a b'"),
        (["up", "--node-resources", "[1]"], "not a JSON object such as '{\"CPU\": 8}': '[1]'"),
        (["up", "--node-resources", "eight"], "not a JSON object such as '{\"CPU\": 8}': 'eight'"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_cluster_is_asked(capsys, free_tcp_port, words, said):
    """There is none at this address, which would be 125."""
    try:
        code = main(["fleet", *words, "--json", "--address", f"127.0.0.1:{free_tcp_port}"])
    except SystemExit as exc:
        code = exc.code
    found = capsys.readouterr()
    assert code == 2 and said in (json.loads(found.out)["message"] if found.out else found.err)
