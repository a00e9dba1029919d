"""The cases of the threat list once more, in containers: the same functions, with an engine whose default image is a small one.

Podman runs those whose answer depends on how the engine applies what it is told; the rest is the cell's doing and the same on both.
"""

import dataclasses
import os

import pytest
from tests import hostview
from tests.engines_fixture import docker, podman  # noqa: F401
from tests.images import tools_directory
from tests.variants import Variant, options_of

import untax
from untax import substrates


class SmallEngine(untax.Engine):
    """Cases that name no image get one of a hundred megabytes: the host's own would be taken in as a whole."""

    def lease(self, spec=None, **late):
        return super().lease(small(spec), **late)

    async def acquire(self, spec=None, **late):
        return await super().acquire(small(spec), **late)


def small(spec):
    spec = spec or untax.EnvSpec()
    return dataclasses.replace(spec, image=f"dir:{tools_directory()}") if spec.image == "host" else spec


@pytest.fixture(scope="session", params=[Variant("container", "docker"), Variant("container", "podman")], ids=str)
def engine(request, _runner, tmp_path_factory):
    options = options_of(request)
    if reason := substrates.load("container", **options).unavailable_reason():
        pytest.skip(f"container: {reason}")
    yield from small_engine(_runner, tmp_path_factory, "container", **options)


def small_engine(_runner, tmp_path_factory, name, **options):
    engine = SmallEngine(name, state_dir=tmp_path_factory.mktemp("engine") / "state", **options)
    engine.test_state = engine.substrate._state_dir
    _runner.run(engine.start())
    yield engine
    _runner.run(engine.aclose())


@pytest.fixture
def state_dir(engine):
    return engine.test_state


@pytest.fixture(autouse=True)
async def invariants(request, monkeypatch):
    """After each case its engine has no container left but those that are still leased."""
    if "engine" not in request.fixturenames:
        yield
        return
    engine = request.getfixturevalue("engine")
    monkeypatch.setattr(hostview, "agents", agents)
    yield
    substrate = engine.substrate
    there = {one["Labels"]["untax.sandbox"] for one in await substrate._list(substrate._labels)}
    assert there <= set(substrate._live), "a container outlived its sandbox"


def agents(root: int | None = None) -> list[hostview.Seen]:
    """Those of containers are nobody's children here; this run's are in the groups of its own engines."""
    del root
    return [p for p in hostview.everyone().values() if p.comm == "cell-agent" and p.is_init and p.state != "Z" and _is_ours(p.pid)]


def _is_ours(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cgroup") as groups:
            text = groups.read()
    except OSError:
        return False
    return f"untax-test-{os.getpid()}" in text or "libpod" in text
