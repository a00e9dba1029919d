"""What has left TLS stays as closed as it was inside: whatever was changed, moved, left out, or sealed by somebody else ends the connection."""

import contextlib
import itertools
import os
import socket
import threading
import time
import tracemalloc

import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transfers import HOST, SOON_S, dialer, publish, serving

from untax.cluster.transfer import sealed, wire
from untax.cluster.transfer.fetch import Fetch
from untax.cluster.transfer.sealed import RECORD, Keys, SealedStream
from untax.cluster.transfer.tls import TlsStream
from untax.cluster.transfer.wire import Peer, PeerFault

KEYS = Keys(b"d" * 32, b"s" * 32)
TAG = 16


class Older:
    """AES-GCM of a release of cryptography that gives bytes of its own and fills nobody's."""

    def __init__(self, key):
        cipher = AESGCM(key)
        self.encrypt, self.decrypt = cipher.encrypt, cipher.decrypt


@contextlib.contextmanager
def pair(keys=KEYS, *, sender=AESGCM, reader=AESGCM):
    """A sender, and a reader of what it sends."""
    mine, theirs = socket.socketpair()
    with pytest.MonkeyPatch.context() as patch, mine, theirs:
        for sock in (mine, theirs):
            sock.settimeout(SOON_S)
        patch.setattr(sealed, "AESGCM", sender)
        dialled = SealedStream(mine, sends=keys.dialler, receives=keys.server)
        patch.setattr(sealed, "AESGCM", reader)
        yield dialled, SealedStream(theirs, sends=keys.server, receives=keys.dialler)


@contextlib.contextmanager
def fed(*records, is_ended=False):
    """A reader that these bytes come to."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.settimeout(SOON_S)
        theirs.settimeout(SOON_S)
        mine.sendall(b"".join(records))
        if is_ended:
            mine.shutdown(socket.SHUT_WR)
        yield SealedStream(theirs, sends=KEYS.server, receives=KEYS.dialler)


def record(number, data, *, key=KEYS.dialler, proven=None):
    size = (len(data) + TAG).to_bytes(4, "big")
    return size + AESGCM(key).encrypt(bytes(4) + number.to_bytes(8, "little"), data, size if proven is None else proven)


def read(stream, size, until=None):
    data = bytearray(size)
    return bytes(data[: stream.read_into(memoryview(data), until)])


# ---- what comes through ----


@pytest.mark.parametrize(("sender", "reader"), [(AESGCM, AESGCM), (Older, Older), (AESGCM, Older), (Older, AESGCM)])
@pytest.mark.parametrize("size", [0, 1, RECORD - 1, RECORD, RECORD + 1, 3 * RECORD + 5])
def test_what_is_sent_is_what_comes(sender, reader, size):
    """In one piece, and with any two releases of cryptography."""
    data = os.urandom(size)
    with pair(sender=sender, reader=reader) as (one, two):
        thread = threading.Thread(target=one.sendall, args=(data,))
        thread.start()
        assert read(two, size) == data
        thread.join()
        two.sendall(b"and back")
        assert read(one, 8) == b"and back"
        assert not two.has_more(0)


def test_this_machine_tells_which_release_it_has():
    """Where the faster way is there, it is taken: `hasattr` is asked the right names."""
    cipher = AESGCM(bytes(32))
    for way, name in ((sealed._sealing, "encrypt_into"), (sealed._opening, "decrypt_into")):
        assert isinstance(way(bytes(32)), type(getattr(cipher, name, way)))


@settings(max_examples=40, deadline=None)
@given(
    sent=st.lists(st.integers(0, 70_000) | st.just(RECORD + 1), max_size=6),
    wanted=st.lists(st.integers(1000, 300_000), min_size=1, max_size=6),
)
def test_reads_need_not_be_as_long_as_what_was_sent(sent, wanted):
    parts = [os.urandom(size) for size in sent]
    whole, came = b"".join(parts), bytearray()
    sizes = itertools.cycle([1, *wanted])
    with pair() as (one, two):
        thread = threading.Thread(target=lambda: [one.sendall(part) for part in parts])
        thread.start()
        while len(came) < len(whole):
            came += read(two, min(next(sizes), len(whole) - len(came)))
        thread.join()
    assert came == whole


def test_a_record_that_comes_byte_by_byte_is_whole_in_the_end():
    """Whoever lost patience meanwhile, and asks again, has lost nothing of it."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        stream = SealedStream(theirs, sends=KEYS.server, receives=KEYS.dialler)
        stream.settimeout(0.01)
        sent = record(0, b"hello")
        for at in range(len(sent) - 1):
            mine.sendall(sent[at : at + 1])
            with pytest.raises(TimeoutError):
                read(stream, 5)
            assert stream.has_more(0)
        mine.sendall(sent[-1:])
        assert read(stream, 5) == b"hello"
        assert not stream.has_more(0)


def test_who_sends_byte_by_byte_is_given_up_in_time():
    mine, theirs = socket.socketpair()
    over = threading.Event()

    def drip():
        for at in record(0, bytes(1000)):
            if over.wait(0.01):
                return
            mine.sendall(bytes([at]))

    with mine, theirs:
        stream = SealedStream(theirs, sends=KEYS.server, receives=KEYS.dialler)
        stream.settimeout(SOON_S)
        thread = threading.Thread(target=drip)
        thread.start()
        begin = time.monotonic()
        assert read(stream, 1000, begin + 0.1) == b""
        assert time.monotonic() - begin < 5
        over.set()
        thread.join()


def test_what_was_read_already_counts_as_more():
    with fed(record(0, b"ab")) as stream:
        assert stream.has_more(0)
        assert read(stream, 1) == b"a"
        assert stream.has_more(0)
        assert read(stream, 1) == b"b"
        assert not stream.has_more(0)


def test_a_cut_from_another_thread_ends_a_wait():
    with pair() as (_, two):
        threading.Timer(0.05, two.cut).start()
        with pytest.raises(ConnectionResetError):
            read(two, 1)


# ---- what does not ----


@pytest.mark.parametrize("at", [4, 5, 100, 1003, 1004, 1010, 1019])
@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("wanted", [1, 1000])
def test_a_flipped_bit_ends_the_connection(at, bit, wanted):
    """In what was sealed or in the tag, whether it goes straight to who wanted it or not; and what comes behind it is not looked at."""
    changed = bytearray(record(0, bytes(1000)))
    changed[at] ^= 1 << bit
    with fed(changed, record(0, bytes(1000)), record(1, bytes(1000))) as stream:
        for _ in range(2):
            with pytest.raises(ConnectionAbortedError):
                read(stream, wanted)
        with pytest.raises(OSError, match="Broken pipe"):
            stream.sendall(b"as if nothing had been")


@pytest.mark.parametrize("bit", range(32))
def test_a_flipped_bit_of_a_size_ends_the_connection(bit):
    """Too much, too little, or a record that ends elsewhere."""
    changed = bytearray(record(0, bytes(1000)))
    changed[bit // 8] ^= 1 << bit % 8
    with fed(changed, bytes(70_000), is_ended=True) as stream, pytest.raises(ConnectionError):
        read(stream, 1)


def test_a_size_is_proven_with_what_it_is_of():
    with fed(record(0, b"x", proven=b"")) as stream, pytest.raises(ConnectionAbortedError):
        read(stream, 1)


@pytest.mark.parametrize(
    "numbers",
    [(0, 0), (0, 2), (1,), (1, 0), (0, 1, 1), (0, 1, 0)],
    ids=["again", "left out", "first left out", "swapped", "second again", "first again"],
)
def test_a_record_in_anothers_place_ends_the_connection(numbers):
    with fed(*(record(number, b"x") for number in numbers)) as stream, pytest.raises(ConnectionAbortedError):
        read(stream, len(numbers))


@pytest.mark.parametrize("key", [KEYS.server, bytes(32)], ids=["what it sent itself", "a stranger's"])
def test_a_record_of_another_key_ends_the_connection(key):
    with fed(record(0, b"x", key=key)) as stream, pytest.raises(ConnectionAbortedError):
        read(stream, 1)


@pytest.mark.parametrize("size", [RECORD + TAG + 1, 1 << 24, 0xFFFFFFFF])
def test_a_size_beyond_the_bound_takes_no_memory(size):
    """Nobody has to send what it says, nor does it have to fit anywhere."""
    with fed(size.to_bytes(4, "big")) as stream:
        tracemalloc.start()
        try:
            with pytest.raises(ConnectionAbortedError, match="a record of"):
                read(stream, 1)
            assert tracemalloc.get_traced_memory()[1] < 64 << 10
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("sent", [bytes(4), (15).to_bytes(4, "big"), record(0, b"")], ids=["nothing", "no tag", "sealed nothing"])
def test_a_record_of_nothing_ends_the_connection(sent):
    """Nobody sends one, and a row of them would be work without an end."""
    with fed(sent) as stream, pytest.raises(ConnectionAbortedError, match="a record of"):
        read(stream, 1)


@pytest.mark.parametrize("left", [0, 1, 3, 4, 5, 100, 1019])
def test_an_end_is_a_cut_wherever_it_comes(left):
    """What is to come has its length: nobody takes an end for all of it."""
    with fed(record(0, b"a"), record(1, bytes(1000))[:left], is_ended=True) as stream:
        assert read(stream, 1) == b"a"
        with pytest.raises(ConnectionResetError):
            read(stream, 1000)


# ---- nonces, keys and memory ----


def test_no_nonce_is_used_twice_whoever_sends(monkeypatch):
    """Two threads at once are a mistake, and would give the key away."""
    nonces = []

    class Noting(Older):
        def __init__(self, key):
            super().__init__(key)
            encrypt = self.encrypt
            self.encrypt = lambda nonce, data, proven: (time.sleep(0), nonces.append((key, nonce)), encrypt(nonce, data, proven))[-1]

    with pair(sender=Noting) as (one, two):
        threads = [threading.Thread(target=lambda: [one.sendall(b"x" * 50) for _ in range(200)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert read(two, 30_000) == b"x" * 30_000
        for thread in threads:
            thread.join()
        one.sendall(bytes(50_000))
        one.sendall(bytes(50_000))
    assert len(nonces) == len(set(nonces)) == 602


def test_a_nonce_is_not_used_again_after_a_send_that_failed():
    mine, theirs = socket.socketpair()
    with mine, theirs:
        stream = SealedStream(mine, sends=KEYS.dialler, receives=KEYS.server)
        stream.settimeout(0)
        with pytest.raises(BlockingIOError):
            stream.sendall(bytes(8 << 20))
        failed = stream._sent
        with pytest.raises(BlockingIOError):
            stream.sendall(b"x")
        assert stream._sent == failed + 1


def test_a_connection_that_carries_questions_takes_little_memory():
    """There are thousands, and most of them wait."""
    with contextlib.ExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(20):
            one, two = stack.enter_context(pair())
            for size in (1, 100, 10_000):
                one.sendall(bytes(size))
                read(two, size)
        after, _ = tracemalloc.get_traced_memory()
    assert (after - before) / 40 < 20 << 10


# ---- leaving TLS ----


def streams(one, peer, trust):
    """Of both ends of a connection to a node: which kind they are."""
    with dialer(trust[1]).dial(peer) as here:
        assert here.ask("stage", key="key")["record"] is None
        (there,) = one
        return type(here._stream), type(there._stream)


@pytest.mark.parametrize(
    ("cannot", "kind"),
    [((), SealedStream), (("dialler",), TlsStream), (("server",), TlsStream), (("dialler", "server"), TlsStream)],
    ids=str,
)
def test_both_ends_leave_tls_or_none(two, trust, monkeypatch, cannot, kind):
    """And a layer travels all the same."""
    me = threading.get_ident()
    monkeypatch.setattr(wire, "can_seal", lambda: ("dialler" if threading.get_ident() == me else "server") not in cannot)
    kept = []
    monkeypatch.setattr(wire.Wire, "welcome", lambda self, *said, real=wire.Wire.welcome: (kept.append(self), real(self, *said)))
    there, here = two
    layer = publish(there, {"file": os.urandom(3 << 20), "small": b"x"})
    with serving(there, trust[0]) as peer:
        assert streams(kept, peer, trust) == (kind, kind)
        Fetch(here, dialer(trust[1]), connections=1).layer(layer.id, [peer])
    here.verify(layer.id)


def test_rules_that_leave_the_cipher_out_are_seen(monkeypatch):
    def none(_key):
        raise UnsupportedAlgorithm("not here")

    assert sealed.can_seal()
    monkeypatch.setattr(sealed, "AESGCM", none)
    assert not sealed.can_seal()


def test_every_connection_has_keys_of_its_own_for_each_direction(two, trust, monkeypatch):
    made = []
    real = SealedStream.__init__

    def noting(self, sock, *, sends, receives):
        made.append((sends, receives))
        real(self, sock, sends=sends, receives=receives)

    monkeypatch.setattr(SealedStream, "__init__", noting)
    with serving(two[0], trust[0]) as peer:
        for _ in range(3):
            dialer(trust[1]).dial(peer).close()
    keys = {key for ends in made for key in ends}
    assert len(keys) == 6
    assert {len(key) for key in keys} == {32}
    assert sorted(made) == sorted((receives, sends) for sends, receives in made), "what one end seals with the other opens with"


@contextlib.contextmanager
def answering(trust, *answers):
    """A node that answers hello so, in one flight, and gives its end away."""
    with socket.create_server((HOST, 0)) as listener:

        def answer():
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError, PeerFault):
                stream = TlsStream(sock, trust[0], within_s=SOON_S)
                end = wire.Wire(stream, "there")
                end.receive()
                for one in answers:
                    data = one if isinstance(one, bytes) else wire.json.dumps(one).encode()
                    stream._tls.write(len(data).to_bytes(4, "little") + data)
                stream._flush()
                sock.recv(1)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield Peer("there", HOST, listener.getsockname()[1])
        thread.join(SOON_S)


@pytest.mark.parametrize("keys", [None, 7, "", "zz" * 64, "00" * 63, "00" * 65, [0] * 64], ids=str)
def test_keys_that_are_none_end_the_connection(trust, keys):
    with answering(trust, {"node": "there", "keys": keys}) as peer, pytest.raises(PeerFault, match="keys that are none"):
        dialer(trust[1]).dial(peer)


def test_what_is_said_in_tls_behind_the_keys_ends_the_connection(trust):
    """It would be lost, and what follows taken for it."""
    with (
        answering(trust, {"node": "there", "keys": KEYS.to_data()}, {"node": "again"}) as peer,
        pytest.raises(PeerFault, match="more was said inside TLS"),
    ):
        dialer(trust[1]).dial(peer)
