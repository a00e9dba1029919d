"""The driver against hands that fail, hang and lie dead: one lease for each sandbox, no more than the budget, nobody forgotten."""

import asyncio
import collections
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import untax
from untax.core.spec import EnvSpec, Repo
from untax.core.stage import Identity, stages_of
from untax.pool.costs import Costs
from untax.pool.options import PoolOptions
from untax.pool.pool import PoolDriver

IMAGE = stages_of(EnvSpec(), Identity("x"))
REPO = stages_of(EnvSpec(repo=Repo("https://example.org/r.git", "c1")), Identity("x"))
DEPS = stages_of(EnvSpec(repo=Repo("https://example.org/r.git", "c1"), setup=("a",)), Identity("x"))
SPECS = (IMAGE, REPO, DEPS)


@dataclass
class FakeEntry:
    name: str
    stages: tuple
    is_dead: bool = False


@dataclass
class FakeHands:
    """Sandboxes that are nothing but names. `failing` and `dying` are shares; `gate` holds creations up."""

    failing: float = 0.0
    dying: float = 0.0
    seed: int = 0
    gate: asyncio.Event | None = None
    error: Exception | None = None
    there: set[str] = field(default_factory=set)
    most: int = 0
    made: list[str] = field(default_factory=list)

    def __post_init__(self):
        self._draws = random.Random(self.seed)
        self._names = itertools.count()
        self.coming = 0

    async def make(self, order, _request):
        self.coming += 1
        self.most = max(self.most, self.coming + len(self.there))
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            if self._draws.random() < self.failing:
                raise untax.CreateError("", "no luck")
        finally:
            self.coming -= 1
        entry = FakeEntry(f"e{next(self._names)}", order.stages)
        entry.is_dead = self._draws.random() < self.dying
        self.there.add(entry.name)
        self.made.append(entry.name)
        return entry

    async def destroy(self, entry):
        await asyncio.sleep(0)
        self.there.discard(entry.name)


def driver_of(hands, **options):
    driver = PoolDriver(hands, PoolOptions(**options), shares_stages=False, upgrades_in_place=True, costs=Costs())
    driver.stored(stage.key for stage in IMAGE)
    return driver


async def lease(driver, stages=IMAGE, wait_s=None):
    """As a box does it: whatever is handed out dead is given back for another."""
    grant = await driver.acquire(stages, "request", wait_s=wait_s)
    while grant.entry.is_dead:
        grant = await driver.again(grant, untax.SandboxLost(grant.entry.name, "dead"))
    driver.bound(grant, 0.0)
    return grant


async def end(driver, grant, hands):
    """As a box does it: the sandbox is destroyed, then its place given up."""
    hands.there.discard(grant.entry.name)
    driver.give_back(grant.entry.name, clean=False, is_gone=True)


async def closed(driver, hands):
    driver.close()
    await driver.wait_closed()
    assert not hands.there
    assert driver.state.size == 0


async def test_what_is_stored_has_changed_only_where_it_is_another():
    """Who watches looks at all of it again each time."""
    hands = FakeHands()
    driver = PoolDriver(hands, PoolOptions(), shares_stages=True, upgrades_in_place=False, costs=Costs())
    await driver.warm(REPO, "r", 1, memory_mib=1.0)
    assert driver.known_stages == {stage.key for stage in REPO}
    before = driver.restocked
    for _ in range(5):
        await end(driver, await lease(driver, REPO), hands)
    await driver.warm(REPO, "r", 1, memory_mib=1.0)
    assert len(hands.made) >= 6 and driver.restocked == before
    await end(driver, await lease(driver, DEPS), hands)
    assert driver.restocked > before and driver.known_stages >= {stage.key for stage in DEPS}
    await closed(driver, hands)


async def test_what_is_warm_is_handed_out_at_once_and_refilled():
    hands = FakeHands()
    driver = driver_of(hands)
    await driver.warm(IMAGE, "r", 3, memory_mib=1.0)
    grant = await lease(driver)

    assert (grant.order.kind, grant.order.waited_s) == ("exact", 0.0)
    await driver.warm(IMAGE, "r", 3, memory_mib=1.0)
    assert len(hands.there) == 4
    await end(driver, grant, hands)
    await closed(driver, hands)


async def test_warm_says_why_it_cannot_be():
    hands = FakeHands(error=untax.StageFailed("deps", "pip said no", b"the log"))
    driver = driver_of(hands, entries=4, memory_mib=100.0)
    with pytest.raises(untax.StageFailed, match="pip said no"):
        await driver.warm(DEPS, "r", 1, memory_mib=1.0)
    hands.error = untax.CreateError("", "no cgroup")
    with pytest.raises(untax.CreateError, match="no cgroup"):
        await driver.warm(IMAGE, "r", 1, memory_mib=1.0)
    with pytest.raises(untax.UsageError, match="entries"):
        await driver.warm(IMAGE, "r", 5, memory_mib=1.0)
    with pytest.raises(untax.UsageError, match="memory_mib"):
        await driver.warm(IMAGE, "r", 2, memory_mib=60.0)
    hands.error = None
    await driver.warm(IMAGE, "r", 1, memory_mib=1.0)
    assert [stage.target for stage in driver.standings() if stage.target] == [1]
    await closed(driver, hands)


async def test_a_creation_that_nobody_waits_for_any_more_is_broken_off():
    hands = FakeHands(gate=asyncio.Event())
    driver = driver_of(hands)
    waiting = asyncio.ensure_future(driver.acquire(IMAGE, "r"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert hands.coming == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert hands.coming == 0
    hands.gate.set()
    grant = await lease(driver)  # at once: nothing has failed, so nothing is held back
    assert grant.order.waited_s < 0.04
    await end(driver, grant, hands)
    await closed(driver, hands)


async def test_a_creation_that_another_waits_for_goes_on_when_the_first_leaves():
    hands = FakeHands(gate=asyncio.Event())
    driver = driver_of(hands, entries=1)
    first = asyncio.ensure_future(driver.acquire(IMAGE, "r"))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(driver.acquire(IMAGE, "r"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    hands.gate.set()
    grant = await second
    assert hands.made == [grant.entry.name]
    driver.bound(grant, 0.0)
    await end(driver, grant, hands)
    await closed(driver, hands)


async def test_a_wait_ends_at_its_deadline_and_says_what_it_was_for():
    hands = FakeHands()
    driver = driver_of(hands, entries=1)
    grant = await lease(driver)
    with pytest.raises(untax.PoolTimeout, match="1 sandboxes of at most 1"):
        await driver.acquire(IMAGE, "r", wait_s=0.02)
    await end(driver, grant, hands)
    await closed(driver, hands)


async def test_q6_a_pool_resized_to_zero_during_leases_leaves_them_alone_and_nothing_behind():
    hands = FakeHands()
    driver = driver_of(hands)
    await driver.warm(IMAGE, "r", 4, memory_mib=0.0)
    grants = [await lease(driver) for _ in range(3)]
    await driver.warm(IMAGE, "r", 0, memory_mib=0.0)
    while driver._destroying:
        await asyncio.sleep(0)
    assert hands.there == {grant.entry.name for grant in grants}
    for grant in grants:
        await end(driver, grant, hands)
    assert driver.state.size == 0
    await closed(driver, hands)


async def test_closing_refuses_who_waits_and_destroys_what_is_idle():
    hands = FakeHands()
    driver = driver_of(hands, entries=1)
    grant = await lease(driver)
    waiting = asyncio.ensure_future(driver.acquire(IMAGE, "r"))
    await asyncio.sleep(0)
    driver.close()
    with pytest.raises(untax.PoolClosed):
        await waiting
    with pytest.raises(untax.PoolClosed):
        await driver.acquire(IMAGE, "r")
    with pytest.raises(untax.PoolClosed):
        await driver.warm(IMAGE, "r", 1, memory_mib=0.0)
    await end(driver, grant, hands)
    await closed(driver, hands)


async def test_x22_sandboxes_that_all_died_while_parked_cost_a_lease_one_creation():
    hands = FakeHands()
    driver = driver_of(hands)
    await driver.warm(IMAGE, "r", 6, memory_mib=0.0)
    for entry in driver.parked():
        entry.is_dead = True
    grant = await lease(driver)
    assert driver.counts.rejected == 6
    assert not grant.entry.is_dead
    await end(driver, grant, hands)
    await closed(driver, hands)


async def test_a_death_that_is_noticed_while_parked_is_replaced():
    hands = FakeHands()
    driver = driver_of(hands)
    await driver.warm(IMAGE, "r", 2, memory_mib=0.0)
    gone = driver.parked()[0]
    driver.died(gone)
    driver.died(gone)
    await driver.warm(IMAGE, "r", 2, memory_mib=0.0)
    assert gone.name not in {entry.name for entry in driver.parked()}
    assert driver.counts.died == 1
    await closed(driver, hands)


async def test_sandboxes_that_die_whenever_they_are_handed_out_do_not_keep_a_lease_for_ever():
    hands = FakeHands(dying=1.0)
    driver = driver_of(hands)
    with pytest.raises(untax.SandboxLost):
        async with asyncio.timeout(5):
            await lease(driver)
    await closed(driver, hands)


async def test_one_that_is_not_proven_gone_counts_until_it_is():
    hands = FakeHands()
    driver = driver_of(hands, entries=1)
    grant = await lease(driver)
    gone = driver.gone_later(grant.entry.name)
    await end(driver, grant, hands)
    assert driver.state.size == 1
    with pytest.raises(untax.PoolTimeout):
        await driver.acquire(IMAGE, "r", wait_s=0.01)
    gone()
    assert driver.state.size == 0
    await closed(driver, hands)


async def test_sizes_follow_demand_when_they_are_to():
    hands = FakeHands()
    driver = driver_of(hands, adaptive=True)
    for _ in range(20):
        grant = await lease(driver)
        driver.held(IMAGE, 0.01)
        await end(driver, grant, hands)
    driver._replan()
    targets = {one.stage.key: one.target for one in driver.standings()}
    assert targets[IMAGE[-1].key] > 0
    while not driver.parked():
        await asyncio.sleep(0)
    assert (await lease(driver)).order.kind == "exact"
    await closed_with_leases(driver, hands)


async def closed_with_leases(driver, hands):
    for name in list(hands.there - {entry.name for entry in driver.parked()}):
        if name in driver._entries:
            hands.there.discard(name)
            driver.give_back(name, clean=False, is_gone=True)
    await closed(driver, hands)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    entries=st.integers(1, 6),
    warm=st.integers(0, 4),
    failing=st.sampled_from((0.0, 0.2)),
    dying=st.sampled_from((0.0, 0.3)),
    clients=st.integers(1, 12),
)
def test_q1_whatever_fails_nobody_shares_a_sandbox_and_the_budget_holds(seed, entries, warm, failing, dying, clients):
    """Clients that lease, hold, cancel and give back against hands that fail: every lease ends served, refused or withdrawn."""
    asyncio.run(_storm(seed, entries, min(warm, entries), failing, dying, clients))


async def _storm(seed, entries, warm, failing, dying, clients):
    draws = random.Random(seed)
    hands = FakeHands(failing=failing, dying=dying, seed=seed)
    driver = driver_of(hands, entries=entries)
    held: set[str] = set()
    outcomes = collections.Counter()

    async def client():
        for _ in range(5):
            stages = draws.choice(SPECS)
            task = asyncio.ensure_future(lease(driver, stages, wait_s=draws.choice((None, 0.01, 0.2))))
            if draws.random() < 0.15:
                await asyncio.sleep(draws.choice((0, 0.001)))
                task.cancel()
            try:
                grant = await task
            except asyncio.CancelledError:
                outcomes["withdrawn"] += 1
                continue
            except (untax.PoolTimeout, untax.CreateError, untax.SandboxLost):
                outcomes["refused"] += 1
                continue
            assert grant.entry.name not in held
            assert grant.entry.name in hands.there
            held.add(grant.entry.name)
            await asyncio.sleep(draws.choice((0, 0, 0.001)))
            held.discard(grant.entry.name)
            if draws.random() < 0.3:
                driver.give_back(grant.entry.name, clean=not grant.order.missing)
            else:
                await end(driver, grant, hands)
            outcomes["served"] += 1

    async with asyncio.timeout(30):  # nobody waits for ever
        if warm:
            with_failures = driver.warm(IMAGE, "r", warm, memory_mib=0.0)
            try:
                await with_failures
            except untax.CreateError:
                pass
        await asyncio.gather(*(client() for _ in range(clients)))
        assert sum(outcomes.values()) == 5 * clients
        assert hands.most <= entries
        await closed(driver, hands)
    assert not driver._asked
    assert not driver._outcomes
    assert not driver._waiting
    assert not driver._for
