"""How a process that does nothing but serve looks for garbage: seldom, and not among what it began with."""

from __future__ import annotations

import gc

_NEW_MOST = 10_000
"""Objects more than before until the young ones are looked through. With Python's 700 a server that leased all it could spent a tenth of its
processor time on that (`benchmarks.fleet_ray`'s clients, processor time by /proc), and hardly anything of a lease is garbage of the kind that has to be looked for."""


def look_seldom() -> None:
    """From now on, for the whole process: not for one that is somebody else's. To be called once everything that stays is there."""
    gc.collect()
    gc.freeze()  # modules, most of all, of which nothing ever becomes garbage
    gc.set_threshold(_NEW_MOST, *gc.get_threshold()[1:])
