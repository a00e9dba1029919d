"""The floor: what it leaves to the background stays there."""

import asyncio
import threading

import untax
from untax.substrates import process


async def test_trees_on_their_way_out_leave_the_loop_s_threads_to_others(tmp_path, monkeypatch):
    """However many, and however long they take; closing waits for them."""
    may_go, gone = threading.Event(), []

    def slow(path):
        may_go.wait(10)
        gone.append(path)
        return True

    substrate = process.make(str(tmp_path))
    await substrate.start()
    monkeypatch.setattr(process, "remove_tree", slow)
    for _ in range(64):
        await (await substrate.create(untax.EnvSpec(isolation="none"))).destroy()
    try:
        async with asyncio.timeout(5):
            await asyncio.to_thread(lambda: None)
        assert gone == []
    finally:
        may_go.set()
    await substrate.aclose()
    assert len(gone) == 64
