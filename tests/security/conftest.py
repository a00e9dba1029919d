"""One engine on the namespace substrate for the whole run, a fresh sandbox for each case, and the standing invariants.

After every hostile case: the engine answers within a second, a fresh sandbox works, and once the case's own sandboxes are
gone nothing of them is left on the host. Cases are named by the ids of the threat list.
"""

import asyncio
import os
import time
from collections.abc import Callable

import pytest
from tests import canary as canaries
from tests import leftovers

import untax
from untax import substrates

LONG = os.environ.get("UNTAX_LONG") == "1"  # full counts where a shorter run is the default
ANSWER_S = 15.0 if os.environ.get("UNTAX_GUEST") else 1.0  # of the standing invariants; an emulated machine is some fifteen times slower


# Not a coroutine: hooks of a conftest below the root are not asked for fixtures of the whole run.
@pytest.fixture(scope="session")
def engine(_runner, tmp_path_factory):
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    leftovers.adopt_orphans()
    engine = untax.Engine("namespace", state_dir=tmp_path_factory.mktemp("engine") / "state")
    _runner.run(_warmed(engine))
    yield engine
    _runner.run(engine.aclose())


async def _warmed(engine) -> None:
    """What the first sandbox makes once for all (a helper, a store) is not what the thousandth leaves behind."""
    await engine.start()

    async def use() -> None:
        async with engine.lease() as box:
            await box.run(["true"])

    for _ in range(2):
        await asyncio.gather(*(use() for _ in range(4)))
    await asyncio.sleep(0.3)  # until what is kept ready for the next lease is ready


@pytest.fixture(scope="session")
def state_dir(engine, tmp_path_factory):
    return next(tmp_path_factory.getbasetemp().glob("engine*/state"))


@pytest.fixture(autouse=True)
async def invariants(request):
    """What must hold after every case here."""
    if "engine" not in request.fixturenames:
        yield
        return
    engine = request.getfixturevalue("engine")
    state = request.getfixturevalue("state_dir")
    watch = leftovers.Watch(marks=(str(state), f"-{os.getpid()}-"), state_dir=state)
    before = watch.take()
    yield
    began = time.monotonic()
    async with asyncio.timeout(10 * ANSWER_S), engine.lease() as fresh:
        assert (await fresh.run(["echo", "alive"])).stdout == b"alive\n"
        took = time.monotonic() - began
    left = await asyncio.to_thread(watch.wait_like, before)
    assert not left, f"left over: {left}"
    assert took < ANSWER_S, f"the engine took {took:.2f} s to give a working sandbox"


@pytest.fixture
def spec():
    return untax.EnvSpec()


@pytest.fixture
async def box(engine, spec):
    async with engine.lease(spec) as box:
        yield box


@pytest.fixture
async def neighbour(engine, spec):
    async with engine.lease(spec) as box:
        yield box


@pytest.fixture
def canary():
    with canaries.planted() as canary:
        yield canary


@pytest.fixture
def enforced(box) -> Callable[[str], None]:
    """Skips a case whose limit this host cannot enforce for this user; the ledger says which and why."""

    def need(*names: str) -> None:
        for lacking in box.ledger.unenforced:
            if lacking.name in names:
                pytest.skip(f"{lacking.name} is not enforced here: {lacking.reason}")

    return need


@pytest.fixture
def as_root():
    if os.geteuid() != 0:
        pytest.skip("needs root")
