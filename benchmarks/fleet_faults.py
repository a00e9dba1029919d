"""Rollouts on four nodes with one killed and one added on the way: each has exactly one ledger, none is lost, none is scored on a fault.

The nodes are raylets of this machine (`tests/raycluster.py`), each with an agent and a state directory of its own. The node is killed as by a power
failure: raylet, agent and everything else at once, with leases on it. A rollout that had its sandbox there must end with the verdict
`infra`; whatever is scored must have given its own answer, from its own sandbox, and a ledger that can be trusted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.raycluster import RayCluster, unavailable_reason

import untax
from benchmarks import _measure
from benchmarks._measure import Row
from untax.cluster.operate import operating
from untax.service.fleet import NodeStatus

NODES = 4
CLIENTS = 48
SETTLES = 4000  # rollouts; with fewer the new node may join when all is over
HAND_S = 2.0  # what this process has in hand when the last rollout ends goes back after one
AGAIN_S = 0.05  # until a rollout for which there was no lease asks again


@dataclass
class Rollout:
    number: int
    verdict: str = ""
    score: float | None = None
    node: str = ""
    ledger: str = ""
    fault: str = ""
    asked: int = 0
    """Times until there was a lease."""


class Trainer:
    def __init__(self, fleet: untax.Fleet, spec: untax.EnvSpec, count: int) -> None:
        self._fleet = fleet
        self._spec = spec
        self.rollouts = [Rollout(number) for number in range(count)]
        self._next = iter(self.rollouts)
        self.done = 0
        self.changed = asyncio.Condition()

    async def client(self) -> None:
        for rollout in self._next:
            await self._play(rollout)
            async with self.changed:
                self.done += 1
                self.changed.notify_all()

    async def _play(self, rollout: Rollout) -> None:
        box = await self._lease(rollout)
        assert box.ledger.placed is not None
        rollout.node = box.ledger.placed.node
        answer = ""
        try:
            async with box.session() as bash:
                await bash.run(f"mark={rollout.number}")
                await box.write("answer", str(rollout.number).encode())
                answer = (await bash.run('echo "$mark $(cat answer)"')).check().text.strip()
        except untax.UntaxError as exc:
            rollout.fault = type(exc).__name__
        finally:
            await box.release()
        ledger = json.loads(box.ledger.to_json())
        rollout.verdict, rollout.ledger = ledger["verdict"], ledger["rollout"]
        if rollout.verdict == "trusted":  # what a trainer scores: nothing else is asked
            rollout.score = float(answer == f"{rollout.number} {rollout.number}")

    async def _lease(self, rollout: Rollout) -> untax.Box:
        while True:
            rollout.asked += 1
            try:
                return await self._fleet.acquire(self._spec, wait_s=60, ttl_s=300)
            except (untax.SubstrateError, untax.PoolError) as exc:
                if not exc.retryable:
                    raise
                await asyncio.sleep(AGAIN_S)

    async def wait_done(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.done >= count)


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    if reason := unavailable_reason():
        raise SystemExit(f"fleet_faults: {reason}")
    # A lost connection is what this is about, hundreds of times.
    logging.getLogger("untax").setLevel(logging.ERROR)
    spec = _measure.spec_for(substrate)
    with tempfile.TemporaryDirectory(prefix="untax-bench-") as place:
        cluster = RayCluster(NODES, cpus=1)
        await asyncio.to_thread(cluster.start)
        try:
            async with untax.Fleet(cluster.address, substrate=substrate, state_dir=Path(place) / "{node}", limits="warn") as fleet:
                await fleet.warm(spec, CLIENTS // 2)
                trainer = Trainer(fleet, spec, arguments.count)
                begin = time.perf_counter()
                faults = asyncio.ensure_future(_faults(cluster, trainer, arguments))
                await asyncio.gather(*(trainer.client() for _ in range(CLIENTS)))
                took = time.perf_counter() - begin
                killed, added = await faults
                await asyncio.sleep(HAND_S)
                told = await fleet.ledgers()
                async with operating(cluster.address, fleet.name) as operated:
                    nodes = (await operated.status()).nodes
        finally:
            await asyncio.to_thread(cluster.close)
    return _rows(substrate, trainer.rollouts, nodes, told, took, killed, added)


async def _faults(cluster: RayCluster, trainer: Trainer, arguments: argparse.Namespace) -> tuple[str, str]:
    await trainer.wait_done(arguments.count // 3)
    # Not the head, on which the driver of this program is; any of the others, perhaps that of whoever keeps the fleet.
    killed = random.Random(arguments.seed).choice(cluster.ids()[1:])
    name = str(cluster._node(killed).node_ip_address)
    await asyncio.to_thread(cluster.kill, killed)
    await trainer.wait_done(arguments.count // 2)
    added = await asyncio.to_thread(cluster.add)
    return name, str(cluster._node(added).node_ip_address)


def _rows(
    substrate: str,
    rollouts: list[Rollout],
    nodes: Sequence[NodeStatus],
    told: Sequence[Mapping[str, Any]],
    took: float,
    killed: str,
    added: str,
) -> list[Row]:
    def none(what: str, found: int, note: str = "") -> Row:
        return _measure.number(what, substrate, found, "rollouts", budget="0", holds=found == 0, note=note)

    infra = [one for one in rollouts if one.verdict == "infra"]
    where = Counter(one.node for one in rollouts)
    ids = Counter(one.ledger for one in rollouts)
    elsewhere = [one for one in infra if one.node != killed]
    living = [one for one in nodes if one.pool is not None]
    own = {(one.ledger, one.node) for one in rollouts}
    strays = [one for one in told if (one["rollout"], one["placed"]["node"]) not in own]
    counts = ", ".join(f"{one.name} {one.ledgers}" for one in living)
    counted = ", ".join(f"{name} {count}" for name, count in sorted(where.items()))
    return [
        _measure.number("rollouts", substrate, len(rollouts), "rollouts", budget="", holds=None, note=f"{len(rollouts) / took:.0f}/s; {counted}"),
        none("lost: without a ledger", sum(one.ledger == "" for one in rollouts)),
        none("that share a ledger with another", len(rollouts) - len(ids)),
        none("more or fewer than the ledgers of a living node", sum(abs(one.ledgers - where[one.name]) for one in living), counts),
        none("whose node has another id for them", len(strays), f"of the latest {len(told)}, which is what nodes keep"),
        none("whose lease outlived them", sum(one.leases for one in living)),
        none("scored on a fault", sum(one.score is not None and (one.fault != "" or one.score != 1.0) for one in rollouts)),
        none("faults on nodes that were not killed", len(elsewhere), "; ".join(sorted({one.fault for one in elsewhere}))),
        _measure.number(
            "masked", substrate, len(infra), "rollouts", budget="> 0: the node had leases", holds=len(infra) > 0,
            note=f"{killed} was killed; {', '.join(sorted({one.fault or 'noticed at its end' for one in infra}))}; {sum(one.asked > 1 for one in rollouts)} asked again for a lease",
        ),
        _measure.number(
            "on the node that was added", substrate, where[added], "rollouts", budget="> 0",
            holds=where[added] > 0 if len(rollouts) >= SETTLES else None, note=added,
        ),
    ]  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of which node is killed (default: %(default)s)")


if __name__ == "__main__":
    raise SystemExit(_measure.main("fleet_faults", __doc__, measure, count=10_000, options=options, only=("namespace", "process")))
