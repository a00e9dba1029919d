"""Waiting for a task that goes on: a cancellation of who waits is put off, never lost, and never the task's."""

import asyncio

import pytest

from untax.core.tasks import EndOf


async def work(until, outcome=None):
    await until.wait()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def end_of(task):
    return await EndOf(task)


@pytest.fixture(params=["c", "python"])
def task_class(request, monkeypatch):
    """The interpreter's task, and the one that it falls back to: what each asks of a future differs."""
    if request.param == "python":
        monkeypatch.setattr(asyncio.tasks, "Task", asyncio.tasks._PyTask)
        monkeypatch.setattr(asyncio, "Task", asyncio.tasks._PyTask)


@pytest.mark.usefixtures("task_class")
class TestEndOf:
    async def test_it_gives_what_came_of_the_task(self):
        done = asyncio.Event()
        task = asyncio.create_task(work(done, 5))
        waiting = asyncio.create_task(end_of(task))
        await asyncio.sleep(0)
        done.set()
        assert await waiting == 5
        assert await end_of(task) == 5  # which is over by now

    async def test_it_raises_what_the_task_failed_with(self):
        done = asyncio.Event()
        done.set()
        with pytest.raises(ValueError, match="its own"):
            await end_of(asyncio.create_task(work(done, ValueError("its own"))))

    @pytest.mark.parametrize("outcome", [5, ValueError("its own")])
    async def test_who_is_cancelled_is_told_once_the_task_is_over(self, outcome):
        done = asyncio.Event()
        task = asyncio.create_task(work(done, outcome))
        waiting = asyncio.create_task(end_of(task))
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
        await asyncio.sleep(0.01)
        assert not task.done() and not waiting.done()
        done.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert task.done() and not task.cancelled()

    async def test_the_tasks_own_cancellation_is_passed_on(self):
        task = asyncio.create_task(work(asyncio.Event()))
        waiting = asyncio.create_task(end_of(task))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def test_a_time_limit_around_it_is_kept_once_the_task_is_over(self):
        done = asyncio.Event()
        task = asyncio.create_task(work(done, 5))
        asyncio.get_running_loop().call_later(0.1, done.set)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await end_of(task)
        assert task.result() == 5 and not asyncio.current_task().cancelling()
        await asyncio.sleep(0)  # nothing of it is left for what comes next

    async def test_several_may_wait_for_one(self):
        done = asyncio.Event()
        task = asyncio.create_task(work(done, 5))
        waiting = [asyncio.create_task(end_of(task)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        done.set()
        assert [type(one) for one in await asyncio.gather(*waiting, return_exceptions=True)] == [int, asyncio.CancelledError, int]
