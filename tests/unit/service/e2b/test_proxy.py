"""What a server inside a sandbox is sent of a request from outside."""

import asyncio
from types import SimpleNamespace

from untax.service.e2b.network import Rules
from untax.service.e2b.proxy import forward, forward_socket


class Inside:
    """A connection to a port inside. It hangs up once it was sent a request."""

    def __init__(self) -> None:
        self.sent = b""

    async def __aenter__(self) -> "Inside":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def connect(self, _: int) -> "Inside":
        return self

    async def write(self, data: bytes) -> None:
        self.sent += data

    async def read(self) -> bytes:
        for _ in range(10):  # it lets who sends go first
            await asyncio.sleep(0)
        return b""

    def close(self) -> None:
        pass


async def sent(carry, scope: dict[str, object], message: dict[str, object]) -> bytes:
    inside = Inside()
    sandbox = SimpleNamespace(id="i1", box=inside, rules=Rules())
    scope = {"path": "/x", "query_string": b"", "type": "http", "method": "POST", **scope}

    async def receive() -> dict[str, object]:
        return message

    async def send(_: object) -> None:
        pass

    await carry(sandbox, 8000, scope, receive, send)
    return inside.sent


async def test_a_body_without_a_length_is_framed_also_when_it_is_one_piece():
    said = await sent(
        forward, {"headers": [(b"host", b"h"), (b"transfer-encoding", b"chunked")]}, {"type": "http.request", "body": b"hello"}
    )
    assert b"Transfer-Encoding: chunked\r\n" in said and said.endswith(b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n")


async def test_a_request_without_a_body_is_not_framed():
    said = await sent(forward, {"headers": [(b"host", b"h")], "method": "GET"}, {"type": "http.request", "body": b""})
    assert b"chunked" not in said.lower() and said.endswith(b"\r\n\r\n")


async def test_a_websocket_brings_its_headers_and_not_those_of_its_own_hop():
    headers = [
        (b"host", b"h"), (b"cookie", b"a=b"), (b"origin", b"https://o"), (b"authorization", b"Bearer t"), (b"connection", b"Upgrade"),
        (b"sec-websocket-key", b"theirs"), (b"sec-websocket-extensions", b"permessage-deflate"), (b"e2b-traffic-access-token", b"secret"),
    ]  # fmt: skip
    said = await sent(forward_socket, {"headers": headers, "type": "websocket"}, {"type": "websocket.connect"})
    assert all(one in said for one in (b"Cookie: a=b\r\n", b"Origin: https://o\r\n", b"Authorization: Bearer t\r\n"))
    assert not any(one in said for one in (b"theirs", b"deflate", b"secret")) and said.count(b"Connection:") == 1
