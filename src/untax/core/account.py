"""One ledger in two processes: what travels when a lease is handed out, and what travels back when it is given up.

The server writes how the sandbox came to be, the holder what it did; each ends with the whole. Times are readings of a monotonic clock, which
differ between machines: `shift_ns` is what turns the other side's readings into one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from untax.core.errors import ProtocolError
from untax.core.ledger import KEPT_ACTIONS, KEPT_EGRESS, ActionRecord, EgressRecord, Ledger, Placed

IN_HAND = "in hand: given with the end of the lease before it"
"""Why a lease was served at once, where its client had been given the sandbox ahead."""

_HOLDERS = ("sandboxes", "resets", "placed")
"""What the holder's ledger knows better than the server's did when it handed the lease out."""
_NAME_MAX = 200
_WORDS_MAX = 2000
_TRIED_MAX = 64
_NUMBER_MAX = 1 << 62
"""Nanoseconds since any beginning, bytes, counts: what is more than this is none of them, and no arithmetic is to meet it."""


def opening(ledger: Ledger) -> dict[str, Any]:
    """How a lease came to be, for its holder. Everything public that the ledger holds goes along."""
    return {
        "facts": {name: value for name, value in vars(ledger).items() if not name.startswith("_")},
        "start_ns": ledger._start_ns,
        "held_ns": ledger._held_from_ns,
        "parts": ledger._parts,
        "reasons": ledger._reasons,
    }


def complete(ledger: Ledger, data: Mapping[str, Any], *, shift_ns: int) -> None:
    """Put how the lease came to be into the ledger that its holder began when it was asked for. The way to the server is in `queue`, the way back in
    `ready`. `ProtocolError` leaves it as it was.
    """
    asked_ns = ledger._start_ns
    come_ns = asked_ns if ledger._held_from_ns is None else ledger._held_from_ns
    try:
        facts = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data["facts"].items()}
        sandboxes = [str(one) for one in facts["sandboxes"]]
        began_ns, held_ns = max(asked_ns, int(data["start_ns"]) + shift_ns), int(data["held_ns"]) + shift_ns
        parts = [(str(name), int(start) + shift_ns, int(end) + shift_ns) for name, start, end in data["parts"]]
        reasons = [str(reason) for reason in data["reasons"]]
        facts["rollout"], facts["substrate"], facts["isolation"]
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ProtocolError(f"a lease without its account: {exc!r}") from exc
    for name, value in facts.items():
        if name not in _HOLDERS:
            setattr(ledger, name, value)
    ledger.sandboxes[:1] = sandboxes
    ledger._parts[:0] = [
        ("queue", asked_ns, began_ns),
        *((name, max(start_ns, asked_ns), max(end_ns, asked_ns)) for name, start_ns, end_ns in parts),
        ("ready", max(asked_ns, min(held_ns, come_ns)), come_ns),
    ]
    for reason in reasons:
        ledger.fault(reason)


def holding(ledger: Ledger) -> dict[str, Any]:
    """What the holder did, for the server: all of it JSON as it stands."""
    held_ns = ledger._held_from_ns or ledger._start_ns
    folded = ledger._folded
    return {
        "asked_ns": ledger._start_ns,
        "held_ns": held_ns,
        "released_ns": ledger._held_to_ns,
        "parts": [part for part in ledger._parts if part[1] >= held_ns],
        "actions": [list(action) for action in ledger.actions],
        "folded": [folded.count, folded.busy_ns, folded.parts],
        "reasons": ledger._reasons,
        **({"placed": [placed.node, placed.why, placed.tried]} if (placed := ledger.placed) is not None else {}),
        "egress": [[one.host, one.port, one.verdict, one.reason, one.at_ns] for one in ledger.egress],
        "egress_counts": [ledger._egress_allowed, ledger._egress_refused],
    }


def _number(told: object) -> int:
    """`ValueError` for what would be believed here and fail whoever reckons with it."""
    if not isinstance(told, int) or not -_NUMBER_MAX <= told <= _NUMBER_MAX:
        raise ValueError("a number that is none, or larger than there are any")
    return told


def _placed(told: object) -> Placed | None:
    """As its holder says, in no more words than there should be."""
    if told is None:
        return None
    if not isinstance(told, (list, tuple)):
        raise TypeError(f"a place that is {type(told).__name__}")
    node, why, others = told
    tried = tuple((str(other)[:_NAME_MAX], str(said)[:_WORDS_MAX]) for other, said in others[:_TRIED_MAX])
    return Placed(str(node)[:_NAME_MAX], str(why)[:_WORDS_MAX], tried)


def merge(ledger: Ledger, data: Mapping[str, Any], *, shift_ns: int, is_ahead: bool = False) -> None:
    """Put the holder's part into the server's ledger, in the place of what the server saw of it. `ProtocolError` leaves it as it was.

    `is_ahead`: it was given before anybody asked for it, and begins with whoever did.
    """
    try:
        held_ns = _number(data["held_ns"]) + shift_ns
        asked_ns = _number(data["asked_ns"]) + shift_ns
        released = data["released_ns"]
        parts = [(str(name)[:_NAME_MAX], _number(start) + shift_ns, _number(end) + shift_ns) for name, start, end in data["parts"]]
        actions = [
            ActionRecord(
                str(name)[:_NAME_MAX],
                _number(start) + shift_ns,
                _number(received) + shift_ns,
                _number(end) + shift_ns,
                _number(inside),
                str(outcome),
            )
            for name, start, received, end, inside, outcome in data["actions"]
        ]
        count, busy_ns, sums = data["folded"]
        folded = (_number(count), _number(busy_ns), {str(name): _number(ns) for name, ns in sums.items()})
        reasons = [str(reason) for reason in data["reasons"]]
        attempts = [
            EgressRecord(str(host), _number(port), str(verdict), str(reason), _number(at_ns) + shift_ns)
            for host, port, verdict, reason, at_ns in data["egress"]
        ]
        allowed, refused = map(_number, data["egress_counts"])
        released_ns = None if released is None else _number(released) + shift_ns
        placed = _placed(data.get("placed"))
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ProtocolError(f"a lease was given up without its account: {str(exc)[:_WORDS_MAX]}") from exc
    if is_ahead:
        ledger.asked_at += (asked_ns - ledger._start_ns) / 1e9
        ledger._start_ns = ledger._held_from_ns = asked_ns
        ledger._parts[:] = [part for part in ledger._parts if part[0] == "cleanup"]
        if ledger.hit is not None:
            ledger.hit.why = IN_HAND
    own_held_ns = ledger._held_from_ns or held_ns
    before = [part for part in ledger._parts if part[2] <= own_held_ns]
    way = [("queue", asked_ns, ledger._start_ns)] if asked_ns < ledger._start_ns else []
    back = [("ready", own_held_ns, held_ns)] if own_held_ns < held_ns else []
    after = [part for part in ledger._parts if part[0] == "cleanup"]  # of a lease that ended by its time
    ledger._parts[:] = [*way, *before, *back, *parts, *after]
    ledger._start_ns = min(asked_ns, ledger._start_ns)
    ledger._held_from_ns = max(own_held_ns, held_ns)
    ledger._kept[:] = actions[:KEPT_ACTIONS]
    ledger._recent[:] = actions[KEPT_ACTIONS:]
    ledger._folded.count, ledger._folded.busy_ns, ledger._folded.parts = folded
    for reason in reasons:
        ledger.fault(reason)
    ledger.placed = placed
    if attempts or allowed or refused:  # otherwise it was the server that dialled, and knows
        ledger._egress[:] = attempts[:KEPT_EGRESS]
        ledger._egress_allowed, ledger._egress_refused = allowed, refused
    if released_ns is not None:
        ledger._held_to_ns = released_ns
