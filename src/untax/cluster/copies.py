"""A snapshot of one node on a second one, for who wants to outlive the first or to fork on both."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from untax.cluster import terms, transfer
from untax.cluster.node import NodeEngine
from untax.cluster.terms import Member, Ticket
from untax.cluster.trust import pinned
from untax.core.errors import BackendError, UsageError
from untax.layers._held import alone
from untax.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping


async def copy(
    snapshot: Snapshot, node: str, members: Iterable[Member], nodes: Mapping[tuple[str, str], NodeEngine], ticket: Ticket
) -> Snapshot:
    """Save `snapshot` where it is, have `node` (an id or its beginning, a name, an address) bring it, and give it as it is there."""
    target = terms.named(members, node)
    holder: object = snapshot.engine
    if not isinstance(holder, NodeEngine):
        raise UsageError(
            f"snapshot {snapshot.id} is not on a node of the fleet but of an engine in a process of its own; copy one of the fleet's"
        )
    if holder.member.key == target.key:
        return snapshot
    if snapshot.is_live:
        raise UsageError(
            f"snapshot {snapshot.id} has the memory of processes in it, which goes on only on its own node; take one without live=True"
        )
    if not target.layers:
        raise UsageError(f"node {target.name} has no store that snapshots could be copied to")
    there = nodes.get(target.key)
    if there is None:
        raise BackendError("", f"node {target.name} does not answer; `untax fleet status` says why")
    await snapshot.save()
    dialer = transfer.Dialer("a client", pinned(ticket.authority), ticket.token)
    peer = transfer.Peer.at(target.node_id, target.layers)
    # Whoever is cancelled leaves it to the node, which goes on: what it has brought is of use to the next who asks.
    await alone(functools.partial(transfer.copy, dialer, peer, snapshot.id, holder.member.node_id), dialer.cut)
    return await there.find_snapshot(snapshot.id)
