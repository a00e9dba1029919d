"""What Ray's autoscaler is told. There is one request for a whole cluster, and the last one stands until the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

log = logging.getLogger("untax.cluster")


async def ask(bundles: Sequence[dict[str, float]]) -> bool:
    """Have the cluster be so large that all of these have room at once; none of them takes back what was asked for. Whether Ray was told."""
    from ray.autoscaler.sdk import request_resources

    try:
        await asyncio.to_thread(request_resources, bundles=list(bundles))
    except Exception as exc:  # Ray's head is away, or has an autoscaler of its own kind
        log.warning("Ray's autoscaler could not be told how many nodes are needed: %s", str(exc).strip().splitlines()[0])
        return False
    return True
