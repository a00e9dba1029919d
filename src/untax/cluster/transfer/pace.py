"""Who waits for whom when two bring the same layer: a lease never at the pace of what comes ahead of demand, and nobody longer than it wants to."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from untax.cluster.transfer.wire import Wires
from untax.core.errors import StageUnavailable
from untax.layers._held import file_lock


class Wanted:
    """Which layers somebody waits for. Whoever brings one of them slowly stops doing so, whether it began before or begins after."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: Counter[str] = Counter()
        self._patient: dict[str, list[Wires]] = {}

    @contextlib.contextmanager
    def by(self, layer_id: str, wires: Wires, *, is_patient: bool) -> Iterator[None]:
        """For as long as one brings the layer, or waits for who does."""
        with self._guard:
            if is_patient:
                self._patient.setdefault(layer_id, []).append(wires)
            else:
                self._waiting[layer_id] += 1
            hurried = list(self._patient.get(layer_id, ())) if self._waiting[layer_id] else []
        for one in hurried:
            one.hurry()
        try:
            yield
        finally:
            with self._guard:
                if is_patient:
                    self._patient[layer_id].remove(wires)
                    if not self._patient[layer_id]:
                        del self._patient[layer_id]
                else:
                    self._waiting[layer_id] -= 1
                if not self._waiting[layer_id]:
                    del self._waiting[layer_id]


@contextlib.contextmanager
def locked(path: Path, wires: Wires) -> Iterator[None]:
    """`file_lock`, whose wait ends when the work is stopped; that is `StageUnavailable`."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock(path, waits=False))
        except BlockingIOError:
            stack.enter_context(_locked_meanwhile(path, wires))
        yield


@contextlib.contextmanager
def _locked_meanwhile(path: Path, wires: Wires) -> Iterator[None]:
    """The kernel lets nobody leave who waits for a lock, so another thread does that; left alone, it lets go of what it gets."""
    word: queue.SimpleQueue[OSError | str] = queue.SimpleQueue()
    leave = threading.Event()

    def hold() -> None:
        try:
            with file_lock(path):
                word.put("got")
                leave.wait()
        except OSError as exc:
            word.put(exc)

    thread = threading.Thread(target=hold, name="untax-lock", daemon=True)
    thread.start()
    try:
        with wires.told_of_stop(lambda: word.put("stopped")):
            came = word.get()
        if isinstance(came, OSError):
            raise came
        if came == "stopped":
            raise StageUnavailable("layer", "the transfer was stopped")
        try:
            yield
        finally:
            leave.set()
            thread.join()  # it is free when this returns
    finally:
        leave.set()
