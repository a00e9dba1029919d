"""A layer of 1 GiB to the store of a second node, beside what `iperf3` reaches on the same path, one after the other.

Two processes, as on two nodes, each with a store of its own. From asking for the layer until it is published there: every byte checked, on the
disk, and the layer usable. `iperf3` stands where other programs have native, and only moves bytes.

Two paths. *Shaped*: two network namespaces of this program's own with a cable between them, 5 Gbit/s and, where the kernel has netem, 1 ms there
and back, as between two machines of a cluster (needs root, `ip` and `tc`); the budget is for this one. *Loopback*: what the kernel copies in memory without any
network; no budget, because there one byte costs `iperf3` less than TLS, a hash and a page of a file can.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import _measure, _two_nodes
from benchmarks._measure import Row
from untax._remove import remove_tree
from untax.cluster.transfer.fetch import CONNECTIONS, Fetch
from untax.cluster.transfer.wire import Dialer, Peer
from untax.cluster.trust import Trust, pinned
from untax.layers import marks
from untax.layers.store import LayerStore

LEAST = 0.6  # issue 9: of what iperf3 reaches on the same path
_MIB = 1 << 20
_IPERF_S = 2
_FEW = 100  # files
_AHEAD_MIB = 64  # of memory that is given back before the bytes come that need it
_NAMES = ("untax-bench-a", "untax-bench-b")
_HOSTS = ("10.251.0.1", "10.251.0.2")


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    if arguments.role:
        _play(arguments)
        raise SystemExit
    return await asyncio.to_thread(_measured, arguments, substrate)


def _measured(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    if shutil.which("iperf3") is None:
        raise SystemExit("layer_transfer: there is no iperf3 here; apt install iperf3")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="untax-bench-", dir=arguments.place) as made:
        place = Path(made)
        layers = _two_nodes.layers(place / "there", arguments.mib)
        for path in arguments.path.split(","):
            with _shaped(arguments) if path == "shaped" else _loopback() as (there, here, host):
                for what, layer_id in layers.items():
                    rows.append(_beside(arguments, path, substrate, place, what, layer_id, there, here, host))
    return rows


def _beside(
    arguments: argparse.Namespace, path: str, substrate: str, place: Path, what: str, layer_id: str, there: Sequence[str], here: Sequence[str], host: str
) -> Row:  # fmt: skip
    trust = Trust.new("bench")
    identity = trust.identity_for(host)
    certificate, key = identity.write(place)
    base = [sys.executable, "-m", "benchmarks.layer_transfer", "--substrate", "namespace", "--place", str(place)]
    serve = [*there, *base, "--role", json.dumps({"host": host, "certificate": str(certificate), "key": str(key), "token": trust.token})]
    ours, theirs = [], []
    with _two_nodes.process(serve) as server:
        port = int(_two_nodes.line(server))
        said = {"host": host, "port": port, "authority": trust.authority.certificate, "token": trust.token}
        fetch = [
            *here,
            *base,
            "--role",
            json.dumps({**said, "layer": layer_id, "connections": arguments.connections, "mib": arguments.mib, "fresh": arguments.fresh}),
        ]
        with _two_nodes.process(fetch) as client:
            _two_nodes.line(client)
            for _ in range(arguments.count + 1):  # the first is discarded
                theirs.append(arguments.mib * _MIB * 8 / _iperf(there, here, host))
                ours.append(float(_two_nodes.ask(client)))
    bits = arguments.mib * _MIB * 8
    speed = [bits / seconds for seconds in theirs[1:]]
    ratio = _measure.percentile(theirs[1:], 0.5) / _measure.percentile(ours[1:], 0.5)
    gbit = bits / _measure.percentile(ours[1:], 0.5) / 1e9
    return _measure.compare(
        f"{what}, {path}",
        substrate,
        ours[1:],
        theirs[1:],
        budget=f"≥ {LEAST} × iperf3's speed" if path == "shaped" else "",
        holds=(lambda _row: ratio >= LEAST) if path == "shaped" else None,
        note=f"native: iperf3; {ratio:.2f} × its speed: {gbit:.2f} of {_measure.percentile(speed, 0.5) / 1e9:.2f} Gbit/s",
    )


# ---- the two nodes ----


def _play(arguments: argparse.Namespace) -> None:
    said, place = json.loads(arguments.role), Path(arguments.place)
    if "key" in said:
        store = LayerStore(place / "there", marks=marks.of_this_process())
        server = _two_nodes.server(store, said)
        server.start()
        print(server.address[1], flush=True)
        sys.stdin.read()
        server.close()
        store.close()
        return
    dialer = Dialer("here", pinned(said["authority"]), said["token"])
    peer = Peer("there", said["host"], said["port"])
    print("ready", flush=True)
    for _ in sys.stdin:
        # Each time into a store of its own. One with many files stays until the end: ext4 passes over the inodes of files that were removed in
        # the last minutes, one by one, so that where thousands were, a new file takes 0.2 ms (`recently_deleted` in a profile).
        store = LayerStore(Path(tempfile.mkdtemp(prefix="here-", dir=place)), marks=marks.of_this_process())
        with contextlib.closing(_Used(place, 0 if said["fresh"] else said["mib"])) as used:
            begin = time.perf_counter()
            used.give(0, 0)
            layer = Fetch(store, dialer, connections=said["connections"], told=used.give).layer(said["layer"], [peer])
            print(time.perf_counter() - begin, flush=True)
        store.close()
        if layer.entries < _FEW:
            remove_tree(store.root)


class _Used:
    """A file in the page cache, which gives its place there up as the layer needs it.

    On a machine that has run for a while no memory is free: what a new file needs in the cache, an old one gives up. On a virtual machine that was left
    idle free memory may be its host's, which gives a page when it is first touched: 2.6 s for 1 GiB here, against 0.3 s for pages that were in use a
    moment ago. That is neither the network's nor the layer's, and `iperf3`, which needs none, never meets it.
    """

    def __init__(self, place: Path, mib: int) -> None:
        self._fd = os.open(place / "used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = (mib + _AHEAD_MIB) * _MIB
        self._given = 0
        zeros = bytes(_MIB)
        for at in range(0, self._size, _MIB):
            os.pwrite(self._fd, zeros, at)
        os.fsync(self._fd)  # what is not on the disk stays in the cache

    def give(self, done: int, _total: int) -> None:
        """So many bytes of the layer have come: as much, and some in advance, is given up."""
        end = min(self._size, (done // _MIB + _AHEAD_MIB) * _MIB)
        if end > self._given:
            os.posix_fadvise(self._fd, self._given, end - self._given, os.POSIX_FADV_DONTNEED)
            self._given = end

    def close(self) -> None:
        os.close(self._fd)


# ---- the path between them ----


@contextlib.contextmanager
def _loopback() -> Iterator[tuple[list[str], list[str], str]]:
    yield [], [], "127.0.0.1"


@contextlib.contextmanager
def _shaped(arguments: argparse.Namespace) -> Iterator[tuple[list[str], list[str], str]]:
    if os.geteuid() != 0:
        raise SystemExit("layer_transfer: only root can make a path of its own; --path loopback needs nobody")
    names = [f"{name}-{os.getpid()}" for name in _NAMES]
    cables = [f"utb{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, host in zip(names, cables, _HOSTS, strict=True):
            _ip("-n", name, "address", "add", f"{host}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            add = ["tc", "-n", name, "qdisc", "add", "dev", cable]
            subprocess.run([*add, "root", "handle", "1:", "tbf", "rate", arguments.rate, "burst", "2mb", "latency", "20ms"], check=True)
            delay = ["parent", "1:1", "netem", "delay", f"{arguments.round_trip_ms / 2}ms", "limit", "100000"]
            if subprocess.run([*add, *delay], check=False, capture_output=True).returncode:
                print("layer_transfer: this kernel has no netem, so the path has a rate and no delay", file=sys.stderr)
        inside = [["ip", "netns", "exec", name] for name in names]
        yield inside[0], inside[1], _HOSTS[0]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True)


def _iperf(there: Sequence[str], here: Sequence[str], host: str) -> float:
    """Bits in a second from `there` to `here`, the way the layer goes."""
    server = subprocess.Popen([*there, "iperf3", "-s", "-1", "-B", host, "-p", "5299", "--forceflush"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    while "listening" not in server.stdout.readline():
        pass
    said = subprocess.run(
        [*here, "iperf3", "-c", host, "-p", "5299", "-t", str(_IPERF_S), "-R", "-J"], check=True, capture_output=True, text=True
    ).stdout
    server.stdout.read()
    server.wait()
    return float(json.loads(said)["end"]["sum_received"]["bits_per_second"])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=1024, help="of the layer (default: %(default)s)")
    parser.add_argument("--path", default="shaped,loopback" if os.geteuid() == 0 else "loopback", help="(default: %(default)s)")
    parser.add_argument("--rate", default="5gbit", help="of the shaped path (default: %(default)s)")
    parser.add_argument("--round-trip-ms", type=float, default=1.0, help="of the shaped path (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="(default: %(default)s)")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="into memory that may have to come from a virtual machine's host first, instead of such as was in use",
    )
    parser.add_argument("--place", help="a directory for both stores (default: the temporary one)")
    parser.add_argument("--role", help=argparse.SUPPRESS)


if __name__ == "__main__":
    raise SystemExit(_measure.main("layer_transfer", __doc__, measure, count=3, options=_options, only=("namespace",)))
