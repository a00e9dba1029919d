"""The cases of the threat list once more, in gVisor sandboxes: the same functions, with an engine whose default image is a small one."""

import os

import pytest
from tests import hostview, leftovers
from tests.security.container.conftest import small_engine, state_dir  # noqa: F401

from untax import substrates


@pytest.fixture(scope="session")
def engine(_runner, tmp_path_factory):
    if reason := substrates.load("gvisor").unavailable_reason():
        pytest.skip(f"gvisor: {reason}")
    yield from small_engine(_runner, tmp_path_factory, "gvisor")


@pytest.fixture(autouse=True)
async def invariants(request, monkeypatch):
    """After each case nothing of a sandbox is left but of those that are still leased."""
    if "engine" not in request.fixturenames:
        yield
        return
    engine = request.getfixturevalue("engine")
    monkeypatch.setattr(hostview, "agents", agents)
    yield
    substrate = engine.substrate
    there = {path.name for path in substrate._holding.path.glob("sbx-*")}
    assert there <= set(substrate._live), "files of a sandbox outlived it"
    groups = {name for name in leftovers._cgroups() if substrate._holding.path.name in name and "sbx-" in name}
    assert all(any(live in name for live in substrate._live) for name in groups), "a group outlived its sandbox"


def agents(root: int | None = None) -> list[hostview.Seen]:
    """The processes that are gVisor's kernels: what is inside has none of its own on the host."""
    return [p for p in hostview.below(root or os.getpid()) if _is_kernel(p.pid)]


def _is_kernel(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            return words.read().startswith(b"runsc-sandbox\0")
    except OSError:
        return False
