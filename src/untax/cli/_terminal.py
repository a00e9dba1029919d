"""Showing what hostile programs print: nothing they write may drive the operator's terminal."""

from __future__ import annotations

import sys
from typing import BinaryIO

# C0 controls but tab, newline and a carriage return before a newline; DEL; the C1 controls, which some terminals obey.
_PLAIN = {"\t", "\n"}


def neutralised(raw: bytes) -> bytes:
    """`raw` as UTF-8 text in which every control character is spelled out, for a terminal."""
    text = raw.decode("utf-8", "backslashreplace").replace("\r\n", "\n")
    if text.isprintable():
        return text.encode()
    return "".join(c if c in _PLAIN or c.isprintable() else _spelled(c) for c in text).encode()


def one_line(text: str) -> str:
    """`text` on one line, with every control character spelled out, for a log or a message."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _spelled(c) for c in text)


def show(raw: bytes, to: BinaryIO, *, is_terminal: bool, as_it_is: bool) -> None:
    """Write a command's output: exact bytes to files and pipes, neutralised to a terminal unless told otherwise."""
    if raw:
        to.write(neutralised(raw) if is_terminal and not as_it_is else raw)
        to.flush()


def show_result(stdout: bytes, stderr: bytes, *, as_it_is: bool) -> None:
    sys.stdout.flush()
    show(stdout, sys.stdout.buffer, is_terminal=sys.stdout.isatty(), as_it_is=as_it_is)
    show(stderr, sys.stderr.buffer, is_terminal=sys.stderr.isatty(), as_it_is=as_it_is)


def _spelled(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class StringFilter:
    """For an interactive terminal: lets colours and cursor movements through, and takes control *strings* out.

    Strings are what sets titles and clipboards, asks the terminal to type something back, or hides text from the
    person (OSC, DCS, APC, PM, SOS). They may be cut at any byte between two calls.
    """

    _OPENERS = b"]P_^X"
    _PLAIN, _ESCAPE, _STRING, _STRING_ESCAPE, _C1 = range(5)

    def __init__(self) -> None:
        self._state = self._PLAIN

    def feed(self, data: bytes) -> bytes:
        if self._state == self._PLAIN and b"\x1b" not in data and b"\xc2" not in data:
            return data
        kept = bytearray()
        for byte in data:
            self._take(byte, kept)
        return bytes(kept)

    def _take(self, byte: int, kept: bytearray) -> None:
        state = self._state
        if state == self._PLAIN:
            if byte == 0x1B:
                self._state = self._ESCAPE
            elif byte == 0xC2:
                self._state = self._C1  # C1 controls are C2 80 … C2 9F in UTF-8
            else:
                kept.append(byte)
        elif state == self._ESCAPE:
            if byte in self._OPENERS:
                self._state = self._STRING
            elif byte != 0x1B:
                kept += bytes((0x1B, byte))
                self._state = self._PLAIN
        elif state == self._C1:
            self._state = self._PLAIN
            if not 0x80 <= byte <= 0x9F:
                kept.append(0xC2)
                self._take(byte, kept)
            elif byte in (0x90, 0x98, 0x9D, 0x9E, 0x9F):
                self._state = self._STRING
        elif byte in (0x07, 0x18, 0x1A):  # BEL ends a string, CAN and SUB abort it
            self._state = self._PLAIN
        elif state == self._STRING and byte == 0x1B:
            self._state = self._STRING_ESCAPE
        elif state == self._STRING_ESCAPE:
            self._state = self._PLAIN if byte == 0x5C else self._STRING
