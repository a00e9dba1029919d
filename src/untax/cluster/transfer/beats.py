"""Says now and then, to whoever waits for this node, that it is still at it: a process that was stopped does not."""

from __future__ import annotations

import threading
from typing import Any

from untax.cluster.transfer.wire import BEAT_S, PeerFault, Wire


class Beats:
    """One thread for all connections, from the first to `close`. `said` is what is sent on each every `BEAT_S`."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said
        self._changed = threading.Condition()
        self._wires: set[Wire] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="untax-layers-beats", daemon=True)

    def add(self, wire: Wire) -> None:
        """From now on it is used here too, until it is dropped."""
        with self._changed:
            if self._is_closed:
                return
            self._wires.add(wire)
            self._changed.notify()
            if self._thread.ident is None:
                self._thread.start()

    def drop(self, wire: Wire) -> None:
        """It is the caller's alone again. Safe to call for one that was never added."""
        with self._changed:
            self._wires.discard(wire)

    def close(self) -> None:
        """Safe to call twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                self._changed.wait_for(lambda: self._wires or self._is_closed)
                self._changed.wait_for(lambda: self._is_closed, BEAT_S)
                for wire in list(self._wires):
                    try:
                        wire.send_at_once(self._said)
                    except PeerFault:
                        self._wires.discard(wire)  # whoever uses it learns it there
