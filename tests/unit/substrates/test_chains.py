"""Files that chains were taken in as: written once, and those not used for longest go first."""

import os

import pytest

from untax.core.errors import CreateError
from untax.core.root import Root
from untax.substrates import _chains


@pytest.fixture
def chains(tmp_path):
    chains = _chains.Chains(tmp_path / "chains", "erofs", kept_bytes=100)
    chains.open()
    return chains


async def taken(chains, key, size=1):
    async def write(path):
        path.write_bytes(bytes(size))

    root = await chains.take_in(key, Root(("layer",)), write)
    used_at(root, int(key))
    return root


def used_at(root, moment):
    os.utime(root.layers[-1], (moment, 0))


async def test_a_chain_that_sandboxes_are_made_of_outlives_those_that_nobody_uses(chains, tmp_path):
    """Also when it was the first to be taken in."""
    first, second, *_ = [await taken(chains, str(number)) for number in range(_chains._KEPT)]
    chains.link(first, tmp_path / "bundle")
    await taken(chains, "99")

    assert chains.has(first)
    assert not chains.has(second)
    assert os.stat(first.layers[-1]).st_mtime == 0  # that is part of what it is


async def test_a_chain_that_is_gone_is_said_to_be_and_a_sandbox_keeps_its_own(chains, tmp_path):
    root = await taken(chains, "1")
    chains.link(root, tmp_path / "bundle")
    await chains.discard(root)

    assert (tmp_path / "bundle").exists()
    for use in (lambda: chains.use(root), lambda: chains.link(root, tmp_path / "other")):
        with pytest.raises(CreateError, match="makes it anew"):
            use()
    assert (await taken(chains, "1")) == root
    assert chains.has(root)


async def test_large_ones_go_before_there_are_many(chains):
    """But never the one that was just written."""
    first, second = [await taken(chains, str(number), size=60) for number in (1, 2)]
    assert (chains.has(first), chains.has(second)) == (False, True)
    third = await taken(chains, "3", size=200)
    assert (chains.has(second), chains.has(third)) == (False, True)
