"""A service that is a node of a fleet answers for all of its nodes: metrics at one address, and a table on its page."""

import asyncio
import contextlib
import functools

import httpx
import pytest
from tests import chromium
from tests.integration.test_dashboard import _DRAWN, _SMALL, _until

import untax
from untax.server.service import Service
from untax.service.app import build
from untax.service.fleet import NodeStatus, Peer, Peers
from untax.service.held import take_over
from untax.service.hosting import Hosting
from untax.service.listen import Address, HttpListener
from untax.service.tenants import Tenant, Tenants, digest

TOKEN = "a-token-of-this-fleet"


@contextlib.asynccontextmanager
async def _node(state):
    async with untax.Engine("process", state_dir=str(state)) as engine, contextlib.AsyncExitStack() as stack:
        service = Service(engine)
        stack.push_async_callback(service.aclose)
        hosting = Hosting(engine, Tenants([(Tenant("fleet"), digest(TOKEN))]), owners=service)
        listener = HttpListener(build(hosting), Address(), functools.partial(take_over, hosting))
        stack.push_async_callback(listener.close)
        stack.push_async_callback(hosting.aclose)
        await listener.start()
        yield hosting, listener.url


@contextlib.asynccontextmanager
async def _three(tmp_path):
    """Two that answer, one that has gone, and one that is not in it."""
    async with _node(tmp_path / "a") as (first, first_url), _node(tmp_path / "b") as (second, second_url):
        peers = [Peer("1" * 56, "alpha", first_url), Peer("2" * 56, "beta", second_url), Peer("3" * 56, "gamma", "http://127.0.0.1:9")]
        for hosting in (first, second):
            hosting.fleet = Peers(TOKEN, name="rollouts")
            hosting.fleet.meet(peers, [NodeStatus("4" * 56, "delta", trouble="it has untax 0.0.9")], wanted=2)
        yield first_url, second_url, second


async def test_any_node_gives_the_metrics_of_all(tmp_path):
    async with _three(tmp_path) as (first, second, _), httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{first}/fleet/metrics")).status_code == 401
        client.headers["authorization"] = f"Bearer {TOKEN}"
        for url in (first, second):
            said = (await client.get(f"{url}/fleet/metrics")).text
            up = [line for line in said.splitlines() if line.startswith("untax_node_up{")]
            assert up == ['untax_node_up{node="alpha"} 1', 'untax_node_up{node="beta"} 1', 'untax_node_up{node="gamma"} 0']
            assert said.count("# TYPE untax_clients gauge") == 1
            assert {'untax_clients{node="alpha"} 0', 'untax_clients{node="beta"} 0'} <= set(said.splitlines())


async def test_any_node_tells_of_the_whole_fleet_with_those_that_are_out_and_those_that_are_wanted(tmp_path):
    """As `untax fleet status --json` does."""
    async with _three(tmp_path) as (first, _, _), httpx.AsyncClient(trust_env=False, headers={"x-api-key": TOKEN}) as client:
        said = (await client.get(f"{first}/v1/fleet")).json()
    nodes = said.pop("nodes")
    assert said == {"fleet": "rollouts", "release": untax.__version__, "substrate": "process", "wanted": 2}
    assert [(one["name"], one["state"]) for one in nodes] == [("alpha", "in"), ("beta", "in"), ("gamma", "out"), ("delta", "out")]
    assert "127.0.0.1:9" in nodes[2]["trouble"] and nodes[3]["trouble"] == "it has untax 0.0.9"


async def test_samples_of_nodes_that_share_a_name_are_told_apart_as_in_ledgers(tmp_path):
    """Raylets of one machine have one name; a sample that is there twice has Prometheus refuse all of them."""
    async with _node(tmp_path / "a") as (hosting, url), httpx.AsyncClient(trust_env=False, headers={"x-api-key": TOKEN}) as client:
        hosting.fleet = Peers(TOKEN)
        hosting.fleet.meet([Peer("1" * 56, "alpha", url), Peer("2" * 56, "alpha", url), Peer("3" * 56, "beta", url)])
        said = (await client.get(f"{url}/fleet/metrics")).text.splitlines()
    up = [line for line in said if line.startswith("untax_node_up{")]
    assert up == ['untax_node_up{node="alpha (11111111)"} 1', 'untax_node_up{node="alpha (22222222)"} 1', 'untax_node_up{node="beta"} 1']
    samples = [line.rpartition(" ")[0] for line in said if not line.startswith("#")]
    assert len(samples) == len(set(samples))


async def test_a_server_of_its_own_is_no_fleet(tmp_path):
    async with _node(tmp_path / "a") as (_, url), httpx.AsyncClient(trust_env=False, headers={"x-api-key": TOKEN}) as client:
        assert (await client.get(f"{url}/fleet/metrics")).status_code == 404
        assert (await client.get(f"{url}/v1/fleet")).status_code == 404


async def test_the_page_shows_the_nodes(tmp_path):
    if reason := chromium.unavailable_reason():
        pytest.skip(reason)
    cells = "[...document.querySelectorAll('#nodes tr')].map(tr => [...tr.children].map(td => td.textContent))"
    async with _three(tmp_path) as (url, second_url, second), untax.connect(second_url, token=TOKEN) as engine:
        spec = untax.EnvSpec(isolation="none")

        def look(width):
            browser.open("about:blank", width=width)
            browser.open(f"{url}/#token={TOKEN}", width=width, is_dark=width < 500)
            _until(browser, f"{_DRAWN} >= 1 && document.querySelectorAll('#nodes tr').length == 5")
            own = f'"url": "{url}/'
            assert [one for one in browser.complaints() if "Network.requestWillBeSent" not in one or own not in one] == []
            assert browser.evaluate(_SMALL) == [] and browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert browser.evaluate("document.querySelector('#wanted').textContent") == "2 more asked of Ray"
            return browser.evaluate(cells)

        browser = await asyncio.to_thread(chromium.Browser().__enter__)
        try:
            async with engine.lease(spec):
                head, *rows = await asyncio.to_thread(look, 1280)
                second.drain()
                await asyncio.to_thread(_until, browser, f"JSON.stringify({cells}).includes('draining')")
            await asyncio.to_thread(look, 390)
        finally:
            await asyncio.to_thread(browser.__exit__, None, None, None)
    assert head[:3] == ["node", "state", "leases"] and head[-3:] == ["starting", "waiting", "trouble"]
    assert [row[:3] for row in rows] == [["alpha", "in", "0"], ["beta", "in", "1"], ["gamma", "out", "0"], ["delta", "out", "0"]]
    assert "no server answers" in rows[2][-1] and rows[3][-1] == "it has untax 0.0.9"
