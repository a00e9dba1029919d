"""The lives of sandboxes, where two requests about one meet."""

import asyncio
from types import SimpleNamespace

import pytest

from untax.core.errors import SandboxLost
from untax.service.e2b.network import Rules
from untax.service.e2b.sandbox import Lifecycle, Manner, Sandbox
from untax.service.e2b.sandboxes import Sandboxes
from untax.service.e2b.templates import Templates
from untax.service.hosting import Holding
from untax.service.tenants import ANYBODY


class Box:
    is_live = True
    is_released = False

    async def release(self) -> None:
        self.is_released = True


async def test_a_sandbox_that_is_killed_while_it_wakes_leaves_no_box(tmp_path):
    woken = Box()
    holding = Holding(ANYBODY, Box(), "e2b")
    sandbox = Sandbox(holding, Manner("base"), hands="user", metadata={}, env={}, rules=Rules(), lifecycle=Lifecycle())
    sandbox.state, sandbox.kept = "paused", SimpleNamespace(id="snap-1")

    async def restore(*_, **__) -> Box:
        holding.ending = asyncio.ensure_future(asyncio.sleep(0))
        return woken

    engine = SimpleNamespace(restore=restore, substrate=SimpleNamespace(isolation="none"))
    sandboxes = Sandboxes(SimpleNamespace(engine=engine), Templates(tmp_path / "templates.json", "host"))
    with pytest.raises(SandboxLost):
        await sandboxes.connect(sandbox, 60)
    assert woken.is_released and holding.box is not woken
