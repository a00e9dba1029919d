"""The page at `/` in a real browser: no complaint, nothing fetched from elsewhere, alive, usable on a phone and in the dark."""

import asyncio
import time

import httpx
import pytest
from tests import chromium
from tests.hosted import hosted

import untax
from untax import substrates

_DRAWN = "Number(document.documentElement.dataset.drawn || 0)"
_SHOWN = """({live: document.querySelectorAll('#live tr').length - 1, rollouts: document.querySelectorAll('#rollouts tr').length - 1,
  bars: document.querySelectorAll('#tax rect').length, fall: document.querySelectorAll('#fall rect').length, latency: document.querySelectorAll('#latency rect').length,
  how: document.getElementById('how').textContent, wide: document.documentElement.scrollWidth <= innerWidth,
  back: getComputedStyle(document.body).backgroundColor, url: location.href})"""


@pytest.fixture(autouse=True)
def possible():
    if reason := substrates.load("namespace").unavailable_reason() or chromium.unavailable_reason():
        pytest.skip(reason)


def _until(browser: chromium.Browser, what: str) -> None:
    end = time.monotonic() + 20
    while not browser.evaluate(what):
        assert time.monotonic() < end, browser.evaluate(_SHOWN)
        time.sleep(0.05)


async def test_the_page_shows_what_happens_and_nothing_of_it_is_fetched_elsewhere(tmp_path):
    async with hosted(tmp_path) as served, served.client() as client, untax.connect(served.url, token=served.token) as engine:
        for _ in range(3):
            async with engine.lease() as box:
                await box.run(["true"])
        lease = (await client.post("/v1/leases", json={})).json()["lease"]
        await client.post(f"/v1/leases/{lease}/run", json={"argv": ["true"]})

        def look():
            with chromium.Browser() as browser:
                found = {}
                for width, is_dark in ((1280, False), (390, True)):
                    browser.open("about:blank", width=width)
                    browser.open(f"{served.url}/#token={served.token}", width=width, is_dark=is_dark)
                    _until(browser, f"{_DRAWN} >= 1 && document.querySelectorAll('#rollouts tr').length == 4")
                    found[width] = browser.evaluate(_SHOWN)
                    assert [one for one in browser.complaints() if served.url not in one] == []
                return found

        found = await asyncio.to_thread(look)
    for shown in found.values():
        assert shown["live"] == 1 and shown["rollouts"] == 3 and shown["bars"] and shown["fall"] and shown["latency"]
        assert shown["how"] == "live" and shown["wide"] and served.token not in shown["url"]
    assert found[390]["back"] != found[1280]["back"]


async def test_without_a_token_the_page_holds_nothing(tmp_path):
    async with hosted(tmp_path) as served, httpx.AsyncClient(base_url=served.url, trust_env=False) as client:
        page = await client.get("/")
        assert page.status_code == 200 and served.token not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert (await client.get("/v1/events")).status_code == 401
        assert (await client.get("/metrics")).status_code == 401
