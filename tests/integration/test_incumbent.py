"""The incumbent path, where commands can be run here as their users do today: how they ended, and whose fault it is when they did not."""

import asyncio
import time
from pathlib import Path

import pytest
from tests.engines_fixture import docker, podman  # noqa: F401
from tests.hostview import stopped
from tests.images import small_directory
from tests.sshd import running, sshd  # noqa: F401
from tests.variants import Variant, options_of

import untax
from untax import substrates
from untax.substrates import _incumbent
from untax.substrates._incumbent import ANSWER_S, code_of_unstarted

SPECS = {
    "container": untax.EnvSpec(image=f"dir:{small_directory()}", isolation="container"),
    "gvisor": untax.EnvSpec(image=f"dir:{small_directory()}", isolation="gvisor"),
    "ssh": untax.EnvSpec(isolation="none"),
}
SLACK_S = 2.0  # of a busy machine


@pytest.fixture(
    scope="module", params=[Variant("container", "docker"), Variant("container", "podman"), Variant("gvisor"), Variant("ssh")], ids=str
)
def engine(request, _runner, tmp_path_factory):
    options = options_of(request)
    name = request.param.substrate
    if reason := substrates.load(name, **options).unavailable_reason():
        pytest.skip(f"{name}: {reason}")
    engine = untax.Engine(name, state_dir=tmp_path_factory.mktemp("incumbent") / "state", **options)
    _runner.run(engine.start())
    yield engine
    _runner.run(engine.aclose())


@pytest.fixture(scope="module")
def box(engine, _runner):
    """One for all: each command is an exec of its own."""
    box = _runner.run(engine.acquire(SPECS[engine.substrate.name]))
    yield box
    _runner.run(box.release())


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 128", 128), ("exit 200", 200), ("exit 255", 255), ("exit 256", 0), ("kill -9 $$", 137), ("kill -15 $$", 143)],
)
async def test_p20_a_status_is_told_as_it_came_and_not_guessed_from(box, script, code):
    """By one number, which is the same for `exit 137` and for signal 9: nobody is said to have died of a signal."""
    result = await box.sandbox.run_incumbent(["sh", "-c", f"echo out; echo err >&2; {script}"], timeout_s=30)

    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == ("exited", code, b"out\n", b"err\n")


async def test_a_command_that_takes_too_long_is_a_timeout(box):
    began = time.monotonic()
    result = await box.sandbox.run_incumbent(["sleep", "20"], timeout_s=1)

    assert (result.outcome, result.exit_code) == ("timeout", 124)
    assert time.monotonic() - began < 1 + ANSWER_S + SLACK_S


async def test_a_command_that_closes_its_output_is_waited_for(box):
    result = await box.sandbox.run_incumbent(["sh", "-c", "exec >&- 2>&-; sleep 0.5; exit 7"], timeout_s=30)

    assert (result.outcome, result.exit_code) == ("exited", 7)


async def test_a_word_of_the_shell_is_no_command(box):
    """`argv` is run without a shell, also where there is one on the way."""
    for word in ("exit", "A=1", "if"):
        assert (await box.sandbox.run_incumbent([word], timeout_s=30)).exit_code == 127


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ('exec: "x": executable file not found in $PATH: unknown', 127),
        ("crun: executable file `x` not found in $PATH: No such file or directory", 127),
        ('exec: "/etc": permission denied', 126),
        ("exec /x: exec format error", 126),
        ("failed to load task: no running task found: task 1a not found", None),
        ("resource temporarily unavailable", None),
    ],
)
def test_a_runtime_s_words_about_itself_are_no_result(words, code):
    assert code_of_unstarted(words) == code


@pytest.mark.parametrize(
    "broken", [ConnectionResetError(104, "reset"), TimeoutError(110, "Connection timed out"), BrokenPipeError(32, "pipe")]
)
async def test_a_connection_that_breaks_is_the_backend_s_failure(broken):
    """Also by the kernel's own deadline, which is nobody's command's: the backend need not be asked."""

    async def work():
        raise broken

    async def ask():
        raise AssertionError

    with pytest.raises(untax.BackendError, match="broke"):
        await _incumbent.by_deadline(work(), 5, "sbx", ask)


@pytest.fixture
def briefly(monkeypatch):
    """How long a backend is given that will not answer."""
    monkeypatch.setattr(_incumbent, "ANSWER_S", 1.0)
    return 1.0


async def infrastructure(seconds, awaitable):
    """The error that it raises, in time."""
    began = time.monotonic()
    with pytest.raises(untax.SubstrateError) as caught:
        await asyncio.wait_for(awaitable, 30)
    assert time.monotonic() - began < seconds + SLACK_S, caught.value
    return caught.value


async def test_a_machine_behind_ssh_that_hangs_is_no_slow_command(tmp_path, briefly):
    """Nor is a login that is refused a command that failed."""
    place = tmp_path / "sshd"
    place.mkdir()
    with running(place) as machine:
        async with untax.Engine("ssh", state_dir=tmp_path / "state", **machine.options) as engine, engine.lease(SPECS["ssh"]) as box:
            with stopped(_first_below(machine.process.pid)):
                hung = await infrastructure(1 + briefly, box.sandbox.run_incumbent(["true"], timeout_s=1))
            thawed = await box.sandbox.run_incumbent(["echo", "back"], timeout_s=30)
            (place / "authorized_keys").rename(place / "nobody")
            refused = await infrastructure(30, box.sandbox.run_incumbent(["true"], timeout_s=30))
            assert (await box.run(["true"])).exit_code == 0  # the session that is held goes on

    assert isinstance(hung, untax.BackendError)
    assert thawed.text == "back\n"
    assert isinstance(refused, untax.SubstrateUnavailable)


async def test_a_gvisor_that_hangs_is_no_slow_command(tmp_path, briefly):
    if reason := substrates.load("gvisor").unavailable_reason():
        pytest.skip(f"gvisor: {reason}")
    async with untax.Engine("gvisor", state_dir=tmp_path / "state") as engine, engine.lease(SPECS["gvisor"]) as box:
        with stopped(_sentry(box.sandbox.pid)):
            hung = await infrastructure(1 + briefly, box.sandbox.run_incumbent(["true"], timeout_s=1))
        thawed = await box.sandbox.run_incumbent(["echo", "back"], timeout_s=30)

    assert isinstance(hung, untax.BackendError)
    assert thawed.text == "back\n"


def _below(pid: int) -> list[int]:
    """Of each of its threads: a program of Go starts others from any."""
    return [int(child) for thread in Path(f"/proc/{pid}/task").iterdir() for child in (thread / "children").read_text().split()]


def _first_below(pid: int) -> int:
    """Who listens: where it has namespaces of its own, the child of what made them."""
    return next(iter(_below(pid)), pid)


def _sentry(runsc: int) -> int:
    """The process that is the sandbox's kernel."""
    return next(pid for pid in _below(runsc) if b"runsc-sandbox" in Path(f"/proc/{pid}/cmdline").read_bytes())
