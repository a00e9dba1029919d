"""One engine for each substrate this machine has, kept for the whole run; a fresh sandbox for each check."""

import pytest
from tests import kubehost
from tests.images import small_image

import untax
from untax import substrates


# Not a coroutine: hooks of a conftest below the root are not asked for fixtures of the whole run.
@pytest.fixture(scope="session", params=substrates.names())
def engine(request, _runner, tmp_path_factory):
    if request.param == "kubernetes":
        yield from _on_a_cluster(_runner, tmp_path_factory.mktemp("state"))
        return
    if reason := substrates.load(request.param).unavailable_reason():
        pytest.skip(f"{request.param}: {reason}")
    engine = untax.Engine(request.param, state_dir=tmp_path_factory.mktemp("state") / request.param)
    _runner.run(engine.start())
    engine.test_substrate = request.param
    yield engine
    _runner.run(engine.aclose())


def _on_a_cluster(_runner, state_dir):
    """An engine on a cluster that is there for as long as the engine."""
    with kubehost.cluster() as cluster:
        substrate = substrates.load("kubernetes", state_dir=str(state_dir), kubeconfig=cluster.kubeconfig)
        engine = untax.Engine(kubehost.Ahead(substrate))
        _runner.run(engine.start())
        engine.test_substrate = "kubernetes"
        yield engine
        _runner.run(engine.aclose())


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
