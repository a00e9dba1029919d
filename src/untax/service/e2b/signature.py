"""Signed URLs of files: who has one may read or write that path without the sandbox's token. No I/O."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Literal

from untax.service.e2b.models import whole

Operation = Literal["read", "write"]


def sign(path: str, operation: Operation, user: str, token: str, expiration: int | None = None) -> str:
    """As the SDK signs: `v1_` and the unpadded base64 of a SHA-256."""
    parts = [path, operation, user, token, *([] if expiration is None else [str(expiration)])]
    digest = hashlib.sha256(":".join(parts).encode()).digest()
    return "v1_" + base64.b64encode(digest).rstrip(b"=").decode()


def refusal(signature: str, path: str, operation: Operation, user: str, token: str, expiration: str | None, now_s: float) -> str | None:
    """Why a signed request is refused, or None."""
    until: int | None = None
    if expiration is not None:
        until = whole(expiration)
        if until is None:
            return "invalid signature expiration"
    if not hmac.compare_digest(signature.encode(), sign(path, operation, user, token, until).encode()):
        return "invalid signature"
    if until is not None and until < now_s:
        return "signature is already expired"
    return None
