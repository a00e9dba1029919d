"""X21: an API server that answers late, wrongly, half or not at all, scripted on loopback."""

import asyncio
import contextlib
import json

import pytest

import untax
from untax.substrates._kubernetes_access import Access
from untax.substrates._kubernetes_api import Api, ApiError
from untax.substrates._kubernetes_watch import Watch


def answer(status: int, body: dict | None = None, *headers: str) -> bytes:
    data = json.dumps(body or {}).encode()
    return "\r\n".join([f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}", *headers, "", ""]).encode() + data


class Server:
    """Gives one answer of the script to each request; None hangs, b"" hangs up, and what is cut stays cut."""

    def __init__(self, *script: bytes | None) -> None:
        self.script = list(script)
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0)
                await reader.readexactly(size)
                self.asked.append(head.split(" HTTP")[0])
                given = self.script.pop(0) if self.script else answer(200, {"last": True})
                if given is None:
                    await asyncio.sleep(60)
                writer.write(given or b"")
                await writer.drain()
                if not given or given.endswith(b"CUT"):
                    break
        writer.close()


@contextlib.asynccontextmanager
async def api(*script: bytes | None, timeout_s: float = 5.0):
    server = Server(*script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = Api(Access("127.0.0.1", port, "", "default", tls=False), timeout_s=timeout_s)
    try:
        yield client, server
    finally:
        client.close()
        listening.close()


async def test_x21_too_many_requests_are_asked_again_after_the_pause():
    async with api(answer(429, {}, "Retry-After: 0"), answer(200, {"ok": 1})) as (client, server):
        assert await client.request("POST", "/pods", {}) == {"ok": 1}
        assert server.asked == ["POST /pods", "POST /pods"]


async def test_x21_a_connection_that_breaks_under_a_get_is_made_anew_and_under_a_post_is_told():
    """A POST may have taken effect: to send it again would be two pods."""
    async with api(b"", answer(200, {"ok": 1})) as (client, server):
        assert await client.request("GET", "/pods") == {"ok": 1}
    async with api(b"", answer(200, {"ok": 1})) as (client, server):
        with pytest.raises(untax.BackendError, match="cannot be reached"):
            await client.request("POST", "/pods", {})
        assert len(server.asked) == 1


async def test_x21_silence_ends_at_the_deadline():
    async with api(None, timeout_s=0.3) as (client, _):
        with pytest.raises(untax.BackendError, match=r"did not answer GET within 0\.3 s"):
            await asyncio.wait_for(client.request("GET", "/pods"), 5)


@pytest.mark.parametrize(
    "given",
    [
        b"nonsense\r\n\r\nCUT",
        b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{CUT",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{{{",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000,
    ],
    ids=["no http", "cut off", "no json", "endless head"],
)
async def test_x21_nonsense_is_the_backend_s_failure(given):
    async with api(*[given] * 9) as (client, _):
        with pytest.raises(untax.BackendError):
            await client.request("POST", "/pods", {})


async def test_a_refusal_has_the_server_s_words():
    async with api(answer(403, {"reason": "Forbidden", "message": "no pods for you"})) as (client, _):
        with pytest.raises(ApiError, match="no pods for you") as caught:
            await client.request("GET", "/pods")
        assert (caught.value.status, caught.value.reason) == (403, "Forbidden")


async def test_a_credential_that_is_refused_is_read_once_more():
    async with api(answer(401), answer(200, {"ok": 1})) as (client, server):
        assert await client.request("GET", "/pods") == {"ok": 1}
        assert len(server.asked) == 2


def chunk(*events: dict) -> bytes:
    lines = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + f"{len(lines):x}\r\n".encode() + lines + b"\r\n0\r\n\r\n"


def pod(name: str, version: int) -> dict:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


async def test_a_watch_goes_on_where_it_ended_and_lists_anew_after_a_gap():
    """What was there before the gap and is not there after it is told to be gone."""
    seen: list[tuple[str, str]] = []
    listed: list[set[str]] = []
    done = asyncio.Event()

    def on_object(kind, thing):
        seen.append((kind, thing["metadata"]["name"]))
        if thing["metadata"]["name"] == "c":
            done.set()

    script = (
        answer(200, {"metadata": {"resourceVersion": "5"}, "items": [pod("a", 4)]}),
        chunk({"type": "ADDED", "object": pod("b", 6)}, {"type": "BOOKMARK", "object": pod("", 7)}),
        b"",
        chunk({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}),
        answer(200, {"metadata": {"resourceVersion": "9"}, "items": [pod("b", 8)]}),
        chunk({"type": "ADDED", "object": pod("c", 10)}),
        None,
    )
    async with api(*script) as (client, server):
        watch = Watch(client, ("pods",), {}, on_object, listed.append)
        await watch.start()
        await asyncio.wait_for(done.wait(), 10)
        await watch.aclose()

    assert seen == [("ADDED", "a"), ("ADDED", "b"), ("ADDED", "b"), ("ADDED", "c")]
    assert listed == [{"a"}, {"b"}]
    versions = [one.split("resourceVersion=")[1] for one in server.asked if "watch=1" in one]
    assert versions[:4] == ["5", "7", "7", "9"]
