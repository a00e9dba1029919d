"""Layers between the nodes of a fleet: fetched where one has them, built once where none has, spread before they are asked for."""

from untax.cluster.transfer.node import Transfer, copy
from untax.cluster.transfer.wire import Dialer, Peer

__all__ = ["Dialer", "Peer", "Transfer", "copy"]
