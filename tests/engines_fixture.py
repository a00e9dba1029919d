"""Container engines of our own for a test run: a dockerd (with its containerd) and a podman, in a directory of their own.

Nothing of the machine's own engines is used or touched, and nothing here has a network. Use in a test module:

    from tests.engines_fixture import docker, podman  # noqa: F401

`docker` and `podman` are fixtures of the whole run; both skip politely, naming the package that is missing.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_START_S = 30.0
_STOP_S = 20.0


class Docker:
    """A dockerd that listens on `socket`, and its containerd on `containerd`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.socket = home / "sock"
        self.containerd = home / "exec" / "containerd" / "containerd.sock"
        self._cgroup = f"/untax-test-{os.getpid()}"
        self._log = (home / "log").open("wb")
        self._daemon = self._begin()

    def _begin(self) -> subprocess.Popen[bytes]:
        home = self.home
        runsc = shutil.which("runsc")  # gVisor as one of its runtimes, where this machine has it
        runtimes = {"runsc": {"path": runsc, "runtimeArgs": ["--ignore-cgroups", "--network=none"]}} if runsc else {}
        (home / "daemon.json").write_text(json.dumps({"runtimes": runtimes}))
        return subprocess.Popen(
            # Should the run itself be killed, the engine must not outlive it.
            ["setpriv", "--pdeathsig", "TERM", "--", "dockerd", "--host", f"unix://{self.socket}", "--pidfile", home / "pid", "--config-file", home / "daemon.json",
             "--data-root", home / "data", "--exec-root", home / "exec", "--storage-driver", "overlay2", "--cgroup-parent", self._cgroup,
             "--iptables=false", "--ip6tables=false", "--bridge=none", "--default-ulimit", "nofile=1024:1024"],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, cwd="/",
        )  # fmt: skip

    def restart(self) -> None:
        """After it was killed: another one over the same directories."""
        for note in ("pid", "exec/containerd/containerd.pid"):  # of processes that may still stand as zombies
            (self.home / note).unlink(missing_ok=True)
        self._daemon = self._begin()
        self.wait_ready()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self.socket.exists() or _run(["docker", "-H", f"unix://{self.socket}", "version"]).returncode != 0:
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("dockerd did not start: " + (self.home / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.1)

    def __call__(self, *arguments: str, **options: object) -> bytes:
        """What `docker ARGUMENTS` prints; an exit status other than 0 is an AssertionError with its words."""
        return _checked(["docker", "-H", f"unix://{self.socket}", *arguments], **options)

    def ctr(self, *arguments: str, **options: object) -> bytes:
        """The same of containerd's own client, in a namespace of its own."""
        return _checked(["ctr", "--address", str(self.containerd), "--namespace", "untax", *arguments], **options)

    def stop(self) -> None:
        self._daemon.send_signal(signal.SIGTERM)  # it ends its containerd too
        try:
            self._daemon.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.home / "exec/containerd/containerd.pid").read_text()), signal.SIGKILL)
        self._log.close()
        for tree in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*")):
            with contextlib.suppress(OSError):
                (tree / self._cgroup.lstrip("/")).rmdir()


class Podman:
    """A podman whose images and containers lie in `home`. Its service, for those who speak HTTP, begins with `serve`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.socket = home / "sock"
        self._service: subprocess.Popen[bytes] | None = None
        (home / "tmp").mkdir()
        # No user namespace, no systemd: what a minimal host has.
        self._command = ["podman", "--root", str(home / "root"), "--runroot", str(home / "run"), "--tmpdir", str(home / "tmp"),
                         "--storage-driver", "overlay", "--cgroup-manager", "cgroupfs", "--events-backend", "none"]  # fmt: skip

    def __call__(self, *arguments: str, **options: object) -> bytes:
        """What `podman ARGUMENTS` prints; an exit status other than 0 is an AssertionError with its words."""
        return _checked([*self._command, *arguments], **options)

    def serve(self) -> Path:
        """The socket on which the engine answers HTTP."""
        if self._service is None:
            self._service = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", *self._command, "system", "service", "--time", "0", f"unix://{self.socket}"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
            )  # fmt: skip
            deadline = time.monotonic() + _START_S
            while not self.socket.exists():
                if self._service.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("podman's service did not start")
                time.sleep(0.05)
        return self.socket

    def stop(self) -> None:
        if self._service is not None:
            self._service.terminate()
            self._service.wait(_STOP_S)
        # Each container's monitor starts a program to clean up, and those of execs wait for minutes; both would mount the storage again.
        deadline = time.monotonic() + _STOP_S
        while (left := _naming(self.home)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _naming(home: Path) -> list[int]:
    """Processes that were started for an engine, by the directory in their arguments; nobody else's have it."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and int(name) != os.getpid() and os.fsencode(home) in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    _need("docker", {"dockerd": "docker.io", "docker": "docker.io", "containerd": "containerd", "setpriv": "util-linux"})
    with _one("docker", Docker) as engine:
        engine.wait_ready()
        yield engine


@pytest.fixture(scope="session")
def podman() -> Iterator[Podman]:
    _need("podman", {"podman": "podman", "setpriv": "util-linux"})
    with _one("podman", Podman) as engine:
        yield engine


_running: dict[str, Any] = {}


@contextlib.contextmanager
def _one(name: str, make: Callable[[Path], Any]) -> Iterator[Any]:
    """One for the whole run. To pytest, a fixture that two modules import is two; the first to begin is the last to end."""
    if name in _running:
        yield _running[name]
        return
    with _home() as home:
        engine = _running[name] = make(home)
        try:
            yield engine
        finally:
            del _running[name]
            engine.stop()


def _need(name: str, programs: dict[str, str]) -> None:
    if os.geteuid() != 0:
        pytest.skip(f"{name}: an engine of our own needs root")
    for program, package in programs.items():
        if shutil.which(program) is None:
            pytest.skip(f"{name}: no {program}; apt install {package}")


@contextlib.contextmanager
def _home() -> Iterator[Path]:
    """Not below pytest's own directory: the name of a socket has at most 107 bytes."""
    home = Path(tempfile.mkdtemp(prefix="untax-eng-"))
    try:
        yield home
    finally:
        below = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for place in sorted((place for place in below if place.startswith(f"{home}/")), reverse=True):
            subprocess.run(["umount", "-l", place], check=False)
        shutil.rmtree(home, ignore_errors=True)


def _run(argv: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
    done: subprocess.CompletedProcess[bytes] = subprocess.run(
        argv, **{"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": 120, **options}
    )  # type: ignore[call-overload]
    return done


def _checked(argv: list[str], **options: object) -> bytes:
    done = _run(argv, **options)
    assert done.returncode == 0, f"{argv}: {(done.stderr or b'').decode(errors='replace')[-2000:]}"
    return done.stdout
