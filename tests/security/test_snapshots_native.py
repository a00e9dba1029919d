"""The live snapshot of a namespace sandbox, at the substrate: what goes on undisturbed, what makes it a copy, what can no longer be changed.

Swapped or cloned, a snapshot holds the files of one moment (Q8). Which of the two it was is asserted wherever the difference is the point.
"""

import asyncio
import contextlib
import os
import subprocess
import time

import pytest
from tests.security.conftest import LONG

import untax

WORK = "/workspace"
ROOT = os.geteuid() == 0


@contextlib.asynccontextmanager
async def frozen(box):
    taken = await box._sandbox.snapshot()
    try:
        yield taken
    finally:
        await taken.discard()


async def how(box) -> str:
    async with frozen(box) as taken:
        return taken.how


class Running:
    """A program that says "ready" when it is, and then more, line by line."""

    def __init__(self, process) -> None:
        self.process = process
        self._rest = b""

    async def line(self) -> str:
        while b"\n" not in self._rest:
            piece = await self.process.read()
            assert piece is not None, f"it ended: {await self.process.wait()}"
            assert piece.stream == "stdout", piece
            self._rest += piece.data
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()


@contextlib.asynccontextmanager
async def running(box, code: str, **options):
    process = await box.start(["python3", "-uc", code], **options)
    try:
        program = Running(process)
        assert await program.line() == "ready"
        yield program
    finally:
        process.kill()
        await process.wait()


def digest(tree) -> str:
    listed = "find . -printf '%p %y %m %U %G %s %T@ %C@ %l %i\\n' | sort; find . -type f -exec sha256sum {} + | sort"
    return subprocess.run(["sh", "-c", listed], cwd=tree, capture_output=True, text=True, check=True).stdout


# ---- what goes on ----

WAITERS = {
    "reading": "import sys; print('ready'); print('got', sys.stdin.readline().strip())",
    "sleeping": "import time; t = time.monotonic(); print('ready'); time.sleep(3); print('got', round(time.monotonic() - t))",
    "polling": (
        "import select, time; p = select.poll(); t = time.monotonic(); print('ready'); n = p.poll(3000)\n"
        "print('got', n, round(time.monotonic() - t))"
    ),
    "epoll": (
        # The system call itself: Python would hide an EINTR.
        "import ctypes, select; e = select.epoll(); e.register(0, select.EPOLLIN); libc = ctypes.CDLL(None, use_errno=True)\n"
        "room = ctypes.create_string_buffer(64); print('ready'); n = libc.epoll_wait(e.fileno(), room, 1, -1); print('got', n, ctypes.get_errno())"
    ),
    "waiting": ("import subprocess; c = subprocess.Popen(['sleep', '3']); print('ready'); print('got', c.wait())"),
    "computing": (
        "import time; t = time.monotonic() + 3; a = x = 1; n = 0; print('ready')\n"
        "while time.monotonic() < t: x = x * 6364136223846793005 % 2**64; n += 1\n"
        "for _ in range(n): a = a * 6364136223846793005 % 2**64\n"
        "print('got', a == x)"
    ),
    "threads": (
        "import threading, time; out = []\n"
        "def nap(): t = time.monotonic(); time.sleep(3); out.append(round(time.monotonic() - t))\n"
        "ts = [threading.Thread(target=nap) for _ in range(8)]; [t.start() for t in ts]; print('ready'); [t.join() for t in ts]; print('got', out)"
    ),
    "signals": (
        "import signal, os, time, threading; n = 0\n"
        "def hit(*_): global n; n += 1\n"
        "signal.signal(signal.SIGALRM, hit); signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01); print('ready'); t = time.monotonic() + 3\n"
        "while time.monotonic() < t: signal.pause()\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "print('got', n > 50)"
    ),
}
EXPECTED = {
    "reading": "line", "sleeping": "3", "polling": "[] 3", "epoll": "1 0", "waiting": "0", "computing": "True", "threads": "[3, 3, 3, 3, 3, 3, 3, 3]",
    "signals": "True",
}  # fmt: skip


async def test_whatever_a_process_does_it_goes_on_over_the_new_root(box):
    """Each kind of waiting, deeper than the root; after many snapshots each ends as it would have, where it was."""
    where = f"{WORK}/deep/er"
    await box.shell(f"mkdir -p {where}")
    end = "import os; open('made', 'a').write('x'); print(os.getcwd())"
    async with contextlib.AsyncExitStack() as stack:
        programs = {name: await stack.enter_async_context(running(box, f"{code}\n{end}", cwd=where)) for name, code in WAITERS.items()}
        stopped = await stack.enter_async_context(running(box, f"print('ready'); print('got', input())\n{end}", cwd=where))
        await stopped.process.signal(19)
        session = await stack.enter_async_context(box.session())
        await session.run(f"cd {where}; X=kept")
        for _ in range(12):
            async with frozen(box) as taken:
                assert taken.how == "swapped"
                await session.run("echo y >> marks")
        assert (await session.run("pwd; echo $X; wc -l < marks")).text.split() == [where, "kept", "12"]
        assert (await box.shell(f"cut -d' ' -f3 /proc/{stopped.process.pid}/stat")).text.strip() == "T"
        await stopped.process.signal(18)
        await stopped.process.write(b"again\n")
        assert [await stopped.line(), await stopped.line()] == ["got again", where]
        for name in ("reading", "epoll"):
            await programs[name].process.write(b"line\n")
        for name, program in programs.items():
            assert [await program.line(), await program.line()] == [f"got {EXPECTED[name]}", where], name
            assert (await program.process.wait()).exit_code == 0
        assert len(await box.read(f"{where}/made")) == len(WAITERS) + 1  # what they write is written to the live root


async def test_a_hundred_snapshots_in_a_row_under_load(engine, box):
    """Programs come and go, and write; every snapshot has all that was finished before it, and the last is about as quick as the first."""
    rounds = 100 if LONG or ROOT else 40
    loop = "import os, subprocess\nprint('ready')\nwhile True: subprocess.run(['sh', '-c', 'cd /workspace; echo $$ > now; rm now; ls / > /dev/null'])"
    hows = set()
    async with running(box, loop), box.session() as session:
        for i in range(rounds):
            await session.run(f"cd {WORK}; echo {i} >> counted; mkdir d{i}; cd d{i}")
            async with frozen(box) as taken:
                hows.add(taken.how)
        counted = (await session.run("pwd; cat ../counted")).text.split()
    assert counted == [f"{WORK}/d{rounds - 1}", *map(str, range(rounds))]
    assert "swapped" in hows
    assert {entry.name for entry in await box.list(WORK)} - {"now"} == {"counted", *(f"d{i}" for i in range(rounds))}


async def test_a_snapshot_under_a_fork_storm_is_taken_or_refused_and_nobody_stays_stopped(engine, spec):
    storm = "import os, time\nprint('ready')\nwhile True:\n    try:\n        if os.fork() == 0: os.chdir('/workspace'); time.sleep(0.01); os._exit(0)\n    except OSError: time.sleep(0.001)\n    try:\n        while os.waitpid(-1, os.WNOHANG)[0]: pass\n    except OSError: pass"
    small = untax.EnvSpec(limits=untax.Limits(pids=64))
    async with engine.lease(small) as box:
        async with running(box, storm) as program:
            taken = 0
            for _ in range(10):
                try:
                    await how(box)
                    taken += 1
                except untax.UntaxError as exc:
                    assert not ROOT, exc  # without a freezer a storm can outrun whoever stops its processes one by one
            assert program.process.is_running
        assert taken == 10 or not ROOT
        assert (await box.shell("cat /proc/*/stat | cut -d' ' -f3 | grep -c '[tT]'", timeout_s=10)).text.strip() == "0"


async def test_a_paused_sandbox_can_be_frozen_and_stays_paused(box):
    if not ROOT:
        pytest.skip("needs root: only its engine has the freezer")
    async with running(box, "import time\nprint('ready')\nwhile True: print(time.monotonic()); time.sleep(0.01)", cwd=WORK) as program:
        await box._sandbox.pause()
        async with frozen(box) as taken:
            assert taken.how == "swapped"

        async def drained():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    while True:
                        await program.line()

        await drained()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await program.line()
        await box._sandbox.resume()
        async with asyncio.timeout(5):
            await program.line()


# ---- what makes it a copy ----

OPEN = {
    "a file to write to": "f = open('/workspace/x', 'w')",
    "a shared mapping": "import mmap; f = open('/workspace/x', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); f.close()",
    "a directory": "import os; d = os.open('/workspace', os.O_RDONLY)",
    "a path": "import os; d = os.open('/workspace', os.O_PATH)",
    "a lock": "import fcntl; open('/workspace/x', 'w').close(); f = open('/workspace/x'); fcntl.flock(f, fcntl.LOCK_SH)",
    "a fifo": "import os; os.mkfifo('/workspace/p'); f = os.open('/workspace/p', os.O_RDONLY | os.O_NONBLOCK)",
    "a socket with a name": "import socket; s = socket.socket(socket.AF_UNIX); s.bind('/workspace/s'); s.listen()",
    "a watch": "import ctypes; c = ctypes.CDLL(None); n = c.inotify_init(); assert c.inotify_add_watch(n, b'/workspace', 0x100) > 0",
    "a removed directory": "import os; os.mkdir('/workspace/gone'); os.chdir('/workspace/gone'); os.rmdir('/workspace/gone')",
    "another's tracer": (
        "import ctypes, os, time; os.chdir('/workspace'); c = ctypes.CDLL(None); pid = os.fork()\n"
        "if not pid: c.ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19); time.sleep(100)\n"
        "os.waitpid(pid, os.WUNTRACED)"
    ),
    "a filter of its own": (
        # Kills whoever calls chdir.
        "import ctypes, os, struct, platform; os.chdir('/workspace'); c = ctypes.CDLL(None); nr = 80 if platform.machine() == 'x86_64' else 49\n"
        "code = b''.join(struct.pack('HBBI', *i) for i in [(0x20, 0, 0, 0), (0x15, 0, 1, nr), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7fff0000)])\n"
        "b = ctypes.create_string_buffer(code); p = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 4, ctypes.addressof(b)))\n"
        "assert c.prctl(38, 1, 0, 0, 0) == 0 and c.prctl(22, 2, p, 0, 0) == 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OPEN)
async def test_q8_what_a_new_root_would_cut_off_makes_it_a_copy(box, what):
    """While it is open the snapshot is a copy; the program goes on as it was, and once it is gone nothing is copied any more."""
    await box.write(f"{WORK}/before", b"there")
    async with running(box, f"{OPEN[what]}\nprint('ready'); print(input())") as program:
        if "tracer" in what and not ROOT:
            with pytest.raises(untax.BackendError, match="stopping its processes"):  # there is no freezer, and one tracer
                await how(box)
            return
        async with frozen(box) as taken:
            assert taken.how == "cloned"
            assert (taken.tree / "workspace/before").read_bytes() == b"there"
        await program.process.write(b"on\n")
        assert await program.line() == "on"
    assert await how(box) == "swapped"


# In machine code, because the child shares its parent's stack: vfork, the child pauses, the parent spins until it may return.
_VFORK = """
import ctypes, mmap, os, sys, threading; os.chdir('/workspace')
code = b'\\xb8\\x3a\\0\\0\\0\\x0f\\x05\\x85\\xc0\\x74\\x01\\xc3\\xb8\\x22\\0\\0\\0\\x0f\\x05\\xeb\\xf7'
m = mmap.mmap(-1, 4096, prot=7); m.write(code); call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))
print('ready')
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code for x86_64")
@pytest.mark.parametrize(("where", "expected"), [("main", "cloned"), ("thread", "swapped")])
async def test_a_parent_that_waits_for_its_vfork_is_not_waited_for(box, where, expected):
    """It cannot be stopped, but neither can it run. Where it alone could change its working directory the snapshot is a copy."""
    run = "call(); print('on')" if where == "main" else "t = threading.Thread(target=call); t.start(); input(); t.join(); print('on')"
    async with running(box, _VFORK + run) as program:
        await asyncio.sleep(0.3)
        async with frozen(box) as taken:
            assert taken.how == expected
            assert taken.taken_ns < 1e9
        await program.process.write(b"\n")
        await box.shell(f"pkill -KILL -P {program.process.pid}")
        assert await program.line() == "on"


_ODD = {
    "no stack": "b'\\x31\\xe4\\xeb\\xfe'",  # xor %esp, %esp; a jump to itself
    "no vdso": "b'\\xeb\\xfe'",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code for x86_64")
@pytest.mark.parametrize("what", _ODD)
async def test_a_process_that_cannot_be_made_to_act_is_left_alone(box, what):
    """It spins where it spun, with the registers it had: nothing of the attempt is left in it."""
    code = (
        "import ctypes, mmap, os, re; os.chdir('/workspace'); c = ctypes.CDLL(None)\n"
        f"m = mmap.mmap(-1, 4096, prot=7); m.write({_ODD[what]}); call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
        "a, b = (int(x, 16) for x in re.search('([0-9a-f]+)-([0-9a-f]+) .*vdso', open('/proc/self/maps').read()).groups())\n"
        "print('ready'); c.munmap(ctypes.c_void_p(a), ctypes.c_size_t(b - a)); call()\n"
    )
    async with running(box, code) as program:
        await asyncio.sleep(0.2)
        for _ in range(3):
            assert await how(box) == "cloned"
        ticks = f"cut -d' ' -f3,14 /proc/{program.process.pid}/stat"
        before = (await box.shell(ticks)).text.split()
        await asyncio.sleep(0.3)
        after = (await box.shell(ticks)).text.split()
        assert after[0] == "R"
        assert int(after[1]) > int(before[1])
    assert await how(box) == "swapped"


async def test_q8_a_snapshot_under_a_writer_is_a_prefix(box):
    """Several writers, each in a file of its own, and a counter that goes up between them: no file is ahead of one written before it."""
    code = "import os\nfs = [open(f'/workspace/w{i}', 'ab', buffering=0) for i in range(4)]\nprint('ready')\nn = 0\nwhile True:\n    for f in fs: f.write(b'%d\\n' % n)\n    n += 1"
    async with running(box, code):
        for _ in range(5):
            async with frozen(box) as taken:
                assert taken.how == "cloned"
                counts = []
                for i in range(4):
                    lines = (taken.tree / f"workspace/w{i}").read_bytes().split(b"\n")
                    assert lines == [b"%d" % n for n in range(len(lines) - 1)] + [b""]
                    counts.append(len(lines))
                assert sorted(counts, reverse=True) == counts
                assert counts[0] - counts[-1] <= 1
            await asyncio.sleep(0.05)


async def test_a_reader_goes_on_and_can_no_longer_write_to_what_was_frozen(box):
    """A descriptor of the old root reads on; opening it again for writing, or its file by way of /proc, is refused: the layer cannot change."""
    await box.write(f"{WORK}/f", b"one\ntwo\n")
    code = (
        "import os; f = open('/workspace/f'); print('ready'); input(); print(f.readline().strip(), f.readline().strip())\n"
        "for how in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):\n"
        "    try: os.open(f'/proc/self/fd/{f.fileno()}', how); print('opened')\n"
        "    except OSError as e: print(e.errno)\n"
        "for act in (lambda: os.fchmod(f.fileno(), 0o777), lambda: os.utime(f.fileno()), lambda: os.setxattr(f.fileno(), 'user.x', b'y')):\n"
        "    try: act(); print('done')\n"
        "    except OSError as e: print(e.errno)\n"
    )
    async with running(box, code) as program, frozen(box) as taken:
        assert taken.how == "swapped"
        before = digest(taken.tree)
        await box.shell(
            "find /workspace /home -exec touch {} +; chmod -R 700 /workspace; echo three >> f; rm -rf /workspace/*; echo x > /workspace/f",
            user="root" if ROOT else None,
        )
        await program.process.write(b"go\n")
        assert await program.line() == "one two"
        assert [await program.line() for _ in range(6)] == ["30"] * 6  # EROFS
        assert digest(taken.tree) == before
        assert await how(box) == "swapped"
        assert digest(taken.tree) == before
    assert await box.read(f"{WORK}/f") == b"x\n"


async def test_attributes_of_the_root_and_of_view_places_survive_every_swap(engine):
    """The directories a fresh upper one repeats look as they did (F11)."""
    show = "stat -c '%n %a %u %g %Y' / /usr /opt /workspace /home /home/user /tmp /dev /proc; getfattr -d -m user / /workspace 2>/dev/null; ls -A / /home"
    async with engine.lease(untax.EnvSpec(user="root" if ROOT else None)) as box:
        await box.shell(
            "chmod 711 /opt /home; chmod 751 /workspace; chown 7:8 /home; setfattr -n user.k -v 1 /workspace; setfattr -n user.k -v 2 /; touch -d @1000000000 /home /workspace; touch -d @1000000001 /; rmdir /srv",
            merge=True,
        )
        before = (await box.shell(show)).text
        for _ in range(3):
            assert await how(box) == "swapped"
            assert (await box.shell(show)).text == before


async def test_workers_for_other_users_come_while_snapshots_are_taken(engine):
    if not ROOT:
        pytest.skip("one user id")
    async with engine.lease() as box:

        async def snapshots():
            for _ in range(10):
                await how(box)

        async def users():
            return [(await box.run(["id", "-u"], user=str(2000 + i))).text.strip() for i in range(10)]

        _, seen = await asyncio.gather(snapshots(), users())
        assert seen == [str(2000 + i) for i in range(10)]


async def test_a_sandbox_that_ends_while_it_is_copied_leaves_nothing(engine, spec):
    """And whoever asked is told; the launcher serves others meanwhile."""
    for delay_s in (0, 0.0005, 0.001, 0.003, 0.01):
        box = await engine.acquire(spec)
        await box.shell("for i in $(seq 60); do echo $i > f$i; done; head -c 2M /dev/urandom > big")
        async with contextlib.AsyncExitStack() as stack:
            if delay_s:
                await stack.enter_async_context(running(box, "f = open('/workspace/x', 'w'); print('ready'); input()"))
            asked = asyncio.ensure_future(box._sandbox.snapshot())
            await asyncio.sleep(delay_s)
            neighbour = await engine.acquire(spec)
            await neighbour.release()
            stack.pop_all()
        await box.release()
        with contextlib.suppress(untax.UntaxError):
            await (await asked).discard()


async def test_a_snapshot_whose_own_process_is_killed_leaves_nobody_stopped(engine, spec):
    """At any moment: the sandbox goes on or is gone, and whoever asked is told. It is never half of one thing and half of another."""
    ends = set()
    for i in range(30 if LONG else 15):
        box = await engine.acquire(spec)
        try:
            async with running(box, "import time\nprint('ready')\nwhile True: print(1); time.sleep(0.01)", cwd=WORK) as program:
                launcher = box._sandbox._launcher.pid
                before = set(children(launcher))
                asked = asyncio.ensure_future(box._sandbox.snapshot())
                await asyncio.sleep(0)
                deadline = time.monotonic() + 1
                while not (new := set(children(launcher)) - before) and not asked.done() and time.monotonic() < deadline:
                    await asyncio.sleep(0)
                time.sleep(i * 0.0003)  # to come at another moment each time
                for pid in new:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                try:
                    await (await asyncio.wait_for(asked, 20)).discard()
                    for _ in range(100):  # more than can have waited in a pipe
                        await asyncio.wait_for(program.line(), 5)
                    ends.add("taken")
                except untax.SandboxLost:
                    ends.add("lost")
                    with pytest.raises(untax.SandboxLost):
                        await asyncio.wait_for(box.run(["true"]), 10)
        except untax.SandboxLost:
            pass  # the program went with it
        finally:
            await box.release()
    assert "lost" in ends, "no snapshot was ever interrupted"


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as listed:
        return [int(child) for child in listed.read().split()]


@pytest.mark.skipif(not ROOT, reason="set-up commands rename what belongs to root")
async def test_a_build_that_renames_what_its_cache_hangs_below_is_copied_and_not_lost(tmp_path):
    """The mount goes where its parents go: no new root can be given it at its old place, which is found out before anything is moved."""
    moved = untax.EnvSpec(setup=("mv /var /elsewhere && mkdir -p /var/cache/untax && echo made > /srv/made",))
    async with untax.Engine("namespace", state_dir=tmp_path / "state") as engine, engine.lease(moved) as box:
        assert (await box.shell("cat /srv/made; test -d /elsewhere/lib && echo moved")).text == "made\nmoved\n"


async def test_a_snapshot_says_how_long_the_sandbox_stood_still(box):
    began = time.monotonic_ns()
    async with frozen(box) as taken:
        assert 0 < taken.taken_ns <= time.monotonic_ns() - began
