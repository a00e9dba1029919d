"""Ray's nodes and named actors in one process and one event loop: calls, names and deaths as Ray has them, without a cluster.

Tasks that an actor begins are its own, and are gone with it, as those of a process are.
"""

import asyncio
import contextvars
import pickle
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from untax.cluster.gauge import Gauge
from untax.cluster.terms import Member
from untax.core.errors import UsageError

_current = contextvars.ContextVar("actor", default=None)


class FakeRay:
    """In place of the module `ray`, in the modules under test."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.loop.set_task_factory(_task)
        self.alive = {}
        self.named = {}
        self.stored = {}
        self.killed = []
        self.asked = []
        self.is_connected = True
        self.cancelled = []
        self.util = SimpleNamespace(list_named_actors=self._list)
        self.internal_kv = SimpleNamespace(_internal_kv_put=self._put, _internal_kv_list=self._keys, _internal_kv_del=self._delete)

    def join(self, node_id):
        self.alive[node_id] = {"NodeID": node_id, "NodeManagerAddress": f"address-of-{node_id}", "Alive": True, "Resources": {"CPU": 4.0}}

    def nodes(self):
        return list(self.alive.values())

    def make(self, kind, *args, name, **kwargs):
        """An actor, from the loop's own thread."""
        made = self.named[name] = Handle(self, name)
        made.actor = made.context.run(kind, *args, **kwargs)
        return made

    async def ask(self, size):
        """In place of the autoscaler's."""
        self.asked.append(size)
        return True

    # ---- what the modules use ----

    def is_initialized(self):
        return self.is_connected

    def init(self, **_):
        pytest.fail("it would have started a cluster")

    def cancel(self, call, *, recursive):
        assert not recursive
        self._connect()
        self.cancelled.append(call)
        call.cancel()

    def _connect(self):
        """As what Ray does by itself, for whoever asks it for anything without being part of a cluster."""
        if not self.is_connected:
            self.init()

    def remote(self, kind):
        def options(*, name, **_):
            async def made(*args, **kwargs):
                return self.named.get(name) or self.make(kind, *args, name=name, **kwargs)

            def begun(*args, **kwargs):  # in a thread
                return asyncio.run_coroutine_threadsafe(made(*args, **kwargs), self.loop).result()

            return SimpleNamespace(remote=begun)

        return SimpleNamespace(options=options)

    def get_actor(self, name, _namespace):
        if name not in self.named:
            raise ValueError(name)
        return self.named[name]

    def kill(self, handle):
        self._connect()
        self.loop.call_soon_threadsafe(handle.die)

    def get_runtime_context(self):
        return SimpleNamespace(current_actor=_current.get(), was_current_actor_reconstructed=False)

    def _list(self, *, all_namespaces):
        assert all_namespaces
        return [{"name": name, "namespace": "untax"} for name in list(self.named)]

    def _put(self, key, value, *, namespace):
        self.stored[namespace, key] = value

    def _keys(self, prefix, *, namespace):
        return [key for space, key in self.stored if space == namespace and key.startswith(prefix)]

    def _delete(self, key, *, del_by_prefix=False, namespace):
        for one in self._keys(key, namespace=namespace):
            if del_by_prefix or one == key:
                del self.stored[namespace, one]


class Handle:
    def __init__(self, ray, name):
        self.ray, self.name = ray, name
        self.actor = None
        self.tasks = set()
        self.death = ray.loop.create_future()
        self.context = contextvars.copy_context()
        self.context.run(_current.set, self)

    def __getattr__(self, method):
        def remote(*args, **kwargs):
            self.ray._connect()
            return asyncio.ensure_future(self._call(method, args, kwargs))

        return SimpleNamespace(remote=remote)

    async def _call(self, method, args, kwargs):
        if self.death.done():
            raise ActorDiedError
        running = self.context.run(asyncio.ensure_future, getattr(self.actor, method)(*args, **kwargs))
        await asyncio.wait({running, self.death}, return_when=asyncio.FIRST_COMPLETED)
        if self.death.done():
            raise ActorDiedError
        return running.result()

    def die(self):
        """As by SIGKILL."""
        if self.death.done():
            return
        self.death.set_result(None)
        self.ray.killed.append(self.name)
        if self.ray.named.get(self.name) is self:
            del self.ray.named[self.name]
        for task in list(self.tasks):
            task.cancel()


def _task(loop, work, **options):
    task = asyncio.Task(work, loop=loop, **options)
    if (owner := _current.get()) is not None:
        owner.tasks.add(task)
        task.add_done_callback(owner.tasks.discard)
    return task


class FakeAgent:
    """Of the nodes of one test: a class of its own for each (`agents()`). Asked as `untax.cluster.apart.Apart` is."""

    def __init__(self, on_end):
        self.on_end = on_end
        self.member = None
        self.is_draining = False
        self.gauge = Gauge()
        self.idle = asyncio.Event()
        self.idle.set()

    async def start(self, made_of):
        self.plan, self.post = pickle.loads(made_of)
        if (awaited := self.hanging.get(self.post.node_id)) is not None:
            await awaited.wait()
        if self.post.node_id in self.there:
            raise UsageError("a server runs on its state directory already")
        self.there[self.post.node_id] = self
        number = len(self.made)
        self.made.append(self)
        self.member = Member(
            self.post.node_id, self.post.name, self.post.address, f"https://{self.post.address}:1", "/s", "boot", "0", "namespace",
            "namespace", "namespace", agent=str(number),
        )  # fmt: skip

    async def aclose(self):
        if self.cannot_end:
            raise RuntimeError("it cannot")
        self.there.pop(self.post.node_id, None)

    async def now(self):
        if (awaited := self.silent.get(self.post.node_id)) is not None:
            await awaited.wait()
        return self.member.drained() if self.is_draining else self.member

    async def meet(self, members):
        pass

    async def drained(self):
        self.is_draining = True
        await self.idle.wait()

    async def news(self, known):
        return await self.gauge.wait_news(known)

    async def rest(self, idle_s):
        if (left_s := idle_s - self.gauge.idle_s) > 0:
            return left_s
        self.is_draining = True
        return 0.0


def agents():
    return type("Agents", (FakeAgent,), {"there": {}, "made": [], "hanging": {}, "silent": {}, "cannot_end": False})
