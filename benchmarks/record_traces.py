"""Record the three traces of `adaptive`: real leases whose arrivals are steady, come in groups, or move from spec to spec.

Each line is what `ledger.to_json()` says of one rollout, without what a replay does not need. The arrivals are drawn from a seed; when they
happened, and how long each was held, is as it came out on the machine that recorded them.
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import untax

PLACE = Path(__file__).parent / "traces"
SPECS = 6
LENGTH_S = 60.0


def steady(draws: random.Random, _now_s: float) -> tuple[float, int, int]:
    """Gap until the next group, its spec, its size."""
    return draws.expovariate(8.0), min(SPECS - 1, int(draws.expovariate(0.7))), 1


def groups(draws: random.Random, _now_s: float) -> tuple[float, int, int]:
    return draws.expovariate(0.8), min(SPECS - 1, int(draws.expovariate(0.7))), draws.choice((4, 8))


def moving(draws: random.Random, now_s: float) -> tuple[float, int, int]:
    favourite = int(now_s / LENGTH_S * SPECS)
    return draws.expovariate(8.0), favourite if draws.random() < 0.9 else draws.randrange(SPECS), 1


TRACES: dict[str, Callable[[random.Random, float], tuple[float, int, int]]] = {"steady": steady, "groups": groups, "moving": moving}


async def record(engine: untax.Engine, name: str, seed: str) -> list[str]:
    draws = random.Random(name + seed)
    lines: list[str] = []
    tasks: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    begin = loop.time()

    async def rollout(spec: int) -> None:
        async with engine.lease(untax.EnvSpec(setup=(f"echo {spec} > spec",))) as box:
            await box.run(["sleep", f"{draws.uniform(0.1, 1.0):.3f}"])
        whole = json.loads(box.ledger.to_json())
        kept = {
            "untax_ledger": whole["untax_ledger"],
            "verdict": whole["verdict"],
            "asked_at": round(whole["asked_at"], 4),
            "wanted": [[name, key[:12]] for name, key in whole["wanted"]],
            "hold_s": round(box.ledger.held_s, 4),
        }
        lines.append(json.dumps(kept, separators=(",", ":")))

    while (now_s := loop.time() - begin) < LENGTH_S:
        gap_s, spec, size = TRACES[name](draws, now_s)
        await asyncio.sleep(gap_s)
        tasks += [asyncio.create_task(rollout(spec)) for _ in range(size)]
    await asyncio.gather(*tasks)
    return sorted(lines, key=lambda line: json.loads(line)["asked_at"])


async def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--place", type=Path, default=PLACE)
    parser.add_argument("--seed", default="", help="for other arrivals of the same kinds")
    arguments = parser.parse_args()
    place: Path = arguments.place
    place.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as state:
        async with untax.Engine(state_dir=state) as engine:
            recorded = await asyncio.gather(*(record(engine, name, arguments.seed) for name in TRACES))
            for name, lines in zip(TRACES, recorded, strict=True):
                (place / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
                print(f"{name}: {len(lines)} rollouts")


if __name__ == "__main__":
    asyncio.run(main())
