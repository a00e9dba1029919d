"""Tickets that `Fleet.current()` was given in this process: one keeps every fleet, and is not to be asked by each task of its cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from untax.cluster import access
from untax.cluster.terms import Member, Ticket

_kept: dict[tuple[int, str | None, str], Ticket] = {}
_own: set[tuple[tuple[int, str | None, str], str]] = set()
"""Which were given here ever, by their tokens."""


def current(name: str) -> tuple[Ticket, bool]:
    """Of the fleet on the cluster that this process is part of, and whether it was asked for just now. Blocks if so."""
    kept = _kept.get(_key(name))
    return (kept, False) if kept is not None else (asked(name), True)


def asked(name: str) -> Ticket:
    """Blocks."""
    ticket = Ticket.from_json(access.ticket_of(name))
    _own.add((_key(name), ticket.token))
    if ticket.members:  # of one without, the next who asks may hear more
        _kept[_key(name)] = ticket
    return ticket


def is_own(ticket: Ticket) -> bool:
    """Whether it is of the cluster that this process is part of, kept or not: it was asked for here."""
    return (_key(ticket.name), ticket.token) in _own


def renew(ticket: Ticket, members: Iterable[Member]) -> None:
    """These are in its fleet now."""
    for key, one in _same(ticket):
        _kept[key] = replace(one, members=tuple(members))


def forget(ticket: Ticket) -> None:
    """Its fleet is no more."""
    for key, _ in _same(ticket):
        _kept.pop(key, None)


def _same(ticket: Ticket) -> list[tuple[tuple[int, str | None, str], Ticket]]:
    return [(key, one) for key, one in list(_kept.items()) if one.token == ticket.token]


def _key(name: str) -> tuple[int, str | None, str]:
    """Of this process and no fork of it, and of the cluster that it is part of: a node is one cluster's alone."""
    return os.getpid(), access.own_node(), name
