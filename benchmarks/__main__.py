"""Every budget, one after another, and one report: `python -m benchmarks [--json FILE] [--only NAME]… [--quick]`."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import _measure

PROGRAMS = (
    "cold_create",
    "action",
    "served",
    "hosted",
    "transfer",
    "layer_transfer",
    "beside_transfer",
    "destroy",
    "fork",
    "reset",
    "snapshot",
    "stages",
    "thousand",
    "flood",
    "crash",
    "cycles",
    "fleet",
    "warm_lease",
    "burst",
    "lease_at_scale",
    "contention",
    "mixed_load",
    "adaptive",
    "parked_kills",
    "neighbours",
    "report",
    "trajectory",
    "meter",
    "container",
    "gvisor",
    "kubernetes",
    "vm",
    "fleet_ray",
    "fleet_faults",
    "fleet_mixed",
)
QUICK = {
    "cold_create": 50,
    "action": 50,
    "served": 50,
    "hosted": 50,
    "transfer": 3,
    "layer_transfer": 1,
    "beside_transfer": 1,
    "destroy": 20,
    "fork": 20,
    "reset": 5,
    "snapshot": 20,
    "stages": 20,
    "thousand": 100,
    "flood": 1,
    "crash": 1,
    "cycles": 200,
    "fleet": 2000,
    "warm_lease": 20,
    "burst": 100,
    "lease_at_scale": 100,
    "contention": 640,
    "mixed_load": 20,
    "adaptive": 1,
    "parked_kills": 200,
    "neighbours": 56,
    "report": 20_000,
    "trajectory": 1,
    "meter": 2,
    "container": 40,
    "gvisor": 40,
    "kubernetes": 60,
    "vm": 3,
    "fleet_ray": 20,
    "fleet_faults": 400,
    "fleet_mixed": 40,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="every performance budget")
    parser.add_argument("--json", metavar="FILE", default="results/budgets.json", help="the report (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=PROGRAMS, help="this program; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few samples: shows that the programs work, settles no budget")
    arguments = parser.parse_args()
    reports = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        for name in arguments.only or PROGRAMS:
            target = Path(place) / f"{name}.json"
            argv = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(target)]
            if arguments.quick:
                argv += ["--count", str(QUICK[name])]
            print(f"\n== {name}", flush=True)
            begin = time.monotonic()
            status = subprocess.run(argv, check=False).returncode
            if target.exists():
                reports.append({**json.loads(target.read_text()), "took_s": round(time.monotonic() - begin, 1)})
            if status:
                failed.append(name)
    _measure.write_json(arguments.json, {"version": 1, "host": _measure.host_facts(), "quick": arguments.quick, "programs": reports})
    print(f"\nwritten to {arguments.json}; " + (f"missed or failed: {', '.join(failed)}" if failed else "every budget holds"))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
