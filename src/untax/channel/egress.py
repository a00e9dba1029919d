"""The network of a sandbox: which destinations it may reach, and the dialling of those it may.

Programs inside speak to a proxy that the cell offers; every destination they name comes here over the channel. The policy is pure
code. A name is resolved once and the checked address is the one that is dialled, so a second answer of a name server
cannot lead elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from untax.channel.link import EgressLink
from untax.core.errors import SandboxLost, UsageError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Verdict = Literal["allowed", "denied", "failed"]
Resolver = Callable[[str, int], Awaitable[list[str]]]

DIAL_TIMEOUT_S = 10.0
LOG_MAX = 10_000  # attempts that one sandbox's log keeps; later ones push out the earliest
_ADDRESSES_MAX = 8  # of one name that are tried
_RELAY = 64 << 10
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*")
_PATTERN = re.compile(r"(?:\*|(?:\*\.)?[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*)")
# Answers to instances of one provider at an address that is otherwise an ordinary one.
_METADATA = frozenset({ipaddress.ip_address("168.63.129.16")})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What `is_public` refuses, as ranges that others can be compared to. Of IPv6 only 2000::/3 is public, without what stands for something else.
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(one)
    for one in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
        "::/3", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "4000::/2", "8000::/1",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EgressAttempt:
    """One destination that a program inside asked for."""

    time: float  # seconds since 1970
    host: str
    port: int
    address: str | None  # what was dialled, or would have been
    verdict: Verdict
    reason: str

    @property
    def allowed(self) -> bool:
        return self.verdict == "allowed"


@dataclass(frozen=True, slots=True)
class _Rule:
    """One pattern: a name, a name with a leading `*.`, `*`, an address or a range of addresses; and a port, or any."""

    name: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    port: int | None

    @classmethod
    def parse(cls, pattern: str) -> _Rule:
        if not isinstance(pattern, str):
            raise UsageError(f'{pattern!r} is not a pattern: network takes "none", "all" or ("host:port", …)')
        host, colon, port = pattern.rpartition(":")
        if not colon or not (port == "*" or (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
            raise UsageError(f'network pattern {pattern!r}: write "host:port" or "host:*", as in "index.example.org:443"')
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        number = None if port == "*" else int(port)
        try:
            return cls("", ipaddress.ip_network(bare), number)
        except ValueError:
            pass
        if not _PATTERN.fullmatch(host):
            raise UsageError(f'network pattern {pattern!r}: the host is a name, "*.name", "*", an address, or [an IPv6 address]')
        return cls(host.lower(), None, number)

    def names(self, host: str, port: int) -> bool:
        if self.network is not None or (self.port is not None and self.port != port):
            return False
        return host == self.name or self.name == "*" or (self.name.startswith("*.") and host.endswith(self.name[1:]))

    def holds(self, address: Address, port: int) -> bool:
        if self.network is None or (self.port is not None and self.port != port):
            return False
        return address.version == self.network.version and address in self.network

    @property
    def is_local(self) -> bool:
        """Whether it opens anything beside public addresses."""
        if self.network is None:
            return self.name == "localhost"
        ends = self.network[0], self.network[-1]
        return not all(is_public(one) for one in ends) or any(
            one.version == self.network.version and one.overlaps(self.network) for one in _NOT_PUBLIC
        )

    def covers(self, other: _Rule) -> bool:
        """Whether all that `other` opens is opened by this one too."""
        if self.port is not None and self.port != other.port:
            return False
        if self.network is None or other.network is None:
            return self.name == "*" or (self.network is other.network and self.name == other.name)
        return other.network.version == self.network.version and other.network.subnet_of(self.network)  # type: ignore[arg-type]


class Policy:
    """`"none"`, `"all"`, or patterns `host:port`.

    Private, loopback, link-local, multicast and reserved addresses, and the addresses of cloud metadata services, are
    reached only where a pattern names the address (or a range that holds it), or is `localhost`. A name that is allowed
    but resolves to one of them is refused.
    """

    def __init__(self, network: str | Sequence[str] = "none") -> None:
        if isinstance(network, str) and network not in ("none", "all"):
            raise UsageError(f'network={network!r}: pass "none", "all" or a tuple of "host:port" patterns')
        self.is_open = network == "all"
        self._rules = () if isinstance(network, str) else tuple(_Rule.parse(pattern) for pattern in network)
        self.is_none = not self.is_open and not self._rules

    def is_within(self, allowed: Policy, own: Sequence[Address] = ()) -> bool:
        """Whether every pattern that opens private or local addresses, or one of `own`, is covered by one of `allowed`."""
        opening = (rule for rule in self._rules if rule.is_local or any(rule.network and one in rule.network for one in own))
        return all(any(one.covers(rule) for one in allowed._rules) for rule in opening)

    def check_name(self, host: str, port: int) -> str | None:
        """Why a destination is refused before it is resolved, or None. `host` is as `clean_host` gives it."""
        if self.is_none:
            return "this sandbox has no network"
        if not 0 < port < 65536:
            return "that is not a port"
        if self.is_open:
            return None
        literal = _address(host)
        if literal is not None:
            if any(rule.holds(literal, port) or (rule.name == "*" and rule.names(host, port)) for rule in self._rules):
                return None
        elif any(rule.names(host, port) for rule in self._rules):
            return None
        return f'not among the allowed destinations: add "{_shown(host)}:{port}" to network to allow it'

    def check_address(self, host: str, address: str, port: int) -> str | None:
        """Why the address that an allowed destination resolved to is refused, or None."""
        found = _address(address)
        if found is None:
            return "that is not an address"
        found = embedded(found)
        if any(rule.holds(found, port) for rule in self._rules):
            return None
        if found.is_loopback and host == "localhost" and any(r.name == "localhost" and r.names(host, port) for r in self._rules):
            return None
        if not is_public(found):
            return f'{found} is not a public address: add "{_shown(str(found))}:{port}" to network to allow it'
        return None


def is_public(address: Address) -> bool:
    address = embedded(address)
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not address.is_unspecified
        and address not in _METADATA
    )


def embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, if it does."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return inner
    return address


def clean_host(raw: bytes) -> str | None:
    """A destination as programs write it, made comparable; None when it is neither a name nor an address."""
    try:
        host = raw.decode("ascii").lower()
    except UnicodeDecodeError:
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    literal = _address(host)
    if literal is not None:
        return str(literal)
    host = host.removesuffix(".")
    return host if len(host) <= 253 and _NAME.fullmatch(host) else None


def _address(text: str) -> Address | None:
    if "%" in text:
        return None
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Egress:
    """Serves the destinations that programs in one sandbox ask for, and remembers every attempt."""

    def __init__(
        self,
        network: str | Sequence[str] | Policy,
        *,
        on_attempt: Callable[[EgressAttempt], None] | None = None,
        resolve: Resolver | None = None,
        dial_timeout_s: float = DIAL_TIMEOUT_S,
    ) -> None:
        self.policy = network if isinstance(network, Policy) else Policy(network)
        self.attempts: deque[EgressAttempt] = deque(maxlen=LOG_MAX)
        self._on_attempt = on_attempt
        self._resolve = resolve or _resolve
        self._dial_timeout_s = dial_timeout_s

    async def serve(self, host: bytes, port: int, link: EgressLink) -> None:
        """Check, dial and relay until both ends have ended."""
        connected = await self._connect(host, port, link)
        if connected is None:
            return
        with connected:
            link.accept()
            if await _relay(connected, link):
                await link.wait()  # until the cell has handed on what is on its way; a failed one is cut off instead

    async def _connect(self, raw: bytes, port: int, link: EgressLink) -> socket.socket | None:
        host = clean_host(raw)
        if host is None:
            self._refuse(link, raw.decode("ascii", "backslashreplace")[:253], port, None, "denied", "not a host name", 400)
            return None
        if (why := self.policy.check_name(host, port)) is not None:
            self._refuse(link, host, port, None, "denied", why, 403)
            return None
        try:
            async with asyncio.timeout(self._dial_timeout_s):
                return await self._dial(host, port, link)
        except TimeoutError:
            self._refuse(link, host, port, None, "failed", f"no answer within {self._dial_timeout_s:g} s", 504)
        except OSError as exc:
            self._refuse(link, host, port, None, "failed", exc.strerror or "not found", 502)
        return None

    async def _dial(self, host: str, port: int, link: EgressLink) -> socket.socket | None:
        addresses = [host] if _address(host) is not None else await self._resolve(host, port)
        why = "the name has no address"
        checked: str | None = None
        failed: OSError | None = None
        for address in addresses[:_ADDRESSES_MAX]:
            refusal = self.policy.check_address(host, address, port) or self._own_address(address, port)
            if refusal is not None:
                why, checked = refusal, address
                continue
            try:
                connected = await _connect(address, port)
            except OSError as exc:
                failed = exc
                continue
            self._record(EgressAttempt(time.time(), host, port, address, "allowed", "allowed"))
            return connected
        if failed is not None:
            raise failed
        self._refuse(link, host, port, checked, "denied", why, 403)
        return None

    def _own_address(self, address: str, port: int) -> str | None:
        """Services of this host are not for sandboxes, also at its public addresses, unless a pattern names them."""
        found = _address(address)
        assert found is not None
        if any(rule.holds(found, port) for rule in self.policy._rules) or found.is_loopback:
            return None
        family = socket.AF_INET6 if found.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port))  # sends nothing: asks the kernel from where it would go
                own: str = probe.getsockname()[0]
            except OSError:
                return None  # no way there; dialling will say so
        return f"{address} is this host's own: add it to network by address to allow it" if own == address else None

    def _refuse(self, link: EgressLink, host: str, port: int, address: str | None, verdict: Verdict, reason: str, status: int) -> None:
        self._record(EgressAttempt(time.time(), host, port, address, verdict, reason))
        link.deny(status, f"{_shown(host)}:{port}: {reason}")

    def _record(self, attempt: EgressAttempt) -> None:
        self.attempts.append(attempt)
        if self._on_attempt is not None:
            self._on_attempt(attempt)


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def _connect(address: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _relay(sock: socket.socket, link: EgressLink) -> bool:
    """Bytes both ways, each as fast as the other side takes them; true when both have ended in good order."""
    tasks = [asyncio.ensure_future(_outwards(sock, link)), asyncio.ensure_future(_inwards(sock, link))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [task.exception() for task in tasks if task.done()]
        for error in errors:
            if error is not None and not isinstance(error, (OSError, SandboxLost)):
                raise error
        return errors == [None, None]
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _outwards(sock: socket.socket, link: EgressLink) -> None:
    loop = asyncio.get_running_loop()
    while (piece := await link.receive()) is not None:
        await loop.sock_sendall(sock, piece[1])
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


async def _inwards(sock: socket.socket, link: EgressLink) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(sock, _RELAY):
        await link.send(data)
    link.send_eof()
