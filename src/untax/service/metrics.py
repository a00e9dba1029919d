"""`/metrics`: what Prometheus asks for, as text. Names of tenants are not in it; it needs a token like everything else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import untax
from untax.service.exposition import escaped
from untax.service.observed import BOUNDS_S

if TYPE_CHECKING:
    from untax.service.hosting import Hosting

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_POOL = {
    "sandboxes": ("gauge", "sandboxes in whatever state, with those that are being made"),
    "starting": ("gauge", "sandboxes that are being made"),
    "exact": ("counter", "leases served by a sandbox of just their stages"),
    "partial": ("counter", "leases served by a sandbox with some of their stages"),
    "cold": ("counter", "leases for which a sandbox was made"),
    "refused": ("counter", "leases that were refused"),
    "died": ("counter", "idle sandboxes that were found dead"),
    "made": ("counter", "sandboxes made"),
    "failed": ("counter", "sandboxes that did not come up"),
    "waited_s": ("counter", "seconds that leases waited"),
}


def text(hosting: Hosting) -> str:
    return "\n".join([*_lines(hosting), ""])


def _lines(hosting: Hosting) -> Iterator[str]:
    yield from _one("untax_info", "gauge", "the release", [({"release": untax.__version__, "substrate": hosting.engine.substrate.name}, 1)])
    yield from _one("untax_draining", "gauge", "1 while no new leases are given", [({}, int(hosting.is_draining))])
    held = [({"dialect": "channel"}, hosting.owners.leases)]
    for dialect in ("lease", "e2b"):
        held.append(({"dialect": dialect}, len(hosting.holdings(dialect=dialect))))
    yield from _one("untax_leases", "gauge", "leases that are held", held)
    yield from _one("untax_clients", "gauge", "clients that hold a connection", [({}, len(hosting.owners.owners))])
    pools = hosting.engine.pools()
    for name, (kind, about) in _POOL.items():
        suffix = "_total" if kind == "counter" else ""
        yield from _one(f"untax_pool_{name.replace('_s', '_seconds')}{suffix}", kind, about, [({}, getattr(pools, name))])
    for name in ("idle", "leased", "making", "waiting"):
        stages = [({"stage": stage.name, "key": stage.key[:12]}, getattr(stage, name)) for stage in pools.stages]
        yield from _one(f"untax_stage_{name}", "gauge", f"sandboxes of this stage: {name}", stages)
    yield from _one(
        "untax_events_total",
        "counter",
        "events by what they are",
        [
            ({"kind": key[0], "of": key[1] if len(key) > 1 and key[0] != "refused" else ""}, value)
            for key, value in _summed(hosting).items()
        ],
    )
    statuses = [({"operation": name, "status": str(status)}, count) for (name, status), count in hosting.observed.statuses.items()]
    yield from _one("untax_requests_total", "counter", "requests that were answered", statuses)
    yield from _histograms(hosting)


def _summed(hosting: Hosting) -> dict[tuple[str, ...], int]:
    """Without the names of tenants."""
    found: dict[tuple[str, ...], int] = {}
    for key, count in hosting.counters.items():
        anonymous = key[:1] if key[0] == "refused" else key
        found[anonymous] = found.get(anonymous, 0) + count
    return found


def _histograms(hosting: Hosting) -> Iterator[str]:
    name = "untax_request_seconds"
    yield f"# HELP {name} how long requests took"
    yield f"# TYPE {name} histogram"
    for operation, took in sorted(hosting.observed.took.items()):
        total = 0
        for bound, count in zip((*(f"{one:g}" for one in BOUNDS_S), "+Inf"), took.buckets, strict=True):
            total += count
            yield f'{name}_bucket{{operation="{operation}",le="{bound}"}} {total}'
        yield f'{name}_sum{{operation="{operation}"}} {took.total_s:.6f}'
        yield f'{name}_count{{operation="{operation}"}} {took.count}'


def _one(name: str, kind: str, about: str, samples: Sequence[tuple[dict[str, str], float]]) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        shown = ",".join(f'{key}="{escaped(one)}"' for key, one in labels.items())
        yield f"{name}{{{shown}}} {value:g}" if shown else f"{name} {value:g}"
