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
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import _measure
from benchmarks._measure import Row
from untax.cluster.transfer.fetch import CONNECTIONS, Fetch
from untax.cluster.transfer.serve import Server
from untax.cluster.transfer.wire import Dialer, Peer
from untax.cluster.trust import Trust, pinned
from untax.layers import marks
from untax.layers.store import LayerStore

LEAST = 0.6  # issue 9: of what iperf3 reaches on the same path
_MIB = 1 << 20
_IPERF_S = 2
_SMALL = 32 << 10  # bytes of each of the small files that are an eighth of the mixed layer
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
        layers = _layers(place / "there", arguments.mib)
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
    with _process(serve) as server:
        port = int(_line(server))
        said = {"host": host, "port": port, "authority": trust.authority.certificate, "token": trust.token}
        fetch = [*here, *base, "--role", json.dumps({**said, "layer": layer_id, "connections": arguments.connections})]
        with _process(fetch) as client:
            _line(client)
            for _ in range(arguments.count + 1):  # the first is discarded
                theirs.append(arguments.mib * _MIB * 8 / _iperf(there, here, host))
                ours.append(float(_ask(client)))
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
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(said["certificate"], said["key"])
        store = LayerStore(place / "there", marks=marks.of_this_process())
        server = Server("there", store, context, said["token"], host=said["host"])
        server.start()
        print(server.address[1], flush=True)
        sys.stdin.read()
        server.close()
        store.close()
        return
    store = LayerStore(place / "here", marks=marks.of_this_process())
    dialer = Dialer("here", pinned(said["authority"]), said["token"])
    peer = Peer("there", said["host"], said["port"])
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        layer = Fetch(store, dialer, connections=said["connections"]).layer(said["layer"], [peer])
        print(time.perf_counter() - begin, flush=True)
        store.close()  # lets go of what no record names
        store.evict()
        assert not layer.tree.exists()


def _layers(root: Path, mib: int) -> dict[str, str]:
    store = LayerStore(root, marks=marks.of_this_process())
    made = {}
    for what, small in (("one file", 0), ("an eighth in small files", mib * _MIB // 8 // _SMALL)):
        with store.draft() as draft:
            with open(draft.tree / "large", "wb") as file:
                file.writelines(os.urandom(_MIB) for _ in range((mib * _MIB - small * _SMALL) // _MIB))
            for number in range(small):
                directory = draft.tree / f"d{number // 100}"
                directory.mkdir(exist_ok=True)
                (directory / str(number)).write_bytes(os.urandom(_SMALL))
            made[f"{mib} MiB, {what}"] = draft.publish().id
    store.close()
    return made


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


# ---- processes ----


@contextlib.contextmanager
def _process(argv: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("layer_transfer: one of the two nodes did not start")
    return line


def _ask(process: "subprocess.Popen[str]") -> str:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return _line(process)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=1024, help="of the layer (default: %(default)s)")
    parser.add_argument("--path", default="shaped,loopback" if os.geteuid() == 0 else "loopback", help="(default: %(default)s)")
    parser.add_argument("--rate", default="5gbit", help="of the shaped path (default: %(default)s)")
    parser.add_argument("--round-trip-ms", type=float, default=1.0, help="of the shaped path (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="(default: %(default)s)")
    parser.add_argument("--place", help="a directory for both stores (default: the temporary one)")
    parser.add_argument("--role", help=argparse.SUPPRESS)


if __name__ == "__main__":
    raise SystemExit(_measure.main("layer_transfer", __doc__, measure, count=3, options=_options, only=("namespace",)))
