"""untax: sandboxes for coding agents, and what they cost. `docs/api.md` describes these names."""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import would take longer than all of the rest
if TYPE_CHECKING:
    from untax.batch import Batch
    from untax.box import Box
    from untax.channel.process import Connection, Process
    from untax.channel.replies import Entry, Match, ProcessInfo, SearchResult, TreeSize
    from untax.channel.session import Session
    from untax.cluster.fleet import Fleet
    from untax.core.errors import (
        ActionError,
        ActionTimeout,
        BackendError,
        CommandFailed,
        CreateError,
        DestroyError,
        DiskFull,
        EditConflict,
        Exists,
        FileError,
        Gone,
        IsDirectory,
        LeaseRefused,
        NotDirectory,
        NotFound,
        NotRun,
        PermissionDenied,
        PoolClosed,
        PoolError,
        PoolTimeout,
        ProtocolError,
        ReadinessTimeout,
        RecordError,
        SandboxLost,
        SpawnFailed,
        StageError,
        StageFailed,
        StageUnavailable,
        SubstrateError,
        SubstrateUnavailable,
        TooLarge,
        UntaxError,
        UsageError,
    )
    from untax.core.ledger import Ledger
    from untax.core.result import CommandResult
    from untax.core.spec import EnvSpec, Limits, Repo
    from untax.engine import Engine
    from untax.layers.merged import Change
    from untax.pool.options import PoolOptions
    from untax.pool.status import PoolStatus, StageStatus
    from untax.remote.engine import connect
    from untax.snapshot import Snapshot

# The one place that holds it: the wheel, the cell and the handshake take it from here.
__version__ = "0.1.0"

# Loaded when first asked for, so that `import untax` costs next to nothing.
_HOME = {
    "Batch": "untax.batch",
    "Box": "untax.box",
    "Change": "untax.layers.merged",
    "CommandResult": "untax.core.result",
    "Connection": "untax.channel.process",
    "Engine": "untax.engine",
    "Entry": "untax.channel.replies",
    "EnvSpec": "untax.core.spec",
    "Fleet": "untax.cluster.fleet",
    "Ledger": "untax.core.ledger",
    "Limits": "untax.core.spec",
    "Match": "untax.channel.replies",
    "PoolOptions": "untax.pool.options",
    "PoolStatus": "untax.pool.status",
    "Process": "untax.channel.process",
    "ProcessInfo": "untax.channel.replies",
    "Repo": "untax.core.spec",
    "SearchResult": "untax.channel.replies",
    "Session": "untax.channel.session",
    "Snapshot": "untax.snapshot",
    "StageStatus": "untax.pool.status",
    "TreeSize": "untax.channel.replies",
    "connect": "untax.remote.engine",
}
_ERRORS = "untax.core.errors"

__all__ = [
    "ActionError",
    "ActionTimeout",
    "BackendError",
    "Batch",
    "Box",
    "Change",
    "CommandFailed",
    "CommandResult",
    "Connection",
    "CreateError",
    "DestroyError",
    "DiskFull",
    "EditConflict",
    "Engine",
    "Entry",
    "EnvSpec",
    "Exists",
    "FileError",
    "Fleet",
    "Gone",
    "IsDirectory",
    "LeaseRefused",
    "Ledger",
    "Limits",
    "Match",
    "NotDirectory",
    "NotFound",
    "NotRun",
    "PermissionDenied",
    "PoolClosed",
    "PoolError",
    "PoolOptions",
    "PoolStatus",
    "PoolTimeout",
    "Process",
    "ProcessInfo",
    "ProtocolError",
    "ReadinessTimeout",
    "RecordError",
    "Repo",
    "SandboxLost",
    "SearchResult",
    "Session",
    "Snapshot",
    "SpawnFailed",
    "StageError",
    "StageFailed",
    "StageStatus",
    "StageUnavailable",
    "SubstrateError",
    "SubstrateUnavailable",
    "TooLarge",
    "TreeSize",
    "UntaxError",
    "UsageError",
    "connect",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'untax' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOME.get(name, _ERRORS)), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
