"""TLS between a connection and its protocol: with both ends ours and with the standard library's, cut anywhere, and with peers that mean harm."""

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import shutil
import socket
import ssl
import subprocess
import threading

import pytest

pytest.importorskip("cryptography", reason="cryptography: not installed; pip install 'untax[ray]'")

from untax.cluster.trust import Trust, pinned
from untax.core.errors import BackendError, UsageError
from untax.remote import tls
from untax.remote.tls import TlsTransport
from untax.remote.web import WebAddress, WebStream

MIB = 1 << 20


class Ends:
    """What both ends trust and are."""

    def __init__(self, place, version=ssl.TLSVersion.TLSv1_3):
        trust = Trust.new("tls")
        self.files = trust.identity_for("127.0.0.1").write(place)
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.load_cert_chain(*self.files)
        self.server.maximum_version = version
        self.client = pinned(trust.authority.certificate)
        self.client.minimum_version = ssl.TLSVersion.TLSv1_2


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    return Ends(tmp_path_factory.mktemp("tls"))


class Inner(asyncio.Protocol):
    """Keeps what it is told."""

    def __init__(self):
        self.told = []
        self.data = bytearray()
        self.transport = None
        self.lost = asyncio.get_running_loop().create_future()
        self.came = asyncio.Event()

    def connection_made(self, transport):
        self.told.append("made")
        self.transport = transport

    def data_received(self, data):
        self.data += data
        self.came.set()

    def eof_received(self):
        self.told.append("eof")

    def connection_lost(self, exc):
        self.told.append("lost")
        self.lost.set_result(exc)

    def pause_writing(self):
        self.told.append("pause")

    def resume_writing(self):
        self.told.append("resume")
        self.came.set()

    async def until(self, is_there):
        async with asyncio.timeout(30):
            while not is_there():
                self.came.clear()
                await self.came.wait()

    async def gone(self):
        return await asyncio.wait_for(asyncio.shield(self.lost), 30)


class Echo(Inner):
    def data_received(self, data):
        super().data_received(data)
        self.transport.write(data)


class Served:
    def __init__(self, server):
        self.port = server.sockets[0].getsockname()[1]
        self.inner = []
        self.complaints = []

    async def first(self):
        """The protocol of the first connection that came so far."""
        async with asyncio.timeout(30):
            while not self.inner or not self.inner[0].told:
                await asyncio.sleep(0.001)
        return self.inner[0]


@contextlib.asynccontextmanager
async def serving(context, make=Echo, handshake_s=30.0):
    """A listener with our end of TLS; what the loop was told of goes to `complaints`."""
    loop = asyncio.get_running_loop()

    def accepted():
        served.inner.append(make())
        return TlsTransport(served.inner[-1], context, handshake_s=handshake_s)

    server = await loop.create_server(accepted, "127.0.0.1", 0)
    served = Served(server)
    loop.set_exception_handler(lambda _, told: served.complaints.append(told))
    try:
        yield served
    finally:
        loop.set_exception_handler(None)
        server.close()
        for inner in served.inner:
            if inner.transport is not None:
                inner.transport.abort()
                await inner.gone()
        await server.wait_closed()


async def connected(ends, port, inner=None):
    inner = inner or Inner()
    await tls.connect(inner, "127.0.0.1", port, ends.client, handshake_s=30.0)
    return inner


# ---- both ends over loopback ----


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_what_is_said_arrives_and_a_close_is_told_to_both(version, tmp_path):
    ends = Ends(tmp_path, version)
    async with serving(ends.server) as served:
        client = await connected(ends, served.port)
        for data in (b"hello", bytearray(b" there"), memoryview(b", you")):
            client.transport.write(data)
        client.transport.writelines([b"!", b"", b"!"])
        await client.until(lambda: client.data == b"hello there, you!!")
        server = served.inner[0]

        assert client.transport.get_extra_info("ssl_object").version() == version.name.replace("_", ".")
        assert client.transport.get_extra_info("peercert")["subjectAltName"] == (("IP Address", "127.0.0.1"),)
        assert client.transport.get_extra_info("cipher") == client.transport.get_extra_info("ssl_object").cipher()
        assert server.transport.get_extra_info("sslcontext") is ends.server
        assert server.transport.get_extra_info("peername") == client.transport.get_extra_info("sockname")
        assert server.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert server.transport.get_extra_info("no such") is None and not server.transport.can_write_eof()
        assert client.transport.get_protocol() is client and not client.transport.is_closing()

        client.transport.close()
        assert client.transport.is_closing()
        client.transport.write(b"too late")
        assert await client.gone() is None and await server.gone() is None
        assert client.told == ["made", "lost"] and server.told == ["made", "eof", "lost"]
        assert server.data == b"hello there, you!!"


async def test_eight_mebibytes_go_both_ways_past_readers_that_stop(ends):
    data = random.Random(1).randbytes(8 * MIB)

    class Slow(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.pause_reading()

    async with serving(ends.server, Slow) as served:
        client = await connected(ends, served.port)
        transport = client.transport
        changing = bytearray(data)
        transport.write(changing)
        changing[:] = bytes(len(changing))  # ours to change again
        assert client.told == ["made", "pause"]
        assert transport.get_write_buffer_size() > MIB
        # What is encrypted ahead of need is bounded; the rest waits in the clear.
        assert transport._raw.get_write_buffer_size() + transport._out.pending < MIB + (64 << 10)
        server = await served.first()
        await asyncio.sleep(0.05)
        assert not server.data and not server.transport.is_reading()

        transport.pause_reading()
        server.transport.resume_reading()
        await server.until(lambda: "pause" in server.told)
        assert not client.data
        transport.resume_reading()
        await client.until(lambda: len(client.data) == len(data) and "resume" in client.told and "resume" in server.told)
        assert hashlib.sha256(client.data).digest() == hashlib.sha256(data).digest()
        assert transport.get_write_buffer_size() == 0
        for one in (client, server):
            assert [told for told in one.told if told in ("pause", "resume")] == ["pause", "resume"] * (one.told.count("pause"))


async def test_who_leaves_speaks_on_over_the_same_connection_in_the_clear(ends):
    """What was written before arrives inside TLS, what comes afterwards does not pass through it, and no alert is in between."""
    async with serving(ends.server) as served:
        plain, answer = await asyncio.to_thread(_leaving, ends, served)
        assert (plain, answer) == (b"inside", b"outside")
        left = served.inner[0]
        assert left.told[-1] == "lost" and left.transport.is_closing()


def _leaving(ends, served):
    with _blocking(ends, served.port) as client:
        client.sendall(b"inside")
        inside = client.recv(100)
        loop = served.inner[0].transport._loop
        theirs = asyncio.run_coroutine_threadsafe(_left(served.inner[0].transport), loop).result(10)
        with theirs, socket.socket(fileno=client.detach()) as ours:
            theirs.setblocking(True)
            ours.settimeout(10)
            ours.sendall(b"out")
            assert theirs.recv(100) == b"out"
            theirs.sendall(b"outside")
            return inside, ours.recv(100)


async def _left(transport):
    return transport.leave()


async def test_nobody_leaves_while_something_is_on_its_way(ends):
    async with serving(ends.server, Inner) as served:
        client = await connected(ends, served.port)
        server = await served.first()
        server.transport.write(bytes(8 * MIB))  # which nobody reads
        client.transport.pause_reading()
        with pytest.raises(OSError, match="not quiet"):
            server.transport.leave()
        client.transport.abort()


async def test_limits_of_what_is_unsent_are_the_callers_to_set(ends):
    async with serving(ends.server) as served:
        client = await connected(ends, served.port)
        assert client.transport.get_write_buffer_limits() == (128 << 10, 512 << 10)
        client.transport.set_write_buffer_limits(high=1000)
        assert client.transport.get_write_buffer_limits() == (250, 1000)
        client.transport.set_write_buffer_limits()
        assert client.transport.get_write_buffer_limits() == (128 << 10, 512 << 10)
        client.transport.abort()
        assert await client.gone() is None


async def test_what_was_written_before_a_close_arrives(ends):
    data = random.Random(2).randbytes(4 * MIB)

    class Parting(Inner):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(data)
            transport.close()

    async with serving(ends.server, Parting) as served:
        client = await connected(ends, served.port)
        assert await client.gone() is None
        assert client.data == data and client.told == ["made", "eof", "lost"]


async def test_a_close_to_a_peer_that_does_not_read_ends_all_the_same(ends, monkeypatch):
    monkeypatch.setattr(tls, "_CLOSE_S", 0.2)
    async with serving(ends.server, Inner) as served:
        client = await connected(ends, served.port)
        (await served.first()).transport.pause_reading()
        client.transport.write(bytes(32 * MIB))
        client.transport.close()
        await client.gone()
        assert client.transport.get_write_buffer_size() == 0


async def test_a_protocol_is_succeeded_by_another_in_the_middle(ends):
    class First(Inner):
        def data_received(self, data):
            super().data_received(data)
            self.transport.set_protocol(second)
            second.connection_made(self.transport)

    async with serving(ends.server, First) as served:
        second = Echo()
        client = await connected(ends, served.port)
        client.transport.write(b"upgrade")
        first = await served.first()
        await first.until(lambda: first.data)
        client.transport.write(b"and on")
        await client.until(lambda: client.data == b"and on")
        second.transport.write(bytes(32 * MIB))
        assert second.told == ["made", "pause"] and second.transport.get_protocol() is second
        second.transport.abort()
        await second.gone()
        assert (first.told, first.data, second.data) == (["made"], b"upgrade", b"and on")
        served.inner.clear()


@pytest.mark.parametrize("where", ["connection_made", "data_received", "eof_received"])
async def test_a_protocol_that_fails_ends_its_connection_and_is_spoken_of(ends, where):
    class Failing(Inner):
        pass

    def fail(self, *arguments):
        getattr(Inner, where)(self, *arguments)
        raise OSError("a fault of ours")  # of a kind that could be taken for the network's

    setattr(Failing, where, fail)
    async with serving(ends.server, Failing) as served:
        client = await connected(ends, served.port)
        client.transport.write(b"x")
        if where == "eof_received":
            client.transport.close()
        server = await served.first()
        assert str(await server.gone()) == "a fault of ours"
        await client.gone()
        assert [(told["protocol"], str(told["exception"]), where in told["message"]) for told in served.complaints] == [
            (server, "a fault of ours", True)
        ]


async def test_a_client_whose_protocol_fails_at_once_is_told(ends):
    class Failing(Inner):
        def connection_made(self, transport):
            raise ValueError("a fault of ours")

    async with serving(ends.server) as served:
        with pytest.raises(ValueError, match="a fault of ours"):
            await connected(ends, served.port, Failing())
        assert len(served.complaints) == 1


# ---- who is refused ----


async def test_a_server_of_another_authority_is_not_spoken_to(ends, tmp_path):
    other = Ends(tmp_path)
    async with serving(other.server) as served:
        inner = Inner()
        with pytest.raises(ssl.SSLCertVerificationError):
            await connected(ends, served.port, inner)
        address = WebAddress("127.0.0.1", served.port, True, tls=ends.client)
        with pytest.raises(UsageError, match=r"its certificate is not trusted \(.+\); name its authority with ca_file="):
            await WebStream(address, {}).open()
        await asyncio.sleep(0.05)
        assert inner.told == [] and not any(one.told for one in served.inner) and not served.complaints


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_a_server_that_speaks_no_tls_is_a_server_that_fails(ends, answer):
    async def plain(reader, writer):
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(OSError) as caught:
            await connected(ends, port)
        assert isinstance(caught.value, ssl.SSLError if answer else ConnectionResetError)
        with pytest.raises(BackendError, match=r"no server answers at https://127\.0\.0\.1"):
            await WebStream(WebAddress("127.0.0.1", port, True, tls=ends.client), {}).open()


async def test_a_server_that_stays_silent_is_given_up(ends):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConnectionAbortedError, match=r"within 0\.1 s"):
            await tls.connect(Inner(), "127.0.0.1", port, ends.client, handshake_s=0.1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await tls.connect(Inner(), "127.0.0.1", port, ends.client, handshake_s=30)
        with silent.accept()[0], silent.accept()[0] as second:
            second.settimeout(5)

            def heard():
                return bool(second.recv(1 << 16) and not second.recv(1 << 16))

            assert await asyncio.to_thread(heard)  # the ClientHello, and then the end: who gave up has closed


async def test_garbage_is_dropped_without_a_word(ends, caplog):
    caplog.set_level(logging.INFO)
    async with serving(ends.server) as served:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\x16\x03\x01\xff\xff" + bytes(70_000), b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(garbage)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                assert len(await asyncio.wait_for(reader.read(), 30)) < 100  # an alert
            writer.close()
        assert not any(one.told for one in served.inner) and not served.complaints and not caplog.records


@pytest.mark.parametrize("does_drip", [False, True])
async def test_a_client_that_is_slow_to_shake_hands_is_dropped(ends, does_drip):
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ends.client.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1").do_handshake()
    async with serving(ends.server, handshake_s=0.3) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        begin = asyncio.get_running_loop().time()
        ended = asyncio.ensure_future(reader.read())
        for byte in hello.read():
            if ended.done():
                break
            if does_drip:
                writer.write(bytes([byte]))
            await asyncio.wait([ended], timeout=0.02)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(ended, 30) == b""
        assert 0.25 < asyncio.get_running_loop().time() - begin < 3
        writer.close()
        assert served.inner[0].told == [] and not served.complaints


# ---- with the ends of others ----


def _blocking(ends, port):
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    return ends.client.wrap_socket(sock, server_hostname="127.0.0.1", suppress_ragged_eofs=False)


async def test_a_blocking_client_of_the_standard_library_is_answered(ends):
    data = random.Random(3).randbytes(2 * MIB)

    def talk(port):
        with _blocking(ends, port) as sock:
            back = bytearray()
            for at in range(0, len(data), 100_000):  # in turn: its object is not for two threads at once
                sock.sendall(data[at : at + 100_000])
                while len(back) < min(at + 100_000, len(data)):
                    back += sock.recv(1 << 16)
            sock.unwrap()  # waits for our close_notify, too
            return back

    async with serving(ends.server) as served:
        assert await asyncio.to_thread(talk, served.port) == data
        assert await served.inner[0].gone() is None
        assert served.inner[0].told[-2:] == ["eof", "lost"]


async def test_a_server_of_asyncio_is_spoken_to(ends):
    async def echo(reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    data = random.Random(4).randbytes(2 * MIB)
    async with await asyncio.start_server(echo, "127.0.0.1", 0, ssl=ends.server) as server:
        client = await connected(ends, server.sockets[0].getsockname()[1])
        client.transport.write(data)
        await client.until(lambda: len(client.data) == len(data))
        assert client.data == data
        client.transport.close()
        assert await client.gone() is None


@pytest.mark.parametrize("is_said", [True, False])
async def test_an_end_is_told_whether_it_was_said_or_not(ends, is_said):
    def leave(port):
        with _blocking(ends, port) as sock:
            sock.sendall(b"bye")
            if is_said:
                sock.unwrap()
            else:
                socket.socket.shutdown(sock, socket.SHUT_WR)
                assert sock.recv(10) == b""  # our end says its own all the same

    async with serving(ends.server, Inner) as served:
        await asyncio.to_thread(leave, served.port)
        assert await served.inner[0].gone() is None
        assert served.inner[0].told == ["made", "eof", "lost"] and served.inner[0].data == b"bye"


async def test_a_close_is_said_and_an_abort_is_not(ends):
    def last(port):
        with _blocking(ends, port) as sock:
            try:
                return sock.recv(10)
            except OSError as exc:
                return type(exc)

    async with serving(ends.server, Inner) as served:
        for end, seen in (("close", (b"",)), ("abort", (ssl.SSLEOFError, ConnectionResetError))):
            reading = asyncio.ensure_future(asyncio.to_thread(last, served.port))
            server = await served.first()
            getattr(server.transport, end)()
            assert await reading in seen
            served.inner.clear()


async def _openssl(port, *options):
    """Lines that are one letter, and come alone, are commands."""
    return await asyncio.create_subprocess_exec(
        "openssl", "s_client", *options, "-no_ign_eof", "-connect", f"127.0.0.1:{port}",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl: not installed")
async def test_a_peer_may_ask_for_new_keys(ends):
    """`K` has openssl send a KeyUpdate, before what it says next, that asks for one in return."""
    async with serving(ends.server) as served:
        process = await _openssl(served.port, "-tls1_3", "-quiet", "-msg", "-msgfile", "/dev/stderr")
        heard = []
        for line in (b"one\n", b"K\n", b"two\n"):
            process.stdin.write(line)
            if line == b"K\n":
                await asyncio.sleep(0.2)
            else:
                while line not in heard:
                    heard.append(await asyncio.wait_for(process.stdout.readline(), 30))
                    assert heard[-1]
        process.stdin.write(b"Q\n")
        await asyncio.wait_for(process.communicate(), 30)
        assert [line[:3] for line in heard if b"KeyUpdate" in line] == [b">>>", b"<<<"]
        assert served.inner[0].data == b"one\ntwo\n"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl: not installed")
async def test_what_tls_itself_has_to_say_is_said_at_once(tmp_path):
    """`R` has openssl ask for another handshake, which nobody gets; it waits for that answer."""
    ends = Ends(tmp_path, ssl.TLSVersion.TLSv1_2)
    async with serving(ends.server, Inner) as served:
        process = await _openssl(served.port, "-tls1_2")
        server = await served.first()
        process.stdin.write(b"one\n")
        await server.until(lambda: server.data == b"one\n")
        process.stdin.write(b"R\n")
        heard, _ = await asyncio.wait_for(process.communicate(), 30)
        assert b"no renegotiation" in heard, heard
        assert "handshake failure" in str(await server.gone())  # which is what it makes of that


# ---- byte by byte, over a wire that we hold in our hands ----


class Wire(asyncio.Transport):
    """A transport that keeps what is written; as full as it is told to be."""

    def __init__(self):
        super().__init__()
        self.sent = bytearray()
        self.is_paused = False
        self.is_misused = False
        """Paused or resumed twice, which not every loop's transport bears."""
        self.ends = []

    def write(self, data):
        self.sent += data

    def get_write_buffer_size(self):
        return len(self.sent)

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def pause_reading(self):
        self.is_misused |= self.is_paused
        self.is_paused = True

    def resume_reading(self):
        self.is_misused |= not self.is_paused
        self.is_paused = False

    def is_closing(self):
        return bool(self.ends)

    def close(self):
        self.ends.append("close")

    def abort(self):
        self.ends.append("abort")


class Peer:
    """The client's end, by the standard library's records in memory; ours is `tls`, with `inner` in it."""

    def __init__(self, ends, inner, most=1 << 20):
        self.inner, self.wire = inner, Wire()
        self.coming, self.going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.object = ends.client.wrap_bio(self.coming, self.going, server_hostname="127.0.0.1")
        self.tls = TlsTransport(inner, ends.server, handshake_s=30)
        self.tls.connection_made(self.wire)
        while True:
            try:
                self.object.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.carry(most)
        self.carry(most)

    def carry(self, most=1 << 20):
        """Both ways, in pieces of at most so many bytes."""
        self.feed(self.going.read(), most)
        self.coming.write(self.wire.sent)
        self.wire.sent.clear()

    def feed(self, data, most=1 << 20):
        while data:
            buffer = self.tls.get_buffer(-1)
            size = min(len(buffer), len(data), most)
            buffer[:size] = data[:size]
            self.tls.buffer_updated(size)
            data = data[size:]

    def records(self, *said):
        for one in said:
            self.object.write(one)
        return self.going.read()

    def lose(self):
        self.tls.connection_lost(None)
        assert not self.wire.is_misused


@pytest.mark.parametrize("most", [1, 7, 1000])
async def test_records_may_be_cut_anywhere(ends, most):
    peer = Peer(ends, Echo(), most)
    said = [b"a", random.Random(5).randbytes(20_000), b"z"]
    peer.feed(peer.records(*said), most)
    assert peer.inner.data == b"".join(said)
    peer.carry(most)
    back = b""
    while len(back) < 20_002:
        back += peer.object.read(1 << 14)
    assert back == b"".join(said)
    peer.lose()


async def test_many_records_that_come_at_once_are_given_together(ends):
    class Counting(Inner):
        def data_received(self, data):
            super().data_received(data)
            self.told.append(len(data))

    peer = Peer(ends, Counting())
    peer.feed(peer.records(*[b"x"] * 1000, b"y" * 60_000))
    assert peer.inner.data == b"x" * 1000 + b"y" * 60_000
    assert len(peer.inner.told) < 8  # "made", and a piece for each buffer that was filled
    peer.lose()
    assert peer.inner.told[-1] == "lost"


async def test_the_first_words_may_come_with_the_end_of_the_handshake(ends):
    peer = Peer.__new__(Peer)
    peer.inner, peer.wire = Echo(), Wire()
    peer.coming, peer.going = ssl.MemoryBIO(), ssl.MemoryBIO()
    peer.object = ends.client.wrap_bio(peer.coming, peer.going, server_hostname="127.0.0.1")
    peer.tls = TlsTransport(peer.inner, ends.server, handshake_s=30)
    peer.tls.connection_made(peer.wire)
    with contextlib.suppress(ssl.SSLWantReadError):
        peer.object.do_handshake()
    peer.carry()
    peer.object.do_handshake()
    assert peer.inner.told == []
    peer.feed(peer.records(b"early"))
    assert peer.inner.told == ["made"] and peer.inner.data == b"early"
    peer.lose()


async def test_who_pauses_in_the_middle_gets_the_rest_afterwards_and_nothing_piles_up(ends):
    class Hesitant(Inner):
        def data_received(self, data):
            super().data_received(data)
            self.transport.pause_reading()
            self.transport.pause_reading()

    peer = Peer(ends, Hesitant())
    peer.tls.resume_reading()
    data = [random.Random(seed).randbytes(16_000) for seed in range(64)]
    wire = peer.records(*data)
    begin = wire[: 60 << 10]
    peer.feed(begin)
    got = len(peer.inner.data)
    assert 0 < got < len(begin) and peer.wire.is_paused and not peer.tls.is_reading()
    peer.feed(wire[len(begin) :])  # from a transport that had read it before it was told
    assert len(peer.inner.data) == got
    for _ in range(100):
        before = len(peer.inner.data)
        peer.tls.resume_reading()
        peer.tls.resume_reading()
        assert len(peer.inner.data) == before  # never from within
        await asyncio.sleep(0)
        assert len(peer.inner.data) - before <= (256 << 10) + 16_000
        if peer.tls.is_reading():
            break
    assert peer.inner.data == b"".join(data) and not peer.wire.is_paused
    assert peer.tls._in.pending == 0
    peer.lose()


async def test_all_that_came_in_a_pause_is_given_after_it(ends):
    peer = Peer(ends, Inner())
    peer.tls.pause_reading()
    peer.feed(peer.records(bytes(300_000)))
    assert peer.inner.data == b""
    peer.tls.resume_reading()
    peer.tls.pause_reading()
    peer.tls.resume_reading()
    await asyncio.sleep(0)
    assert peer.inner.data == bytes(300_000) and not peer.wire.is_paused
    peer.lose()


async def test_who_asks_for_new_keys_and_never_reads_is_dropped(ends):
    """By hand: whatever TLS itself has to say while the transport below is full stays with us, and no more than so much of it."""
    peer = Peer(ends, Inner())
    peer.tls.pause_writing()
    peer.tls._out.write(b"x" * (60 << 10))
    peer.tls.write(b"waits")
    peer.feed(peer.records(b"hello"))
    assert peer.wire.sent == b"" and peer.wire.ends == [] and peer.inner.data == b"hello"
    peer.tls._out.write(b"x" * (60 << 10))
    peer.feed(peer.records(b" again"))
    assert peer.wire.ends == ["abort"]
    peer.lose()
    assert isinstance(peer.inner.lost.result(), ConnectionAbortedError)


async def test_an_end_waits_for_who_pauses(ends):
    class Hesitant(Inner):
        def data_received(self, data):
            super().data_received(data)
            self.transport.pause_reading()

    peer = Peer(ends, Hesitant())
    peer.feed(peer.records(b"one"))
    peer.feed(peer.records(b"two"))
    assert peer.tls.eof_received()  # keeps it open
    assert peer.inner.told == ["made"] and peer.inner.data == b"one" and not peer.wire.ends
    peer.tls.resume_reading()
    await asyncio.sleep(0)
    assert peer.inner.told == ["made"] and peer.inner.data == b"onetwo"
    peer.tls.resume_reading()
    await asyncio.sleep(0)
    assert peer.inner.told == ["made", "eof"] and peer.wire.ends == ["close"]
    peer.lose()
    assert peer.inner.told == ["made", "eof", "lost"]


async def test_a_record_that_was_tampered_with_ends_the_connection(ends):
    peer = Peer(ends, Inner())
    record = bytearray(peer.records(b"pay 10"))
    record[-1] ^= 1
    peer.feed(record)
    assert peer.inner.data == b"" and peer.wire.ends == ["abort"] and peer.tls.is_closing()
    peer.tls.write(b"nobody reads it")
    peer.feed(peer.records(b"nor this"))
    peer.lose()
    assert isinstance(peer.inner.lost.result(), ssl.SSLError) and peer.inner.told == ["made", "lost"]


async def test_while_the_transport_below_is_full_the_rest_waits_in_the_clear(ends):
    peer = Peer(ends, Inner())
    peer.tls.pause_writing()
    peer.tls.write(b"a" * 100_000)
    peer.tls.write(b"b" * 100_000)
    assert peer.wire.sent == b"" and peer.tls.get_write_buffer_size() == 200_000 and peer.inner.told == ["made", "pause"]
    peer.tls.close()
    peer.tls.write(b"c")
    assert peer.wire.ends == []
    peer.tls.resume_writing()
    assert peer.inner.told == ["made", "pause", "resume"] and peer.wire.ends == ["close"]
    peer.carry()
    peer.tls.pause_writing()
    peer.tls.resume_writing()
    assert peer.wire.ends == ["close"]
    got = b""
    while piece := peer.object.read(1 << 14):  # until close_notify
        got += piece
    assert got == b"a" * 100_000 + b"b" * 100_000
    peer.lose()


async def test_who_holds_a_transport_that_ended_does_not_hold_its_protocol(ends):
    peer = Peer(ends, Inner())
    peer.lose()
    assert peer.tls.get_protocol() is not peer.inner and peer.tls.is_closing()
    peer.tls.close()
    peer.tls.pause_reading()
    peer.tls.resume_reading()
    await asyncio.sleep(0)
    peer.tls.write(b"x")
    assert peer.wire.sent == b"" and peer.wire.ends == []


def test_it_stands_on_the_transports_of_uvloop(tmp_path):
    uvloop = pytest.importorskip("uvloop", reason="uvloop: not installed; pip install uvloop")
    ends = Ends(tmp_path)

    async def all_of_it():
        await test_eight_mebibytes_go_both_ways_past_readers_that_stop(ends)
        await test_what_was_written_before_a_close_arrives(ends)
        await test_limits_of_what_is_unsent_are_the_callers_to_set(ends)
        await test_a_blocking_client_of_the_standard_library_is_answered(ends)
        await test_a_protocol_that_fails_ends_its_connection_and_is_spoken_of(ends, "data_received")
        await test_a_server_that_stays_silent_is_given_up(ends)
        for way in (False, True):
            await test_a_client_that_is_slow_to_shake_hands_is_dropped(ends, way)
            await test_an_end_is_told_whether_it_was_said_or_not(ends, way)

    def run():
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(all_of_it())

    failures = []

    def guarded():
        try:
            run()
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=guarded)  # which has no other loop
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
