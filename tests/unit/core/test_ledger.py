"""The account adds up: parts share their ends, and what no part covers is said."""

import json
import pickle

import pytest

from untax.core import ledger as module
from untax.core.ledger import ActionRecord, EgressRecord, Ledger
from untax.core.stage import Fetched
from untax.core.substrate import Unenforced
from untax.testing import FakeClock


def make(clock=None):
    clock = clock or FakeClock(start_ns=1_000)
    return Ledger(rollout="r1", substrate="fake", isolation="vm", start_ns=clock(), clock=clock)


def a_rollout():
    """queue 10, create 20, ready 5, then: holder 7, an action of 30 (20 inside, 2 to observe), holder 3, cleanup 4."""
    ledger = make()
    ledger.add("queue", 1_000, 1_010)
    ledger.add("create", 1_010, 1_030)
    ledger.add("ready", 1_030, 1_035)
    ledger.held(1_035)
    ledger.record(ActionRecord("run", 1_042, 1_070, 1_072, 20, "exited"))
    ledger.released(1_075)
    ledger.add("cleanup", 1_075, 1_079)
    ledger.closed(1_079)
    return ledger


def test_the_parts_add_up_to_the_whole():
    numbers = a_rollout().metrics()

    parts = {name: round(numbers[f"{name}_s"] * 1e9) for name in (*module.PARTS, "holder", "unattributed", "total", "tax")}
    assert parts == {
        "queue": 10,
        "create": 20,
        "ready": 5,
        "setup": 0,
        "action": 20,
        "dispatch": 8,
        "observe": 2,
        "reset": 0,
        "cleanup": 4,
        "holder": 10,
        "unattributed": 0,
        "total": 79,
        "tax": 49,
    }


def test_neighbouring_parts_share_one_timestamp():
    spans = a_rollout().spans

    assert [span.name for span in spans] == ["queue", "create", "ready", "dispatch", "action", "observe", "cleanup"]
    assert [span.start_ns for span in spans[1:3]] == [span.end_ns for span in spans[:2]]
    assert spans[3].end_ns == spans[4].start_ns
    assert spans[4].end_ns == spans[5].start_ns


def test_what_no_part_covers_is_unattributed():
    ledger = make()
    ledger.add("create", 1_000, 1_010)
    ledger.held(1_014)  # four nanoseconds are nobody's
    ledger.released(1_020)
    ledger.closed(1_020)

    numbers = ledger.metrics()
    assert round(numbers["unattributed_s"] * 1e9) == 4
    assert round(numbers["holder_s"] * 1e9) == 6


def test_stages_that_came_from_another_node_are_told_from_those_that_were_built():
    """In the account, in words and in JSON; and their seconds are plain ones."""
    ledger = make()
    ledger.put_in_place({"image": Fetched(2.5, 0.5), "deps": 4.0})

    assert (ledger.stages, ledger.fetched) == ({"image": 2.5, "deps": 4.0}, {"image": 0.5})
    assert all(type(seconds) is float for seconds in ledger.stages.values())
    assert "fetched: image in 2.500 s" in str(ledger) and "built: deps in 4.000 s" in str(ledger)
    assert json.loads(ledger.to_json())["fetched"] == {"image": 0.5}
    assert "fetched" not in json.loads(make().to_json())
    assert pickle.loads(pickle.dumps(Fetched(2.5, 0.5))).fetch_s == 0.5


def test_actions_that_overlap_are_each_counted_and_cover_time_once():
    ledger = make()
    ledger.held(1_000)
    ledger.record(ActionRecord("run", 1_000, 1_050, 1_050, 40, "exited"))
    ledger.record(ActionRecord("run", 1_010, 1_060, 1_060, 40, "exited"))
    ledger.released(1_070)
    ledger.closed(1_070)

    numbers = ledger.metrics()
    assert round(numbers["action_s"] * 1e9) == 80
    assert round(numbers["holder_s"] * 1e9) == 10


def test_a_cell_that_claims_too_much_time_gets_no_more_than_there_was():
    ledger = make()
    ledger.record(ActionRecord("run", 1_000, 1_050, 1_050, 10**18, "exited"))

    assert round(ledger.metrics()["action_s"] * 1e9) == 50
    assert ledger.metrics()["dispatch_s"] == 0


def test_a_fault_makes_the_verdict():
    ledger = make()
    assert (ledger.verdict, ledger.reason) == ("trusted", None)

    ledger.fault("SandboxLost: gone")
    ledger.fault("SandboxLost: gone")
    assert (ledger.verdict, ledger.reason) == ("infra", "SandboxLost: gone")
    assert json.loads(ledger.to_json())["reasons"] == ["SandboxLost: gone"]


def test_the_document_carries_its_version_and_everything_in_it():
    ledger = a_rollout()
    ledger.unenforced = (Unenforced("disk_mib", "no quota", "btrfs"),)
    ledger.egress_attempt(EgressRecord("a.example", 443, "denied", "not allowed", 1_040))

    line = ledger.to_json()
    document = json.loads(line)
    assert "\n" not in line
    assert document["untax_ledger"] == module.SCHEMA
    assert document["actions"] == [["run", 42, 70, 72, 20, "exited"]]
    assert document["egress"][0]["at_ns"] == 40
    assert document["unenforced"][0]["remedy"] == "btrfs"
    assert document["metrics"]["egress_refused"] == 1


def test_a_ledger_is_live_until_it_is_closed():
    clock = FakeClock()
    ledger = make(clock)
    clock.advance(1.0)
    assert ledger.total_s == pytest.approx(1.0)
    ledger.closed(clock())
    clock.advance(1.0)
    assert ledger.total_s == pytest.approx(1.0)


def test_a_very_long_lease_keeps_sums_and_not_every_record(monkeypatch):
    monkeypatch.setattr(module, "KEPT_ACTIONS", 10)
    monkeypatch.setattr(module, "_FOLD_AT", 8)
    ledger = make()
    for n in range(100):
        ledger.record(ActionRecord("run", n * 10, n * 10 + 5, n * 10 + 5, 3, "exited"))

    assert len(ledger.actions) < 20
    numbers = ledger.metrics()
    assert numbers["actions"] == 100
    assert round(numbers["action_s"] * 1e9) == 300
    assert round(numbers["dispatch_s"] * 1e9) == 200


def test_printing_says_where_the_time_went():
    text = str(a_rollout())

    assert "trusted" in text
    assert "dispatch" in text
    assert "setup" not in text
