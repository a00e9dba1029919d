"""What a server says of itself to who watches it: all of it at first, then what changes, and nothing at all while nobody does."""

import asyncio
import contextlib
import itertools
import math

import pytest
from tests.unit.server.test_service import break_connection, serving, until

import untax
import untax.leases
from untax.cluster.view import Views
from untax.pool.options import PoolOptions
from untax.server import view as module
from untax.server.owners import Owner


def pooled(tmp_path, **options):
    return serving(tmp_path, pool=PoolOptions(**options))


@contextlib.asynccontextmanager
async def watching(engine):
    """What it was told, and the same put together."""
    parts, views = [], Views()
    views.joined("n", isolation="none")

    def told(part):
        parts.append(part)
        views.told("n", part)

    task = asyncio.ensure_future(engine.watch(told))
    try:
        await until(lambda: parts or task.done())
        yield parts, views.view("n")
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_all_of_it_is_told_at_first_and_then_what_has_changed(tmp_path):
    async with serving(tmp_path) as service, untax.connect(service.url) as engine, watching(engine) as (parts, view):
        assert parts[0]["whole"] is True
        assert (view.leased, view.starting, view.is_draining, view.free_mib) == (0, 0, False, math.inf)

        await engine.warm(n=2)
        stages, present = await engine.ladder(untax.EnvSpec(isolation="none"))
        key = stages[-1].key
        assert key in present
        await until(lambda: view.idle.get(key) == 2)
        async with engine.lease():
            await until(lambda: view.leased == 1)
            assert view.idle.get(key, 0) >= 1
        await until(lambda: view.leased == 0 and view.idle.get(key) == 2)

        assert not any(part.get("whole") for part in parts[1:])
        assert all("isolation" not in part and "cpus" not in part for part in parts[1:])
        assert view.costs.known("create") is not None


async def test_nothing_is_called_while_nobody_watches(tmp_path):
    async with serving(tmp_path) as service, untax.connect(service.url) as engine:
        driver = service.engine.pooling.driver
        before = driver.changed
        async with watching(engine):
            assert driver.changed is not before
        await until(lambda: driver.changed is before)
        assert service.views._looking is None and service.views._timer is None


async def test_pushes_are_apart(tmp_path, monkeypatch):
    """However many leases there are between them."""
    pushed = []
    push = module.Views._push

    def counted(self):
        pushed.append(asyncio.get_running_loop().time())
        push(self)

    monkeypatch.setattr(module.Views, "_push", counted)
    async with serving(tmp_path) as service, untax.connect(service.url) as engine, watching(engine):
        for _ in range(100):
            async with engine.lease():
                pass
    apart = [later - earlier for earlier, later in itertools.pairwise(pushed)]
    assert len(pushed) < 100
    assert min(apart) >= module.PUSH_S * 0.95


async def test_all_of_it_is_put_together_only_for_who_is_told(tmp_path, monkeypatch):
    """Who leases from elsewhere, or from its hand, is not told every 50 ms, and nothing is compared for it as often."""
    made, whole = [], module.Views._whole
    monkeypatch.setattr(module.Views, "_whole", lambda self: made.append(asyncio.get_running_loop().time()) or whole(self))
    async with serving(tmp_path) as service, untax.connect(service.url) as engine, untax.connect(service.url) as other, watching(other):
        await engine.warm(n=4)
        await until(lambda: service.engine.pools().stages[0].idle == 4)
        await asyncio.sleep(0.3)
        made.clear()
        end_s = asyncio.get_running_loop().time() + 1.0
        while asyncio.get_running_loop().time() < end_s:
            async with engine.lease():
                await asyncio.sleep(0.01)
        assert 1 <= len(made) <= 14  # a fifth of a second's pushes, and what is put off


@pytest.mark.parametrize("what", ["draining", "busy", "building", "stored", "most_starting", "full"])
async def test_what_is_told_soon_does_not_wait_for_what_is_told_later(tmp_path, monkeypatch, what):
    monkeypatch.setattr(module, "_IDLE_S", 3600.0)
    monkeypatch.setattr(module, "_LOOK_S", 3600.0)
    async with (
        serving(tmp_path, pool=PoolOptions(entries=2)) as service,
        untax.connect(service.url) as engine,
        untax.connect(service.url) as other,
    ):
        async with watching(other) as (_, view):
            views = service.views
            if what == "draining":
                service.drain()
                await until(lambda: view.is_draining)
            elif what == "busy":
                views._busy = 0.9
                views.changed()
                await until(lambda: view.busy == 0.9)
            elif what == "building":
                monkeypatch.setattr(type(service.engine.pooling.driver.state), "building", lambda self: {"stage": 0.0})
                views.changed()
                await until(lambda: "stage" in view.building)
            elif what == "stored":
                service.engine.pooling.driver.stored(["stage"])
                await until(lambda: "stage" in view.stored)
            elif what == "most_starting":
                most = view.most_starting
                monkeypatch.setattr(type(service.engine.pooling.driver.state.admission), "cap", 4 * most)
                views.changed()
                await until(lambda: view.most_starting == 4 * most)
            else:
                boxes = [await engine.acquire(), await engine.acquire()]
                await until(lambda: view.free_sandboxes == 0)
                for box in boxes:
                    await box.release()
                await until(lambda: view.free_sandboxes > 0)


async def test_what_goes_up_and_down_a_little_is_not_told_soon(tmp_path, monkeypatch):
    """Also around a power of two."""
    async with serving(tmp_path) as service, untax.connect(service.url) as engine, watching(engine):
        views, admission = service.views, type(service.engine.pooling.driver.state.admission)
        monkeypatch.setattr(admission, "cap", 8)
        views._push()
        for cap, is_urgent in ((7, False), (8, False), (15, False), (16, True), (4, True), (5, False)):
            monkeypatch.setattr(admission, "cap", cap)
            assert views._is_urgent() is is_urgent


async def test_who_does_not_lease_here_is_told_less_often_and_in_the_end_all(tmp_path):
    class Onlooker:
        unsent = asked = 0

        def __init__(self):
            self.told = []

        def say(self, body, fd=None):
            self.told.append((asyncio.get_running_loop().time(), body["part"]))

    onlooker = Onlooker()
    async with serving(tmp_path) as service, untax.connect(service.url) as engine, watching(engine):
        service.views.watch(onlooker, 1)
        for n in (1, 4, 1, 4, 8):
            await engine.warm(n=n)
            await asyncio.sleep(0.03)
        await until(lambda: any(8 in part.get("idle", {}).values() for _, part in onlooker.told))
        service.views.leave(onlooker)
    apart = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(onlooker.told)]
    assert apart and min(apart) >= module._ELSEWHERE_S * 0.95


async def test_a_watcher_that_lost_its_connection_is_told_everything_anew(tmp_path):
    async with serving(tmp_path) as service, untax.connect(service.url) as engine, watching(engine) as (parts, view):
        await engine.warm(n=1)
        await until(lambda: view.idle)
        break_connection(engine)
        await until(lambda: sum(bool(part.get("whole")) for part in parts) == 2)
        await engine.warm(n=3)
        await until(lambda: list(view.idle.values()) == [3])
        assert len(service.views._watchers) == 1


async def test_the_end_of_a_server_ends_the_watch_with_its_reason(tmp_path):
    async with serving(tmp_path) as service:
        engine = untax.connect(service.url)
        await engine.start()
        watch = asyncio.ensure_future(engine.watch(lambda part: None))
        await until(lambda: service.views._watchers)
    with pytest.raises((untax.BackendError, untax.PoolClosed)):
        await watch
    await engine.aclose()


async def test_a_standing_watch_does_not_keep_answers_from_being_forgotten(tmp_path):
    async with serving(tmp_path) as service, untax.connect(service.url) as engine, watching(engine):
        for _ in range(20):
            await engine.pools()
        [owner] = service.owners
        assert len(owner.answers) <= 2


async def test_draining_is_told(tmp_path):
    async with serving(tmp_path) as service, untax.connect(service.url) as engine, watching(engine) as (_, view):
        service.drain()
        await until(lambda: view.is_draining)


async def test_who_reads_too_slowly_is_told_all_of_it_once_it_has_caught_up(tmp_path, monkeypatch):
    async with serving(tmp_path) as service, untax.connect(service.url) as engine, watching(engine) as (parts, view):
        monkeypatch.setattr(module, "_UNSENT_MAX", -1)
        await engine.warm(n=2)
        await until(lambda: any(told.view is None for told in service.views._watchers.values()))
        monkeypatch.undo()
        await engine.warm(n=3)
        await until(lambda: list(view.idle.values()) == [3])
        assert sum(bool(part.get("whole")) for part in parts) == 2


async def test_a_view_says_up_to_which_request_for_a_lease_it_has_them_in(tmp_path):
    async with pooled(tmp_path, entries=1) as service, untax.connect(service.url) as engine, watching(engine) as (parts, view):
        request = untax.leases.checked(engine.offer, None, untax.leases.Bindings())
        numbers = []
        first = await engine.fulfil(request, on_sent=numbers.append)
        await until(lambda: parts[-1].get("asked") == numbers[0])
        assert view.leased == 1
        waiting = asyncio.ensure_future(engine.fulfil(request, on_sent=numbers.append))  # has no answer, and is in it all the same
        await until(lambda: parts[-1].get("asked") == numbers[-1] != numbers[0])
        assert view.waiting == 1 and numbers[1] > numbers[0]
        await first.release()
        await (await waiting).release()
        await until(lambda: view.leased == 0)
        assert {part["asked"] for part in parts if "asked" in part} == {0, *numbers}  # told when it differs, and only then


# ---- who rests ----


class Onlooker:
    unsent = asked = 0

    def __init__(self):
        self.told = []

    def say(self, body, fd=None):
        self.told.append(body["part"])


@pytest.fixture
def hours(monkeypatch):
    """What may be told later to who rests is not told within a test."""
    monkeypatch.setattr(module, "_RESTING_S", 3600.0)


async def test_who_rests_is_told_all_of_it_once_and_what_changed_when_it_rests_no_more(tmp_path, hours):
    resting, attentive = Onlooker(), Onlooker()
    async with serving(tmp_path) as service, untax.connect(service.url) as engine:
        service.views.watch(resting, 1, is_resting=True)
        service.views.watch(attentive, 1)
        for n in (1, 4, 8):
            await engine.warm(n=n)
            await until(lambda n=n: any(n in part.get("idle", {}).values() for part in attentive.told))
        assert [part.get("whole") for part in resting.told] == [True]

        service.views.watch(resting, 1)

        await until(lambda: len(resting.told) == 2)
        assert "whole" not in resting.told[1] and list(resting.told[1]["idle"].values()) == [8]
        await engine.warm(n=2)
        await until(lambda: 2 in resting.told[-1].get("idle", {}).values())


@pytest.mark.parametrize("is_resting", [True, False])
async def test_what_is_idle_again_as_it_was_told_is_known_to_who_heard_that_it_was_used_up(tmp_path, monkeypatch, hours, is_resting):
    """Also where it rested meanwhile: nothing is another than it was told, so nothing need be told."""
    now_s, spec = 100.0, untax.EnvSpec(isolation="none")
    views = Views(clock=lambda: now_s)
    views.joined("n", isolation="none")
    watcher = Onlooker()
    watcher.say = lambda body, fd=None: (Onlooker.say(watcher, body), views.told("n", body["part"]))
    async with serving(tmp_path) as service, untax.connect(service.url) as engine:
        await engine.warm(n=4)
        stages, _ = await engine.ladder(spec)
        views.learnt(spec, "n", stages)
        service.views.watch(watcher, 1)
        await until(lambda: views.view("n").idle.get(stages[-1].key) == 4)
        service.views.watch(watcher, 1, is_resting=is_resting)
        monkeypatch.setattr(service.views, "_push", lambda: None)  # until it is full again
        boxes = [await engine.acquire() for _ in range(4)]
        views.used_up(spec, "n")
        for box in boxes:
            await box.release()
        await until(lambda: service.engine.pools().stages[-1].idle == 4)
        monkeypatch.undo()
        monkeypatch.setattr(module, "_RESTING_S", 3600.0)

        service.views.watch(watcher, 1)
        now_s += 5.0
        assert views.rank(spec)
        assert views.view("n").idle == {stages[-1].key: 4}


async def test_who_rests_hears_of_everything_in_the_end(tmp_path, monkeypatch):
    """And not more often than that."""
    monkeypatch.setattr(module, "_RESTING_S", 0.3)
    resting, at_s = Onlooker(), []
    resting.say = lambda body, fd=None: (at_s.append(asyncio.get_running_loop().time()), Onlooker.say(resting, body))
    async with serving(tmp_path) as service, untax.connect(service.url) as engine:
        service.views.watch(resting, 1, is_resting=True)
        for n in (1, 4, 1, 4, 8):
            await engine.warm(n=n)
            await asyncio.sleep(0.1)
        await until(lambda: 8 in resting.told[-1].get("idle", {}).values())
    apart = [later - earlier for earlier, later in itertools.pairwise(at_s)]
    assert apart and min(apart) >= 0.3 * 0.95


async def test_nothing_is_put_together_while_all_rest(tmp_path, monkeypatch, hours):
    """Until one of them rests no more, which it is told then at once."""
    made, whole = [], module.Views._whole
    monkeypatch.setattr(module.Views, "_whole", lambda self: made.append(1) or whole(self))
    monkeypatch.setattr(module, "_IDLE_S", 0.02)
    resting = Onlooker()
    async with serving(tmp_path) as service, untax.connect(service.url) as engine:
        service.views.watch(resting, 1, is_resting=True)
        service.views._rested_s = asyncio.get_running_loop().time()
        made.clear()
        for n in (1, 4, 8):
            await engine.warm(n=n)
            await asyncio.sleep(0.1)
        assert not made
        monkeypatch.setattr(module, "_IDLE_S", 3600.0)
        await asyncio.sleep(0.05)  # what is due next is due in an hour
        service.views.watch(resting, 1)
        await until(lambda: 8 in resting.told[-1].get("idle", {}).values())


async def test_who_rests_is_told_at_once_that_there_are_no_more_leases(tmp_path, hours):
    resting = Onlooker()
    async with serving(tmp_path) as service:
        service.views.watch(resting, 1, is_resting=True)
        service.drain()
        await until(lambda: resting.told[-1].get("is_draining"))


async def test_a_drain_is_told_as_soon_as_ever_also_where_what_else_there_is_can_wait(tmp_path, monkeypatch, hours):
    monkeypatch.setattr(module, "_IDLE_S", 3600.0)
    resting = Onlooker()
    async with serving(tmp_path) as service, untax.connect(service.url) as engine:
        service.views.watch(resting, 1, is_resting=True)
        service.views._rested_s = asyncio.get_running_loop().time()
        await engine.warm(n=1)
        await until(lambda: service.views._timer is not None and service.views._timer.when() > asyncio.get_running_loop().time() + 60)
        service.drain()
        await until(lambda: resting.told[-1].get("is_draining"))


async def test_many_who_wake_one_after_the_other_do_not_put_off_what_the_first_is_told(tmp_path, monkeypatch, hours):
    monkeypatch.setattr(module, "_FIRST_S", 60.0)  # nobody waits for it, and on a full machine what follows takes its time
    async with serving(tmp_path) as service:
        first, *others = onlookers = [Onlooker() for _ in range(20)]
        for number, one in enumerate(onlookers):
            service.views.watch(one, number, is_resting=True)
        service.views._pushed_s = asyncio.get_running_loop().time()
        service.views.watch(first, 0)
        due_s = service.views._timer.when()
        for number, one in enumerate(others, 1):
            await asyncio.sleep(0.001)
            service.views.watch(one, number)
            assert service.views._timer.when() <= due_s


async def test_who_rests_is_told_what_its_own_requests_came_to(tmp_path, hours):
    """Or its claims would stay for as long as it rests."""
    async with serving(tmp_path) as service, untax.connect(service.url) as engine:
        engine.rest(True)
        async with watching(engine) as (parts, _):
            numbers = []
            request = untax.leases.checked(engine.offer, None, untax.leases.Bindings())
            box = await engine.fulfil(request, on_sent=numbers.append)
            await until(lambda: parts[-1].get("asked") == numbers[0])
            await box.release()


async def test_a_connection_that_is_taken_up_again_goes_on_at_the_same_pace(tmp_path, hours):
    """Also where another was said while there was none."""

    def is_resting(service):
        [told] = service.views._watchers.values()
        return told.is_resting

    async with serving(tmp_path) as service, untax.connect(service.url) as engine, watching(engine) as (parts, view):
        engine.rest(True)
        await until(lambda: is_resting(service))
        for wholes, rests in ((2, True), (3, False), (4, False)):
            engine._connection.on_lost = lambda reason, rests=rests: engine.rest(rests)
            break_connection(engine)
            await until(lambda wholes=wholes: sum(bool(part.get("whole")) for part in parts) == wholes)
            assert is_resting(service) is rests
        await engine.warm(n=3)
        await until(lambda: list(view.idle.values()) == [3])


async def test_what_is_said_while_a_watch_has_no_connection_yet_holds_for_it(tmp_path, hours):
    async with serving(tmp_path) as service, untax.connect(service.url) as engine:
        break_connection(engine)
        await until(lambda: not engine._connection.is_connected)
        watch = asyncio.ensure_future(engine.watch(lambda part: None))
        await asyncio.sleep(0)
        engine.rest(True)
        await until(lambda: [told.is_resting for told in service.views._watchers.values()] == [True])
        watch.cancel()


SAID = {
    "isolation": "namespace",
    "idle": {"k": 4},
    "stored": frozenset({"k"}),
    "building": {},
    "starting": 0,
    "most_starting": 4,
    "waiting": 0,
    "leased": 4,
    "cpus": 4,
    "busy": 0.0,
    "filled": 0.5,
    "free_sandboxes": 12,
    "free_mib": 8192.0,
    "most_mib": None,
    "is_draining": False,
    "costs": {"by_name": {}, "by_key": {}},
}


@pytest.mark.parametrize(
    "differs",
    [
        {"stored": frozenset()},
        {"building": {"other": 0.1}},
        {"busy": 0.2},
        {"free_sandboxes": 0},
        {"free_mib": 4000.0},
        {"is_draining": True},
    ],
)
def test_where_something_can_be_had_at_all_is_told_first(differs):
    assert module._pause_s(SAID, SAID | differs) == module._ELSEWHERE_S
    assert module._pause_s(SAID | differs, SAID) == module._ELSEWHERE_S


@pytest.mark.parametrize(
    "differs",
    [
        {"idle": {}},
        {"idle": {"k": 2}},
        {"idle": {"k": 8}},
        {"idle": {"k": 4, "other": 1}},
        {"starting": 2},
        {"waiting": 1},
        {"leased": 8},
    ],
)
def test_what_is_another_before_a_lease_gets_there_is_told_next(differs):
    assert module._pause_s(SAID, SAID | differs) == module._IDLE_S
    assert module._pause_s(SAID | differs, SAID) == module._IDLE_S


@pytest.mark.parametrize(
    "differs",
    [{}, {"idle": {"k": 3}}, {"leased": 5}, {"starting": 1}, {"free_sandboxes": 11}, {"free_mib": 7168.0}, {"filled": 0.52}, {"most_starting": 5}],
)  # fmt: skip
def test_what_decides_nothing_may_be_told_later(differs):
    assert module._pause_s(SAID, SAID | differs) == module._LATER_S


async def test_who_does_not_lease_here_hears_of_everything_in_the_end(tmp_path):
    """However often what it was not told at once is gone again by the time it would be."""
    async with (
        serving(tmp_path) as service,
        untax.connect(service.url) as leasing,
        untax.connect(service.url) as other,
        watching(leasing) as (_, mine),
        watching(other) as (told, theirs),
    ):
        await leasing.warm(n=8)
        await until(lambda: sum(theirs.idle.values()) == 8)
        for _ in range(30):
            async with leasing.lease():
                pass
        async with leasing.lease():
            await until(lambda: theirs.leased == mine.leased == 1)
        await until(lambda: theirs.leased == mine.leased == 0 and theirs.idle == mine.idle)
        assert not any(part.get("asked") for part in told)


def test_a_request_counts_once_a_pool_knows_of_it_and_of_all_before_it():
    owner = Owner("somebody")
    first, second = owner.leasing(3), owner.leasing(5)
    assert owner.asked == 2
    second()
    assert owner.asked == 2
    first()
    first()
    assert owner.asked == 5


# ---- refusals ----


async def test_a_server_without_room_refuses_who_may_go_elsewhere_and_lets_the_others_wait(tmp_path):
    async with pooled(tmp_path, entries=1) as service, untax.connect(service.url) as engine:
        request = untax.leases.checked(engine.offer, None, untax.leases.Bindings(wait_s=5.0))
        first = await engine.fulfil(request, may_refuse=True)
        with pytest.raises(untax.LeaseRefused, match="1 sandboxes are leased") as raised:
            await engine.fulfil(request, may_refuse=True)
        assert raised.value.reason == "full" and raised.value.retryable
        waiting = asyncio.ensure_future(engine.fulfil(request))
        await until(lambda: service.engine.pooling.driver.state.waiting)
        await first.release()
        await (await waiting).release()


async def test_memory_that_is_not_free_is_a_refusal_and_what_is_idle_is_free(tmp_path):
    async with pooled(tmp_path, memory_mib=3000.0) as service, untax.connect(service.url) as engine:
        await engine.warm(n=2, limits=untax.Limits(memory_mib=1000))

        def request(mib):
            return untax.leases.checked(engine.offer, None, untax.leases.Bindings(limits=untax.Limits(memory_mib=mib)))

        box = await engine.fulfil(request(2500), may_refuse=True)
        with pytest.raises(untax.LeaseRefused, match=r"1000 MiB are asked for, and 500 of 3000 are free"):
            await engine.fulfil(request(1000), may_refuse=True)
        await box.release()


async def test_a_draining_server_refuses_by_type_who_may_go_elsewhere(tmp_path):
    async with serving(tmp_path) as service, untax.connect(service.url) as engine:
        service.drain()
        request = untax.leases.checked(engine.offer, None, untax.leases.Bindings())
        with pytest.raises(untax.LeaseRefused) as raised:
            await engine.fulfil(request, may_refuse=True)
        assert raised.value.reason == "draining"
        with pytest.raises(untax.PoolClosed):
            await engine.fulfil(request)


async def test_the_way_to_a_server_is_measured(tmp_path):
    async with serving(tmp_path) as service, untax.connect(service.url) as engine:
        greeted_s = engine.link_s
        assert 0 < greeted_s < 5
        for _ in range(5):
            async with engine.lease():
                pass
        assert 0 < engine.link_s < 5
