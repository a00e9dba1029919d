"""How far long work is, on standard error: a bar that redraws itself on a terminal, a line for each step otherwise."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from untax.cli._terminal import one_line

_EVERY_S = 0.1  # fast enough to look alive, slow enough for a serial line
_BAR = 24  # characters


def human(count: float) -> str:
    """Bytes in the unit in which they have one to four digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds(count: float) -> str:
    return f"{count:.1f} s" if count < 100 else f"{count / 60:.0f} min" if count < 6000 else f"{count / 3600:.1f} h"


class Progress:
    """Called with what is being done, the bytes done and of how many, from any thread. At the end of its block the line is free again."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._is_terminal = self._out.isatty()
        self._lock = threading.Lock()
        self._what: str | None = None
        self._done = 0
        self._began = self._drawn = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._finish()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        with self._lock:
            now = time.monotonic()
            if what != self._what:
                self._finish()
                self._what, self._began, self._drawn = what, now, 0.0
                if not self._is_terminal:
                    self._say(f"untax: {one_line(what)}" + (f" ({human(total)})" if total else ""))
            self._done = done
            if self._is_terminal and (now - self._drawn >= _EVERY_S or done == total):
                self._drawn = now
                self._draw(what, done, total, now - self._began)

    def _draw(self, what: str, done: int, total: int | None, elapsed_s: float) -> None:
        if total:
            part = min(1.0, done / total)
            filled = int(part * _BAR)
            text = f"[{'#' * filled}{' ' * (_BAR - filled)}] {part:4.0%}  {human(done)} of {human(total)}"
        else:
            text = human(done)
        if elapsed_s > 1:
            text += f"  {human(done / elapsed_s)}/s"
        width = os.get_terminal_size(self._out.fileno()).columns or 80
        self._out.write(f"\r\x1b[K{f'{one_line(what)}  {text}'[: width - 1]}")
        self._out.flush()

    def _finish(self) -> None:
        """The last thing said, with what it came to."""
        if self._what is None:
            return
        line = f"untax: {one_line(self._what)}: {human(self._done)} in {seconds(time.monotonic() - self._began)}"
        self._what = None
        if self._is_terminal:
            self._out.write("\r\x1b[K")
            self._say(line)

    def _say(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()
