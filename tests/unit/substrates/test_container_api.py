"""The engine's end of the socket may be slow, frozen, gone or talk nonsense; the caller has an answer or an error in time."""

import asyncio
import contextlib
import os
import threading

import pytest

from untax.core.errors import BackendError, UsageError
from untax.core.root import Root
from untax.substrates import container
from untax.substrates._container_api import EngineApi, Refused, find_socket, socket_trouble
from untax.substrates._container_images import EngineImages

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(tmp_path, answer, recovered=lambda: None, answer_s=0.3):
    """An engine of which `answer(reader, writer)` is the whole life of a connection."""

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
        writer.close()

    path = str(tmp_path / "sock")
    server = await asyncio.start_unix_server(serve, path)
    api = EngineApi("docker", path, answer_s, recovered)
    try:
        yield api
    finally:
        await api.aclose()
        server.close()


def saying(data):
    async def answer(reader, writer):
        writer.write(data)
        await writer.drain()

    return answer


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (OK + b'{"a": 1}', {"a": 1}),
        (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{"a"\r\n4;x=y\r\n: 1}\r\n0\r\n\r\n', {"a": 1}),
        (b'HTTP/1.0 200 OK\r\n\r\n{"a": 1}', {"a": 1}),
        (b'HTTP/1.1 200 OK\r\n\r\n{"a": 1}\r\n{"b": 2}\r\n', [{"a": 1}, {"b": 2}]),
        (b"HTTP/1.1 204 No Content\r\n\r\n", None),
    ],
)
async def test_an_answer_is_read_in_each_of_its_forms(tmp_path, data, value):
    async with serving(tmp_path, saying(data)) as api:
        assert await api.ask("GET", "/x") == value


async def test_a_no_comes_with_its_words(tmp_path):
    async with serving(tmp_path, saying(b'HTTP/1.1 404 Not Found\r\n\r\n{"message":"no such\\nbox "}')) as api:
        with pytest.raises(Refused, match=r"no such box \(HTTP 404\)"):
            await api.ask("GET", "/x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 17),
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (17 << 20),
    ],
)
async def test_nonsense_is_the_engine_s_failure(tmp_path, data):
    async with serving(tmp_path, saying(data), answer_s=5) as api:
        with pytest.raises(BackendError):
            await api.ask("GET", "/x")


async def test_x18_after_one_deadline_calls_fail_at_once_until_the_engine_answers(tmp_path):
    """The circuit is open while a question is left waiting, and closes by itself with its answer."""
    frozen, asked, recovered = asyncio.Event(), [], asyncio.Event()

    async def answer(reader, writer):
        asked.append(1)
        await frozen.wait()
        writer.write(OK + b'"better"')

    async with serving(tmp_path, answer, recovered.set) as api:
        with pytest.raises(BackendError, match=r"did not answer within 0\.3 s"):
            await api.ask("GET", "/x")
        began = asyncio.get_running_loop().time()
        for _ in range(20):
            with pytest.raises(BackendError, match="does not answer"):
                await api.ask("GET", "/x")
        assert asyncio.get_running_loop().time() - began < 0.2
        frozen.set()
        await asyncio.wait_for(recovered.wait(), 5)
        assert len(asked) == 2  # the one that waited in vain, and the vigil
        assert await api.ask("GET", "/x") == "better"


async def test_an_engine_that_was_started_anew_is_asked_again(tmp_path):
    async def answer(reader, writer):
        await asyncio.sleep(60)

    async with serving(tmp_path, answer) as api:
        with pytest.raises(BackendError):
            await api.ask("GET", "/x")
        vigil = api._vigil
    os.unlink(tmp_path / "sock")
    assert vigil.done()
    with pytest.raises(BackendError, match="no docker engine listens"):
        await EngineApi("docker", str(tmp_path / "sock"), 1, lambda: None).ask("GET", "/x")


def test_sockets_are_found_by_variable_and_by_place(tmp_path):
    (tmp_path / "docker.sock").touch()

    assert find_socket("docker", {"DOCKER_HOST": "unix:///x/y"}) == "/x/y"
    assert find_socket("podman", {"CONTAINER_HOST": "tcp://127.0.0.1:1"}) is None
    if not os.path.exists("/var/run/docker.sock"):
        assert find_socket("docker", {"XDG_RUNTIME_DIR": str(tmp_path)}) == str(tmp_path / "docker.sock")


def test_what_stands_in_the_way_is_said_with_its_remedy(tmp_path):
    assert "start its service" in socket_trouble("docker", str(tmp_path / "missing"))
    assert "shorter" in socket_trouble("docker", "/" + "x" * 120)
    substrate = container.make(socket=str(tmp_path / "missing"), engine="podman")
    assert "podman engine listens" in substrate.unavailable_reason()
    assert substrate.evidence() == []


@pytest.mark.parametrize(
    "options", [{"engine": "rkt"}, {"socket": "relative"}, {"starts": 0}, {"starts": True}, {"keep_images": 0}, {"answer_s": 0}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(UsageError):
        container.make(**options)


@pytest.mark.parametrize("is_refused_first", [True, False])
async def test_a_tree_that_nobody_reads_or_nobody_writes_holds_nobody_up(tmp_path, is_refused_first):
    """The engine is gone before the tree is begun, or the tree fails before it is begun."""
    refused = threading.Event()

    class Api:
        engine = "docker"

        async def send_stream(self, target, reader, whole, *, query, patience_s):
            if not is_refused_first:
                assert await reader.read() == b""
                await whole
            asyncio.get_running_loop().call_later(0.05, refused.set)
            raise BackendError("", "gone")

    def export(root, target, name, labels, /, to):
        if not is_refused_first:
            raise BackendError("", "nothing to read")
        refused.wait(5)
        with target.open("wb") as out:
            out.write(b"x")

    images = EngineImages(Api(), tmp_path, 4)
    before = len(os.listdir("/proc/self/fd"))
    async with asyncio.timeout(5):
        with pytest.raises(BackendError, match="gone" if is_refused_first else "nothing to read"):
            await images._pour("tag", Root(()), export)
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before
