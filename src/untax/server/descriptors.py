"""How many files a server may have open."""

from __future__ import annotations

import resource

_DESCRIPTORS = 1 << 16


def allow_descriptors() -> None:
    """As many as the machine's operator lets us, up to what ten thousand sandboxes need; sandboxes have a limit of their own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
