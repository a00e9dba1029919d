"""`Engine("auto")` over fakes: what it does with a substrate whose boundary turns out not to hold."""

import asyncio
import logging

import pytest

import untax
from untax import substrates
from untax.auto import Candidates
from untax.core.errors import UsageError
from untax.core.substrate import Typical
from untax.testing import FakeSubstrate

VM = untax.EnvSpec(isolation="vm")


class Emulated(FakeSubstrate):
    """A machine that says at its start what it is worth."""

    name = "machine"

    def boundary_trouble(self):
        return "this host only emulates; use another host"


class Sound(FakeSubstrate):
    """One that has the same ability and nothing to say."""

    name = "machine"

    def boundary_trouble(self):
        return None


class Dear(FakeSubstrate):
    name = "dear"
    typical = Typical(start_s=100.0, action_s=1.0)


class Weak(FakeSubstrate):
    name = "weak"

    def __init__(self):
        super().__init__(isolation="namespace")


@pytest.fixture
def having(monkeypatch, tmp_path):
    """`having(A, B)`: an engine that chooses between these."""

    def made(*kinds, **options):
        by_name = {kind.name: kind for kind in kinds}
        monkeypatch.setattr(substrates, "names", lambda: list(by_name))
        monkeypatch.setattr(substrates, "load", lambda name, **_: by_name[name]())
        return untax.Engine("auto", state_dir=tmp_path / "state", **options)

    return made


async def test_a_boundary_that_does_not_hold_is_left_out_and_the_next_best_serves(having, caplog):
    """Whether it holds is known once it has started, and by then it was chosen."""
    caplog.set_level(logging.INFO, "untax.auto")
    async with having(Emulated, Dear, Weak) as engine:
        assert engine.choice(VM).substrate == "machine"
        async with engine.lease(VM) as box:
            assert (await box.run(["true"])).exit_code == 0
        assert engine.choice(VM).left_out["machine"] == "this host only emulates; use another host"
    assert box.ledger.substrate == "dear"
    assert "dear (isolation 'vm', 'vm' asked for)" in box.ledger.choice
    assert caplog.text.count("machine is left out where a boundary is asked for: this host only emulates") == 1


@pytest.mark.parametrize("isolation", ["namespace", "container", "gvisor", "vm"])
async def test_where_nothing_is_left_the_error_has_the_reason_and_the_remedy(having, isolation):
    """What has no boundary is no namespace either."""
    spec = untax.EnvSpec(isolation=isolation)
    async with having(Emulated) as engine:
        for ask in (engine.acquire, engine.warm, engine.prepare, engine.acquire):
            with pytest.raises(UsageError, match=rf"isolation '{isolation}'.*machine: this host only emulates; use another host"):
                await ask(spec)


async def test_of_many_who_ask_at_once_none_gets_it(having):
    """The first of them finds it out, and those who wait with it for the same start are told too."""
    async with having(Emulated, Dear) as engine:
        boxes = await asyncio.gather(*(engine.acquire(VM) for _ in range(4)))
        assert {box.ledger.substrate for box in boxes} == {"dear"}


async def test_who_asks_for_no_boundary_may_have_it(having):
    async with having(Emulated) as engine:
        async with engine.lease(untax.EnvSpec(isolation="none")) as box:
            assert box.ledger.substrate == "machine"
        with pytest.raises(UsageError, match="only emulates"):
            await engine.acquire(VM)
        async with engine.lease(untax.EnvSpec(isolation="none")) as box:
            assert box.ledger.substrate == "machine"


async def test_the_least_that_is_leased_counts_like_what_is_asked_for(having):
    async with having(Emulated, least="vm") as engine:
        with pytest.raises(UsageError, match=r"isolation 'vm'.*only emulates"):
            await engine.acquire(untax.EnvSpec(isolation="none"))


async def test_a_boundary_that_holds_is_chosen(having):
    async with having(Sound, Dear) as engine, engine.lease(VM) as box:
        assert box.ledger.substrate == "machine"


def test_who_has_time_finds_it_out_before_anything_starts(having, tmp_path):
    """As `untax doctor` does; an engine's start does not wait for a trial that takes seconds."""
    having(Emulated, Dear)
    brief, thorough = (Candidates(str(tmp_path), {}, 50) for _ in range(2))
    for name in ("machine", "dear"):
        brief.look_at(name, is_brief=True)
        thorough.look_at(name)

    assert brief.choose(VM).substrate == "machine"
    assert thorough.choose(VM).substrate == "dear"
