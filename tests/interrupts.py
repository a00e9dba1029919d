"""Interrupts (KeyboardInterrupt) at every step of a program, one after another: what a signal does to it by chance."""

import _thread
import contextlib
import gc
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


def at_each_step(work: Callable[[], object], *, every: int = 1) -> Iterator[int]:
    """Do `work` again and again, each time with an interrupt some steps later; gives how many steps it did without, and ends when it has no more."""
    for step in itertools.count(0, every):
        if not _interrupted(work, step):
            return
        yield step


def _interrupted(work: Callable[[], object], after: int) -> bool:
    """Whether `work` has a step after that many: an instruction of Python's in this thread. A signal has come in before it, and is raised where Python looks for signals next."""
    done = 0

    def count(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal done
        frame.f_trace_opcodes = True
        if event == "opcode":
            done += 1
            if done > after:
                sys.settrace(before)  # the next call of this would be where Python looks
                for _ in map(_thread.interrupt_main, (signal.SIGINT,)):
                    return None  # it does not on the way from there
        return count

    before = sys.gettrace()
    with raised(), _uncollected():
        try:
            sys.settrace(count)
            work()
            sys.settrace(before)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
    assert done <= after, "the interrupt was dropped"
    return False


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """By Python's own handler, whatever a test or a library before has put in its place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Python drops an interrupt that comes in a finalizer, and a collection runs those of anybody's garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
