"""One engine for each substrate this machine has, kept for the whole run; a fresh sandbox for each check."""

import os

import pytest
from tests.engines_fixture import docker, podman  # noqa: F401
from tests.images import small_image
from tests.sshd import sshd  # noqa: F401
from tests.variants import VARIANTS, options_of

import untax
from untax import substrates


# Not a coroutine: hooks of a conftest below the root are not asked for fixtures of the whole run.
@pytest.fixture(scope="session", params=VARIANTS, ids=str)
def engine(request, _runner, tmp_path_factory):
    if request.param.substrate == "vm" and os.geteuid() != 0:
        pytest.skip(
            "vm: emulated machines are slow, so the whole suite has them as root only; tests/security/test_vm.py has some as anyone"
        )
    name, options = request.param.substrate, options_of(request)
    if reason := substrates.load(name, **options).unavailable_reason():
        pytest.skip(f"{name}: {reason}")
    engine = untax.Engine(name, state_dir=tmp_path_factory.mktemp("state") / name, **options)
    _runner.run(engine.start())
    engine.test_substrate = name
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
