"""Chains for a substrate that takes them in: once each, under their stage's key, with what the image says of itself."""

import json
import subprocess
import tarfile
from typing import ClassVar

import pytest

import untax
from untax.core.root import ImageConfig, Root
from untax.core.spec import FrozenEnv
from untax.testing import FakeSubstrate


class ImportingFake(FakeSubstrate):
    """Keeps what it took in as names and contents."""

    builder = "no-such-builder"
    takes = "oci"
    image_sockets: ClassVar = {}

    def __init__(self, place):
        super().__init__(isolation="container")
        self.place = place
        self.taken = {}
        self.roots = []

    async def own_root(self, image):
        if image != "docker:mine":
            return None
        return Root(("own:mine",), config=ImageConfig(env=FrozenEnv({"GREETING": "hi"}), workdir="/srv"))

    async def take_in(self, key, root, export):
        if key not in self.taken:
            export(root, self.place / key, "localhost/fake:1", {"label": "x"})
            with tarfile.open(self.place / key) as tar:
                config = next(
                    json.load(tar.extractfile(one))
                    for one in tar
                    if one.name.startswith("blobs/sha256/") and tar.extractfile(one).read(1) == b"{"
                )
            self.taken[key] = config
        return Root((f"taken:{key}",), config=root.config)

    async def discard(self, root):
        self.taken = {key: value for key, value in self.taken.items() if root.layers != (f"taken:{key}",)}

    def has_taken(self, root):
        return any(root.layers == (f"taken:{key}",) for key in self.taken) or root.layers == ("own:mine",)

    async def create_on(self, spec, root, *, cache=None):
        assert cache is None
        self.roots.append(root)
        return await self.create(spec)


@pytest.fixture
def image(tmp_path):
    place = tmp_path / "image"
    place.mkdir()
    (place / "file").write_text("x")
    return untax.EnvSpec(image=f"dir:{place}", isolation="container")


@pytest.fixture
async def engine(tmp_path):
    async with untax.Engine(ImportingFake(tmp_path), state_dir=tmp_path / "state") as engine:
        yield engine


async def test_a_chain_is_taken_in_once_however_often_it_is_leased(engine, image):
    for _ in range(2):
        async with engine.lease(image) as box:
            assert (await box.run(["true"])).exit_code == 0
    substrate = engine.substrate

    assert len(substrate.taken) == 1
    assert {root.layers for root in substrate.roots} == {(f"taken:{next(iter(substrate.taken))}",)}
    assert [root.is_furnished for root in substrate.roots] == [False, False]
    assert next(iter(substrate.taken.values()))["config"]["Labels"]["label"] == "x"


async def test_its_time_is_on_record_where_it_was_spent(engine, image):
    async with engine.lease(image) as first, engine.lease(image) as second:
        assert "import" in first.ledger.stages
        assert "import" not in second.ledger.stages


async def test_an_image_of_its_own_is_used_as_it_is(engine):
    async with engine.lease(untax.EnvSpec(image="docker:mine", isolation="container")) as box:
        assert "GREETING=hi" in (await box.run(["env"])).text
        assert engine.substrate.taken == {}
        assert engine.substrate.specs[-1].workdir == "/srv"


async def test_a_repository_is_in_the_chain_and_not_copied_at_the_lease(engine, image, tmp_path):
    origin = tmp_path / "origin"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(origin)]
    subprocess.run(["git", "init", "-q", str(origin)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    spec = untax.EnvSpec(image=image.image, repo=untax.Repo(str(origin), commit), isolation="container")
    async with engine.lease(spec):
        pass
    (config,) = engine.substrate.taken.values()

    assert len(config["rootfs"]["diff_ids"]) == 2


async def test_a_stage_that_must_be_built_needs_the_builder(engine, image):
    with pytest.raises(untax.UsageError, match="no-such-builder"):
        await engine.acquire(untax.EnvSpec(image=image.image, setup=("true",), isolation="container"))


async def test_what_failed_is_looked_for_again(engine, image):
    async with engine.lease(image):
        pass
    engine.substrate.taken.clear()
    engine.substrate.failures["create"] = untax.CreateError("", "the image is gone")
    with pytest.raises(untax.CreateError):
        await engine.acquire(image)
    del engine.substrate.failures["create"]
    async with engine.lease(image):
        assert len(engine.substrate.taken) == 1


async def test_what_had_to_go_is_taken_in_again_before_anything_fails(engine, image):
    async with engine.lease(image):
        pass
    engine.substrate.taken.clear()
    async with engine.lease(image) as box:
        assert "import" in box.ledger.stages
    assert len(engine.substrate.taken) == 1


async def test_preparing_takes_in_and_discarding_gives_up(engine, image):
    prepared = await engine.prepare(image)
    prepared.pin.close()
    assert "import" in prepared.built
    async with engine.lease(image):
        pass
    await engine.warehouse.discard(image)

    assert engine.substrate.taken == {}


async def test_there_are_no_snapshots_of_what_lies_elsewhere(engine, image):
    async with engine.lease(image) as box:
        with pytest.raises(untax.UsageError, match="has no layers"):
            await box.snapshot()
        await box.reset()
        assert box.ledger.verdict == "trusted"
