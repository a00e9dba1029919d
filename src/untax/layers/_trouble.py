"""What a disk refuses to a store, in the store's words."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from untax.core.errors import StageUnavailable

WHO = "store"
"""What errors name as the stage: it is none of the ladder's."""
BUDGET = "budget"
"""The same, where waiting or letting go of something would not help."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def told(root: Path) -> Iterator[None]:
    """`StageUnavailable` in the place of an `OSError`."""
    try:
        yield
    except OSError as exc:
        raise unavailable(exc, root) from exc


def unavailable(exc: OSError, root: Path) -> StageUnavailable:
    if exc.errno in FULL:
        return StageUnavailable(WHO, f"the disk that holds {root} is full ({exc.strerror}); free some, or name another state_dir")
    return StageUnavailable(
        WHO, f"{exc.filename or root}: {exc.strerror or exc}; make {root} readable and writable, or name another state_dir"
    )


def missing(layer_id: str) -> StageUnavailable:
    return StageUnavailable(WHO, f"layer {layer_id} is not in the store (any more); its stage is built again when next asked for")
