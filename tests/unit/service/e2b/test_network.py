"""E2B's network rules: what is allowed wins, and the host's own network opens by name only."""

import pytest

from untax.core.errors import UsageError
from untax.service.e2b.network import Rules


def reaches(rules: Rules, host: str, address: str | None = None, port: int = 443) -> bool:
    policy = rules.policy()
    return policy.check_name(host, port) is None and policy.check_address(host, address or host, port) is None


def test_without_rules_everything_public_is_reached_and_nothing_private():
    rules = Rules.parse(None, None)
    assert reaches(rules, "9.9.9.9")
    assert not reaches(rules, "10.0.0.1")
    assert not reaches(rules, "rebound.example.org", "169.254.169.254")


def test_no_internet_access_is_none():
    assert not reaches(Rules.parse(None, False), "9.9.9.9")
    assert reaches(Rules.parse({"allowOut": ["9.9.9.9"]}, False), "9.9.9.9")


def test_what_is_allowed_wins_over_what_is_denied():
    rules = Rules.parse({"denyOut": ["0.0.0.0/0"], "allowOut": ["9.9.9.9", "*.example.org"]}, None)
    assert reaches(rules, "9.9.9.9")
    assert reaches(rules, "a.example.org", "93.184.215.14")
    assert not reaches(rules, "8.8.4.4")
    assert not reaches(rules, "example.com", "93.184.215.14")


def test_a_denied_range_holds_for_names_that_resolve_into_it():
    rules = Rules.parse({"denyOut": ["9.9.9.0/24"]}, None)
    assert not reaches(rules, "9.9.9.9")
    assert not reaches(rules, "dns.example.org", "9.9.9.9")
    assert reaches(rules, "dns.example.org", "8.8.4.4")


def test_allowing_everything_does_not_open_the_hosts_network():
    rules = Rules.parse({"allowOut": ["0.0.0.0/0"]}, None)
    assert reaches(rules, "9.9.9.9")
    assert not reaches(rules, "10.0.0.1")
    assert reaches(Rules.parse({"allowOut": ["10.0.0.1"]}, None), "10.0.0.1")


def test_an_update_replaces_what_goes_out_and_keeps_what_comes_in():
    rules = Rules.parse({"denyOut": ["9.9.9.9"], "allowPublicTraffic": False, "maskRequestHost": "a.example.org"}, None)
    updated = rules.updated({}, None)
    assert reaches(updated, "9.9.9.9")
    assert (updated.public_traffic, updated.mask_host) == (False, "a.example.org")


@pytest.mark.parametrize(
    "network",
    [
        {"allowOut": "9.9.9.9"},
        {"denyOut": [1]},
        {"allowOut": ["a b"]},
        {"rules": {"a": []} | {"b": 1}},
        {"maskRequestHost": "a\r\nb"},
        {"allowOut": ["x:99999"]},
    ],
)
def test_rules_that_are_none_are_refused(network):
    with pytest.raises(UsageError):
        Rules.parse(network, None)


@pytest.mark.parametrize("host", ["::ffff:9.9.9.9", "64:ff9b::909:909", "2002:909:909::"])
def test_an_address_within_another_is_denied_as_itself(host):
    rules = Rules.parse({"denyOut": ["9.9.9.0/24"]}, None)
    assert not reaches(rules, host)
    assert not reaches(rules, "dns.example.org", host)
    assert reaches(Rules.parse({"denyOut": ["0.0.0.0/0"], "allowOut": ["9.9.9.9"]}, None), host)
