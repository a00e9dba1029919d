"""A simulated fleet of a thousand nodes: how much nearer state-distance placement is, and how long a million rollouts take to play."""

import argparse
import time
from pathlib import Path

from benchmarks import _measure
from benchmarks._measure import Row
from untax.pool.simulation import drawn, read_fleet, simulate

FILE = Path(__file__).parent.parent / "examples" / "fleet-1000.toml"
MOST = {"image-affinity": 0.5, "random": 0.2}  # × mean time to ready
MOST_S = 300.0  # on one core, for a million
FEWEST = 100_000  # rollouts; with fewer the nodes are still nearly empty, and the ratios say nothing


async def measure(arguments: argparse.Namespace, _: str) -> list[Row]:
    description = read_fleet(FILE).with_rollouts(arguments.count)
    trace = drawn(description, 1)
    settles = arguments.count >= FEWEST
    mean_s, rows = {}, []
    for policy in ("state-distance", *MOST):
        begin = time.process_time()
        mean_s[policy] = simulate(description, trace, policy, 1).mean_s
        took_s = (time.process_time() - begin) * 1_000_000 / arguments.count
        rows.append(
            _measure.number(
                f"CPU for a million rollouts, {policy}",
                "simulated",
                took_s,
                "s",
                budget=f"≤ {MOST_S:g} s",
                holds=took_s <= MOST_S if settles else None,
                note=f"mean time to ready {mean_s[policy]:.3g} s",
            )
        )
    for policy, most in MOST.items():
        ratio = mean_s["state-distance"] / mean_s[policy]
        holds = ratio <= most if settles else None
        rows.append(_measure.number(f"state-distance ÷ {policy}", "simulated", ratio, "×", budget=f"≤ {most:g} ×", holds=holds))
    return rows


if __name__ == "__main__":
    # No substrate takes part; the floor stands for it, which every machine has.
    raise SystemExit(_measure.main("fleet", __doc__, measure, count=1_000_000, only=("process",)))
