"""multipart/form-data as it comes, without holding more of it than a piece. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message as Headers
from typing import NamedTuple
from urllib.parse import unquote

_HEAD_MAX = 16 << 10


class Bad(ValueError):
    """Not a multipart body."""


class Part(NamedTuple):
    """A part begins."""

    name: str
    filename: str | None


def boundary_in(content_type: str) -> bytes | None:
    """The boundary that a content type names, or None when it is not multipart."""
    headers = Headers()
    headers["content-type"] = content_type
    if headers.get_content_type() != "multipart/form-data":
        return None
    boundary = headers.get_param("boundary")
    if not isinstance(boundary, str) or not 0 < len(boundary) <= 200 or not boundary.isascii():
        raise Bad("the content type names no boundary")
    return boundary.encode()


class Multipart:
    """Feed it bytes; it gives the beginnings of parts, and their data in pieces."""

    def __init__(self, boundary: bytes) -> None:
        self._mark = b"\r\n--" + boundary
        self._have = bytearray(b"\r\n")  # so that the first boundary is like all others
        self._is_in_part = False
        self.is_over = False

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        if self.is_over:
            return  # an epilogue
        self._have += data
        while not self.is_over:
            at = self._have.find(self._mark)
            if at < 0:
                yield from self._rest()
                return
            after = at + len(self._mark)
            if len(self._have) < after + 2:
                return
            if self._have[after : after + 2] == b"--":
                yield from self._data(at)
                self.is_over = True
                return
            end = self._have.find(b"\r\n\r\n", after)
            if end < 0:
                if len(self._have) - after > _HEAD_MAX:
                    raise Bad("the head of a part is too long")
                return
            head = bytes(self._have[after + 2 : end + 4])
            yield from self._data(at)
            del self._have[: end + 4 - at]
            self._is_in_part = True
            yield _part(head)

    def _data(self, size: int) -> Iterator[bytes]:
        """What stands before the next boundary; it is taken off by who calls where a part follows."""
        if self._is_in_part and size:
            yield bytes(self._have[:size])
        del self._have[:size]

    def _rest(self) -> Iterator[bytes]:
        keep = len(self._mark) + 1
        if len(self._have) > keep:
            size = len(self._have) - keep
            if self._is_in_part:
                yield bytes(self._have[:size])
            del self._have[:size]

    def finish(self) -> None:
        if not self.is_over:
            raise Bad("the body ended before its last boundary")


def _part(head: bytes) -> Part:
    lines = head.decode("utf-8", "replace").split("\r\n")
    disposition = next(
        (value for name, _, value in (line.partition(":") for line in lines) if name.strip().lower() == "content-disposition"), ""
    )
    names: dict[str, str] = {}
    for name, quoted, bare in re.findall(r';\s*(name|filename)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s]*))', disposition):
        text = re.sub(r"\\(.)", r"\1", quoted or bare)
        names[name] = re.sub("%(22|0D|0A)", lambda found: unquote(found[0]), text)  # as browsers and httpx escape quotes and line ends
    if found := re.search(r"filename\*\s*=\s*utf-8''([^;\s]+)", disposition, re.IGNORECASE):
        names["filename"] = unquote(found[1])
    return Part(names.get("name", ""), names.get("filename"))
