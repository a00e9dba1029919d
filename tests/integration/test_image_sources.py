"""Sandboxes on images from files and on this host, as programs outside ask for them."""

import json
import os
import subprocess
import sys

import pytest
from tests import hostile_archives as hostile
from tests.images import small_directory

import untax
from untax.substrates._host import is_host_root

SCRIPT = """
import asyncio, sys, untax

async def main():
    async with untax.Engine(state_dir=sys.argv[1]) as engine, engine.lease(untax.EnvSpec(image="host")) as box:
        seen = await box.run(["cat", sys.argv[2]])
        tried = await box.run(["sh", "-c", f"echo changed >{sys.argv[2]} 2>/dev/null; umount {sys.argv[3]}"])
        print(seen.stdout, tried.exit_code != 0)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "small.tar"
    subprocess.run(["tar", "-c", "-f", path, "-C", small_directory(), "."], check=True)
    return path


@pytest.fixture(params=["tar", "oci", "docker-archive"])
def image(request, packed, tmp_path):
    """The same small root file system in each of the forms."""
    if request.param == "tar":
        return f"tar:{packed}"
    layer = packed.read_bytes()
    members = hostile.Layout([layer], [layer]).members() if request.param == "oci" else hostile.docker_members([layer])
    (tmp_path / "image.tar").write_bytes(hostile.plain_tar(members))
    return f"{request.param}:{tmp_path / 'image.tar'}"


async def test_a_sandbox_stands_on_an_image_from_a_file(image, tmp_path):
    """And what it writes stays its own: the next one finds the image as it was."""
    spec = untax.EnvSpec(image=image)
    user = "root" if is_host_root() else None  # with an ordinary user's engine everything inside belongs to the one user there is
    async with untax.Engine(state_dir=str(tmp_path / "state")) as engine:
        for _ in range(2):
            async with engine.lease(spec, user=user) as box:
                before = await box.run(["sh", "-c", "cat /etc/hosts; ls /etc"])
                await box.run(["sh", "-c", "echo mine >/etc/mine; rm /etc/hosts"])
                assert before.stdout.startswith(b"127.0.0.1 localhost")
                assert b"mine" not in before.stdout


async def test_t22_a_hostile_image_makes_no_sandbox_and_the_engine_goes_on(packed, tmp_path):
    bad = tmp_path / "bad.tar"
    bad.write_bytes(hostile.Tar("gnu", b"").add(b"../out", data=b"x").bytes())
    async with untax.Engine(state_dir=str(tmp_path / "state")) as engine:
        with pytest.raises(untax.StageFailed, match="leads out"):
            async with engine.lease(untax.EnvSpec(image=f"tar:{bad}")):
                raise AssertionError("no sandbox may come of it")
        async with engine.lease(untax.EnvSpec(image=f"tar:{packed}")) as box:
            assert (await box.run(["true"])).exit_code == 0


@pytest.mark.skipif(not is_host_root(), reason="root: only root can mount something below /usr to look for it")
def test_what_is_mounted_below_a_directory_of_the_host_is_seen_inside(tmp_path):
    """On many machines /usr/local is a disk of its own. Mounted in a namespace of this test's own; the host never sees it."""
    place = next((place for place in ("/usr/local/games", "/usr/games", "/usr/src", "/usr/local/src") if os.path.isdir(place)), None)
    if place is None:
        pytest.skip("no directory below /usr that could be covered")
    mount = 'mount -t tmpfs tmpfs "$1" && echo seen >"$1/file" && shift && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", place, sys.executable, "-c", SCRIPT, tmp_path / "state", f"{place}/file", place],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, timeout=120,
    )  # fmt: skip

    assert done.stdout.strip() == "b'seen\\n' True", done.stderr
    assert not os.path.exists(f"{place}/file")


async def test_what_an_image_says_of_itself_is_found_inside(packed, tmp_path):
    """Variables and working directory of its config, unless the spec says otherwise."""
    layer = packed.read_bytes()
    config = hostile.image_config([layer], Env=["FROM_IMAGE=yes", "OVERRIDDEN=image"], WorkingDir="/usr/lib")
    (tmp_path / "image.tar").write_bytes(hostile.plain_tar(hostile.Layout([layer], [layer], config).members()))
    spec = untax.EnvSpec(image=f"oci:{tmp_path / 'image.tar'}", env={"OVERRIDDEN": "spec"})
    async with untax.Engine(state_dir=str(tmp_path / "state")) as engine, engine.lease(spec) as box:
        found = await box.run(["sh", "-c", 'echo "$FROM_IMAGE $OVERRIDDEN $PWD"'])

    assert found.text.split() == ["yes", "spec", "/usr/lib"], json.dumps(found.text)
