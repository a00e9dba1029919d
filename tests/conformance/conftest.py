"""One engine for each substrate this machine has, kept for the whole run; a fresh sandbox for each check."""

import contextlib
import os

import pytest
from tests import sshd
from tests.images import small_image

import untax
from untax import substrates


# Not a coroutine: hooks of a conftest below the root are not asked for fixtures of the whole run.
@pytest.fixture(scope="session", params=substrates.names())
def engine(request, _runner, tmp_path_factory):
    if request.param == "vm" and os.geteuid() != 0:
        pytest.skip(
            "vm: emulated machines are slow, so the whole suite has them as root only; tests/security/test_vm.py has some as anyone"
        )
    with contextlib.ExitStack() as stack:
        options = stack.enter_context(sshd.running(tmp_path_factory.mktemp("sshd"))).options if request.param == "ssh" else {}
        if reason := substrates.load(request.param, **options).unavailable_reason():
            pytest.skip(f"{request.param}: {reason}")
        engine = untax.Engine(request.param, state_dir=tmp_path_factory.mktemp("state") / request.param, **options)
        _runner.run(engine.start())
        engine.test_substrate = request.param
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
