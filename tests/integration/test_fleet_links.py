"""What becomes of leases when the link between a client and a node breaks, falls silent or is cut."""

import asyncio
import contextlib
import json
import time

import pytest
from tests import raycluster
from tests.relay import Relay

import untax

if reason := raycluster.unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

from untax.cluster import actors

LEASE_S = 3.0
LATE_S = 10.0  # a call returns within a second of its deadline; this machine may be full


@pytest.fixture(scope="module")
async def fleet(ray_nodes, tmp_path_factory):
    async with untax.Fleet(ray_nodes.address, state_dir=tmp_path_factory.mktemp("links") / "{node}", lease_s=LEASE_S) as fleet:
        yield fleet


@contextlib.asynccontextmanager
async def relayed(fleet):
    """A second client, which has only the node that is reached over TLS, and that through a relay."""
    member = elsewhere(fleet).member
    host, port = member.url.removeprefix("https://").split(":")
    async with Relay(host, int(port)) as relay:
        ticket = json.loads(fleet.ticket())
        ticket["members"] = [{**member.to_data(), "url": f"https://{host}:{relay.port}"}]
        client = untax.Fleet.from_ticket(json.dumps(ticket))
        await client.start()
        try:
            client._following.cancel()  # it would be told the other way there
            yield relay, client
        finally:
            relay.cut()
            await client.aclose()


def elsewhere(fleet):
    """The node that is reached over TLS."""
    return next(node for node in fleet._nodes.values() if not node.is_here)


async def leases_there(fleet):
    import ray

    name = actors.node_actor_name(fleet.name, fleet._ticket.instance, elsewhere(fleet).member.node_id)
    return await ray.get_actor(name, actors.NAMESPACE).leases.remote()


async def test_a_connection_that_breaks_is_taken_up_again_within_the_lease(fleet):
    node = elsewhere(fleet)
    box = await node.acquire()
    assert (await box.run(["mkfifo", "go"])).exit_code == 0
    running = asyncio.ensure_future(box.shell("read line < go; echo $line"))
    await asyncio.sleep(0)
    node._connection._stream._transport.abort()
    assert (await box.shell("echo whole > go")).exit_code == 0
    assert (await running).stdout == b"whole\n"
    await box.release()
    assert box.ledger.verdict == "trusted"


async def test_what_was_on_its_way_over_a_link_that_fell_silent_arrives_once_when_it_is_back(fleet):
    async with relayed(fleet) as (relay, client):
        box = await client.acquire()
        relay.silence()
        running = asyncio.ensure_future(box.shell("echo once >> there; cat there"))
        await relay.swallowed.wait()
        assert not running.done()
        relay.restore()
        assert (await running).stdout == b"once\n"
        await box.release()
        assert box.ledger.verdict == "trusted"


async def test_a_machine_that_vanishes_without_a_word_is_an_infrastructure_outcome_by_the_deadline(fleet):
    """Nobody resets the connection: the action ends at its deadline as a lost sandbox, and the node takes back what nobody renews."""
    before = await leases_there(fleet)
    async with relayed(fleet) as (relay, client):
        box = await client.acquire()
        assert (await box.run(["echo", "on"])).stdout == b"on\n"
        assert await leases_there(fleet) == before + 1
        relay.silence()
        began_s = time.monotonic()
        with pytest.raises(untax.SandboxLost):
            await box.run(["touch", "/tmp/never"], timeout_s=1.0)
        assert time.monotonic() - began_s < 1.0 + LATE_S
        assert box.ledger.verdict == "infra"
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        async with asyncio.timeout(60):
            while await leases_there(fleet) != before:  # its lease, and then it is
                await asyncio.sleep(0.1)
        relay.cut()
        await box.release()
        assert box.ledger.verdict == "infra"


async def test_a_client_cut_off_for_longer_than_its_lease_gets_an_infrastructure_outcome(fleet):
    async with relayed(fleet) as (relay, client):
        box = await client.acquire()
        assert (await box.run(["echo", "on"])).stdout == b"on\n"
        relay.cut()
        with pytest.raises(untax.SandboxLost):
            await box.run(["touch", "/tmp/never"])
        await box.release()
        assert box.ledger.verdict == "infra"
