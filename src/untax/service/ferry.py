"""The native process that carries the channels of this node's boxes to clients on other machines, as its agent has it.

A client that holds a connection asks for a second one beside it. Hands are shaken and the token is checked there as on the first; then both ends leave TLS behind,
with keys that were made for this connection and told inside it, and the connection itself is the process's. `docs/protocol.md` has what goes over it,
`native/ferry.c` what becomes of it; decision 0020 says why.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import Iterable
from struct import Struct

from untax.remote.tls import keep_awake
from untax.server.owners import Owner
from untax.substrates._host import cell_path, wait_exit

log = logging.getLogger("untax.service")

KEYS_SIZE = 64
"""Bytes: the client's key, then the server's."""
_HEAD = Struct("<cI")
_NUMBER = Struct("<I")
_ROOM = 1 << 20  # bytes of messages to it that it has not read yet
_END_S = 2.0  # for it to end by itself


class Ferry:
    """Starts with the first client that asks for it, and again should it end. Belongs to one event loop."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._numbers: dict[str, int] = {}
        """Its clients, by the ids of owners."""
        self._greeted: set[int] = set()
        """Those of them whose connection is there."""
        self._next = 1
        self._is_closed = False

    def connect(self, owner: Owner, sock: socket.socket, keys: bytes) -> None:
        """Have it speak with this owner's client over `sock`, which stays the caller's to close. `OSError` when it cannot."""
        self._start()
        number = self._numbers.get(owner.id)
        if number is None:
            number = self._next
            self._next += 1
        keep_awake(sock)
        if not self._tell(b"C", number, keys, sock.fileno()):
            raise BlockingIOError("the ferry does not answer")
        if owner.id not in self._numbers:
            self._numbers[owner.id] = number
            owner.at_end.append(lambda: self._forget(owner))

    def carry(self, owner: Owner, lane: int, fd: int) -> bool:
        """Carry a channel, whose descriptor stays the caller's; False for who has no connection to it now."""
        number = self._numbers.get(owner.id)
        return number is not None and number in self._greeted and self._tell(b"L", number, _NUMBER.pack(lane), fd)

    def keep(self, owner: Owner, lanes: Iterable[int]) -> None:
        """Of what it carries for the owner its client knows these; the others were in answers that never came."""
        number = self._numbers.get(owner.id)
        if number is not None and not self._tell(b"K", number, b"".join(map(_NUMBER.pack, lanes))):
            self._lose("it does not read what it is told")  # or two would read from one sandbox

    async def aclose(self) -> None:
        """Every connection that it has ends. Safe to call twice."""
        self._is_closed = True
        process = self._process
        self._let_go()
        if process is not None:
            await wait_exit(process, _END_S, process.kill)

    # ---- inside ----

    def _start(self) -> None:
        if self._control is not None:
            return
        if self._is_closed:
            raise BrokenPipeError("the server is closing")
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
            try:
                self._process = subprocess.Popen(
                    [cell_path(), "ferry"], stdin=its.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
                )
            except BaseException:
                ours.close()
                raise
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._heard)

    def _heard(self) -> None:
        assert self._control is not None
        try:
            message = self._control.recv(_HEAD.size)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._lose("it ended")
            return
        op, number = _HEAD.unpack(message)
        (self._greeted.add if op == b"G" else self._greeted.discard)(number)

    def _tell(self, op: bytes, number: int, body: bytes = b"", fd: int | None = None) -> bool:
        if self._control is None:
            return False
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self._control.sendmsg([_HEAD.pack(op, number), body], rights)
        except (BrokenPipeError, ConnectionError) as exc:
            self._lose(os.strerror(exc.errno or 0))
            return False
        except OSError:  # full, or too many descriptors are on their way to it
            return False
        return True

    def _forget(self, owner: Owner) -> None:
        number = self._numbers.pop(owner.id, None)
        if number is not None and not self._tell(b"F", number):
            self._lose("it does not read what it is told")

    def _lose(self, reason: str) -> None:
        """Its clients find their connections broken, ask for another one, and hear then that their lanes are over."""
        log.error("the ferry is lost, and with it what it carried: %s", reason)
        process = self._process
        self._let_go()
        if process is not None:
            process.kill()
            process.wait()

    def _let_go(self) -> None:
        control, self._control, self._process = self._control, None, None
        self._numbers.clear()
        self._greeted.clear()
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()
