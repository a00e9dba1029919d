"""A layer arrives exactly as if it had been built here, or not at all: from whoever gives it, whoever lies, and whatever is cut."""

import base64
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import zlib

import pytest
from tests.transfers import MARKS, contexts, dialer, publish, serving, stores
from tests.unit.layers.odd import furnish
from tests.unit.layers.private import die_at, in_child, mount, on_tmpfs

from untax._remove import remove_tree
from untax.cluster.transfer import fetch as fetch_module
from untax.cluster.transfer.fetch import Fetch, Throttle
from untax.cluster.transfer.outgoing import Outgoing
from untax.cluster.transfer.plan import CHUNK_BYTES
from untax.cluster.transfer.wire import Peer, PeerFault, Refused
from untax.core.errors import StageUnavailable
from untax.layers import marks
from untax.layers._descent import Descent, walk
from untax.layers.digest import attributes_hash, id_of_rows
from untax.layers.store import LayerStore

MIB = 1 << 20


def bulky(store, large_mib=20):
    """A large file, small ones, and one that ends a chunk."""
    files = {"large": os.urandom(large_mib * MIB + 5), "d/edge": os.urandom(CHUNK_BYTES)}
    return publish(store, files | {f"d/{n}": os.urandom(30_000) for n in range(300)})


def listing(tree):
    """All that can be seen of a tree, of times those that a copy keeps."""
    seen = []
    with Descent(tree) as descent:
        for visit in walk(descent):
            if visit is not None:
                name, st, _ = visit
                seen.append((name, st.st_mode, st.st_uid, st.st_gid, st.st_nlink, st.st_mtime_ns * (not marks.is_whiteout(st)), st.st_rdev))
    return seen


def nothing_half_made(store):
    return not list((store.root / "drafts").iterdir()) and not list(store.arrivals.iterdir())


# ---- as if it had been built here ----


def test_everything_that_a_workload_can_make_arrives(two, trust, tmp_path):
    """Owners, modes, times, attributes, marks, holes, hard links, pipes, sockets, names that are no text, 1,200 directories deep."""
    there, here = two
    with there.draft() as draft:
        furnish(draft.tree, outside=tmp_path)
        os.utime(draft.tree / "sparse", ns=(1, 1_234_567_891))
        if os.geteuid() == 0:
            os.chown(draft.tree / "plain", 1000, 33)
            os.setxattr(draft.tree / "sparse", marks.opaque("trusted"), b"y")
            os.chown(draft.tree / "way out", 5, 6, follow_symlinks=False)
        else:  # whoever cannot read its own files cannot give them away
            os.chmod(draft.tree / "closed", 0o700)
            os.chmod(draft.tree / "closed/inner", 0o700)
            os.chmod(draft.tree / "closed/inner/file", 0o400)
            os.removexattr(draft.tree / "sparse", "user.overlay.opaque")
            os.setxattr(draft.tree / "sparse", "user.overlay.opaque", b"y")
        (draft.tree / "empty").write_bytes(b"")
        layer = draft.publish()
    with serving(there, trust[0]) as peer:
        got = Fetch(here, dialer(trust[1])).layer(layer.id, [peer])

    assert (got.id, got.entries) == (layer.id, layer.entries)
    assert listing(got.tree) == listing(layer.tree)
    assert (got.tree / "sparse/big").stat().st_blocks * 512 < MIB
    assert os.path.samefile(got.tree / "plain", got.tree / "second name")
    here.check_seal(layer.id)
    here.verify(layer.id)
    assert nothing_half_made(here)


def test_contents_in_many_chunks_arrive(two, trust):
    there, here = two
    layer = bulky(there)
    said = []
    with serving(there, trust[0]) as peer:
        Fetch(here, dialer(trust[1]), told=lambda done, total: said.append((done, total))).layer(layer.id, [peer])

    here.verify(layer.id)
    assert said[-1][0] == said[-1][1] > 24 * MIB


def test_many_who_want_a_layer_have_it_sent_once(two, trust, monkeypatch):
    there, here = two
    layer = bulky(there, 8)
    sent = []
    real = Outgoing.send_chunk
    monkeypatch.setattr(Outgoing, "send_chunk", lambda self, wire, number: (sent.append(number), real(self, wire, number))[1])
    with serving(there, trust[0]) as peer:
        threads = [threading.Thread(target=Fetch(here, dialer(trust[1])).layer, args=(layer.id, [peer])) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert here.layer(layer.id)
    assert sorted(sent) == sorted(set(sent))


# ---- cut off ----


def test_a_cut_is_gone_on_with_by_the_next_node(two, trust, tmp_path, monkeypatch):
    """What came before the cut is not sent again."""
    there, here = two
    layer = bulky(there)
    real = Outgoing.send_chunk
    sent = []

    def cut(self, wire, number):
        sent.append(number)
        if len(sent) in (4, 5):
            wire.cut()
            return
        real(self, wire, number)

    monkeypatch.setattr(Outgoing, "send_chunk", cut)
    with serving(there, trust[0]) as peer, serving(there, trust[0], node="second") as second:
        Fetch(here, dialer(trust[1]), connections=1).layer(layer.id, [peer, second])

    here.verify(layer.id)
    assert len(sent) <= len(set(sent)) + 4, "but for those that were on their way when it was cut"
    assert nothing_half_made(here)


FETCHES = """
import ssl, sys
from pathlib import Path
from untax.cluster.transfer.fetch import Fetch, Throttle
from untax.cluster.transfer.wire import Dialer, Peer
from untax.layers.store import LayerStore
root, marks, certificate, port, layer_id, rate = sys.argv[1:]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.load_verify_locations(certificate)
def told(done, total):
    print(done, flush=True)
store = LayerStore(Path(root), marks=marks)
Fetch(store, Dialer("here", context, "the fleet's token"), throttle=Throttle(float(rate)), told=told).layer(layer_id, [Peer("there", "127.0.0.1", int(port))])
"""


def test_a_fetch_that_was_killed_is_gone_on_with(tmp_path):
    """Killed after some chunks; the store is whole, and the next fetch is sent only what was missing."""
    serve, trusted = contexts(tmp_path)
    with stores(tmp_path, "there", "here") as (there, here):
        layer = bulky(there)
        with serving(there, serve) as peer:
            argv = [
                sys.executable,
                "-c",
                FETCHES,
                str(here.root),
                MARKS,
                str(tmp_path / "cert.pem"),
                str(peer.port),
                layer.id,
                str(12 * MIB),
            ]
            for killed_after in (2, 2):
                child = subprocess.Popen(argv, stdout=subprocess.PIPE)
                for _ in range(killed_after):
                    assert child.stdout.readline()
                child.send_signal(signal.SIGKILL)
                child.communicate()
            again = LayerStore(here.root, marks=MARKS)
            assert again.layers() == []
            assert again.spares(), "what has come is kept, and counted"
            said = []
            Fetch(again, dialer(trusted), told=lambda done, _: said.append(done)).layer(layer.id, [peer])
            again.verify(layer.id)
            again.close()

    assert said[0] > 12 * MIB, "four chunks at least were there already"


STEPS = (
    "rename",
    "fsync",
    "mkdir",
    "open",
    "unlink",
    "rmdir",
    "write",
    "pwrite",
    "ftruncate",
    "link",
    "symlink",
    "utime",
    "fchmod",
    "close",
)


def test_kill_9_at_every_step_leaves_a_whole_store(two, trust):
    """A child fetches and is killed before its n-th call into the kernel, for one n after the other until it gets through."""
    there, here = two
    layer = publish(there, {"large": os.urandom(5 * MIB), **{f"d/{n}": os.urandom(3000) for n in range(12)}})
    survived = None
    step = 0
    here.close()
    with serving(there, trust[0]) as peer:
        while survived is None:
            remove_tree(here.root)
            LayerStore(here.root, marks=MARKS).close()
            status = os.waitstatus_to_exitcode(in_child(fetch_and_die, here.root, trust[1], peer, layer.id, step))
            if status == 0:
                survived = step
            else:
                assert status == -signal.SIGKILL
            again = LayerStore(here.root, marks=MARKS)
            assert os.listdir(here.root / "drafts") == os.listdir(here.root / "damaged") == [], f"step {step}"
            for one in again.layers():
                again.verify(one.id)
            assert Fetch(again, dialer(trust[1])).layer(layer.id, [peer]).id == layer.id
            again.verify(layer.id)
            again.close()
            step += 9 if step < 90 else 21
    assert survived > 90


def fetch_and_die(root, context, peer, layer_id, step):
    store = LayerStore(root, marks=MARKS)
    die_at(step, STEPS)
    Fetch(store, dialer(context), connections=1).layer(layer_id, [peer])


def test_what_was_damaged_after_a_cut_is_sent_again(two, trust, monkeypatch):
    """What is noted as having come is read and hashed, not believed."""
    there, here = two
    layer = bulky(there)
    real = Outgoing.send_chunk
    sent = []

    def cut(self, wire, number):
        sent.append(number)
        wire.cut() if len(sent) == 7 else real(self, wire, number)

    monkeypatch.setattr(Outgoing, "send_chunk", cut)
    with serving(there, trust[0]) as peer:
        monkeypatch.setattr(fetch_module, "_TRIES", 1)
        with pytest.raises(StageUnavailable):
            Fetch(here, dialer(trust[1]), connections=1).layer(layer.id, [peer])
        for name in ("large", "d/0"):
            half = here.arrivals / layer.id / "tree" / name
            with half.open("r+b") as file:
                file.write(b"something else")
        monkeypatch.setattr(fetch_module, "_TRIES", 3)
        Fetch(here, dialer(trust[1])).layer(layer.id, [peer])

    here.verify(layer.id)


# ---- liars ----


def wrong_bytes(self, wire, number):
    row = self._chunks[number]
    length = sum(piece.length for piece in row)
    head = b"".join((1).to_bytes(4, "little") for _ in row)
    head += b"".join(piece.offset.to_bytes(8, "little") + piece.length.to_bytes(8, "little") for piece in row)
    wire.send({"map": len(head), "bytes": length})
    wire.send_bytes(head + bytes(length - 1) + b"x")


def truncated(self, wire, number):
    """Nothing but a hole where there is something."""
    head = bytes(4 * len(self._chunks[number]))
    wire.send({"map": len(head), "bytes": 0})
    wire.send_bytes(head)


def ends_early(self, wire, number):
    wire.send({"map": 20, "bytes": 1000})
    wire.send_bytes(b"\1\0\0\0")
    wire.cut()


def endless(self, wire, number):
    wire.send({"map": 20, "bytes": 1 << 62})


def outside(self, wire, number):
    piece = self._chunks[number][0]
    head = (1).to_bytes(4, "little") + (piece.offset + piece.length).to_bytes(8, "little") + (100).to_bytes(8, "little")
    head += bytes(4 * (len(self._chunks[number]) - 1))
    wire.send({"map": len(head), "bytes": 100})
    wire.send_bytes(head + bytes(100))


def nonsense(self, wire, number):
    wire.send_bytes(b"\xff\xff\xff\xff" + b"HTTP/1.1 200 OK\r\n\r\n")


def no_answer(self, wire, number):
    wire.send({"map": "many", "bytes": None})


@pytest.mark.parametrize("lie", [wrong_bytes, truncated, ends_early, endless, outside, nonsense, no_answer])
def test_a_node_that_gives_something_else_is_left_for_the_next(two, trust, monkeypatch, lie):
    there, here = two
    layer = bulky(there, 9)
    real = Outgoing.send_chunk
    liars = set()

    def told(self, wire, number):
        (lie if id(self) in liars else real)(self, wire, number)

    monkeypatch.setattr(Outgoing, "send_chunk", told)
    outgoing = Outgoing(there, layer.id)
    liars.add(id(outgoing))
    with serving(there, trust[0], node="liar", prepared={layer.id: outgoing}) as liar, serving(there, trust[0]) as honest:
        with pytest.raises(StageUnavailable, match="liar"):
            Fetch(here, dialer(trust[1])).layer(layer.id, [liar])
        assert here.layers() == []
        Fetch(here, dialer(trust[1])).layer(layer.id, [liar, honest])

    here.verify(layer.id)
    assert nothing_half_made(here)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trusted.overlay.metacopy", b""),
        (f"{MARKS}.overlay.redirect", b"../../etc"),
        (f"{MARKS}.overlay.redirect", b"/a//b"),
        ("security.selinux.no", b"x"),
        ("trusted.other", b"x"),
    ],
)
def test_attributes_that_no_layer_may_have_are_refused(two, trust, name, value):
    """With a hash that fits: the list and the attributes are by one author."""
    there, here = two
    layer = publish(there, {"d/file": b"x"})
    outgoing = Outgoing(there, layer.id)
    texts = []
    data = zlib.decompress(outgoing.packed_rows)
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        texts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    fields = texts[1].split(b"\0")
    fields[6] = attributes_hash([(name, value)])
    texts[1] = b"\0".join(fields)
    rest = json.loads(zlib.decompress(outgoing.rest))
    rest["attributes"] = {"1": [[name, base64.b64encode(value).decode()]]}
    outgoing.rest = zlib.compress(json.dumps(rest).encode())
    outgoing.packed_rows = zlib.compress(b"".join(len(text).to_bytes(4, "little") + text for text in texts))
    forged = id_of_rows(texts)
    with serving(_Pins(there), trust[0], prepared={forged: outgoing}) as peer:
        with pytest.raises(Exception, match="extended attribute"):
            Fetch(here, dialer(trust[1])).layer(forged, [peer])
    assert here.layers() == []


class _Pins:
    """A store that has whatever is asked for."""

    def __init__(self, store):
        self._store = store

    def pin(self, ids):
        return self._store.pin(())


def test_a_fleet_is_closed_to_others(two, trust, tmp_path):
    """Without its token, without its certificate, or with another release: refused, in words that name the node."""
    there, _ = two
    other = tmp_path / "other"
    other.mkdir()
    with serving(there, trust[0]) as peer:
        with pytest.raises(Refused, match=r"there.*token"):
            dialer(trust[1], token="another").dial(peer)
        with pytest.raises(PeerFault, match="CERTIFICATE"):
            dialer(contexts(other)[1]).dial(peer)
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with pytest.raises(PeerFault):
            dialer(anybody).dial(peer)
        wire = dialer(trust[1]).dial(peer)
        with pytest.raises(Refused, match="what is"):
            wire.ask("everything")
        with pytest.raises(Refused, match="not the id"):
            wire.ask("layer", layer="../../etc")
        with pytest.raises(Refused, match="no layer"):
            wire.ask("chunk", chunk=0)
        wire.close()


def test_another_release_is_refused_with_words(two, trust, monkeypatch):
    there, _ = two
    with serving(there, trust[0]) as peer:
        monkeypatch.setattr("untax.cluster.transfer.wire.__version__", "0.0.1")
        with pytest.raises(Refused, match=r"0\.0\.1.*install one release"):
            dialer(trust[1]).dial(peer)


# ---- a full disk ----


def test_a_full_disk_is_told_and_leaves_the_store_whole(trust, tmp_path):
    target = tmp_path / "small"
    target.mkdir()

    def fill():
        mount("tmpfs", target, "size=12m")
        kind = marks.of_this_process()
        with_room = LayerStore(tmp_path / "there", marks=kind)
        here = LayerStore(target / "here", marks=kind)
        layer = bulky(with_room, 16)
        small = publish(with_room, {"small": b"x" * 1000})
        with serving(with_room, trust[0]) as peer:
            with pytest.raises(StageUnavailable, match="is full"):
                Fetch(here, dialer(trust[1])).layer(layer.id, [peer])
            assert nothing_half_made(here) or [path.suffix for path in here.arrivals.iterdir()] == [".use", ".lock"]
            assert Fetch(here, dialer(trust[1])).layer(small.id, [peer]).id == small.id
        here.close()
        with_room.close()

    on_tmpfs(fill)
    remove_tree(tmp_path / "there")


def test_a_budget_of_bytes_in_a_second_is_kept(monkeypatch):
    waited = []
    throttle = Throttle(1000.0)
    stopped = threading.Event()
    monkeypatch.setattr(stopped, "wait", waited.append)
    for _ in range(3):
        throttle.take(500, stopped)

    assert waited[-1] == pytest.approx(1.5, abs=0.1)


def test_there_is_nobody(two, trust):
    _, here = two
    with pytest.raises(StageUnavailable, match="gone"):
        Fetch(here, dialer(trust[1])).layer("sha256-" + "1" * 64, [Peer("gone", "127.0.0.1", 1)])
