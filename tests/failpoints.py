"""`untax serve` that kills itself at a named step: `python -m tests.failpoints NAME serve OPTIONS…`.

A failpoint stands between two steps of what a server does for its clients. It strikes as SIGKILL, so that nothing after it
is carried out: neither the rest of the step, nor an end in good order.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from untax import engine, pooling, shelf, standby, tenancy
from untax.cli import main
from untax.server import answers, operations

# name → (where, what, whether the step itself is carried out before)
POINTS: dict[str, tuple[Any, str, bool]] = {
    "create.asked": (engine.Engine, "create", False),
    "create.made": (engine.Engine, "create", True),
    "create.configured": (standby.Standby, "_configure", True),
    "lease.asked": (operations.Operations, "op_lease", False),
    "lease.bound": (tenancy.Tenancy, "take_over", True),
    "lease.handed": (operations, "hand_over", True),
    "lease.answered": (answers.Answer, "_say", True),
    "reset.asked": (tenancy.Tenancy, "_replace", False),
    "reset.replaced": (tenancy.Tenancy, "_replace", True),
    "snapshot.frozen": (tenancy.Tenancy, "_freeze", True),
    "snapshot.saved": (shelf.Shelf, "save", True),
    "fork.asked": (tenancy.Tenancy, "_open", False),
    "fork.made": (tenancy.Tenancy, "_open", True),
    "destroy.asked": (engine.Engine, "destroy", False),
    "destroy.done": (engine.Engine, "destroy", True),
    "destroy.told": (pooling.Pooling, "was_returned", True),
}


def _strike() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _struck(real: Callable[..., Any], is_after: bool) -> Callable[..., Any]:
    @functools.wraps(real)
    def at_once(*args: Any, **kwargs: Any) -> Any:
        if is_after:
            real(*args, **kwargs)
        _strike()

    @functools.wraps(real)
    async def in_time(*args: Any, **kwargs: Any) -> Any:
        if is_after:
            await real(*args, **kwargs)
        _strike()

    return in_time if real.__code__.co_flags & 0x80 else at_once  # CO_COROUTINE


def arm(name: str) -> None:
    where, what, is_after = POINTS[name]
    setattr(where, what, _struck(getattr(where, what), is_after))


if __name__ == "__main__":
    arm(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
