"""Requests that are carried out once, however often they are asked for.

A client numbers its requests. A reply that was lost with its connection is asked for again under the same number and is the same reply:
there is never a second lease for one request. With each request the client says up to which number it has seen the replies.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from untax.core.errors import BackendError, UntaxError, UsageError
from untax.remote.messages import Body, error_data
from untax.server.handed import Handed
from untax.server.owners import Owner

log = logging.getLogger("untax.server")

REQUESTS_MAX = 1024
"""Requests of one owner that may be under way at once."""
ANSWERS_KEPT = 2 * REQUESTS_MAX
"""Of each owner, for the case that they are asked for again; those that the client has seen are forgotten before."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request came to."""

    body: Body
    handed: Handed | None = None
    """The channel whose descriptor goes along."""
    undo: Callable[[], Coroutine[Any, Any, object]] | None = None
    """What gives it back when nobody wants it any more."""


class Asker(Protocol):
    def say(self, body: Body, fd: int | None = None) -> None:
        """`UsageError` for what is too large."""


class Answer:
    """One request, under way or done, and who waits for it."""

    task: asyncio.Task[Outcome]
    _on_end: Callable[[], object]

    def __init__(self) -> None:
        self.is_unwanted = False
        self._askers: list[tuple[Asker, int]] = []

    def begin(
        self, begin: Begin, chore: Callable[[Coroutine[Any, Any, Outcome]], asyncio.Task[Outcome]], on_end: Callable[[], object]
    ) -> None:
        self._on_end = on_end
        self.task = chore(self._carried_out(begin))
        self.task.add_done_callback(self._done)

    def ask(self, asker: Asker, request_id: int) -> None:
        if self.task.done():
            self._tell(asker, request_id)
        else:
            self._askers.append((asker, request_id))

    async def _carried_out(self, begin: Begin) -> Outcome:
        outcome = await begin(self.part)
        # Here and not in a callback of the task: what the operation put off until nobody waits comes before those.
        for asker, request_id in self._take_askers():
            self._say(asker, request_id, outcome)
        return outcome

    def part(self, body: Body) -> None:
        """Something of the answer, ahead of its end."""
        for asker, request_id in self._askers:
            asker.say({"id": request_id, "part": body})

    def _done(self, _: asyncio.Task[Outcome]) -> None:
        try:
            for asker, request_id in self._take_askers():  # of one that failed or was cancelled; the others are told already
                self._tell(asker, request_id)
        finally:
            self._on_end()

    def _take_askers(self) -> list[tuple[Asker, int]]:
        askers, self._askers = self._askers, []
        return askers

    def _tell(self, asker: Asker, request_id: int) -> None:
        try:
            if self.task.cancelled():
                raise BackendError("", "the request was cancelled")
            outcome = self.task.result()
        except UntaxError as exc:
            asker.say({"id": request_id, "error": error_data(exc)})
        except Exception as exc:  # a bug here: told to the client, and written down with where it is
            log.exception("a request failed")
            asker.say({"id": request_id, "error": _bug(exc)})
        else:
            self._say(asker, request_id, outcome)

    def _say(self, asker: Asker, request_id: int, outcome: Outcome) -> None:
        """Raises nothing: what was carried out stays so, and is given back when it is asked for no more."""
        try:
            fd = outcome.handed.descriptor() if outcome.handed is not None else None
            asker.say({"id": request_id, "ok": outcome.body}, fd)
        except UntaxError as exc:
            asker.say({"id": request_id, "error": error_data(exc)})
        except Exception as exc:
            log.exception("an answer could not be given")
            asker.say({"id": request_id, "error": _bug(exc)})


def _bug(exc: Exception) -> Body:
    return error_data(BackendError("", f"the server failed: {type(exc).__name__}: {exc}"))


Begin = Callable[[Callable[[Body], None]], Coroutine[Any, Any, Outcome]]
"""Carries a request out; it is given a way to tell something ahead of the end."""


class Answers:
    """The requests of all owners."""

    def __init__(self, chore: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]], on_end: Callable[[], object]) -> None:
        """`on_end` is told of each that is not under way any more."""
        self._chore = chore
        self._on_end = on_end

    def ask(self, owner: Owner, request_id: int, begin: Begin, asker: Asker) -> None:
        """Carry it out, unless that was done already, and tell the asker."""
        answer = owner.answers.get(request_id)
        if answer is None:
            if owner.under_way >= REQUESTS_MAX:
                error = UsageError(f"more than {REQUESTS_MAX} requests at once to one server: wait for some of them")
                asker.say({"id": request_id, "error": error_data(error)})
                return
            answer = owner.answers[request_id] = Answer()
            owner.under_way += 1
            answer.begin(begin, self._chore, functools.partial(self._ended, owner))
            self._forget_old(owner)
        answer.ask(asker, request_id)

    def seen(self, owner: Owner, up_to: int) -> None:
        """The client has the replies to every request up to this number."""
        for request_id in [one for one, answer in owner.answers.items() if one <= up_to and answer.task.done()]:
            del owner.answers[request_id]

    def cancel(self, owner: Owner, request_id: int) -> None:
        """Nobody wants it any more: it is stopped, or given back when it is there already."""
        answer = owner.answers.get(request_id)
        if answer is None or answer.is_unwanted:
            return
        answer.is_unwanted = True
        answer.task.cancel()
        answer.task.add_done_callback(self._undo)

    def end(self, owner: Owner) -> list[asyncio.Task[Outcome]]:
        """Stop everything that is under way; gives what has to be waited for."""
        running = [answer.task for answer in owner.answers.values() if not answer.task.done()]
        for task in running:
            task.cancel()
        owner.answers.clear()
        return running

    def _ended(self, owner: Owner) -> None:
        owner.under_way -= 1
        self._on_end()

    def _undo(self, task: asyncio.Task[Outcome]) -> None:
        if not task.cancelled() and task.exception() is None and (undo := task.result().undo) is not None:
            self._chore(undo())

    def _forget_old(self, owner: Owner) -> None:
        surplus = len(owner.answers) - ANSWERS_KEPT
        if surplus > 0:
            done = [one for one, answer in owner.answers.items() if answer.task.done()]
            for request_id in done[:surplus]:
                del owner.answers[request_id]
