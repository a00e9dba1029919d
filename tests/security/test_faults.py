"""THREATS 3: what fails under an engine, and how it says so. The engine under test runs in a process of its own.

A fault of the infrastructure is an exception of its own kind and never a command's exit code; afterwards nothing is left.
Most faults are put on one process or one scratch file system; none touches what the machine shares.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from tests import agentwire as w
from tests import hostview, leftovers, wallclock
from tests.enginehost import Refused, engine_host

import untax
from untax.channel import actions
from untax.channel.client import Channel
from untax.channel.stream import SocketStream
from untax.substrates._host import cell_path

LONG = os.environ.get("UNTAX_LONG") == "1"
INFRASTRUCTURE = {"SubstrateError", "PoolError", "UsageError", "ProtocolError"}


before: set[str] = set()  # processes below this one when the test began


@pytest.fixture(autouse=True)
def baseline():
    leftovers.adopt_orphans()
    before.clear()
    before.update(leftovers.Watch(marks=()).take().processes)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def traces_of(state: Path, engine_pid: int, beside: int | None = None) -> dict[str, list[str]]:
    """What an engine that is no more has left on the host. `beside`: another engine; its processes, and those of what ran before, come and go."""
    running = [beside] if beside else []
    running += [int(process.split()[0]) for process in before]
    others = {p.pid for root in running for p in hostview.below(root)}
    now = leftovers.Watch(marks=(str(state), f"-{engine_pid}-"), spares=0, ignore_processes=lambda p: p.pid in others).take()
    found = now.more_than(leftovers.Snapshot(processes=frozenset(before), namespaces=now.namespaces, descriptors=now.descriptors))
    sandboxes = [str(p) for p in state.rglob("*") if p.name.startswith(("sbx-", "spare-"))] if state.exists() else []
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


# ---- the engine itself ----


async def test_x1_a_killed_engine_leaves_nothing_behind_the_next_start(state):
    """With 50 live sandboxes, each with processes: all gone within 10 s of the next start."""
    async with engine_host(state) as host:
        await asyncio.gather(*(host.lease(f"b{n}") for n in range(50)))
        await asyncio.gather(*(host.run(f"b{n}", ["sh", "-c", "echo x >f; (sleep 1000 &)"]) for n in range(50)))
        pid = host.pid
        inits = [a.pid for a in hostview.agents(pid)]
        assert len(inits) >= 50
        host.kill()
        await host.process.wait()
        assert all(hostview.wait_gone(init, 10) for init in inits)
        began = time.monotonic()
        async with engine_host(state) as second:
            await second.lease("a")
            before.update(leftovers.Watch(marks=()).take().processes)  # the second engine's own
            assert not await wait_clean(state.with_name("none"), pid, 10, beside=second.pid)
            assert time.monotonic() - began < 10
            await second.call("release", box="a")
    assert not await wait_clean(state, pid, 10)


@pytest.mark.parametrize("when", [1, 3] if LONG else [1])
@pytest.mark.parametrize("call", ["fsmount", "move_mount", "clone", "clone3", "mkdirat", "setresuid"])
async def test_x2_killed_between_two_steps_of_create(state, call, when):
    """The launcher dies at a named call while it makes a sandbox: a typed error, and the next start is clean."""
    await kill_launcher_at(f"{call}:signal=KILL:when={when}", state, "lease")


@pytest.mark.parametrize("when", [1, 2, 3] if LONG else [1])
@pytest.mark.parametrize("call", ["openat", "waitid", "umount2", "unlinkat", "sendmsg"])
async def test_x2_killed_between_two_steps_of_destroy(state, call, when):
    await kill_launcher_at(f"{call}:signal=KILL:when={when}", state, "release")


@pytest.mark.parametrize("when", [1, 2, 3] if LONG else [1])
@pytest.mark.parametrize("call", ["waitid", "unlinkat", "open_tree", "clone3", "setns"])
async def test_x2_killed_between_two_steps_of_reset(state, call, when):
    """Nobody is killed here: the old sandbox ends by itself when its channel does, before it is asked to go."""
    await kill_launcher_at(f"{call}:signal=KILL:when={when}", state, "reset")


async def test_x2_a_launcher_that_dies_just_after_a_clone_leaves_no_request_waiting(state):
    """Its child, held up in its first call, has the launcher's end of the socket open: no end of file tells of the death."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    async with engine_host(state) as host:
        await host.lease("first")
        pid, launcher = host.pid, launcher_of(host.pid)
        made = {p.pid for p in hostview.below(launcher)}
        async with strace(launcher, "inject=prctl:delay_enter=8s:when=1"):
            second = asyncio.create_task(host.lease("second", {"workdir": "/elsewhere"}))  # over which nothing was made ahead
            held = await asyncio.to_thread(hostview.eventually, lambda: bool({p.pid for p in hostview.below(launcher)} - made), 5)
            os.kill(launcher, signal.SIGSTOP)
            third = asyncio.create_task(host.lease("third"))
            await host.call("ping")  # the engine has asked for the third by now
            os.kill(launcher, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(Refused) as caught:
                await asyncio.wait_for(third, 12)
            took = time.monotonic() - began
            [outcome] = await asyncio.gather(asyncio.wait_for(second, 30), return_exceptions=True)
        host.kill()
        await host.process.wait()
    assert held
    assert caught.value.kind == "BackendError", caught.value
    assert took < 10  # the creation before it is held up for eight seconds, and until then might have served it
    assert isinstance(outcome, Refused) and set(outcome.families) & INFRASTRUCTURE, outcome
    assert await works(state)
    assert not await wait_clean(state, pid, 10)


async def kill_launcher_at(where: str, state: Path, op: str) -> None:
    """Three of `op` at once while the launcher dies there: each ends, as does a lease after it; nothing is left in the end."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    async with engine_host(state) as host:
        names = [f"b{n}" for n in range(3)]
        for name in ["first", *(names if op != "lease" else [])]:
            await host.lease(name)
            await host.run(name, ["sh", "-c", "echo x >written; (sleep 1000 &)"])
        launcher = launcher_of(host.pid)
        pid = host.pid
        async with strace(launcher, f"inject={where}") as struck:
            outcomes = await asyncio.gather(
                *(asyncio.wait_for(host.call(op, **fields_of(op, name)), 12) for name in names), return_exceptions=True
            )
            outcomes += await asyncio.gather(asyncio.wait_for(host.lease("late"), 12), return_exceptions=True)
            if not hostview.wait_gone(launcher, 0):
                await asyncio.sleep(0.1)  # some calls are only made while nothing else is to be done (QUIET_MS of native/launch.c)
        for outcome in outcomes:
            assert outcome is None or (isinstance(outcome, Refused) and set(outcome.families) & INFRASTRUCTURE), outcome
        # strace, which is killed when it waits for a dead tracee, may have said nothing.
        met = struck or hostview.wait_gone(launcher, 0)
        host.kill()
        await host.process.wait()
    assert await works(state)
    assert not await wait_clean(state, pid, 10)
    if not met and os.geteuid() != 0:
        pytest.skip(f"root: an ordinary user's launcher does not come to {where}")
    assert met, f"nobody comes to {where}"


def fields_of(op: str, name: str) -> dict:
    return {"box": name, "spec": {}, "options": {}} if op == "lease" else {"box": name}


def launcher_of(engine_pid: int) -> int:
    """The helper: the child of the engine that is the parent of agents, and no agent itself."""
    helpers = [p for p in hostview.below(engine_pid) if p.ppid == engine_pid and not p.is_init]
    assert len(helpers) == 1, helpers
    return helpers[0].pid


@contextlib.asynccontextmanager
async def strace(pid: int, expression: str):
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
            "-e",
            expression,
            *(f"--attach={each}" for each in traced),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await asyncio.to_thread(hostview.eventually, lambda: _is_traced(pid) or tracer.returncode is not None, 5)
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
            struck += [line for line in text.splitlines() if "INJECTED" in line or "killed by SIGKILL" in line]


def _is_traced(pid: int) -> bool:
    try:
        return "TracerPid:\t0" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


async def test_x3_a_frozen_engine_goes_on_as_if_nothing_had_been(state):
    async with engine_host(state) as host:
        await host.lease("a")
        task = asyncio.create_task(host.run("a", ["sh", "-c", "sleep 1; echo done"], timeout_s=30))
        with hostview.stopped(host.pid):
            await asyncio.sleep(2)
        assert (await asyncio.wait_for(task, 10))["stdout"] == b"done\n"
        assert (await host.run("a", ["echo", "next"]))["stdout"] == b"next\n"


async def test_x3_a_deadline_that_passed_while_frozen_is_a_timeout_and_not_a_loss(state):
    async with engine_host(state) as host:
        await host.lease("a")
        task = asyncio.create_task(host.run("a", ["sleep", "60"], timeout_s=1))
        await asyncio.sleep(0.2)
        with hostview.stopped(host.pid):
            await asyncio.sleep(2.5)
        assert (await asyncio.wait_for(task, 10))["outcome"] == "timeout"
        assert (await host.run("a", ["true"]))["exit_code"] == 0


# ---- the agent ----


async def test_x4_a_dead_agent_is_a_lost_sandbox_at_once(engine):
    box = await engine.acquire()
    try:
        pid = await agent_of(box)
        task = asyncio.create_task(box.run(["sleep", "60"]))
        await box.run(["true"])
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(untax.SandboxLost):
            await task
        assert time.monotonic() - began < 1
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        assert box.ledger.verdict == "infra"
    finally:
        await box.release()


async def agent_of(box) -> int:
    """The host pid of a box's agent: the one with our process beside it."""
    mark = f"mark-{random.getrandbits(64):x}"
    process = await box.start(["sleep", "1000"], env={"MARK": mark})
    try:
        for agent in hostview.agents():
            for seen in hostview.inside(agent):
                with contextlib.suppress(OSError):
                    if mark.encode() in Path(f"/proc/{seen.pid}/environ").read_bytes():
                        return agent.pid
        raise AssertionError("no agent found")
    finally:
        process.kill()


async def test_x5_a_stopped_agent_is_a_lost_sandbox_at_the_deadline(engine):
    box = await engine.acquire()
    pid = await agent_of(box)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"], timeout_s=1)
        assert 1 <= time.monotonic() - began < 2.5
        assert box.ledger.verdict == "infra"
    finally:
        await box.release()
    assert hostview.wait_gone(pid, 2)


async def test_x6_a_connection_that_is_cut_or_garbled_is_a_lost_sandbox(tmp_path):
    """A proxy between client and cell cuts after so many bytes, flips one, repeats or delays; answers are right or a loss."""
    import socket

    generator = random.Random(6)
    for fault in ("cut", "flip", "repeat", "delay", "half") * (4 if LONG else 1):
        ours, near = socket.socketpair()
        far, theirs = socket.socketpair()
        cell = subprocess.Popen([cell_path(), "agent", "--stdio"], stdin=theirs, stdout=theirs, cwd=tmp_path)
        theirs.close()
        at = generator.randrange(30, 400)
        relay = asyncio.create_task(_relay(near, far, fault, at))
        channel = Channel(SocketStream(ours), sandbox_id=fault, grace_s=0.3)
        try:
            for n in range(20):
                result = await channel.call(actions.run(["echo", str(n)], timeout_s=1))
                assert result.stdout == f"{n}\n".encode() or fault == "flip"
        except (untax.SandboxLost, untax.UntaxError) as exc:
            assert fault != "delay", exc
        finally:
            channel.close()
            relay.cancel()
            await asyncio.wait([relay])
            near.close()
            far.close()
            assert await asyncio.to_thread(cell.wait, 5) >= 0


async def _relay(near, far, fault: str, at: int) -> None:
    loop = asyncio.get_running_loop()
    near.setblocking(False)
    far.setblocking(False)

    async def forward(source, sink) -> None:
        while data := await loop.sock_recv(source, 65536):
            await loop.sock_sendall(sink, data)

    async def backward() -> None:
        passed = 0
        done = False
        while data := await loop.sock_recv(far, 97):
            if not done and passed + len(data) > at:
                done = True
                if fault == "cut":
                    near.close()
                    return
                if fault == "half":
                    near.shutdown(1)
                    return
                if fault == "flip":
                    data = bytes([data[0] ^ 0x40]) + data[1:]
                if fault == "repeat":
                    data += data
                if fault == "delay":
                    await asyncio.sleep(0.2)
            passed += len(data)
            await loop.sock_sendall(near, data)

    with contextlib.suppress(OSError):
        await asyncio.gather(forward(near, far), backward())


# ---- the file system below the engine ----


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


@pytest.fixture
def scratch(tmp_path, as_root):
    with loop_file_system(tmp_path) as where:
        yield where


async def test_x7_a_frozen_file_system_holds_up_nobody_but_its_user(tmp_path, as_root, engine, box):
    """The command sits in uninterruptible sleep; its caller is told on time, others do not notice (P19)."""
    with loop_file_system(tmp_path, mib=512) as where:
        async with engine_host(where / "state") as host:
            await host.lease("a")
            await host.run("a", ["true"])
            subprocess.run(["fsfreeze", "-f", str(where)], check=True)
            began = time.monotonic()
            try:
                result = await asyncio.wait_for(
                    host.run("a", ["sh", "-c", "for i in 1 2 3; do dd if=/dev/zero of=f$i bs=1M count=8 oflag=direct; done"], timeout_s=1),
                    10,
                )
                assert result["outcome"] == "timeout", result
            except Refused as refused:
                assert refused.kind == "SandboxLost", refused
            took = time.monotonic() - began
            other = await box.run(["echo", "fine"])
            subprocess.run(["fsfreeze", "-u", str(where)], check=True)
        assert took < 3
        assert other.round_trip_s < 1


async def test_p19_the_engine_of_a_frozen_file_system_answers_on_time(tmp_path, as_root):
    """Also what the engine itself does there (a create, a destroy) is bounded by the caller's own deadline."""
    with loop_file_system(tmp_path, mib=512) as where:
        async with engine_host(where / "state") as host:
            await host.lease("a")
            subprocess.run(["fsfreeze", "-f", str(where)], check=True)
            began = time.monotonic()
            try:
                await asyncio.wait_for(host.lease("b", {}, wait_s=1.0), 10)
            except Refused as refused:
                assert set(refused.families) & INFRASTRUCTURE, refused
            assert time.monotonic() - began < 3
            assert (await asyncio.wait_for(host.call("ping"), 2))["pid"] == host.pid
            subprocess.run(["fsfreeze", "-u", str(where)], check=True)


async def test_x8_an_image_on_a_hung_file_system_holds_up_nobody_else(tmp_path, as_root):
    """A FUSE file system whose daemon never answers: the lease that wants it ends at its own deadline."""
    where = tmp_path / "hung"
    where.mkdir()
    daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", FUSE_DAEMON, str(where), stdout=asyncio.subprocess.PIPE)
    try:
        said = (await asyncio.wait_for(daemon.stdout.readline(), 5)).decode().split()
        if not said or said[0] != "up":
            pytest.skip("FUSE cannot be mounted here")
        async with engine_host(tmp_path / "state") as host:
            await host.lease("a")
            try:
                began = time.monotonic()
                with pytest.raises(Refused) as caught:
                    await asyncio.wait_for(host.lease("b", {"image": f"dir:{where}"}, wait_s=1.0), 10)
                took = time.monotonic() - began
                assert set(caught.value.families) & INFRASTRUCTURE, caught.value
                fine = await asyncio.wait_for(host.run("a", ["echo", "fine"]), 5)
                await asyncio.wait_for(host.lease("c", {}, wait_s=5.0), 10)
            finally:
                daemon.kill()  # the kernel then answers for it: everybody who waits gets an error
                await daemon.wait()
        assert took < 4
        assert fine["stdout"] == b"fine\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            daemon.kill()
        await daemon.wait()
        subprocess.run(["umount", "-l", str(where)], capture_output=True)


FUSE_DAEMON = textwrap.dedent(
    """
    import ctypes, os, struct, sys, threading
    fd = os.open('/dev/fuse', os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f'fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other'.encode()
    if libc.mount(b'hung', sys.argv[1].encode(), b'fuse.hung', 0, options):
        print('no', os.strerror(ctypes.get_errno()), flush=True)
        sys.exit(1)
    print('up', flush=True)
    while True:
        request = os.read(fd, 1 << 17)
        length, opcode, unique = struct.unpack_from('<IIQ', request)
        if opcode == 26:  # INIT is answered, so that later requests really hang
            body = struct.pack('<IIIIHHIIHHI', 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0) + bytes(28)
            os.write(fd, struct.pack('<IiQ', 16 + len(body), 0, unique) + body)
    """
)


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


async def test_x9_a_full_state_directory_is_a_typed_error_and_recovers(scratch):
    """Existing sandboxes keep running commands; a new one is refused or works; space that returns is used."""
    async with engine_host(scratch / "state") as host:
        await host.lease("a")
        filler = fill(scratch)
        try:
            await host.lease("b")
            await host.run("b", ["true"])
        except Refused as refused:
            assert "SubstrateError" in refused.families, refused
        assert (await host.run("a", ["echo", "still"]))["stdout"] == b"still\n"
        filler.unlink()
        (scratch / "filler2").unlink(missing_ok=True)
        await host.lease("c")
        assert (await host.run("c", ["true"]))["exit_code"] == 0


async def test_x9_an_engine_that_starts_on_a_full_disk_says_so(scratch):
    fill(scratch)
    try:
        async with engine_host(scratch / "state") as host:
            await host.lease("a")
            await host.run("a", ["true"])
    except Refused as refused:
        assert set(refused.families) & INFRASTRUCTURE, refused
        assert "space" in refused.message.lower() or "disk" in refused.message.lower(), refused


async def test_x10_no_inodes_left_is_a_typed_error(tmp_path, as_root):
    with loop_file_system(tmp_path, options=("-N", "1000")) as where:
        async with engine_host(where / "state") as host:
            await host.lease("a")
            made = 0
            with contextlib.suppress(OSError):
                for made in range(2000):
                    (where / f"i{made}").touch()
            assert made > 100
            try:
                await host.lease("b")
            except Refused as refused:
                assert "SubstrateError" in refused.families, refused
            assert (await host.run("a", ["echo", "still"]))["stdout"] == b"still\n"
            for n in range(made):
                (where / f"i{n}").unlink(missing_ok=True)
            await host.lease("c")


async def test_x11_a_state_directory_that_turns_read_only(scratch):
    async with engine_host(scratch / "state") as host:
        await host.lease("a")
        subprocess.run(["mount", "-o", "remount,abort", str(scratch)], check=True)  # "ro" is refused while anything is written
        with pytest.raises(OSError, match="Read-only"):
            (scratch / "probe").touch()
        try:
            await host.lease("b", {}, wait_s=5.0)
        except Refused as refused:
            assert set(refused.families) & INFRASTRUCTURE, refused
        assert (await host.call("ping"))["pid"] == host.pid
        with contextlib.suppress(Refused):
            await host.run("a", ["echo", "still"], timeout_s=5)


async def test_x11_an_engine_that_starts_on_a_read_only_directory_names_the_remedy(scratch):
    subprocess.run(["mount", "-o", "remount,ro", str(scratch)], check=True)
    with pytest.raises(Refused) as caught:
        async with engine_host(scratch / "state"):
            pass
    assert set(caught.value.families) & INFRASTRUCTURE
    assert "state_dir" in caught.value.message


async def test_x12_input_and_output_errors_below_the_state_directory(tmp_path, as_root):
    """The backing file shrinks under it: what is lost is lost in a typed way, the engine lives, another directory works."""
    with loop_file_system(tmp_path, mib=256) as where:
        async with engine_host(where / "state") as host:
            await host.lease("a")
            os.truncate(tmp_path / "disk.img", 4 << 20)
            subprocess.run(["sync", "-f", str(where)], capture_output=True)
            for argv in (["sh", "-c", "dd if=/dev/zero of=f bs=1M count=20 conv=fsync"], ["cat", "f"]):
                with contextlib.suppress(Refused):
                    await asyncio.wait_for(host.run("a", argv, timeout_s=5), 10)
            with contextlib.suppress(Refused):
                await asyncio.wait_for(host.lease("b", {}, wait_s=5.0), 10)
            assert (await host.call("ping"))["pid"] == host.pid
    assert await works(tmp_path / "other")


# ---- the kernel says no ----


@pytest.mark.parametrize(
    "call",
    [
        "umount2",
        "clone",
        "fsopen",
        "fsconfig",
        "fsmount",
        "move_mount",
        "mount_setattr",
        "mkdirat",
        "sethostname",
        "setresuid",
        "capset",
        "epoll_ctl",
    ]
    + (["pivot_root", "clone3", "openat2", "write", "seccomp", "setns", "chdir"] if LONG else []),
)
async def test_x13_a_single_call_that_fails_is_rolled_back(state, call):
    """For the first, second, third … time that it is made: a typed error or none, and then everything is as before."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    async with engine_host(state) as host:
        await host.lease("first")
        await host.call("release", box="first")
        launcher = launcher_of(host.pid)
        met = 0
        for when in range(1, 6 if LONG else 3):
            async with strace(launcher, f"inject={call}:error=EBUSY:when={when}") as struck:
                # One finds what was made ahead, the other does not.
                names = {"b": {}, "c": {"workdir": "/elsewhere"}}
                tries = [asyncio.wait_for(host.lease(name, spec, wait_s=8.0), 20) for name, spec in names.items()]
                for name, refused in zip(names, await asyncio.gather(*tries, return_exceptions=True), strict=True):
                    if refused is None:
                        await asyncio.wait_for(host.call("release", box=name), 20)
                    else:
                        assert isinstance(refused, Refused) and set(refused.families) & INFRASTRUCTURE, refused
            met += len(struck)
            await host.lease("after")
            assert (await host.run("after", ["echo", "ok"]))["stdout"] == b"ok\n"
            await host.call("release", box="after")
        remaining = hostview.eventually(lambda: not hostview.held(host.pid), 5)
        pid = host.pid
        assert remaining or hostview.held(host.pid) <= 1  # one may be kept ready
    assert not await wait_clean(state, pid, 10)
    if not met and os.geteuid() != 0:
        pytest.skip(f"root: an ordinary user's launcher does not make the call {call}")
    assert met, f"nobody makes the call {call} while a sandbox is made"


async def test_x14_out_of_descriptors_is_a_refusal(state):
    async with engine_host(state) as host:
        await host.lease("a")
        used = (await host.call("ping"))["descriptors"]
        subprocess.run(["prlimit", "--pid", str(host.pid), f"--nofile={used + 4}:"], check=True)
        failures = []
        for n in range(12):
            try:
                await asyncio.wait_for(host.lease(f"b{n}", {}, wait_s=5.0), 10)
            except Refused as refused:
                assert set(refused.families) & INFRASTRUCTURE, refused
                failures.append(refused)
        assert failures
        assert (await host.run("a", ["echo", "still"]))["stdout"] == b"still\n"
        subprocess.run(["prlimit", "--pid", str(host.pid), "--nofile=4096:"], check=True)
        await host.lease("c")
        assert (await host.run("c", ["true"]))["exit_code"] == 0
        pid = host.pid
    assert not await wait_clean(state, pid, 10)


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


async def test_x15_an_engine_that_cannot_fork_refuses(state, as_root):
    async with engine_host(state) as host:
        await host.lease("a")
        tree = [host.pid, launcher_of(host.pid)]
        with own_group("pids") as group:
            for pid in tree:
                (group / "cgroup.procs").write_text(str(pid))
            current = int((group / "pids.current").read_text())
            (group / "pids.max").write_text(str(current + 2))
            for n in range(4):
                with contextlib.suppress(Refused):
                    await asyncio.wait_for(host.lease(f"b{n}", {}, wait_s=5.0), 10)
            assert (await host.run("a", ["echo", "still"]))["stdout"] == b"still\n"
            (group / "pids.max").write_text("max")
            await host.lease("c")
            assert (await host.run("c", ["true"]))["exit_code"] == 0
            pid = host.pid
            host.kill()
            await host.process.wait()
    assert await works(state)
    assert not await wait_clean(state, pid, 10)


async def test_x16_an_engine_short_of_memory_blames_no_sandbox(state, as_root):
    """The engine is killed for its own memory: clients see its end, and the next start is clean."""
    async with engine_host(state) as host:
        await host.lease("a")
        with own_group("memory") as group:
            for name in ("memory.limit_in_bytes", "memory.max"):
                if (group / name).exists():
                    (group / name).write_text(str(24 << 20))
            (group / "cgroup.procs").write_text(str(host.pid))
            outcome: object
            try:
                outcome = await asyncio.wait_for(host.run("a", ["head", "-c", "60000000", "/dev/zero"], cap=60_000_000, timeout_s=20), 25)
            except (EOFError, Refused, TimeoutError) as exc:
                outcome = exc
            if isinstance(outcome, dict):
                assert outcome["outcome"] == "exited", "a sandbox was blamed"
            pid = host.pid
            with contextlib.suppress(ProcessLookupError):
                host.kill()
            await host.process.wait()
    assert await works(state)
    assert not await wait_clean(state, pid, 10)


async def test_x17_a_sandbox_out_of_memory_is_told_with_evidence(engine, box, enforced):
    enforced("memory_mib")
    async with engine.lease(limits=untax.Limits(memory_mib=128)) as small:
        result = await small.run(["python3", "-c", "x = bytearray(1 << 30)"])
        after = await small.run(["echo", "alive"])

    assert (result.outcome, result.exit_code) == ("oom", 137)
    assert result.oom_kills >= 1
    assert after.stdout == b"alive\n"
    assert small.ledger.verdict == "trusted"


# ---- clocks, slow machines ----


@pytest.mark.parametrize("by", [3600, -3600])
async def test_x24_a_wall_clock_that_steps_changes_no_deadline(state, tmp_path, by):
    env, flag = wallclock.shifted(tmp_path, by)
    async with engine_host(state, env=env) as host:
        await host.lease("a", {}, ttl_s=600)
        task = asyncio.create_task(host.run("a", ["sleep", "60"], timeout_s=1))
        await asyncio.sleep(0.2)
        flag.touch()
        began = time.monotonic()
        result = await asyncio.wait_for(task, 10)
        assert result["outcome"] == "timeout"
        assert time.monotonic() - began < 2
        slow = await host.run("a", ["sleep", "0.2"])
        ledger = await host.call("ledger", box="a")

    assert 0.2 <= slow["elapsed_s"] < 5
    assert 0.2 <= slow["round_trip_s"] < 5
    assert all(value >= 0 for value in numbers_in(ledger))


def numbers_in(value):
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers_in(inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


async def test_x26_deadlines_hold_on_a_slow_disk(tmp_path, as_root):
    """256 KiB/s for the engine and all it makes."""
    with loop_file_system(tmp_path, mib=256) as where:
        async with engine_host(where / "state") as host:
            await host.lease("a")
            device = os.stat(where).st_dev
            rate = f"{os.major(device)}:{os.minor(device)} 262144"
            with own_group("blkio", blkio__throttle__write_bps_device=rate) as group:
                for pid in [host.pid, *(p.pid for p in hostview.below(host.pid))]:
                    with contextlib.suppress(OSError):
                        (group / "cgroup.procs").write_text(str(pid))
                began = time.monotonic()
                result = await asyncio.wait_for(
                    host.run("a", ["dd", "if=/dev/zero", "of=f", "bs=1M", "count=40", "oflag=direct"], timeout_s=1.5), 15
                )
                assert result["outcome"] in ("timeout", "exited"), result
                assert time.monotonic() - began < 4
                host.kill()
                await host.process.wait()


async def test_x27_deadlines_hold_with_a_twentieth_of_a_processor(state, as_root):
    async with engine_host(state) as host:
        await host.lease("a")
        with own_group("cpu") as group:
            if (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_period_us").write_text("100000")
                (group / "cpu.cfs_quota_us").write_text("5000")
            else:
                (group / "cpu.max").write_text("5000 100000")
            (group / "cgroup.procs").write_text(str(host.pid))
            outcomes = []
            for _ in range(3):
                began = time.monotonic()
                outcomes.append(((await host.run("a", ["sleep", "60"], timeout_s=0.5))["outcome"], time.monotonic() - began))
            fine = await host.run("a", ["echo", "fine"], timeout_s=5)

    assert [outcome for outcome, _ in outcomes] == ["timeout"] * 3
    assert max(took for _, took in outcomes) < 2.5
    assert fine["stdout"] == b"fine\n"


# ---- what does not go away ----


async def test_x28_a_mount_that_someone_holds_does_not_keep_the_sandbox(engine, as_root, state_dir):
    """A shell of the host's sits in the sandbox's directory; destroy returns, and what is left goes when it leaves."""
    box = await engine.acquire()
    pid = await agent_of(box)
    holder = await asyncio.create_subprocess_exec(
        "nsenter", "-t", str(pid), "-m", "--", "sh", "-c", "cd /workspace && echo in && exec sleep 100", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert (await asyncio.wait_for(holder.stdout.readline(), 5)) == b"in\n"
        began = time.monotonic()
        await asyncio.wait_for(box.release(), 10)
        assert time.monotonic() - began < 3
        async with engine.lease() as other:
            assert (await other.run(["echo", "fine"])).stdout == b"fine\n"
    finally:
        holder.kill()
        await holder.wait()
        holder._transport.close()
    assert Path("/usr/bin/env").exists()


async def test_x29_a_group_that_refuses_to_go_is_tried_again(state, as_root):
    """A stranger's process sits in a group below the sandbox's own; when it has left, the next start removes the group."""
    async with engine_host(state) as host:
        await host.lease("a")
        pid = host.pid
        groups = [
            Path(where)
            for where in leftovers._cgroups()
            if f"-{host.pid}-" in where and where.rsplit("/", 1)[-1].startswith(("sbx-", "spare-"))
        ]
        if not groups:
            pytest.skip("no control groups here")
        stranger = await asyncio.create_subprocess_exec("sleep", "100")
        try:
            for group in groups:
                with contextlib.suppress(OSError):
                    (group / "stranger").mkdir()
                    (group / "stranger" / "cgroup.procs").write_text(str(stranger.pid))
            os.kill(stranger.pid, signal.SIGSTOP)
            began = time.monotonic()
            await asyncio.wait_for(host.call("release", box="a"), 10)
            assert time.monotonic() - began < 5
            await host.lease("b")
            assert (await host.run("b", ["true"]))["exit_code"] == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                stranger.kill()
            await stranger.wait()
            for group in groups:
                with contextlib.suppress(OSError):
                    (group / "stranger").rmdir()
    assert await works(state)
    assert not await wait_clean(state, pid, 10)


async def test_x29_groups_go_although_their_state_directory_is_gone_too(state, tmp_path, as_root):
    """Only those of the dead, and of those only the empty: an engine that lives keeps its groups, idle or not."""
    async with engine_host(tmp_path / "living") as living, engine_host(state) as host:
        await living.lease("a")
        await living.call("release", box="a")
        await host.lease("a")
        pid = host.pid
        kept = {c for c in leftovers._cgroups() if f"-{living.pid}-" in c and "spare-" not in c and "sbx-" not in c}
        launchers = [p.pid for p in hostview.below(pid) if p.ppid == pid]
        for victim in (*launchers, pid):  # the launcher first: it has no time to remove anything
            os.kill(victim, signal.SIGKILL)
        await host.process.wait()
        if not [c for c in leftovers._cgroups() if f"-{pid}-" in c]:
            pytest.skip("no control groups here")
        await asyncio.to_thread(hostview.eventually, lambda: not any(p.state != "Z" for p in hostview.below(pid)), 5, 0.05)
        await asyncio.to_thread(shutil.rmtree, state)
        assert await works(tmp_path / "other")

        assert not [c for c in leftovers._cgroups() if f"-{pid}-" in c]
        assert kept <= set(leftovers._cgroups())
        await living.lease("b")
        assert (await living.run("b", ["true"]))["exit_code"] == 0


@pytest.mark.parametrize("damage", ["truncate", "garbage", "directory", "link"])
async def test_x30_damaged_state_files_do_not_keep_an_engine_from_starting(state, damage):
    async with engine_host(state) as host:
        await host.lease("a")
        host.kill()
        await host.process.wait()
        pid = host.pid
    # os.walk, because what the dead engine's helper still removes vanishes under us
    files = [Path(where, name) for where, _, names in os.walk(state) for name in names if "sbx-" not in where and "spare-" not in where]
    for path in files:
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_size > 1 << 20:
                continue
            if damage == "truncate":
                os.truncate(path, 0)
            elif damage == "garbage":
                path.write_bytes(os.urandom(300))
            elif damage == "directory":
                path.unlink()
                path.mkdir()
            else:
                path.unlink()
                path.symlink_to("/etc/passwd")
    passwd = Path("/etc/passwd").read_bytes()
    try:
        assert await works(state)
    except Refused as refused:
        assert refused.kind in ("UsageError", "BackendError"), refused
        assert "state" in refused.message
    assert Path("/etc/passwd").read_bytes() == passwd
    assert not [c for c in leftovers._cgroups() if f"-{pid}-" in c]


async def test_x30_strange_entries_are_left_alone(state):
    async with engine_host(state) as host:
        await host.lease("a")
    outside = state.parent / "precious"
    outside.mkdir()
    (outside / "file").write_text("keep")
    for root in [p for p in state.iterdir() if p.is_dir()] or [state]:
        (root / "engine-1-evil").symlink_to(outside)
        (root / "engine-2-file").write_text("x")
        (root / "unknown").mkdir()
    assert await works(state)
    assert (outside / "file").read_text() == "keep"


async def test_x31_another_version_is_refused_with_both_named(tmp_path):
    import socket

    with w.Peer(cell_path(), tmp_path) as peer:
        peer.next()
        peer.send(w.hello(major=9))
        found = peer.next()
        assert found is not None
        assert found[1] == w.ERROR
        assert int.from_bytes(found[2][:2], "little") == w.VERSION
        assert b"9" in found[2]
        assert b"1" in found[2]
        assert peer.is_closed()

    ours, theirs = socket.socketpair()
    channel = Channel(SocketStream(theirs), sandbox_id="old")
    ours.sendall(w.hello(major=2, version=b"7.7.7"))
    with pytest.raises(untax.ProtocolError) as caught:
        await channel.wait_ready(2)
    assert "7.7.7" in str(caught.value) or "2" in str(caught.value)
    assert untax.__version__ in str(caught.value) or "1" in str(caught.value)
    channel.close()
    ours.close()


# ---- what the host lacks ----


def doctor(prefix: list[str], tmp_path: Path) -> dict:
    root = Path(__file__).resolve().parent.parent.parent
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "UNTAX_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path)}
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "untax.cli", "doctor", "--json"], capture_output=True, text=True, env=env, timeout=60
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def of_substrate(report: dict, name: str) -> dict:
    [found] = [s for s in report["substrates"] if s["name"] == name]
    return found


NO_USER_NAMESPACES = ["unshare", "-Ur", "sh", "-c", 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"', "sh"]


async def test_x32_without_user_namespaces_the_level_is_unavailable_and_says_why(state, tmp_path):
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("needs unshare and user namespaces")
    with pytest.raises(Refused) as caught:
        async with engine_host(state, prefix=NO_USER_NAMESPACES) as host:
            await host.lease("a")
    assert caught.value.kind in ("SubstrateUnavailable", "CreateError"), caught.value
    assert "max_user_namespaces" in caught.value.message

    found = of_substrate(doctor(NO_USER_NAMESPACES, tmp_path), "namespace")
    assert "max_user_namespaces" in json.dumps(found)


async def test_x32_without_control_groups_limits_are_marked_and_strict_refuses(state, as_root):
    """Hidden in a mount namespace of our own."""
    hide = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"', "sh"]
    async with engine_host(state, prefix=hide) as host:
        await host.lease("a")
        marked = json.dumps(await host.call("ledger", box="a"))
    assert "memory_mib" in marked
    with pytest.raises(Refused) as caught:
        async with engine_host(state, prefix=hide, options={"limits": "strict"}) as host:
            await host.lease("a")
    assert caught.value.kind == "SubstrateUnavailable"
    assert "memory_mib" in caught.value.message


def test_x32_the_doctor_reports_every_substrate(tmp_path):
    report = doctor([], tmp_path)
    assert {"process", "namespace"} <= {s["name"] for s in report["substrates"]}


# ---- cancellation, floods ----


async def test_x34_cancellation_at_any_point_leaves_nothing(engine, state_dir):
    """Leases, resets and commands cancelled after random delays; the fixture then counts what is left."""
    generator = random.Random(34)
    watch = leftovers.Watch(marks=(str(state_dir), f"-{os.getpid()}-"), state_dir=state_dir)
    before = watch.take()

    async def rollout() -> None:
        async with engine.lease() as box:
            await box.shell("sleep 0.005; (sleep 100 &)")
            await box.reset()
            await box.run(["sleep", "5"])

    for _ in range(300 if LONG else 60):
        task = asyncio.create_task(rollout())
        await asyncio.sleep(generator.random() * 0.08)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not await asyncio.to_thread(watch.wait_like, before, 10)


async def test_x35_failures_in_a_loop_do_not_fill_the_log(state, tmp_path):
    """A thousand actions, half of which raise and half of which fail; what is written stays small."""
    log = tmp_path / "stderr"
    with open(log, "wb") as stderr:
        async with engine_host(state, stderr=stderr.fileno()) as host:
            await host.lease("a")
            for _ in range(20):
                outcomes = await asyncio.gather(
                    *(host.run("a", ["false"], cwd="/missing" if n % 2 else None) for n in range(50)), return_exceptions=True
                )
                assert len(outcomes) == 50
    assert log.stat().st_size < 64 << 10
    written = [p for p in state.rglob("*") if p.is_file() and not {"disks", "layers"} & set(p.parts)]
    assert sum(p.stat().st_size for p in written) < 1 << 20
