"""Adapters: one file for each way to run sandboxes. `names()` finds them, `load(name)` makes one."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from untax.core.errors import UsageError
from untax.core.substrate import Substrate

HOSTED = {f"hosted:{provider}": f"_hosted_{provider}" for provider in ("daytona", "e2b", "untax")}
"""Providers: each wants an account, so they are not among `names()`, which every suite goes through."""


def names() -> tuple[str, ...]:
    """All substrates there are, whether or not this machine can use them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


def load(name: str, **options: Any) -> Substrate:
    """The substrate of that name. An unknown name or option is a `UsageError`, never a default."""
    if name not in names() and name not in HOSTED:
        raise UsageError(f"there is no substrate {name!r}; there are: {', '.join((*names(), *HOSTED))}")
    make = importlib.import_module(f"untax.substrates.{HOSTED.get(name, name)}").make
    try:
        inspect.signature(make).bind(**options)
    except TypeError as exc:
        known = ", ".join(inspect.signature(make).parameters) or "none"
        raise UsageError(f"substrate {name!r}: {exc}; its options are: {known}") from None
    substrate: Substrate = make(**options)
    return substrate
