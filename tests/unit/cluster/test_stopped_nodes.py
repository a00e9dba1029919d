"""A node whose process is stopped has connections that nobody ends, and a kernel that answers for it: those who wait for it go on all the same."""

import signal
import subprocess
import sys
import threading

import pytest
from tests.transfers import MARKS, SOON_S, TOKEN, Node, contexts, key_owned_by

from untax.cluster.transfer import Peer, errand, serve, wire
from untax.cluster.transfer.errand import Errand

NODE = """
import ssl, sys
from pathlib import Path
from untax.cluster.transfer import Peer, Transfer, beats, room
from untax.cluster.transfer.errand import Errand
from untax.layers.store import LayerStore
root, marks, trust, token, other, key = sys.argv[1:]
room.BEAT_S = beats.BEAT_S = 0.1
serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
serving.load_cert_chain(trust + "/cert.pem", trust + "/key.pem")
trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
trusting.load_verify_locations(trust + "/cert.pem")
store = LayerStore(Path(root), marks=marks)
node = Transfer("stopped", store, server_context=serving, client_context=trusting, token=token, host="127.0.0.1", budget=None)
claim = node.claims.claim
def noted(*args, **kwargs):
    print("claimed", flush=True)
    return claim(*args, **kwargs)
node.claims.claim = noted
node.start()
node.meet([Peer.at("owner", other)])
print(node.address, flush=True)
if key:
    held = Errand(node, key, "repo", lambda *_: None)
    assert held.begin() is None
    print("it builds", flush=True)
sys.stdin.read()
node.close()
store.close()
"""


@pytest.fixture
def begun(tmp_path):
    """Another node in a process of its own, and one here."""
    directory = tmp_path / "trust"
    directory.mkdir()
    here = Node("owner", tmp_path, contexts(directory))
    children = []

    def begin(key):
        argv = [sys.executable, "-c", NODE, str(tmp_path / "stopped"), MARKS, str(directory), TOKEN, here.transfer.address, key]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child, Peer.at("stopped", child.stdout.readline().strip())

    yield here, begin
    for child in children:
        child.send_signal(signal.SIGCONT)
        child.communicate()
        assert child.returncode == 0
    here.close()


def waiting(node, key):
    """One more who wants it, in a thread; where its end is told."""
    ended = []
    wanted = Errand(node.transfer, key, "repo", lambda *_: None)

    def run():
        ended.append(wanted.begin())
        wanted.left()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ended


def test_a_stopped_owner_is_left_for_the_next(begun, monkeypatch):
    here, begin = begun
    monkeypatch.setattr(errand, "_ASKED_S", 0.5)
    child, peer = begin("")
    here.transfer.meet([peer])
    key = key_owned_by("stopped", "owner")
    with here.transfer.dialer.dial(peer) as first:
        assert first.ask("claim", key=key, not_at=[])["outcome"] == "granted"
        monkeypatch.setattr(wire, "SILENCE_S", 1.0)
        thread, ended = waiting(here, key)
        assert [child.stdout.readline() for _ in range(2)] == ["claimed\n"] * 2
        child.send_signal(signal.SIGSTOP)
        thread.join(SOON_S)

    assert ended == [None], "it builds"


def test_a_stopped_builder_loses_its_claim_to_the_next(begun, monkeypatch):
    here, begin = begun
    monkeypatch.setattr(errand, "_ASKED_S", 0.5)
    monkeypatch.setattr("untax.cluster.transfer.room.BEAT_S", 0.1)
    monkeypatch.setattr(serve, "SILENCE_S", 2.0)
    key = key_owned_by("owner", "stopped")
    child, peer = begin(key)
    here.transfer.meet([peer])
    assert child.stdout.readline() == "it builds\n"
    thread, ended = waiting(here, key)
    child.send_signal(signal.SIGSTOP)
    thread.join(SOON_S)

    assert ended == [None], "it builds"
