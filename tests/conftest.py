"""Hooks of every suite: coroutine tests and fixtures, and skips that are failures where they were promised not to happen."""

import asyncio
import functools
import inspect
import os
import re
import signal
from collections.abc import Iterator

import pytest

# A shell that starts us in the background has us ignore Ctrl-C, and so would every program that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` does the same with hang-ups. We go on ignoring them, but by a handler, which programs that are started do not inherit.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# ---- coroutine tests and fixtures, on one loop for the whole run so that a fixture may outlive a test ----


@pytest.fixture(scope="session", autouse=True)
def _runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    runner = pyfuncitem._request.getfixturevalue("_runner")
    wanted = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    runner.run(pyfuncitem.obj(**wanted))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    made = fixturedef.func
    if inspect.isasyncgenfunction(made):
        runner = request.getfixturevalue("_runner")

        @functools.wraps(made)
        def generator(*args, **kwargs):
            steps = made(*args, **kwargs)
            yield runner.run(_step(steps))
            runner.run(_finish(steps))

        del generator.__wrapped__  # or pytest sees the asynchronous one behind it
        fixturedef.func = generator
    elif inspect.iscoroutinefunction(made):
        runner = request.getfixturevalue("_runner")
        fixturedef.func = lambda *args, **kwargs: runner.run(made(*args, **kwargs))


async def _step(steps):
    return await anext(steps)


async def _finish(steps):
    async for _ in steps:
        raise AssertionError("an asynchronous fixture yields once")


# ---- UNTAX_REQUIRE=process,namespace: a skip for lack of those is a failure; with "all" in it, every skip that is not expected ----

REQUIRED = {name.strip() for name in os.environ.get("UNTAX_REQUIRE", "").split(",")} - {"", "user"}  # "user" is for scripts/run-as-user

# Reasons that stand on a machine that lacks nothing. What a package or a kernel option would mend does not belong here.
EXPECTED = re.compile(
    "|".join(
        (
            r"the substrate '[\w:]+' has no ",  # one of several that the check runs on
            r"newer syntax than this Python has",
            r"the kernel itself refuses NUL in an argument",
            r"this kernel does not mount mkfs\.ext4 .*prjquota",  # hosts without CONFIG_QUOTA; the guest has it
            r"debian: this machine's apt gets nothing from a Debian mirror",  # a machine without a network
            r"guest: this is the guest",
            r"(an ordinary )?user: "
            if os.geteuid() == 0
            else r".*\b(root|one user)\b|.* is not enforced here: |owners: |trusted: |mounts: ",
        )
    )
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A reason of the form "namespace: needs …" names what is lacking; a required one must not be."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        lacking = reason.partition(":")[0].strip()
        if lacking in REQUIRED or ("all" in REQUIRED and not EXPECTED.match(reason)):
            report.outcome = "failed"
            report.longrepr = f"UNTAX_REQUIRE has {' '.join(sorted(REQUIRED))}, yet this was skipped: {reason}"
    return report


# ---- what takes minutes and is run before a release, or when what it is about has changed: UNTAX_LONG=1 ----


def pytest_collection_modifyitems(config, items):
    if not os.environ.get("UNTAX_LONG") and (long := [one for one in items if one.get_closest_marker("long")]):
        config.hook.pytest_deselected(items=long)
        items[:] = [one for one in items if one not in long]


# ---- what this machine lacks, once, at the end ----


def pytest_terminal_summary(terminalreporter):
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        who = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
        terminalreporter.section(f"skipped on this machine, as {who}")
        for reason, count in sorted(reasons.items()):
            terminalreporter.write_line(f"{count:5d} × {reason}")
