"""What the tests of faults stand on: an engine in a process of its own, what it left behind, and one fault at a time.

Most faults are put on one process or one scratch file system; none touches what the machine shares.
"""

import asyncio
import contextlib
import os
import random
import subprocess
import tempfile
from pathlib import Path

import pytest
from tests import hostview, leftovers
from tests.enginehost import engine_host

INFRASTRUCTURE = {"SubstrateError", "PoolError", "UsageError", "ProtocolError"}

before: set[str] = set()  # processes below this one when the test began


def traces_of(state: Path, engine_pid: int, beside: int | None = None) -> dict[str, list[str]]:
    """What an engine that is no more has left on the host. `beside`: another engine; its processes, and those of what ran before, come and go."""
    running = [beside] if beside else []
    running += [int(process.split()[0]) for process in before]
    others = {p.pid for root in running for p in hostview.below(root)}
    now = leftovers.Watch(marks=(str(state), f"-{engine_pid}-"), spares=0, ignore_processes=lambda p: p.pid in others).take()
    found = now.more_than(leftovers.Snapshot(processes=frozenset(before), namespaces=now.namespaces, descriptors=now.descriptors))
    sandboxes = leftovers.named(state, "sbx-", "spare-")
    return found | ({"entries": sandboxes} if sandboxes else {})


async def wait_clean(state: Path, engine_pid: int, within_s: float, beside: int | None = None) -> dict[str, list[str]]:
    left: dict[str, list[str]] = {}

    def is_clean() -> bool:
        nonlocal left
        left = traces_of(state, engine_pid, beside)
        return not left

    await asyncio.to_thread(hostview.eventually, is_clean, within_s, 0.1)
    return left


async def works(state: Path) -> bool:
    """A next engine on the same state directory starts and gives a working sandbox."""
    async with engine_host(state) as host:
        await host.lease("fresh")
        return (await host.run("fresh", ["echo", "ok"]))["stdout"] == b"ok\n"


def launcher_of(engine_pid: int) -> int:
    """The helper: the child of the engine that is the parent of agents, and no agent itself."""
    helpers = [p for p in hostview.below(engine_pid) if p.ppid == engine_pid and not p.is_init]
    assert len(helpers) == 1, helpers
    return helpers[0].pid


async def agent_of(box) -> int:
    """The host pid of a box's agent: the one with our process beside it."""
    mark = f"mark-{random.getrandbits(64):x}"
    process = await box.start(["sleep", "1000"], env={"MARK": mark})

    def found() -> int:
        for agent in hostview.agents():
            for seen in hostview.inside(agent):
                with contextlib.suppress(OSError):
                    if mark.encode() in Path(f"/proc/{seen.pid}/environ").read_bytes():
                        return agent.pid
        return 0

    try:
        return await hostview.until(found, 10)  # beside others it may take a while until it has its environment
    finally:
        process.kill()


@contextlib.asynccontextmanager
async def strace(pid: int, *expressions: str):
    """Tamper with calls of a process, of its maker and of all they make from now on; gives a list that afterwards holds what was tampered with."""
    struck: list[str] = []
    traced = [pid, *(p.pid for p in hostview.below(pid) if p.ppid == pid and p.comm == "cell-maker")]
    with tempfile.NamedTemporaryFile() as log:
        tracer = await asyncio.create_subprocess_exec(
            "strace",
            "-f",
            "-qq",
            "-o",
            log.name,
            *(f"-e{each}" for each in expressions),
            *(f"--attach={each}" for each in traced),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await asyncio.to_thread(hostview.eventually, lambda: is_traced(pid) or tracer.returncode is not None, 30)
            # One that makes things ahead of need may be struck as soon as it is traced, and its tracer ends with it.
            if tracer.returncode is not None and not hostview.wait_gone(pid, 0):
                pytest.skip(f"strace: {(await tracer.stderr.read()).decode()[-200:]}")
            yield struck
        finally:
            with contextlib.suppress(ProcessLookupError):
                tracer.terminate()
            try:
                await asyncio.wait_for(tracer.wait(), 3)
            except TimeoutError:
                tracer.kill()  # it waits for a tracee that has been killed under it
                await tracer.wait()
            tracer._transport.close()
            text = Path(log.name).read_text(errors="replace")
            struck += [line for line in text.splitlines() if any(word in line for word in ("INJECTED", "DELAYED", "killed by SIGKILL"))]


def is_traced(pid: int) -> bool:
    try:
        return "TracerPid:\t0" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@contextlib.contextmanager
def loop_file_system(tmp_path: Path, *, mib: int = 64, options: tuple[str, ...] = ()):
    """A scratch ext4 of our own, mounted below the test's directory."""
    image, where = tmp_path / "disk.img", tmp_path / "mnt"
    with open(image, "wb") as file:
        file.truncate(mib << 20)
    where.mkdir()
    subprocess.run(["mkfs.ext4", "-qF", *options, str(image)], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(where)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no loop mount here: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["fsfreeze", "-u", str(where)], capture_output=True)
        hostview.eventually(lambda: subprocess.run(["umount", str(where)], capture_output=True).returncode == 0, 10, 0.1)
        if where.is_mount():
            subprocess.run(["umount", "-l", str(where)])


def taken_out(image: Path, where: Path) -> None:
    """Unmounted, and the image a copy of what reached the disk: whoever made a mount namespace meanwhile still has the other, as it was."""
    assert hostview.eventually(lambda: subprocess.run(["umount", str(where)], capture_output=True).returncode == 0, 20, 0.1)
    subprocess.run(["cp", "--sparse=always", str(image), str(image) + "~"], check=True)
    os.replace(str(image) + "~", image)


def fill(where: Path) -> Path:
    """Until not a byte is left, the reserve included."""
    path = where / "filler"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with open(where / "filler2", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x")
    return path


@contextlib.contextmanager
def own_group(controller: str, **settings: str):
    """A scratch control group (v1, or v2 where that has the controller)."""
    for root in (f"/sys/fs/cgroup/{controller}", "/sys/fs/cgroup"):
        parent = Path(root)
        group = parent / f"untax-test-{os.getpid()}-{random.getrandbits(32):x}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for name, value in settings.items():
                (group / name.replace("__", ".")).write_text(value)
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            hostview.eventually(lambda made=group: _removed(made), 5, 0.05)
        return
    pytest.skip(f"no control group for {controller} can be made here")


def _removed(group: Path) -> bool:
    try:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(pid)
        for child in group.iterdir():
            if child.is_dir():
                _removed(child)
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
