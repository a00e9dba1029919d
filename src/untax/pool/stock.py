"""The sandboxes of a pool on one node: which are idle, leased and being destroyed, where they stand, and what they count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from untax.core.stage import Stage
from untax.pool.placement import Fleet

_HERE = ""  # the only node of a pool's fleet


@dataclass(slots=True)
class Entry:
    id: str
    stages: tuple[Stage, ...]
    """Those that it may stand on when it comes back."""
    stage: Stage
    """The uppermost that it has, when it is idle."""
    memory_mib: float
    state: Literal["new", "idle", "leased", "leaving"] = "new"
    since_s: float = 0.0
    """When it was parked."""
    order: int | None = None
    """The order it came of, until it has been leased once."""
    ordered_s: float = 0.0
    for_ticket: bool = False
    ticket: str | None = None
    """Whose lease it is, and the uppermost stage key of what was asked for."""
    spec: str | None = None
    is_dead: bool = False
    is_upgraded: bool = False


class Stock:
    """What there is. `fleet` is the same by stage key, with the layers that lie here."""

    def __init__(self, *, entries: int, memory_mib: float) -> None:
        self._most, self._most_mib = entries, memory_mib
        self.fleet = Fleet()
        self.fleet.add_node(_HERE)
        self._entries: dict[str, Entry] = {}
        self._ordered = 0  # being made
        self.idle = 0
        self.idle_mib = 0.0
        self.memory_mib = 0.0
        """Of all of them, with those that are being made."""
        self._leaving = 0
        self._leaving_mib = 0.0

    def __len__(self) -> int:
        return len(self._entries) + self._ordered

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    # ---- what happens to one ----

    def order(self, memory_mib: float) -> None:
        """One is going to be made: its room is taken from now on."""
        self._ordered += 1
        self.memory_mib += memory_mib

    def order_ended(self, memory_mib: float) -> None:
        """It came to nothing, or is added next."""
        self._ordered -= 1
        self.memory_mib -= memory_mib
        self._settle()

    def add(self, entry: Entry) -> None:
        self._entries[entry.id] = entry
        self.memory_mib += entry.memory_mib

    def park(self, entry: Entry, now_s: float) -> None:
        entry.state, entry.since_s = "idle", now_s
        self.fleet.park(entry.id, _HERE, entry.stage.key)
        self.idle += 1
        self.idle_mib += entry.memory_mib

    def lend(self, entry: Entry, ticket: str, stages: tuple[Stage, ...], *, more_mib: float, is_upgraded: bool) -> None:
        self._unpark(entry)
        entry.state, entry.ticket, entry.spec, entry.stages = "leased", ticket, stages[-1].key, stages
        entry.is_upgraded = is_upgraded
        entry.memory_mib += more_mib
        self.memory_mib += more_mib

    def leave(self, entry: Entry) -> None:
        """It is being destroyed, and counts until it is gone."""
        if entry.state == "idle":
            self._unpark(entry)
        entry.state = "leaving"
        self._leaving += 1
        self._leaving_mib += entry.memory_mib

    def gone(self, entry: Entry) -> None:
        del self._entries[entry.id]
        self.memory_mib -= entry.memory_mib
        self._leaving -= 1
        self._leaving_mib -= entry.memory_mib
        self._settle()

    def _unpark(self, entry: Entry) -> None:
        self.fleet.take(entry.id)
        self.idle -= 1
        self.idle_mib -= entry.memory_mib

    def _settle(self) -> None:
        if not self._entries and not self._ordered:
            self.memory_mib = self.idle_mib = self._leaving_mib = 0.0  # what rounding left over

    def stored(self, key: str) -> None:
        self.fleet.stored(_HERE, key)

    def evicted(self, key: str) -> None:
        self.fleet.evicted(_HERE, key)

    def set_load(self, load: float) -> None:
        self.fleet.node(_HERE).load = load

    # ---- what there is ----

    @property
    def leased(self) -> int:
        return len(self._entries) - self.idle - self._leaving

    @property
    def room(self) -> tuple[float, float]:
        """Sandboxes and MiB that there could be beside those that are not idle."""
        return self._most - len(self) + self.idle, self._most_mib - self.memory_mib + self.idle_mib

    def idle_by_key(self) -> dict[str, int]:
        return self.fleet.idle_by_key()

    def idle_at(self, key: str) -> int:
        return self.fleet.idle_at(key)

    def newest_idle(self, key: str) -> Entry | None:
        """The one that was parked last with this stage uppermost."""
        return self._entries[self.fleet.last_parked(_HERE, key)] if self.fleet.idle_at(key) else None

    def longest_idle(self, key: str) -> Entry:
        return self._entries[next(self.fleet.idle(_HERE, key))]

    def all_idle(self) -> Iterator[Entry]:
        return (entry for entry in list(self._entries.values()) if entry.state == "idle") if self.idle else iter(())

    def has_room(self, entries: int, memory_mib: float, *, in_time: bool = False) -> bool:
        """For so much more; `in_time`: once what is being destroyed is gone."""
        leaving, leaving_mib = (self._leaving, self._leaving_mib) if in_time else (0, 0.0)
        return len(self) - leaving + entries <= self._most and self.memory_mib - leaving_mib + memory_mib <= self._most_mib
