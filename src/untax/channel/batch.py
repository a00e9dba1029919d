"""Several calls sent as one request, carried out inside one after another. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from untax.channel import wire
from untax.channel.call import Call
from untax.channel.flow import Flow, WatchFlow
from untax.channel.wire import Reader
from untax.core.errors import UntaxError, UsageError

_TIMEOUT_MAX_S = 4e6  # the sum of long deadlines must still fit the wire's u32 of milliseconds


class BatchCall(Call[int]):
    """The request around `calls`. Its deadline is the sum of theirs; it has none when one of them has none."""

    __slots__ = ("_calls", "_stop")

    def __init__(self, calls: Sequence[Call[Any]], *, stop: bool) -> None:
        for call in calls:
            if call.body is not None or isinstance(call, (Flow, WatchFlow)) or call.finished:
                raise UsageError("streams, bodies over 1 MiB and calls already made cannot be in a batch: send them alone")
        times = [call.timeout_s for call in calls]
        total = None if not times or None in times else min(sum(filter(None, times)), _TIMEOUT_MAX_S)
        super().__init__(wire.BATCH, b"", timeout_s=total, decode=Reader.u32)
        self._calls = calls
        self._stop = stop

    def join(self, ids: Sequence[int]) -> None:
        """Put the calls into the request, each under its id."""
        frames = [call.encode(request_id) for call, request_id in zip(self._calls, ids, strict=True)]
        self.payload = wire.u8(self._stop) + wire.u32(len(frames)) + b"".join(frames)

    @property
    def has_all_answers(self) -> bool:
        return all(call.finished for call in self._calls)

    def outcomes(self, sandbox_id: str, round_trip_ns: int) -> list[object]:
        """In order, each call's value or the `UntaxError` it would have raised."""
        return [_outcome(call, sandbox_id, round_trip_ns) for call in self._calls]


def _outcome(call: Call[Any], sandbox_id: str, round_trip_ns: int) -> object:
    try:
        return call.result(sandbox_id, round_trip_ns)
    except UntaxError as exc:
        return exc
