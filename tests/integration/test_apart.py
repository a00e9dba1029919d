"""An agent in a process of its own: what is asked of it, what it says where it cannot be, and that neither process outlives the other."""

import asyncio
import contextlib
import json
import os
import pickle
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.hostview import until
from tests.serving import PATIENCE_S, script

import untax
from untax import substrates
from untax.core.span import now_ns

pytest.importorskip("cryptography", reason="ray: the extra is not installed")
pytest.importorskip("uvicorn", reason="server: the extra is not installed")

from untax.cluster import apart as module
from untax.cluster import desk
from untax.cluster.apart import Apart
from untax.cluster.node import NodeEngine
from untax.cluster.plan import Plan, Post
from untax.cluster.scaling import Load
from untax.cluster.terms import Roll, Ticket
from untax.cluster.trust import Trust
from untax.core.errors import BackendError

TRUST = Trust.new("apart")
ADDRESS = "127.0.0.3"

HOLDER = """
import asyncio, pickle, sys
from untax.cluster.apart import Apart
async def main():
    apart = Apart(lambda: None)
    await apart.start(open(sys.argv[1], "rb").read())
    print(apart._process.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.fixture
def state(tmp_path):
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    return tmp_path


def made_of(state, substrate="namespace"):
    post = Post("there", "there", ADDRESS, TRUST.token, TRUST.authority.certificate, TRUST.identity_for(ADDRESS))
    return pickle.dumps((Plan("apart", substrate, str(state / "{node}")), post))


@contextlib.asynccontextmanager
async def apart(state, on_end=lambda: None):
    agent = Apart(on_end)
    try:
        yield agent, await agent.start(made_of(state))
    finally:
        await agent.aclose()


def client(member):
    ticket = Ticket("apart", TRUST.token, TRUST.authority.certificate, untax.__version__, "")
    return NodeEngine(member, ticket, is_here=True, clock=now_ns)


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_everything_that_is_asked_of_it_is_carried_out_there(state):
    async with apart(state) as (agent, member), client(member) as node:
        pid = agent._process.pid
        assert pid != os.getpid() and Path(f"/proc/{pid}/comm").read_text() == "untax-agent\n"
        assert await agent.now() == member and not member.is_draining
        assert await agent.leases() == 0 and await agent.rest(3600.0) > 3500.0
        await agent.meet(Roll(1, (member,), ()))
        async with node.lease() as box:
            assert (await box.run(["echo", "there"])).stdout == b"there\n"
            assert await agent.leases() == 1
            drained = asyncio.ensure_future(agent.drained())
            while not (await agent.now()).is_draining:
                await asyncio.sleep(0.01)
            assert not drained.done()
        await asyncio.wait_for(drained, 10)
        load = None
        while load is None or not load.is_idle:
            load = await asyncio.wait_for(agent.news(load), 10)
            assert isinstance(load, Load)
    assert not is_there(pid) and not Path(member.socket).exists()


async def test_it_has_its_turns_on_a_processor_among_those_of_its_node_and_is_not_meant_by_ctrl_c(state):
    """Kernels that group processes by their session give each group the same share: on its own it would be ahead of all those who lease of it (decision 0021)."""
    async with apart(state) as (agent, _):
        pid = agent._process.pid
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid != os.getpgid(0)


async def test_one_that_cannot_be_says_why_and_leaves_nothing(state):
    agent = Apart(lambda: None)
    with pytest.raises(BackendError, match="nonsense"):
        await agent.start(made_of(state, "nonsense"))
    assert agent._process.returncode is not None
    with pytest.raises(BackendError, match="has ended"):
        await agent.now()
    await agent.aclose()


async def test_one_that_dies_at_once_says_so_to_who_starts_it_and_to_nobody_else(monkeypatch):
    monkeypatch.setattr(module, "command", lambda *_: ["/bin/false"])
    told = []
    agent = Apart(lambda: told.append("it has ended"))
    with pytest.raises(BackendError, match=r"has ended \(exit status 1\)"):
        await agent.start(b"")
    await asyncio.sleep(0.05)
    assert not told


async def test_a_node_that_lacks_a_module_says_what_to_install(state, monkeypatch):
    (state / "uvicorn.py").write_text("raise ModuleNotFoundError(\"No module named 'uvicorn'\")")
    monkeypatch.syspath_prepend(str(state))
    agent = Apart(lambda: None)
    with pytest.raises(BackendError, match=r"No module named 'uvicorn': install the fleet's release there: pip install 'untax\[ray\]=="):
        await agent.start(made_of(state))


async def test_what_lies_in_the_working_directory_is_not_taken_for_pythons_own(state, monkeypatch):
    (state / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(state)
    async with apart(state) as (agent, _):
        assert await agent.leases() == 0


async def test_a_start_that_is_given_up_leaves_nothing(state):
    agent = Apart(lambda: None)
    starting = asyncio.ensure_future(agent.start(made_of(state)))
    await until(lambda: agent._reading is not None and list(state.glob("*/fleet-*")))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert agent._process.returncode is not None
    await _until_swept(state)


async def test_nothing_that_an_agent_starts_has_its_line_to_the_actor(state):
    async with apart(state) as (agent, _):
        pid = agent._process.pid
        fd = json.loads(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2])["fd"]
        [flags] = [line.split()[1] for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines() if line.startswith("flags")]
        assert int(flags, 8) & os.O_CLOEXEC


async def test_an_answer_that_cannot_be_read_ends_it(state, monkeypatch):
    """Whoever asked would wait for ever."""
    ended = asyncio.Event()
    async with apart(state, ended.set) as (agent, _):

        async def unread(reader):
            await reader.readexactly(1)
            raise ValueError("nobody can read that")

        await agent.now()
        monkeypatch.setattr(module, "next_of", unread)
        await agent.now()  # which the one before it is still waiting for
        with pytest.raises(BackendError, match="has ended"):
            await agent.leases()
        assert ended.is_set()
        with pytest.raises(ValueError, match="nobody can read"):
            await agent._reading


async def test_an_answer_that_cannot_be_sent_is_an_error():
    written = []
    writer = SimpleNamespace(write=written.append)
    await desk._answer(SimpleNamespace(leases=lambda: asyncio.sleep(0, result=lambda: None)), writer, 7, "leases", ())
    [said] = written
    number, value, trouble = pickle.loads(said[4:])
    assert (number, value) == (7, None) and "pickle" in trouble


async def test_what_goes_wrong_there_is_an_error_here_and_no_end_of_it(state):
    async with apart(state) as (agent, _):
        with pytest.raises(BackendError, match="TypeError"):
            await agent.rest(None)
        assert await agent.leases() == 0


async def test_its_death_is_told_and_ends_what_was_asked(state):
    ended = asyncio.Event()
    async with apart(state, ended.set) as (agent, member), client(member) as node:
        box = await node.acquire()
        asked = asyncio.ensure_future(agent.drained())
        await asyncio.sleep(0)
        os.kill(agent._process.pid, signal.SIGKILL)
        await asyncio.wait_for(ended.wait(), 10)
        with pytest.raises(BackendError, match="has ended"):
            await asked
        with pytest.raises(untax.SandboxLost):
            async with asyncio.timeout(PATIENCE_S):
                while True:  # who ends its sandboxes hears of the death as we do, and perhaps a moment later
                    await box.run(["true"])
        await box.release()
    await _until_swept(state)


async def test_an_end_that_was_asked_for_is_not_told(state):
    ended = asyncio.Event()
    async with apart(state, ended.set):
        pass
    assert not ended.is_set()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_it_goes_with_whoever_started_it(state, how):
    """Also one that is stopped and would not notice."""
    (state / "made_of").write_bytes(made_of(state))
    process, line = await script(HOLDER, str(state / "made_of"))
    try:
        pid = int(line)
        assert is_there(pid)
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGSTOP)
    finally:
        process.kill()
        await process.wait()
        process._transport.close()
    await until(lambda: not is_there(pid))
    await _until_swept(state)


async def _until_swept(state):
    """By the process that outlives both."""
    await until(lambda: not list(state.glob("*/fleet-*")) and str(state) not in Path("/proc/self/mountinfo").read_text())
