"""One account in two processes: both ends have the whole, and it adds up in both."""

import pytest

from untax.core import account
from untax.core.errors import ProtocolError
from untax.core.ledger import ActionRecord, EgressRecord, Ledger
from untax.core.substrate import Unenforced
from untax.remote.messages import decode, encode, plain, read_plain
from untax.testing import FakeClock


def sent(body):
    return decode(encode(body)[4:])[0]


def given_up(body):
    return read_plain(plain(body))


def a_server_s(clock):
    ledger = Ledger(rollout="r1", substrate="fake", isolation="vm", start_ns=1_000, clock=clock)
    ledger.sandboxes.append("sbx-1")
    ledger.unenforced = (Unenforced("cpus", "why", "remedy"),)
    ledger.stages = {"deps": 1.5}
    ledger.add("queue", 1_000, 1_010)
    ledger.add("create", 1_010, 1_030)
    ledger.held(1_030)
    return ledger


def a_holder_s(theirs, *, asked_ns, come_ns, shift_ns, is_complete=True):
    ledger = Ledger(
        rollout="", substrate="fake", isolation="vm", start_ns=asked_ns + shift_ns, clock=FakeClock(start_ns=come_ns + shift_ns)
    )
    ledger.sandboxes.append("sbx-1")
    ledger.held(come_ns + shift_ns)
    if is_complete:
        account.complete(ledger, sent(account.opening(theirs)), shift_ns=shift_ns)
    return ledger


def a_rollout(shift_ns=0, *, is_complete=True):
    """The server's clock is `shift_ns` behind the holder's. Asked at 990, held at 1,040, an action of 20, a reset of 5, released at 1,080."""
    theirs = a_server_s(FakeClock(start_ns=1_030))
    ours = a_holder_s(theirs, asked_ns=990, come_ns=1_040, shift_ns=shift_ns, is_complete=is_complete)
    ours.record(ActionRecord("run", 1_050 + shift_ns, 1_068 + shift_ns, 1_070 + shift_ns, 10, "exited"))
    ours.add("reset", 1_070 + shift_ns, 1_075 + shift_ns)
    ours.egress_attempt(EgressRecord("example.org", 443, "denied", "no", 1_051 + shift_ns))
    ours.released(1_080 + shift_ns)
    return ours, theirs


@pytest.mark.parametrize("shift_ns", [0, 5_000_000, -900])
def test_the_holder_has_the_whole(shift_ns):
    ours, _ = a_rollout(shift_ns)
    ours.add("cleanup", 1_080 + shift_ns, 1_090 + shift_ns)
    ours.closed(1_090 + shift_ns)
    numbers = {name: round(value * 1e9) for name, value in ours.metrics().items() if name.endswith("_s")}

    assert (ours.rollout, ours.sandboxes, ours.stages) == ("r1", ["sbx-1"], {"deps": 1.5})
    assert ours.unenforced == (Unenforced("cpus", "why", "remedy"),)
    assert {name: numbers[f"{name}_s"] for name in ("queue", "create", "ready", "action", "dispatch", "observe", "reset", "cleanup")} == {
        "queue": 20, "create": 20, "ready": 10, "action": 10, "dispatch": 8, "observe": 2, "reset": 5, "cleanup": 10,
    }  # fmt: skip
    assert (numbers["holder_s"], numbers["unattributed_s"], numbers["total_s"]) == (15, 0, 100)


def test_the_holder_has_the_whole_whenever_it_looks():
    """Also once everything is over, with resets and faults of its own in between."""
    early, late = (a_rollout(is_complete=is_complete) for is_complete in (True, False))
    for ours, _ in (early, late):
        ours.sandboxes.append("sbx-2")
        ours.was_reset("replaced")
        ours.add("cleanup", 1_080, 1_090)
        ours.closed(1_090)
        ours.asked_at = 0.0
    ours, theirs = late
    assert (ours.rollout, ours.hit, ours.stages) == ("", None, {})
    account.complete(ours, sent(account.opening(theirs)), shift_ns=0)
    early[0].asked_at = ours.asked_at
    assert ours.to_json() == early[0].to_json()
    assert (ours.sandboxes, ours.resets) == (["sbx-1", "sbx-2"], {"replaced": 1})


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("shift_ns", [0, 5_000_000])
def test_the_server_gets_the_holder_s_part(shift_ns, is_complete):
    """Whether the holder has looked into its ledger or not."""
    ours, theirs = a_rollout(shift_ns, is_complete=is_complete)
    theirs.add("reset", 1_071, 1_074)  # what it saw of it itself is not counted twice
    ours.fault("SandboxLost: gone")

    account.merge(theirs, given_up(account.holding(ours)), shift_ns=-shift_ns)
    theirs.released(1_081)
    theirs.add("cleanup", 1_080, 1_088)
    theirs.closed(1_088)
    numbers = {name: round(value * 1e9) for name, value in theirs.metrics().items() if name.endswith("_s")}

    assert [(a.name, a.start_ns, a.inside_ns) for a in theirs.actions] == [("run", 1_050, 10)]
    assert (numbers["queue_s"], numbers["ready_s"], numbers["reset_s"], numbers["holder_s"]) == (20, 10, 5, 15)
    assert (numbers["unattributed_s"], numbers["total_s"]) == (0, 98)
    assert (theirs.verdict, theirs.reason) == ("infra", "SandboxLost: gone")
    assert theirs.egress == (EgressRecord("example.org", 443, "denied", "no", 1_051),)
    assert theirs.metrics()["egress_refused"] == 1


def test_a_lease_that_ended_by_its_time_keeps_the_server_s_cleanup():
    ours, theirs = a_rollout()
    theirs.add("cleanup", 1_080, 1_088)
    account.merge(theirs, given_up(account.holding(ours)), shift_ns=0)

    assert round(theirs.metrics()["cleanup_s"] * 1e9) == 8


NUMBERS = [10**400, -(10**400), float("inf"), 1 << 63, 1.5]


@pytest.mark.parametrize(
    "spoiled",
    [
        {},
        {"held_ns": "x"},
        {"parts": [1]},
        {"actions": [[1]]},
        {"folded": None},
        {"placed": ["a", "why"]},
        *({"asked_ns": number} for number in NUMBERS),
        *({"parts": [["queue", 1, number]]} for number in NUMBERS),
        *({"folded": [0, 0, {"action": number}]} for number in NUMBERS),
        *({"egress_counts": [0, number]} for number in NUMBERS),
    ],
)
def test_an_account_that_cannot_be_read_changes_nothing(spoiled):
    ours, theirs = a_rollout()
    before = theirs.to_json()
    data = given_up(account.holding(ours)) | spoiled if spoiled else {}
    with pytest.raises(ProtocolError):
        account.merge(theirs, data, shift_ns=0)
    assert theirs.to_json() == before


@pytest.mark.parametrize("spoiled", [{"facts": {}}, {"facts": 1}, {"parts": [1]}, {"start_ns": "x"}, {"reasons": None}])
def test_a_lease_whose_account_cannot_be_read_is_refused_and_the_holder_s_stays_as_it_is(spoiled):
    ours, theirs = a_rollout(is_complete=False)
    before = ours.to_json()
    with pytest.raises(ProtocolError):
        account.complete(ours, sent(account.opening(theirs)) | spoiled, shift_ns=0)
    assert ours.to_json() == before


@pytest.mark.parametrize("shift_ns", [0, 5_000_000])
def test_what_was_given_ahead_begins_with_who_asked_for_it(shift_ns):
    """Held by the server since 1,030, asked for at 2,000, had at 2,010, released at 2,050: the time in between is nobody's."""
    theirs = a_server_s(FakeClock(start_ns=1_030))
    asked_at = theirs.asked_at
    ours = a_holder_s(theirs, asked_ns=2_000, come_ns=2_010, shift_ns=shift_ns)
    ours.record(ActionRecord("run", 2_020 + shift_ns, 2_038 + shift_ns, 2_040 + shift_ns, 10, "exited"))
    ours.released(2_050 + shift_ns)
    account.merge(theirs, given_up(account.holding(ours)), shift_ns=-shift_ns, is_ahead=True)
    for ledger, shift in ((ours, shift_ns), (theirs, 0)):
        ledger.add("cleanup", 2_050 + shift, 2_060 + shift)
        ledger.closed(2_060 + shift)
        numbers = {name: round(value * 1e9) for name, value in ledger.metrics().items() if name.endswith("_s")}
        assert {name: numbers[f"{name}_s"] for name in ("queue", "create", "ready", "cleanup", "holder", "unattributed", "total")} == {
            "queue": 0, "create": 0, "ready": 10, "cleanup": 10, "holder": 20, "unattributed": 0, "total": 60,
        }  # fmt: skip
    assert theirs.asked_at == pytest.approx(asked_at + 1e-6, abs=1e-9)
