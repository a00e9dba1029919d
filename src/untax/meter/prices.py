"""What an hour of a sandbox costs on each substrate of a run, where that differs from a worker's. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from untax.core.errors import UsageError
from untax.meter.gather import Gathered

_HOUR_S = 3600


def by_the_hour(run: Gathered, given: Sequence[str] = ()) -> dict[str, float]:
    """By the run's own names: `usd_per_s` of the plan's options, as hosted sandboxes have it, and NAME=P of a command line over it."""
    found: dict[str, float] = {}
    options = run.run.plan.get("options")
    for name, said in options.items() if isinstance(options, Mapping) else ():
        a_second = said.get("usd_per_s") if isinstance(said, Mapping) else None
        if isinstance(a_second, (int, float)) and not isinstance(a_second, bool) and 0 <= a_second < math.inf:
            found[str(name)] = a_second * _HOUR_S
    there = {case.substrate for case in run.cases}
    for text in given:
        name, _, price = text.rpartition("=")
        if name not in there:
            raise UsageError(f"--price-of: the run has no substrate {name!r}; it has {', '.join(sorted(there))}")
        try:
            found[name] = float(price)
        except ValueError:
            raise UsageError(f"--price-of: {text!r} is not NAME=P; write something like hosted:e2b=0.1") from None
        if not 0 <= found[name] < math.inf:
            raise UsageError(f"--price-of: {price} is not a price")
    return found
