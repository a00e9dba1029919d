"""Whoever has not the fleet's token gets nothing from the server of layers, and keeps nobody else from it."""

import contextlib
import json
import socket
import ssl
import struct
import threading

import pytest
from tests.transfers import HOST, dialer, stores

from untax import __version__
from untax.cluster.transfer import door
from untax.cluster.transfer.serve import Server
from untax.cluster.transfer.wire import PROTOCOL, Peer, PeerFault

HELLO_HEADER = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # of a TLS handshake that goes on for 512 bytes


@pytest.fixture
def server(tmp_path, trust):
    with stores(tmp_path, "there") as (store,):
        made = Server("there", store, trust[0], "the fleet's token", host=HOST)
        made.start()
        yield made
        made.close()


def plain(server):
    return socket.create_connection(server.address, 10)


def is_served(server, trust):
    with dialer(trust[1]).dial(Peer("there", *server.address)) as wire:
        return wire.ask("stage", key="key")["record"] is None


def ends(sock, drip=b"", most=400):
    """Whether the other end closes it, while a byte is sent to it every 25 ms for ten seconds."""
    sock.settimeout(0.025)
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        for at in range(most):
            with contextlib.suppress(TimeoutError):
                if sock.recv(4096) == b"":
                    return True
            if at < len(drip):
                sock.send(drip[at : at + 1])
        return False
    return True


class Spoken:
    """Somebody who speaks TLS, byte by byte if they like."""

    def __init__(self, server, context):
        self.sock = plain(server)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=HOST)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.sock.sendall(self._out.read())
                came = self.sock.recv(65536)
                if not came:
                    raise ConnectionError("the handshake took too long") from None
                self._in.write(came)
        self.sock.sendall(self._out.read())

    def packed(self, data):
        self._tls.write(data)
        return self._out.read()

    def heard(self):
        """The next that comes."""
        while True:
            try:
                return self._tls.read(65536)
            except ssl.SSLWantReadError:
                came = self.sock.recv(65536)
                if not came:
                    raise ConnectionError("it ended") from None
                self._in.write(came)


def message(value):
    data = json.dumps(value).encode()
    return struct.pack("<I", len(data)) + data


def test_hundreds_who_say_nothing_hold_up_nobody(server, trust):
    """More than there are threads for them: the oldest go, and a node of the fleet comes in at once."""
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(plain(server)).sendall(HELLO_HEADER)
        assert is_served(server, trust)
        assert len(server._door._greeting) <= door._MOST
    assert is_served(server, trust)


def test_a_handshake_byte_by_byte_has_an_end(server, trust, monkeypatch):
    """Each byte comes in time, all of them together do not."""
    monkeypatch.setattr(door, "CONNECT_S", 0.5)
    with plain(server) as sock:
        assert ends(sock, HELLO_HEADER + bytes(500))
    monkeypatch.undo()
    assert is_served(server, trust)


def test_a_hello_byte_by_byte_has_an_end(server, trust, monkeypatch):
    """Of one TLS record, of which nothing can be read before it is whole."""
    monkeypatch.setattr(door, "CONNECT_S", 1.5)
    spoken = Spoken(server, trust[1])
    with spoken.sock:
        assert ends(spoken.sock, spoken.packed(bytes(600)))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        struct.pack("<I", 4097),
        struct.pack("<I", 0xFFFFFFFF) + b"x" * 100,
        struct.pack("<I", 4) + b"null",
        struct.pack("<I", 3) + b"\xff\xfe\xfd",
        struct.pack("<I", 4000) + b"[" * 4000,
        message({"op": "hello"}),
        message({"op": "hello", "token": ["the fleet's token"]}),
        message({"op": "stage", "key": "key", "token": "the fleet's token"}),
        message({"op": "hello", "token": "the fleet's token\0"}),
        message({"op": "hello", "token": "\ud800"}),
        message({"op": "hello", "token": "the fleet's token", "protocol": 1, "version": None}),
    ],
    ids=str,
)
def test_whatever_is_no_hello_gets_nothing(server, trust, monkeypatch, said):
    monkeypatch.setattr(door, "CONNECT_S", 1.5)
    spoken = Spoken(server, trust[1])
    with spoken.sock:
        if said:
            spoken.sock.sendall(spoken.packed(said))
        assert ends(spoken.sock)
    assert not server._sessions
    monkeypatch.undo()
    assert is_served(server, trust)


def hello(**more):
    said = {"op": "hello", "protocol": PROTOCOL, "version": __version__, "token": "the fleet's token", "node": "here", "seals": True}
    return message({**said, **more})


@pytest.mark.parametrize("token", [None, "another fleet's"])
def test_no_keys_are_told_to_who_has_no_token(server, trust, token):
    spoken = Spoken(server, trust[1])
    with spoken.sock:
        spoken.sock.sendall(spoken.packed(hello(token=token)))
        answer = b""
        with contextlib.suppress(ConnectionError):
            while True:
                answer += spoken.heard()
        assert b"not its fleet's token" in answer
        assert b"keys" not in answer


@pytest.mark.parametrize("records", [1, 2])
def test_what_is_said_in_tls_behind_hello_ends_the_connection(server, trust, records):
    """The node that answers leaves TLS with its answer: a question before it would be lost."""
    spoken = Spoken(server, trust[1])
    asked = message({"op": "stage", "key": "key"})
    with spoken.sock:
        if records == 1:
            spoken.sock.sendall(spoken.packed(hello() + asked))
        else:
            spoken.sock.sendall(spoken.packed(hello()) + spoken.packed(asked))
        assert ends(spoken.sock)
    assert is_served(server, trust)


def test_tls_goes_on_for_who_does_not_seal(server, trust):
    spoken = Spoken(server, trust[1])
    with spoken.sock:
        spoken.sock.sendall(spoken.packed(hello(seals=False)))
        assert b"keys" not in spoken.heard()
        spoken.sock.sendall(spoken.packed(message({"op": "stage", "key": "key"})))
        assert b"record" in spoken.heard()


def test_who_was_told_keys_and_stays_in_tls_is_let_go(server, trust):
    """Nothing is answered to what is not sealed."""
    spoken = Spoken(server, trust[1])
    with spoken.sock:
        spoken.sock.sendall(spoken.packed(hello()))
        assert b"keys" in spoken.heard()
        spoken.sock.sendall(spoken.packed(message({"op": "stage", "key": "key"})))
        assert ends(spoken.sock)
    assert is_served(server, trust)


def test_no_descriptors_for_a_while_is_no_end(server, trust, monkeypatch):
    """An attacker, or a burst, may take the last descriptor: the door opens again when there are some."""
    real = server._door._listener
    left = [OSError(24, "Too many open files")] * 3

    class Short:
        def accept(self):
            if left:
                raise left.pop()
            return real.accept()

        def __getattr__(self, name):
            return getattr(real, name)

    server._door._listener = Short()
    assert is_served(server, trust)  # by the call that waited already
    assert is_served(server, trust)
    assert not left


def test_a_hostile_node_cannot_hold_a_dialer(trust):
    """Somebody else at a node's address, who answers byte by byte."""
    with socket.create_server((HOST, 0)) as listener:
        peer = Peer("there", HOST, listener.getsockname()[1])
        left = []

        def drip():
            sock, _ = listener.accept()
            with sock:
                left.append(ends(sock, b"\x16\x03\x03\x3f\xff\x02\x00\x3f\xfb\x03\x03" + bytes(400)))

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with pytest.raises(PeerFault, match="there"):
            dialer(trust[1]).dial(peer, timeout_s=0.5)
        thread.join(20)

    assert left == [True]
