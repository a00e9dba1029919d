"""An sshd of the tests' own, for the user who runs them: its keys, its port and its files lie in one directory.

It is a machine of its own as far as that goes without a kernel of one: its processes, mounts and host name are in namespaces of their own, and its home
is a directory of the tests'. Its network is this machine's loopback, so that it can be reached.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Sshd:
    address: str
    identity: str
    known_hosts: str
    key: str
    """Its public key, as a line of known_hosts has it after the name."""
    process: subprocess.Popen[bytes]
    home: Path
    """Where who logs in finds itself; seen from here."""
    is_apart: bool
    """In namespaces of its own; where an ordinary user may make none, it is a process like any other."""

    @property
    def options(self) -> dict[str, str]:
        return {"host": self.address, "identity": self.identity, "known_hosts": self.known_hosts}


@contextlib.contextmanager
def running(place: Path) -> Iterator[Sshd]:
    program = shutil.which("sshd", path="/usr/sbin:/usr/bin:/usr/local/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("ssh: no sshd or ssh here; apt install openssh-server openssh-client")
    for name in ("host_key", "login_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / name], check=True)
    shutil.copy(place / "login_key.pub", place / "authorized_keys")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it keeps apart what it does not trust
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = place / "home"
    home.mkdir(mode=0o700)
    config = place / "config"
    config.write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {place}/host_key\nAuthorizedKeysFile {place}/authorized_keys\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
        "KexAlgorithms curve25519-sha256\nMaxStartups 100\nMaxSessions 100\nPrintMotd no\n"
        f"SetEnv HOME={home}\n"  # over the one of /etc/passwd, below which this machine's own programs may lie
    )
    apart = _apart()
    process = subprocess.Popen([*apart, program, "-D", "-e", "-f", config], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_port(port)
        key = " ".join((place / "host_key.pub").read_text().split()[:2])
        known = place / "known_hosts"
        known.write_text(f"[127.0.0.1]:{port} {key}\n")
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        yield Sshd(f"{user}@127.0.0.1:{port}", str(place / "login_key"), str(known), key, process, home, bool(apart))
    finally:
        process.kill()  # `unshare` keeps other signals from itself; with it go the first process there, and by that all of them
        process.wait()


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running(tmp_path_factory.mktemp("sshd")) as one:
        yield one


def _apart() -> list[str]:
    """What puts a program into namespaces of its own, or nothing where that cannot be had."""
    whose = [] if os.geteuid() == 0 else ["--user", "--map-current-user"]
    words = ["unshare", *whose, "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc", "--"]
    return words if shutil.which("unshare") and subprocess.run([*words, "true"], capture_output=True).returncode == 0 else []


def _wait_port(port: int) -> None:
    end = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)  # nothing tells when another program listens
        else:
            return
