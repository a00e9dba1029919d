"""The OpenSSH client as this package runs it: without questions, with the host's key checked, and nothing forwarded."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from untax.core.errors import BackendError, SubstrateError, SubstrateUnavailable, UsageError
from untax.substrates._host import cell_path

FAILED = 255  # what ssh ends with when it is ssh that failed
_WORDS_MAX = 4096
_ADDRESS = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9_.-]*)(?::(?P<port>[0-9]{1,5}))?"
)
_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ControlMaster": "no",
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RequestTTY": "no",
    "EscapeChar": "none",
    "LogLevel": "ERROR",
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "3",
}


@dataclass(frozen=True, slots=True)
class Address:
    """A machine, and how to log in to it."""

    host: str
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    known_hosts: str | None = None

    @classmethod
    def parse(cls, text: str, identity: str | None = None, known_hosts: str | None = None) -> Address:
        """`user@host:port`; the first and the last may be left out."""
        found = _ADDRESS.fullmatch(text)
        if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
            raise UsageError(f"{text!r} is not a machine to log in to; write host, user@host or user@host:port")
        return cls(found["host"].strip("[]"), found["user"], int(found["port"]) if found["port"] else None, identity, known_hosts)

    def __str__(self) -> str:
        return f"{self.user}@{self.host}" if self.user else self.host


def ssh_path() -> str | None:
    return shutil.which("ssh", path=f"{os.environ.get('PATH', '')}:/usr/bin")


def arguments(address: Address, connect_s: float, command: str) -> list[str]:
    """What runs `command`, a line for the shell there."""
    ssh = ssh_path()
    if ssh is None:
        raise SubstrateUnavailable("", "no ssh found; apt install openssh-client")
    argv = [ssh, "-T"]
    for name, value in {**_OPTIONS, "ConnectTimeout": str(max(1, round(connect_s)))}.items():
        argv += ["-o", f"{name}={value}"]
    if address.known_hosts is not None:
        argv += ["-o", f"UserKnownHostsFile={address.known_hosts}", "-o", "GlobalKnownHostsFile=/dev/null"]
    if address.identity is not None:
        argv += ["-o", "IdentitiesOnly=yes", "-i", address.identity]
    if address.port is not None:
        argv += ["-p", str(address.port)]
    return [*argv, "--", str(address), command]


def start(address: Address, connect_s: float, command: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """One held session: its process, and a socket that is its input and output. It ends with this process."""
    ours, its = socket.socketpair()
    argv = [cell_path(), "confined", "--parent", str(os.getpid()), "--", *arguments(address, connect_s, command)]
    with its:
        try:
            process = subprocess.Popen(argv, stdin=its.fileno(), stdout=its.fileno(), stderr=subprocess.PIPE)
        except OSError as exc:
            ours.close()
            raise BackendError("", f"ssh cannot be started: {exc.strerror}") from exc
    return process, ours


async def run(
    address: Address, connect_s: float, command: str, stdin: bytes = b"", timeout_s: float | None = None
) -> tuple[int, bytes, bytes]:
    """One session of its own, as people do it: exit status, output and errors. `TimeoutError` past its time, and it is ended."""
    process = await asyncio.create_subprocess_exec(
        *arguments(address, connect_s, command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out, err


def words_of(process: subprocess.Popen[bytes]) -> str:
    """What it has said on its standard error so far."""
    pipe = process.stderr
    if pipe is None or pipe.closed:
        return ""
    os.set_blocking(pipe.fileno(), False)
    try:
        return (pipe.read(_WORDS_MAX) or b"").decode(errors="replace").strip()
    except OSError:
        return ""


def failure(sandbox_id: str, address: Address, words: str) -> SubstrateError:
    """What ssh's own words mean, with the remedy."""
    where = f"ssh {address}: {words or 'the connection ended'}"
    if "Host key verification failed" in words or "key has changed" in words or "IDENTIFICATION HAS CHANGED" in words:
        return SubstrateUnavailable(
            sandbox_id,
            f"{where}; compare its key, and add it to known_hosts (`ssh-keyscan -p PORT HOST`), or name a file with known_hosts=…",
        )
    if "Permission denied" in words or "Too many authentication failures" in words:
        return SubstrateUnavailable(
            sandbox_id, f"{where}; a key without a passphrase, or an agent, must let this user in: identity=…, ssh-add"
        )
    return BackendError(sandbox_id, f"{where}; is the machine up, and reachable from here?")


def quoted(argv: Sequence[str]) -> str:
    return " ".join(shlex.quote(one) for one in argv)
