"""Getting at Ray: which addresses are taken, which of them lead to one cluster, and what is said while Ray's head is away. Ray's part is played here."""

import asyncio
import functools
import logging
import socket
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="ray: not installed; pip install 'untax[ray]'")

import ray
from tests.unit.cluster.fakeray import FakeRay

import untax
from untax.cluster import access
from untax.cluster.joining import Joining
from untax.cluster.plan import Plan
from untax.layers._held import blocking


class FakeCluster:
    """In place of the module `ray`: a head that listens, and whatever this process has of it."""

    exceptions = ray.exceptions

    def __init__(self, port):
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.is_connected = False
        self.inits = []
        self.ids = {}
        self.trouble = None
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self._raylet = SimpleNamespace(GcsClient=lambda address: SimpleNamespace(cluster_id=self.ids.get(address, "one")))

    def is_initialized(self):
        return self.is_connected

    def init(self, address, **_):
        self.inits.append(address)
        self.is_connected = True

    def shutdown(self):
        self.is_connected = False

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address=self.address, get_node_id=lambda: "node")

    def get_actor(self, *_):
        raise self.trouble

    def nodes(self):
        raise self.trouble


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(access._Users, "count", 0)
    monkeypatch.setattr(access._Users, "is_ours", False)
    with socket.create_server(("127.0.0.1", 0)) as head:
        fake = FakeCluster(head.getsockname()[1])
        monkeypatch.setattr(access, "require_ray", lambda: fake)
        yield fake


# ---- addresses ----


@pytest.mark.parametrize(
    "address", ["local", "", "head", ":6379", "head:", "head:0", "head:65536", "head:99999", "head:x", "head:-1", 6379, None]
)
def test_an_address_is_auto_or_a_host_and_a_port(cluster, address):
    """Ray takes others too, and starts a cluster for some of them."""
    with pytest.raises(untax.UsageError, match=r"address must be 'auto' or HOST:PORT of a Ray cluster's head"):
        access.connect(address)
    assert not cluster.inits


@pytest.mark.parametrize("said", ["local", "ray://head:10001", "head:99999"])
def test_what_the_environment_says_for_auto_is_held_to_the_same(cluster, monkeypatch, said):
    monkeypatch.setenv("RAY_ADDRESS", said)
    with pytest.raises(untax.UsageError, match=r"RAY_ADDRESS must be|not ray://"):
        access.connect("auto")
    assert not cluster.inits
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    assert access.connect("auto") == cluster.address
    access.disconnect()


def test_what_the_environment_says_is_nothing_to_a_process_that_is_part_of_a_cluster(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    cluster.is_connected = True
    assert access.connect("auto") == cluster.address
    access.disconnect()


# ---- which cluster ----


def test_whoever_connects_by_one_name_may_find_the_head_under_another(cluster):
    cluster.address = "head-of-the-cluster.svc:6379"  # as Ray has it
    assert access.connect(f"127.0.0.1:{cluster.port}") == cluster.address
    access.disconnect()
    assert not cluster.is_connected


@pytest.mark.parametrize("host", ["localhost", "127.1", "127.0.0.1"])
def test_two_spellings_of_one_address_lead_to_one_cluster(cluster, host):
    cluster.is_connected = True
    assert access.connect(f"{host}:{cluster.port}") == cluster.address
    access.disconnect()


def test_where_the_addresses_differ_the_heads_say_whether_they_are_one(cluster):
    """As with a service before the head, which has an address of its own."""
    cluster.is_connected = True
    with socket.create_server(("127.0.0.3", 0)) as service:
        other = f"127.0.0.3:{service.getsockname()[1]}"
        assert access.connect(other) == cluster.address
        access.disconnect()
        cluster.ids[other] = "another"
        with pytest.raises(
            untax.UsageError, match=rf"connected to the Ray cluster at {cluster.address}, not {other}: ray.shutdown\(\) first"
        ):
            access.connect(other)
        assert access.connect(other, anywhere=True) == cluster.address  # a handle's fleet is asked, and no address
        access.disconnect()
    with pytest.raises(untax.UsageError, match=r"ray.shutdown\(\) first"):
        access.connect(other)  # where nobody answers there is another one, or none
    assert access._Users.count == 0 and cluster.is_connected


# ---- Ray's head is away ----


@pytest.mark.parametrize(
    "ask", [access.find_keeper, access.ticket_of, lambda name: access.start_keeper(Plan(name), "head:1", is_lasting=False)]
)
def test_a_head_that_is_away_is_a_failure_of_the_cluster_with_its_remedy(cluster, ask):
    cluster.is_connected = True
    cluster.trouble = ray.exceptions.GetTimeoutError("There was timeout in getting the actor handle")
    with pytest.raises(
        untax.BackendError, match=r"Ray's head does not answer \(There was timeout .* see that it runs \(`ray status`\)"
    ) as raised:
        ask("fleet")
    assert raised.value.retryable


# ---- taking a fleet down ----


@pytest.fixture
async def fake(monkeypatch):
    """Ray with one actor, who keeps a fleet and answers nothing."""
    fake = FakeRay()
    monkeypatch.setattr(access, "require_ray", lambda: fake)
    fake.keeper = fake.make(lambda: SimpleNamespace(members=lambda _: asyncio.Event().wait(), down=asyncio.Event().wait), name="keeper")
    yield fake
    fake.keeper.die()
    await asyncio.sleep(0)
    fake.loop.set_task_factory(None)


async def test_a_keeper_that_does_not_answer_is_killed_and_that_is_said(fake, monkeypatch, caplog):
    killed = []

    async def kill(actor):
        killed.append(actor)

    monkeypatch.setattr(access, "kill", kill)
    monkeypatch.setattr(access, "_DOWN_S", 0.01)
    with caplog.at_level(logging.WARNING):
        await access.take_down(fake.keeper)
    assert killed == [fake.keeper]
    assert "not taken down within 0.01 s: its keeper is killed" in caplog.text


# ---- what listens and is no Ray ----


@pytest.fixture
def hanging(cluster, monkeypatch):
    """Something listens there, and Ray tries for minutes: `let_in` ends that."""
    let_in, ended = threading.Event(), threading.Event()

    def init(address, **_):
        cluster.inits.append(address)
        assert let_in.wait(30)
        cluster.is_connected = True

    def shutdown():
        cluster.is_connected = False
        ended.set()

    monkeypatch.setattr(access._Users, "left", None)
    cluster.init, cluster.shutdown = init, shutdown
    cluster.let_in, cluster.ended = let_in, ended
    yield cluster
    let_in.set()


def test_ray_that_does_not_let_a_process_in_is_given_up_in_time_with_the_remedy(hanging, monkeypatch):
    monkeypatch.setattr(access, "_INIT_S", 0.05)
    with pytest.raises(
        untax.SubstrateUnavailable, match=r"did not let this process in within 0.05 s: is it the port of a head.*ray start --head"
    ):
        access.connect(hanging.address)
    assert access._Users.count == 0 and not access._Users.is_ours


async def test_who_is_interrupted_while_ray_tries_waits_for_it_no_more(hanging):
    given_up = access.GivenUp()
    connecting = asyncio.ensure_future(blocking(functools.partial(access.connect, hanging.address, given_up=given_up), stop=given_up.say))
    while not hanging.inits:
        await asyncio.sleep(0.001)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(connecting, 10)
    assert not hanging.let_in.is_set() and access._Users.count == 0


def test_a_connection_that_comes_when_nobody_waits_for_it_any_more_is_ended(hanging, monkeypatch):
    monkeypatch.setattr(access, "_INIT_S", 0.05)
    with pytest.raises(untax.SubstrateUnavailable):
        access.connect(hanging.address)
    hanging.let_in.set()
    assert hanging.ended.wait(10) and not hanging.is_connected


def test_the_next_who_connects_waits_for_an_attempt_that_was_given_up(hanging, monkeypatch):
    """Ray in one process cannot be let in twice at a time."""
    monkeypatch.setattr(access, "_INIT_S", 0.05)
    for _ in range(2):
        with pytest.raises(untax.SubstrateUnavailable):
            access.connect(hanging.address)
    assert len(hanging.inits) == 1
    monkeypatch.setattr(access, "_INIT_S", 30.0)
    hanging.let_in.set()
    assert access.connect(hanging.address) == hanging.address
    assert len(hanging.inits) == 2 and hanging.ended.is_set() and hanging.is_connected
    access.disconnect()


def test_a_connection_that_is_about_to_be_ended_is_not_taken_for_the_programs_own(hanging, monkeypatch):
    """Ray counts as connected until whoever gave the attempt up has ended it."""
    may_end, is_ending, shutdown = threading.Event(), threading.Event(), hanging.shutdown

    def slow():
        is_ending.set()
        assert may_end.wait(30)
        shutdown()

    hanging.shutdown = slow
    monkeypatch.setattr(access, "_INIT_S", 0.05)
    with pytest.raises(untax.SubstrateUnavailable):
        access.connect(hanging.address)
    hanging.let_in.set()
    assert is_ending.wait(10) and hanging.is_connected
    with pytest.raises(untax.SubstrateUnavailable, match="did not let this process in"):
        access.connect(hanging.address)
    monkeypatch.setattr(access, "_INIT_S", 30.0)
    may_end.set()
    access.connect(hanging.address)
    assert len(hanging.inits) == 2 and hanging.is_connected and access._Users.is_ours
    access.disconnect()
    assert not hanging.is_connected


def test_a_head_that_does_not_say_which_cluster_it_is_is_not_waited_for(cluster, monkeypatch):
    monkeypatch.setattr(access, "_REACH_S", 0.05)
    is_over = threading.Event()
    monkeypatch.setattr(cluster, "_raylet", SimpleNamespace(GcsClient=lambda address: is_over.wait(30)))
    assert access._cluster_id(cluster.address) is None
    is_over.set()


def test_who_has_left_its_cluster_starts_none_by_asking_who_keeps_a_fleet(cluster, monkeypatch):
    """Ray does, for whoever asks it anything without being part of a cluster."""
    monkeypatch.setattr(cluster, "get_actor", lambda *_: pytest.fail("it would have started one"), raising=False)
    with pytest.raises(untax.BackendError, match="has left its Ray cluster"):
        access.find_keeper("x")


async def test_who_has_left_its_cluster_starts_none_by_what_it_does_to_its_fleet(fake):
    """Neither by asking who keeps it nor by asking that no more, nor by taking it down: Ray does, on the event loop."""
    joining = Joining(Plan("x"), {})
    joining.keeper, joining.is_maker = fake.keeper, True
    call = access.ask("x", fake.keeper.members, -1)
    fake.is_connected = False
    for ask in (joining.news(1), joining.roll(), joining.asked(fake.keeper.down)):
        with pytest.raises(untax.BackendError, match="has left its Ray cluster"):
            await ask
    assert await joining._is_ours(fake.keeper, None) is None
    access.cancel(call)
    assert not fake.cancelled
    await asyncio.wait_for(joining.take_down(), 10)


async def test_a_question_that_nobody_waits_for_any_more_is_cancelled(fake):
    joining = Joining(Plan("x"), {})
    joining.keeper = fake.keeper
    asking = asyncio.ensure_future(joining.news(1))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert len(fake.cancelled) == 1
