"""SIGTERM and SIGHUP do what Ctrl-C does: batch systems, `timeout` and terminals that are closed end a command that way, and it cleans up all the same."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """Within `taken()`. One that whoever started us ignores stays ignored, as `nohup` wants it."""

    def __init__(self) -> None:
        self._number: int | None = None

    @property
    def exit_code(self) -> int:
        """Of a command that was interrupted."""
        return 128 + (self._number or signal.SIGINT)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        numbers: list[signal.Signals] = []
        if threading.current_thread() is threading.main_thread():  # nobody else may have handlers
            numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
        for number in numbers:
            signal.signal(number, self._interrupt)
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._number is not None:
            return  # `timeout` sends it twice, and what has begun to clean up is not to be cut off
        self._number = number
        on_interrupt = signal.getsignal(signal.SIGINT)
        if not callable(on_interrupt):  # ignored, as in the background of a script
            raise KeyboardInterrupt
        on_interrupt(signal.SIGINT, frame)  # an event loop's own, where one runs: it cancels what is under way
