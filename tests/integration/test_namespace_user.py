"""A sandbox whose spec names a user: everything in it acts as that user, and inside."""

import os

import pytest

import untax
from untax import substrates


@pytest.fixture
async def engine(tmp_path):
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    async with untax.Engine(state_dir=tmp_path / "state") as engine:
        yield engine


@pytest.mark.skipif(os.geteuid() != 0, reason="root: an ordinary user's sandboxes have one user")
async def test_the_specs_user_acts_inside_from_the_first_action_on(engine, tmp_path):
    """Entered before its set-up was done, a sandbox gave its user the host's own root and network. A race, so more than once."""
    canary = tmp_path / "canary"
    canary.touch()

    for _ in range(20):
        async with engine.lease(user="root") as box:
            assert await box.list(".") == []
            with pytest.raises(untax.NotFound):
                await box.stat(canary)
            links = (await box.read("/proc/net/dev")).decode().splitlines()[2:]
            assert [link.split(":")[0].strip() for link in links] == ["lo"]
            assert (await box.run(["id", "-u"])).text == "0\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="an ordinary user: root can have any user")
async def test_an_ordinary_users_engine_refuses_another_user(engine):
    with pytest.raises(untax.UsageError, match="run the engine as root"):
        await engine.acquire(user="root")


async def test_an_unknown_user_is_the_callers_mistake(engine):
    with pytest.raises(untax.UsageError, match="no such user"):
        await engine.acquire(untax.EnvSpec(user="nosuch"))

    async with engine.lease() as box:
        assert (await box.run(["true"])).exit_code == 0
