"""E2B's network rules as a policy of ours. Pure.

Rules name what may and what may not be reached; what is allowed wins over what is denied, and what is neither is allowed, unless
the sandbox has no internet access. Private and local addresses of the host stay closed whatever a rule says about everything: they open only by name,
and where the operator allowed it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from untax.channel.egress import Policy, embedded
from untax.core.errors import UsageError

ALL_TRAFFIC = ("0.0.0.0/0", "::/0")
_RULES_MAX = 1000


@dataclass(frozen=True, slots=True)
class Rules:
    """As they were asked for; `to_json` gives them back."""

    internet: bool = True
    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    public_traffic: bool = True
    mask_host: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, network: Mapping[str, Any] | None, internet: bool | None) -> Rules:
        """`UsageError` names what is not understood, or cannot be done here."""
        network = network or {}
        if not isinstance(network, Mapping):
            raise UsageError("network is not an object")
        for name in ("rules", "egressProxy"):
            if network.get(name):
                raise UsageError(f"network.{name} is not available on this server: it would have to read what sandboxes send encrypted")
        mask = network.get("maskRequestHost")
        if mask is not None and (not isinstance(mask, str) or any(c in mask for c in "\r\n\0 ")):
            raise UsageError("network.maskRequestHost is not a host")
        public = network.get("allowPublicTraffic")
        rules = cls(
            internet is not False,
            _patterns(network, "allowOut"),
            _patterns(network, "denyOut"),
            public is not False,
            mask,
            {name: value for name, value in network.items() if value is not None},
        )
        rules.policy()  # reads every pattern
        return rules

    def policy(self) -> RulesPolicy:
        return RulesPolicy(self)

    @property
    def network(self) -> str | tuple[str, ...]:
        """What they open, as a spec would say it; for who asks whether that may be."""
        policy = self.policy()
        if policy.is_none:
            return "none"
        return (*(_as_pattern(rule) for rule in self.allow_out if rule not in ALL_TRAFFIC), *(("*:*",) if policy.is_default_open else ()))

    def updated(self, network: Mapping[str, Any], internet: bool | None) -> Rules:
        """All rules for what goes out are replaced; what comes in stays as it was."""
        return Rules.parse({**network, "allowPublicTraffic": self.public_traffic, "maskRequestHost": self.mask_host}, internet)


def _patterns(network: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = network.get(name) or []
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > _RULES_MAX or not all(isinstance(v, str) for v in value):
        raise UsageError(f"network.{name} is not a list of addresses, ranges or names")
    return tuple(value)


def _as_pattern(rule: str) -> str:
    """`host[:port]` of theirs as `host:port` of ours."""
    try:
        found = ipaddress.ip_network(rule, strict=False)
    except ValueError:
        host, colon, port = rule.rpartition(":")
        return rule if colon and port.isdigit() and host else f"{rule}:*"
    shown = str(found.network_address) if found.num_addresses == 1 else str(found)
    return f"[{shown}]:*" if found.version == 6 else f"{shown}:*"


class RulesPolicy(Policy):
    """Allowed, then denied, then the default. What is allowed by address may be an address of the host's own network."""

    def __init__(self, rules: Rules) -> None:
        everything = set(ALL_TRAFFIC)
        # A rule about all traffic is the default, not a permission for the host's own addresses.
        super().__init__(tuple(_as_pattern(rule) for rule in rules.allow_out if rule not in everything))
        self._denied = Policy(tuple(_as_pattern(rule) for rule in rules.deny_out if rule not in everything))
        denies_all = any(rule in everything for rule in rules.deny_out) or not rules.internet
        self.is_default_open = any(rule in everything for rule in rules.allow_out) or not denies_all
        self.is_none = not self.is_default_open and not self._rules

    def check_name(self, host: str, port: int) -> str | None:
        host = _meant(host)
        why = super().check_name(host, port)
        if why is None or self.is_none or not self.is_default_open:
            return why
        if not self._denied.is_none and self._denied.check_name(host, port) is None:
            return "denied by the sandbox's network rules"
        return None

    def check_address(self, host: str, address: str, port: int) -> str | None:
        why = super().check_address(host, address, port)
        if why is not None or self._denied.is_none or super().check_name(_meant(host), port) is None:
            return why
        found = embedded(
            ipaddress.ip_address(address)
        )  # of a name that no rule allows: a range that is denied holds for what it resolved to
        is_allowed = any(rule.holds(found, port) for rule in self._rules)
        is_denied = any(rule.holds(found, port) for rule in self._denied._rules)
        return "denied by the sandbox's network rules" if is_denied and not is_allowed else None


def _meant(host: str) -> str:
    """An address that stands for another is that one; rules are written for it."""
    try:
        return str(embedded(ipaddress.ip_address(host)))
    except ValueError:
        return host
