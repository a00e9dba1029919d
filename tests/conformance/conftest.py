"""One engine for each substrate this machine has, kept for the whole run; a fresh sandbox for each check.

`served` is the engine of `untax serve` in another process: what concerns lifecycles and streams is checked over it too, with UNTAX_SERVED=1
everything is.
"""

import os

import pytest
from tests import kubehost
from tests.engines_fixture import docker, podman  # noqa: F401
from tests.images import small_image
from tests.serving import ended, started
from tests.variants import VARIANTS, Variant, options_of

import untax
from untax import substrates

SERVED = Variant("namespace", is_served=True)
SERVED_MODULES = {"test_lifecycle", "test_network", "test_sessions", "test_snapshots", "test_streams"}


@pytest.hookimpl
def pytest_collection_modifyitems(config, items):
    if not os.environ.get("UNTAX_SERVED"):
        over = [item for item in items if is_served(item) and item.path.stem not in SERVED_MODULES]
        config.hook.pytest_deselected(items=over)
        items[:] = [item for item in items if item not in set(over)]


def is_served(item):
    return getattr(item, "callspec", None) is not None and item.callspec.params.get("engine") == SERVED


# Not a coroutine: hooks of a conftest below the root are not asked for fixtures of the whole run.
@pytest.fixture(scope="session", params=[*VARIANTS, SERVED], ids=str)
def engine(request, _runner, tmp_path_factory):
    name = request.param.substrate
    if name == "kubernetes":
        yield from _on_a_cluster(_runner, tmp_path_factory.mktemp("state"))
        return
    options = options_of(request)
    if reason := substrates.load(name, **options).unavailable_reason():
        pytest.skip(f"{name}: {reason}")
    state = tmp_path_factory.mktemp("state") / name
    served = _runner.run(started(tmp_path_factory.mktemp("socket") / "s", state, substrate=name)) if request.param.is_served else None
    engine = untax.Engine(name, state_dir=state, **options) if served is None else untax.connect(served.url)
    _runner.run(engine.start())
    engine.test_substrate = name
    yield engine
    _runner.run(engine.aclose())
    if served is not None:
        _runner.run(ended(served))


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
