"""Errors as HTTP: which status each gets, and what its body says. No lower layer knows either.

A failing command is a result, and never comes here. What the caller can mend is 4xx; what the infrastructure did is 5xx with the
sandbox's name in it, and `retryable` says whether a fresh sandbox may do better.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from starlette.responses import Response

from untax.core.errors import (
    ActionError,
    ActionTimeout,
    BackendError,
    CreateError,
    DestroyError,
    DiskFull,
    EditConflict,
    Exists,
    FileError,
    Gone,
    LeaseRefused,
    NotFound,
    NotRun,
    PermissionDenied,
    PoolClosed,
    PoolTimeout,
    ProtocolError,
    ReadinessTimeout,
    SandboxLost,
    SpawnFailed,
    StageFailed,
    StageUnavailable,
    SubstrateError,
    SubstrateUnavailable,
    TooLarge,
    UntaxError,
    UsageError,
)

_RETRY_S = 1.0


class Refused(UntaxError):
    """The service itself says no, before anything was asked of the engine."""

    def __init__(self, status: int, kind: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.retryable = retry_after_s is not None


def unauthorized() -> Refused:
    """The same whatever was wrong with the token, and whether or not what was asked for exists."""
    return Refused(401, "Unauthorized", "a token is needed: Authorization: Bearer TOKEN, or X-API-Key: TOKEN")


def not_found(what: str) -> Refused:
    """The same for what never was, what is no more, and what is somebody else's."""
    return Refused(404, "NotFound", f"there is no such {what}")


# The first that fits, so subclasses stand before their bases.
_STATUS: tuple[tuple[type[UntaxError], int], ...] = (
    (NotFound, 404),
    (Exists, 409),
    (PermissionDenied, 403),
    (TooLarge, 413),
    (DiskFull, 507),
    (FileError, 409),
    (EditConflict, 409),
    (ActionTimeout, 408),
    (Gone, 404),
    (NotRun, 409),
    (ActionError, 409),
    (StageFailed, 422),
    (StageUnavailable, 503),
    (UsageError, 400),
    (PoolTimeout, 503),
    (LeaseRefused, 503),
    (PoolClosed, 503),
    (SandboxLost, 410),
    (SubstrateUnavailable, 503),
    (CreateError, 503),
    (ReadinessTimeout, 503),
    (BackendError, 503),
    (SpawnFailed, 422),
    (DestroyError, 500),
    (ProtocolError, 502),
)


def status_of(exc: UntaxError) -> int:
    if isinstance(exc, Refused):
        return exc.status
    return next((status for kind, status in _STATUS if isinstance(exc, kind)), 500)


def retry_after_of(exc: UntaxError) -> float | None:
    if isinstance(exc, Refused):
        return exc.retry_after_s
    return _RETRY_S if status_of(exc) == 503 else None


def error_body(exc: UntaxError) -> dict[str, object]:
    """What the native dialect says: `{"error": {…}}`."""
    said: dict[str, object] = {
        "kind": exc.kind if isinstance(exc, Refused) else type(exc).__name__,
        "message": str(exc),
        "retryable": exc.retryable,
    }
    if isinstance(exc, SubstrateError) and exc.sandbox_id:
        said["sandbox"] = exc.sandbox_id
    if isinstance(exc, FileError):
        said["errno"], said["path"] = exc.errno, _text(exc.filename)
    return {"error": said}


def _text(name: object) -> str | None:
    return name.decode(errors="replace") if isinstance(name, bytes) else None if name is None else str(name)


def error_headers(exc: UntaxError) -> dict[str, str]:
    headers = {}
    if (after := retry_after_of(exc)) is not None:
        headers["retry-after"] = str(max(1, math.ceil(after)))
    if status_of(exc) == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(exc: UntaxError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        json.dumps(error_body(exc)),
        status_of(exc),
        {**error_headers(exc), **(headers or {})},
        "application/json",
    )
