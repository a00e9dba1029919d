"""What one node of a fleet could not do, and another may: told apart from what is wrong everywhere, and told with the node's name."""

from __future__ import annotations

from untax.core.errors import (
    BackendError,
    CreateError,
    LeaseRefused,
    PoolClosed,
    StageFailed,
    StageUnavailable,
    SubstrateError,
    SubstrateUnavailable,
    UntaxError,
)

_ELSEWHERE = (
    BackendError,
    CreateError,
    LeaseRefused,
    PoolClosed,
    StageUnavailable,
    SubstrateError,
    SubstrateUnavailable,
)  # what another node may do better


def is_better_elsewhere(exc: UntaxError) -> bool:
    """Whether another node may do better."""
    return isinstance(exc, _ELSEWHERE) or (isinstance(exc, StageFailed) and exc.found_no_room)


def named(node: str, exc: UntaxError) -> UntaxError:
    """The same, with the node in its words."""
    where = f"node {node}: "
    if isinstance(exc, (StageFailed, StageUnavailable)):
        return type(exc)(exc.stage, where + exc.message, exc.log)
    if isinstance(exc, SubstrateError):
        return type(exc)(exc.sandbox_id, where + exc.message)
    if isinstance(exc, LeaseRefused):
        return LeaseRefused(exc.reason, where + exc.message)
    return type(exc)(where + str(exc))
