"""HTTP for image sources: blocking, in threads that can be told to stop, with the standard library alone.

What the other end does is not to be relied on. It may answer late, drip, cut the connection, answer with an error that passes,
or send the caller elsewhere. Whatever passes with time is `Transient`, and `persist` waits it out within bounds; a redirect
never takes credentials to another origin, and never leads from a protected connection to an open one.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import http.client
import random
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from untax.core.errors import StageFailed, StageUnavailable
from untax.layers._held import alone
from untax.layers.sources import Stop, Stopped
from untax.layers.sources._reference import is_loopback

T = TypeVar("T")

CHUNK = 256 * 1024
_MOST_REDIRECTS = 5  # registries use one, to where their blobs are kept
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to put up with what. The defaults suit a registry across the world that is having a bad minute."""

    connect_s: float = 10.0
    answer_s: float = 60.0
    """From the request to the end of the answer's head, however slowly that drips."""
    stall_s: float = 30.0
    slowest_bytes_per_s: int = 1024
    """Less than this over a whole `stall_s` is no better than silence."""
    attempts: int = 6
    """In a row without progress."""
    most_attempts: int = 50
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    longest_asked_wait_s: float = 120.0
    """A server that asks for more than this is told about, not waited for."""


class Transient(Exception):
    """What may be better in a moment. `progressed` says that the attempt brought something."""

    def __init__(self, reason: str, *, wait_s: float | None = None, progressed: bool = False) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.progressed = progressed


class Halt(Stop):
    """A stop that also ends waiting: sleepers wake, and what was handed to it (a connection to cut, a program to end) is called."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._ends: set[Callable[[], None]] = set()

    def set(self) -> None:
        with self._lock:
            self._event.set()
            for end in self._ends:
                end()

    def sleep(self, seconds: float) -> None:
        if self._event.wait(seconds):
            raise Stopped

    def hold(self, end: Callable[[], None]) -> None:
        """Call `end` when set. It must be quick, and safe to call from another thread."""
        with self._lock:
            self.check()
            self._ends.add(end)

    def drop(self, end: Callable[[], None]) -> None:
        with self._lock:
            self._ends.discard(end)


def _cut(held: socket.socket) -> None:
    """Wake whoever reads from it. Not through the TLS object, which its reader is using."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(held, socket.SHUT_RDWR)


async def in_thread(halt: Halt, work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own. When cancelled, `halt` is set and the thread has ended before this returns."""
    return await alone(work, halt.set)


def persist(what: str, patience: Patience, halt: Halt, attempt: Callable[[], T]) -> T:
    """What `attempt` gives, tried again while it is `Transient`; `StageUnavailable` when patience ends.

    Waits grow from attempt to attempt and are drawn at random below their bound, so that many who failed together do not
    come back together. A server that says how long to wait is obeyed, within bounds.
    """
    failures = 0
    for attempts in range(1, patience.most_attempts + 1):
        halt.check()
        try:
            return attempt()
        except Transient as exc:
            halt.check()
            failures = 1 if exc.progressed else failures + 1
            reason = str(exc)
            if exc.wait_s is not None and exc.wait_s > patience.longest_asked_wait_s:
                raise StageUnavailable("image", f"{what}: {reason}, and asks to wait {exc.wait_s:.0f} s; try again then") from exc
            if failures >= patience.attempts or attempts == patience.most_attempts:
                raise StageUnavailable("image", f"{what}: {reason} (tried {attempts} times)") from exc
            bound = min(patience.longest_wait_s, patience.first_wait_s * 2 ** (failures - 1))
            wait_s = random.uniform(0, bound) if exc.wait_s is None else exc.wait_s + random.uniform(0, patience.first_wait_s)
        halt.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


class Reply:
    """An answer whose body is still to be read. Close it in any case; as a context manager it closes itself."""

    def __init__(self, response: http.client.HTTPResponse, url: str, patience: Patience, halt: Halt, close: Callable[[], None]) -> None:
        self.status = response.status
        self.headers = response.headers
        self.url = url
        self._response, self._patience, self._halt, self._close = response, patience, halt, close
        length = self.headers.get("Content-Length", "")
        self.length = int(length) if length.isascii() and length.isdigit() and not response.chunked else None

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._close()

    def chunks(self) -> Iterator[bytes]:
        """The body as it comes. `Transient` when it stalls, drips or is cut before its announced length."""
        left, since, got = self.length, time.monotonic(), 0
        while left is None or left > 0:
            self._halt.check()
            try:
                # http.client itself does not count what read1 takes, and would wait for more than was announced.
                data = self._response.read1(CHUNK if left is None else min(CHUNK, left))
            except TimeoutError as exc:
                raise Transient(f"{shown(self.url)} sent nothing for {self._patience.stall_s:g} s") from exc
            except (OSError, http.client.HTTPException, ValueError) as exc:
                self._halt.check()
                raise Transient(f"{shown(self.url)} broke off: {_words(exc)}") from exc
            if not data:
                self._halt.check()
                if left:
                    raise Transient(f"{shown(self.url)} broke off {left} bytes before its end")
                return
            left = None if left is None else left - len(data)
            got += len(data)
            now = time.monotonic()
            if now - since >= self._patience.stall_s:
                if got < self._patience.slowest_bytes_per_s * (now - since):
                    raise Transient(f"{shown(self.url)} sends less than {self._patience.slowest_bytes_per_s} bytes a second")
                since, got = now, 0
            yield data

    def read(self, most: int) -> bytes:
        """The whole body, or `StageFailed` when it is longer than `most`."""
        body = bytearray()
        for data in self.chunks():
            body += data
            if len(body) > most:
                raise StageFailed("image", f"{shown(self.url)} answered with more than {most} bytes")
        return bytes(body)


class Web:
    """Opens URLs on behalf of one image source that lives at `home`.

    Plain HTTP goes to `home` itself where `is_plain` says so, and between addresses of this machine; to nobody else.
    """

    def __init__(self, home: str, *, is_plain: bool, patience: Patience, halt: Halt) -> None:
        self._home, self._is_plain = home, is_plain
        self.patience, self.halt = patience, halt

    def open(
        self, method: str, url: str, headers: Mapping[str, str], *, authorization: str | None = None, body: bytes | None = None
    ) -> Reply:
        """The answer after redirects, its status not one that passes with time; those are `Transient`, like a lost connection."""
        first = origin = self._origin(url)
        for _ in range(_MOST_REDIRECTS + 1):
            sent = dict(headers)
            if authorization is not None and origin == first:
                sent["Authorization"] = authorization
            reply = send(lambda: self._connection(*origin), method, url, sent, body, self.patience, self.halt)  # noqa: B023
            if reply.status not in _REDIRECTS or body is not None:
                return _unless_transient(reply)
            reply.close()
            url = self._next(url, reply.headers.get("Location"))
            origin = self._origin(url)
        raise StageFailed("image", f"{shown(url)}: more than {_MOST_REDIRECTS} redirects")

    def _next(self, url: str, location: str | None) -> str:
        try:
            return urljoin(url, location or "")
        except ValueError as exc:
            raise StageFailed("image", f"{shown(url)} redirects to nowhere") from exc

    def _origin(self, url: str) -> tuple[str, str, int]:
        """Scheme, host and port; `StageFailed` for what must not be opened."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as exc:
            raise StageFailed("image", f"{shown(url)} is not an address") from exc
        if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
            raise StageFailed("image", f"{shown(url)} is not an address that an image is fetched from")
        if parts.scheme == "http" and not self._may_be_plain(host):
            raise StageFailed("image", f"{shown(url)}: refused, because its connection would be neither private nor authentic")
        return parts.scheme, host, port or (443 if parts.scheme == "https" else 80)

    def _may_be_plain(self, host: str) -> bool:
        return self._is_plain and (host == self._home.strip("[]") or (is_loopback(host) and is_loopback(self._home)))

    def _connection(self, scheme: str, host: str, port: int) -> http.client.HTTPConnection:
        if scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self.patience.connect_s)
        trust = _trust(host, port)
        proxy = None if is_loopback(host) else _proxy(host)
        if proxy is None:
            return _TLSConnection(host, port, host, self.patience.connect_s, trust)
        through, headers = proxy
        connection = _TLSConnection(*through, host, self.patience.connect_s, trust)
        connection.set_tunnel(host, port, headers)
        return connection


class _TLSConnection(http.client.HTTPSConnection):
    """One that can be cut in the middle of its handshake: http.client's own shows its socket only afterwards."""

    def __init__(self, host: str, port: int, name: str, timeout_s: float, trust: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout=timeout_s, context=trust)
        self._name, self._trust = name, trust

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)  # and through the proxy, where there is one
        protected = self._trust.wrap_socket(self.sock, server_hostname=self._name, do_handshake_on_connect=False)
        self.sock = protected
        protected.do_handshake()


def send(
    connect: Callable[[], http.client.HTTPConnection],
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | None,
    patience: Patience,
    halt: Halt,
) -> Reply:
    """One request on a connection of its own, its answer's head read. `Transient` for everything the network may do."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection = connect()
    held: list[socket.socket] = []
    is_late = threading.Event()

    def cut() -> None:
        for each in (*held, connection.sock):  # http.client forgets its own as soon as the answer's head is read
            if each is not None:
                _cut(each)

    def late() -> None:
        is_late.set()
        cut()

    def close() -> None:
        halt.drop(cut)
        connection.close()

    def close_all() -> None:
        response.close()
        close()

    watchdog = threading.Timer(patience.answer_s, late)  # a timeout of the socket alone restarts with every byte
    watchdog.daemon = True
    watchdog.start()
    try:
        halt.hold(cut)
        connection.connect()
        held.append(connection.sock)
        connection.sock.settimeout(patience.stall_s)
        connection.request(method, target, body=body, headers={"User-Agent": "untax", "Connection": "close", **headers})
        response = connection.getresponse()
        if is_late.is_set():
            raise TimeoutError
    except ssl.SSLCertVerificationError as exc:
        close()
        raise StageFailed(
            "image",
            f"{shown(url)}: its certificate is not trusted ({exc.verify_message}); name its authority in SSL_CERT_FILE "
            f"or in /etc/containers/certs.d/{parts.netloc}/ca.crt",
        ) from exc
    except (OSError, http.client.HTTPException, ValueError) as exc:
        close()
        halt.check()
        if is_late.is_set() or isinstance(exc, TimeoutError):
            raise Transient(f"{shown(url)} did not answer in time") from exc
        raise Transient(f"{shown(url)}: {_words(exc)}") from exc
    except BaseException:
        close()
        raise
    finally:
        watchdog.cancel()
    return Reply(response, url, patience, halt, close_all)


def _unless_transient(reply: Reply) -> Reply:
    if reply.status not in _TRANSIENT:
        return reply
    wait_s = _asked_wait(reply.headers.get("Retry-After"))
    reply.close()
    raise Transient(f"{shown(reply.url)} answered {reply.status} {http.client.responses.get(reply.status, '')}".rstrip(), wait_s=wait_s)


def _asked_wait(text: str | None) -> float | None:
    """Seconds from a Retry-After header, which holds a number or a date; None when it holds neither."""
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        until = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def _trust(host: str, port: int) -> ssl.SSLContext:
    """The system's authorities, and those that were put where container engines look for a registry's own."""
    context = ssl.create_default_context()
    for base in (Path("/etc/containers/certs.d"), Path("/etc/docker/certs.d")):
        for directory in (base / f"{host}:{port}", base / host):
            for certificate in sorted(directory.glob("*.crt")) if directory.is_dir() else ():
                with contextlib.suppress(OSError, ssl.SSLError):  # one that cannot be read vouches for nobody
                    context.load_verify_locations(certificate)
    return context


def _proxy(host: str) -> tuple[tuple[str, int], dict[str, str]] | None:
    """Where HTTPS_PROXY sends connections to `host`, and what to say there."""
    url = urllib.request.getproxies().get("https")
    if not url or urllib.request.proxy_bypass(host):
        return None
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        raise StageFailed("image", "HTTPS_PROXY does not name an http:// proxy; unset it, or put the registry into NO_PROXY")
    headers = {}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    return (parts.hostname, parts.port or 80), headers


def shown(url: str) -> str:
    """A URL for people: without the query, where signatures are, and without what a terminal would obey."""
    try:
        parts = urlsplit(url)
        text = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    except ValueError:
        text = url.partition("?")[0]
    return printable(text, 200)


def printable(text: str, most: int) -> str:
    """At most so many characters, each of them printable; for what another machine wrote."""
    kept = "".join(c if c.isprintable() else "�" for c in text[: most + 1])
    return kept if len(kept) <= most else kept[: most - 1] + "…"


def _words(exc: BaseException) -> str:
    if isinstance(exc, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(exc, ssl.SSLError):
        return f"TLS failed ({exc.reason or 'cut off'})"
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    return printable(f"{type(exc).__name__} {exc}".strip(), 120)
