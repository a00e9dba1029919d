"""Two nodes' stores in one test, and what they trust each other by."""

import contextlib
import os
import ssl
import subprocess

from hypothesis import strategies as st

from untax._remove import remove_tree
from untax.cluster.transfer import Transfer
from untax.cluster.transfer.claims import owners
from untax.cluster.transfer.serve import Server
from untax.cluster.transfer.wire import Dialer, Peer
from untax.layers.build import Stages
from untax.layers.store import LayerStore

MARKS = "trusted" if os.geteuid() == 0 else "user"
TOKEN = "the fleet's token"
HOST = "127.0.0.1"
SOON_S = 30.0  # for what takes an instant, on a machine that has other things to do
ODD_DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.sampled_from(["0", "1", "2"]), inner, max_size=3),
    max_leaves=8,
)
"""Whatever JSON can say."""


def contexts(directory):
    """For a server at `HOST`, and for whoever trusts it."""
    key, certificate = directory / "key.pem", directory / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    named = ["-subj", "/CN=untax test", "-addext", f"subjectAltName=IP:{HOST}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*made, *named], check=True, capture_output=True)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.load_verify_locations(certificate)
    return serving, trusting


@contextlib.contextmanager
def stores(directory, *names):
    opened = [LayerStore(directory / name, marks=MARKS) for name in names]
    try:
        yield opened
    finally:
        for store in opened:
            store.close()
            remove_tree(store.root)


def publish(store, files):
    """A layer of these files, by their paths."""
    with store.draft() as draft:
        for name, data in files.items():
            path = draft.tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return draft.publish()


def key_owned_by(node, *others):
    """Of a stage that this node says who builds."""
    return next(key for key in (f"key-{number}" for number in range(1000)) if owners(key, (node, *others))[0] == node)


@contextlib.contextmanager
def serving(store, context, *, node="there", token=TOKEN, prepared=None, **options):
    """`prepared`: layers as this node gives them, whatever its store has."""
    server = Server(node, store, context, token, host=HOST, **options)
    server._recent.update(prepared or {})
    server.start()
    try:
        yield Peer(node, *server.address)
    finally:
        server.close()


class Node:
    """One of a fleet's, without an engine. It spreads nothing by itself."""

    def __init__(self, name, root, trust):
        self.store = LayerStore(root / name, marks=MARKS)
        self.transfer = Transfer(name, self.store, server_context=trust[0], client_context=trust[1], token=TOKEN, host=HOST, budget=None)
        self.transfer.start()
        self.peer = Peer.at(name, self.transfer.address)
        self.stages = Stages(self.store)
        self.stages.source = self.transfer

    async def tree(self, repo):
        found = await self.stages.repo_tree(repo)
        try:
            return (found.path / "file").read_text()
        finally:
            found.pin.close()

    def close(self):
        self.transfer.close()
        self.store.close()
        remove_tree(self.store.root)


def meet(nodes):
    for node in nodes:
        node.transfer.meet([one.peer for one in nodes])


def dialer(context, *, node="here", token=TOKEN):
    return Dialer(node, context, token)
