"""What a fleet's processes tell each other, and what can be wrong with a node."""

import json

import pytest

import untax
from untax.cluster import terms
from untax.cluster.terms import Member, Refusal, Roll, Ticket
from untax.remote.engine import RemoteSubstrate

MEMBER = Member(
    "ab" * 28, "10.0.0.7", "10.0.0.7", "https://10.0.0.7:4711", "/run/s", "boot", untax.__version__, "namespace", "namespace", "namespace"
)
TICKET = Ticket(
    "untax", "secret-token", "PEM", untax.__version__, "10.0.0.1:6379", RemoteSubstrate("namespace", "namespace", "namespace"), (MEMBER,)
)


def test_what_is_told_arrives_as_it_was():
    roll = Roll(7, (MEMBER, MEMBER.drained()), (Refusal("cd", "10.0.0.8", "no"),))
    assert Roll.from_json(roll.to_json()) == roll
    assert Ticket.from_json(TICKET.to_json()) == TICKET


def test_a_ticket_does_not_show_its_secret():
    assert "secret-token" not in repr(TICKET)


def test_a_ticket_of_another_release_is_refused_with_the_remedy():
    other = json.dumps({**json.loads(TICKET.to_json()), "version": "0.0.9"})
    with pytest.raises(untax.UsageError, match=r"runs untax 0\.0\.9.*install untax==0\.0\.9"):
        Ticket.from_json(other)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"name": 1}', '{"version": 1, "members": [{}], "refusals": []}'])
def test_what_is_no_ticket_and_no_roll_is_refused(text):
    for kind in (Ticket, Roll):
        with pytest.raises((untax.ProtocolError, untax.UsageError)):
            kind.from_json(text)


def test_a_member_of_a_later_release_is_read_without_what_it_has_more():
    assert Member.from_data({**MEMBER.to_data(), "colour": "red"}) == MEMBER


def test_a_node_of_another_release_is_told_what_to_install():
    assert terms.version_trouble("1.2", "1.2") is None
    assert terms.version_trouble("1.1", "1.2") == "it has untax 1.1, the fleet 1.2: install untax==1.2 there"


@pytest.mark.parametrize(("asked", "said", "answered"), [(100, 100.5, 101), (100, 129, 101), (100, 71, 101), (0, 500, 600)])
def test_a_clock_that_is_right_or_nearly_so_is_taken(asked, said, answered):
    assert terms.skew_trouble(asked, said, answered) is None


def test_a_clock_that_is_wrong_is_told_by_how_much_and_which_way():
    assert "3600 s ahead" in str(terms.skew_trouble(100, 3701, 101))
    assert "99 s behind" in str(terms.skew_trouble(100, 1, 101))
    assert "NTP" in str(terms.skew_trouble(100, 1, 101))


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 64, None, 3])
def test_a_fleet_has_a_name_that_can_be_a_file(name):
    with pytest.raises(untax.UsageError, match="letters, digits"):
        terms.checked_name(name)


def test_a_fleet_without_nodes_says_why_of_each():
    error = terms.nobody("untax", [Refusal("a", "10.0.0.8", "its clock is wrong"), Refusal("b", "10.0.0.9", "no namespaces")])
    assert "node 10.0.0.8: its clock is wrong; node 10.0.0.9: no namespaces" in str(error)
