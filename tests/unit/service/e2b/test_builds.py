"""Steps that are none, and files that wait for builds: how many there may be, and for how long."""

import os

import pytest

from untax.core.errors import UsageError
from untax.service.e2b.builds import Contexts, checked_steps
from untax.service.errors import Refused
from untax.service.tenants import Allowance, Tenant

ALICE = Tenant("alice", Allowance(uploads_mib=1))
HASHES = [digit * 64 for digit in "abc"]


async def pieces(size: int):
    for _ in range(size >> 10):
        yield b"x" * 1024


@pytest.mark.parametrize("kind", [["sh"], {"a": 1}, None, 1, "", "NOPE"])
def test_a_step_of_no_known_kind_is_refused(kind):
    with pytest.raises(UsageError):
        checked_steps([{"type": kind, "args": ["true"]}])


async def test_files_for_builds_are_counted_by_tenant_and_go_with_the_last_build(tmp_path):
    contexts = Contexts(tmp_path)
    for one in (HASHES[0], HASHES[0], HASHES[1]):
        contexts.announce("alice", one)
    await contexts.store(ALICE, HASHES[0], pieces(600 << 10))
    with pytest.raises(Refused) as told:
        await contexts.store(ALICE, HASHES[1], pieces(600 << 10))
    assert told.value.status == 429
    await contexts.store(ALICE, HASHES[0], pieces(700 << 10))  # in its own place
    await contexts.store(Tenant("bob"), HASHES[1], pieces(600 << 10))
    contexts.done("alice", [HASHES[0]])
    assert contexts.path("alice", HASHES[0]).exists()  # another build announced it
    contexts.done("alice", [HASHES[0]])
    assert [one.name for one in contexts.path("alice", HASHES[0]).parent.iterdir()] == []
    await contexts.store(ALICE, HASHES[1], pieces(600 << 10))


async def test_files_that_no_build_came_for_make_room(tmp_path):
    contexts = Contexts(tmp_path)
    await contexts.store(ALICE, HASHES[0], pieces(600 << 10))
    os.utime(contexts.path("alice", HASHES[0]), (0, 0))
    await contexts.store(ALICE, HASHES[1], pieces(600 << 10))
    assert not contexts.path("alice", HASHES[0]).exists()
