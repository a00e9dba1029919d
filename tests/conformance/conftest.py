"""One engine for each substrate this machine has, kept for the whole run; a fresh sandbox for each check.

With UNTAX_SERVED=1 the engine is the one of `untax serve` in another process, and every check has to hold all the same.
"""

import os

import pytest
from tests.images import small_image
from tests.serving import ended, started

import untax
from untax import substrates


# Not a coroutine: hooks of a conftest below the root are not asked for fixtures of the whole run.
@pytest.fixture(scope="session", params=substrates.names())
def engine(request, _runner, tmp_path_factory):
    if reason := substrates.load(request.param).unavailable_reason():
        pytest.skip(f"{request.param}: {reason}")
    if os.environ.get("UNTAX_SERVED"):
        served = _runner.run(started(tmp_path_factory.mktemp("sock") / "s", tmp_path_factory.mktemp("state"), substrate=request.param))
        engine = untax.connect(served.url)
    else:
        engine = untax.Engine(request.param, state_dir=tmp_path_factory.mktemp("state") / request.param)
    _runner.run(engine.start())
    engine.test_substrate = request.param
    yield engine
    _runner.run(engine.aclose())
    if os.environ.get("UNTAX_SERVED"):
        _runner.run(ended(served))


@pytest.fixture
def spec(engine):
    """The same few megabytes everywhere; the weakest boundary that this substrate can claim."""
    name = engine.test_substrate
    return untax.EnvSpec(image=small_image(name), isolation=substrates.load(name).isolation)


@pytest.fixture
async def box(engine, spec):
    async with engine.lease(spec) as box:
        yield box


@pytest.fixture
def isolated(engine):
    """Skips a check that only a substrate with a boundary can pass: nothing destructive is ever run on the bare host."""
    if substrates.load(engine.test_substrate).isolation == "none":
        pytest.skip(f"the substrate {engine.test_substrate!r} has no boundary")
