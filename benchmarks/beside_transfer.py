"""What a layer of 1 GiB that travels does to the actions of rollouts on both nodes: latency of `true` beside it, and without it.

Two processes, as two agents are: each has an engine with a sandbox in use, and does its part of the transfer in threads of the same process. Every
10 ms an action is run on each, first with nothing beside it, then while the layer comes ahead of demand at the pace that spreading keeps to
(`spread.Budget`), then while it comes as fast as it can, as a lease has it that waits for it; then with nothing again. Over loopback, and here both nodes
share the processors: between two machines each has its own. No budget: an issue names none.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import untax
from benchmarks import _measure, _two_nodes
from benchmarks._measure import Row
from untax.cluster.transfer.fetch import Fetch, Throttle
from untax.cluster.transfer.spread import Budget
from untax.cluster.transfer.wire import Dialer, Peer
from untax.cluster.trust import Trust, pinned
from untax.layers import marks
from untax.layers.store import LayerStore

HOST = "127.0.0.1"
EVERY_S = 0.01
_QUIET_S = 4.0
CASES = (("nothing", None), ("a stage that is spread", Budget().bytes_per_s), ("a stage that is waited for", 0.0), ("nothing", None))


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    if arguments.role:
        await _play(json.loads(arguments.role), substrate)
        raise SystemExit
    return await asyncio.to_thread(_measured, arguments, substrate)


def _measured(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="untax-bench-", dir=arguments.place) as place:
        layer_id = next(iter(_two_nodes.layers(Path(place, "there"), arguments.mib, only=1).values()))
        trust = Trust.new("bench")
        certificate, key = trust.identity_for(HOST).write(Path(place))
        said = {"place": place, "host": HOST, "token": trust.token}
        serving = {**said, "certificate": str(certificate), "key": str(key)}
        with _two_nodes.process(_argv(substrate, serving)) as there:
            fetching = {**said, "authority": trust.authority.certificate, "port": int(_two_nodes.line(there)), "layer": layer_id}
            with _two_nodes.process(_argv(substrate, fetching)) as here:
                _two_nodes.line(here)
                for _ in range(arguments.count):
                    for what, bytes_per_s in CASES:
                        for node in (there, here):
                            _two_nodes.ask(node, "act")
                        if bytes_per_s is None:
                            time.sleep(_QUIET_S)
                        else:
                            _two_nodes.ask(here, f"fetch {bytes_per_s}")
                        for name, node in (("sending", there), ("receiving", here)):
                            found.setdefault((name, what), []).extend(json.loads(_two_nodes.ask(node, "stop")))
    return [_row(substrate, name, what, took, found[name, "nothing"]) for (name, what), took in found.items() if what != "nothing"]


def _row(substrate: str, name: str, what: str, beside: Sequence[float], alone: Sequence[float]) -> Row:
    tails = [_measure.percentile(samples, 0.99) for samples in (beside, alone)]
    return _measure.compare(
        f"`true` on the {name} node beside {what}",
        substrate,
        beside,
        alone,
        note=f"native: without; p99 {tails[0] * 1e3:.2f} ms, {tails[0] / tails[1]:.2f} × without ({tails[1] * 1e3:.2f} ms); {len(alone)} without",
    )


def _argv(substrate: str, said: Mapping[str, object]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.beside_transfer", "--substrate", substrate, "--role", json.dumps(said)]


# ---- one node ----


async def _play(said: dict[str, str], substrate: str) -> None:
    place, name = Path(said["place"]), "there" if "key" in said else "here"
    store = LayerStore(place / name, marks=marks.of_this_process())
    asked: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(asked.put_nowait, line.strip())
        loop.call_soon_threadsafe(asked.put_nowait, "")

    async with _measure.engine_on(substrate, place / f"{name}-state") as engine, engine.lease(_measure.spec_for(substrate)) as box:
        server = _two_nodes.server(store, said) if "key" in said else None
        if server is not None:
            server.start()
        print(server.address[1] if server is not None else "ready", flush=True)
        threading.Thread(target=listen, daemon=True).start()
        acting: asyncio.Task[list[float]] | None = None
        stopped = asyncio.Event()
        while what := await asked.get():
            if what == "act":
                stopped.clear()
                acting = loop.create_task(_act(box, stopped))
                print("acting", flush=True)
            elif what == "stop":
                assert acting is not None
                stopped.set()
                print(json.dumps(await acting), flush=True)
            else:
                await asyncio.to_thread(_fetch, store, said, float(what.split()[1]))
                print("fetched", flush=True)
        if server is not None:
            await asyncio.to_thread(server.close)
    store.close()


async def _act(box: untax.Box, stopped: asyncio.Event) -> list[float]:
    took: list[float] = []
    while not stopped.is_set():
        took.append(await _measure.timed(box.run(["true"])))
        await asyncio.sleep(EVERY_S)
    return took


def _fetch(store: LayerStore, said: dict[str, str], bytes_per_s: float) -> None:
    dialer = Dialer("here", pinned(said["authority"]), said["token"])
    fetch = Fetch(store, dialer, throttle=Throttle(bytes_per_s or None))
    layer = fetch.layer(said["layer"], [Peer("there", said["host"], int(said["port"]))])
    store.close()  # lets go of what no record names
    store.evict()
    assert not layer.tree.exists()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=1024, help="of the layer (default: %(default)s)")
    parser.add_argument("--place", help="a directory for both stores (default: the temporary one)")
    parser.add_argument("--role", help=argparse.SUPPRESS)


if __name__ == "__main__":
    raise SystemExit(_measure.main("beside_transfer", __doc__, measure, count=1, options=_options, only=("namespace",)))
