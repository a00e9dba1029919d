"""What a client has in hand: sandboxes that its server gave with the end of one lease, for the next one.

A client that leases the same thing again and again, as every worker in a loop does, asks for the next sandbox in the message that gives the last one up.
What comes with the answer waits here, so that the next lease asks nobody. It is the server's all the same: whatever is not leased within a second goes back,
at once when the server wants it, and the server keeps no account of what was never leased.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from untax.core.spec import EnvSpec
from untax.leases import Request
from untax.remote.connection import Reply

_IN_A_ROW = 3  # leases of one thing, each so soon after the end of another, before the next one is asked for ahead
_NEXT_S = 0.5  # in which a worker has scored one rollout and begins another
_SOON_S = 0.1  # for which a worker that has given a lease up is taken to be about to ask for the next
_KEPT_S = 1.0
"""A second of an idle sandbox is what a worker may cost that has stopped leasing."""
_MOST = 64
_LEAST_TTL_S = 60.0  # of leases that are worth it: what waits here is older by up to `_KEPT_S` than its holder thinks


@dataclass(frozen=True, slots=True)
class Given:
    """One that came ahead."""

    lease_id: str
    reply: Reply
    answered_s: float
    """When its server asked it for the answer that proved that it lives, or later."""
    given_s: float


class Hand:
    """Of one connection. `give_back` tells the server that the lease of this id is not wanted."""

    def __init__(self, give_back: Callable[[str], object]) -> None:
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._for: tuple[EnvSpec, float] | None = None
        self._in_a_row = 0
        self._ended_s = -math.inf
        self._between: deque[float] = deque(maxlen=_MOST)  # when leases ended whose workers have not come for the next one yet
        self._given: deque[Given] = deque()
        self._coming = self._drops = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._given)

    def take(self, request: Request) -> Given | None:
        """A lease of this is asked for: what is in hand for it, the oldest first."""
        wanted = request.spec, request.ttl_s
        if wanted != self._for:
            self.drop()
            self._for, self._in_a_row = wanted, 0
        elif self._loop.time() <= self._ended_s + _NEXT_S:
            self._in_a_row += 1
        else:
            self._in_a_row = 0
        if self._between:
            self._between.popleft()
        self._drop_old()
        return self._given.popleft() if self._given and not request.files else None

    def wants(self, request: Request, held: int) -> bool:
        """Whether the next one is to be asked for with the end of this lease, of `held` that its client has. If so, `keep` or `failed` comes of it."""
        if self._in_a_row < _IN_A_ROW or (request.spec, request.ttl_s) != self._for or self._is_closed:
            return False
        if not request.is_plain or request.files or request.ttl_s < _LEAST_TTL_S:
            return False
        # One that has just ended has a worker too: what came with its end is that one's, not ours.
        while self._between and self._between[0] + _SOON_S < self._loop.time():
            self._between.popleft()
        if len(self._given) + self._coming >= min(held + len(self._between), _MOST):
            return False
        self._coming += 1
        return True

    @property
    def is_in_use(self) -> bool:
        """Whether the next lease is likely to be served from here."""
        return self._in_a_row >= _IN_A_ROW and self._loop.time() <= self._ended_s + _KEPT_S

    def ended(self) -> None:
        """A lease was given up just now."""
        self._ended_s = self._loop.time()
        if self._in_a_row >= _IN_A_ROW:
            self._between.append(self._ended_s)

    def failed(self) -> None:
        """What was asked for does not come."""
        self._coming -= 1

    @property
    def drops(self) -> int:
        """How often everything was given back: what was asked for before is not kept after it."""
        return self._drops

    def keep(self, request: Request, lease_id: str, reply: Reply, drops: int, *, silent_s: float = 0.0, late_s: float = 0.0) -> None:
        """It came; `drops` is what it was when that was asked for. It had not answered for `silent_s` when it was given, `late_s` ago: who was
        busy meanwhile may be late for it.
        """
        self._coming -= 1
        given_s = self._loop.time() - late_s
        given = Given(lease_id, reply, given_s - silent_s, given_s)
        if drops != self._drops or self._is_closed or (request.spec, request.ttl_s) != self._for:
            self._let_go(given)
            return
        self._given.append(given)
        if self._timer is None:
            self._timer = self._loop.call_later(_KEPT_S, self._look)

    def drop(self) -> None:
        """Give everything back, also what is on its way."""
        self._drops += 1
        while self._given:
            self._let_go(self._given.popleft())

    def forget(self) -> None:
        """The server has given it up, or is no more."""
        while self._given:
            self._given.popleft().reply.discard()

    def close(self) -> None:
        """Nothing more is kept."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.drop()

    def _let_go(self, given: Given) -> None:
        given.reply.discard()
        self._give_back(given.lease_id)

    def _look(self) -> None:
        """For what nobody came for."""
        self._timer = None
        self._drop_old()
        if self._given:
            self._timer = self._loop.call_at(self._given[0].given_s + _KEPT_S, self._look)

    def _drop_old(self) -> None:
        while self._given and self._given[0].given_s + _KEPT_S <= self._loop.time():
            self._let_go(self._given.popleft())
