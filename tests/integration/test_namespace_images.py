"""Images of the namespace substrate that not every host can show in the same way."""

import os
import subprocess

import pytest
from tests.images import small_image

import untax


@pytest.fixture
def on_an_overlay(tmp_path):
    """The small image seen through an overlay mount, whose owners the kernel cannot shift."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    lower = small_image("namespace").removeprefix("dir:")
    for name in ("upper", "work", "image"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={lower},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(tmp_path / "image")], check=True)
    yield f"dir:{tmp_path / 'image'}"
    subprocess.run(["umount", str(tmp_path / "image")], check=True)


async def test_an_image_whose_owners_cannot_be_shifted_still_works(on_an_overlay, tmp_path):
    """Its files then belong to nobody inside; the sandbox's own directories are its own all the same."""
    async with untax.Engine("namespace", state_dir=tmp_path / "state") as engine, engine.lease(untax.EnvSpec(image=on_an_overlay)) as box:
        await box.write("mine", b"x")
        image, own = await box.stat("/usr"), await box.stat("mine")

    assert (image.uid, own.uid) == (65534, 1000)


async def test_the_files_of_an_image_belong_to_root_inside(tmp_path):
    """Where owners can be shifted, root inside owns the image's files and may change them, in its own sandbox only."""
    if os.geteuid() != 0:
        pytest.skip("an ordinary user's engine has one user id")
    spec = untax.EnvSpec(image=small_image("namespace"), user="root")
    async with untax.Engine("namespace", state_dir=tmp_path / "state") as engine:
        async with engine.lease(spec) as box:
            before = await box.stat("/usr")
            await box.write("/usr/new", b"x")
        async with engine.lease(spec) as other:
            names = [entry.name for entry in await other.list("/usr")]

    assert before.uid == 0
    assert "new" not in names
