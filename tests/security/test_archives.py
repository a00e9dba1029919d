"""Hostile images: hundreds of archives that try to get out, to fill the disk or to be two things at once. All are refused.

Beside each stands what it aims at. Nothing there may change, nothing may stay in the store, and the next good image must work.
"""

import asyncio
import gzip
import hashlib
import io
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import hostile_archives as hostile
from tests import treelist

from untax.core.errors import StageError, StageFailed, StageUnavailable, UsageError
from untax.core.root import ImageConfig
from untax.layers.blob import Caps
from untax.layers.sources import Source, find
from untax.layers.sources.config import read_config
from untax.layers.store import LayerStore
from untax.layers.unpack import unpack
from untax.substrates._host import is_host_root

MARKS = "trusted" if is_host_root() else "user"
MIB = 1 << 20


def silent(what, done, total):
    pass


class Ground:
    """A store with things beside it that nothing may touch."""

    def __init__(self, top: Path) -> None:
        self.around, self.place = top / "around", top / "place"
        self.around.mkdir()
        self.place.mkdir()
        (self.around / "canary").write_text("untouched")
        (self.around / "closed").mkdir(mode=0o700)
        (self.around / "closed" / "canary").write_text("untouched")
        (self.around / "link").symlink_to("canary")
        self.store = LayerStore(self.around / "store", marks=MARKS)
        (self.place / "good.tar.gz").write_bytes(gzip.compress(hostile.good_layer(b"etc/below")))
        self.inodes = {}

    async def fetch(self, image):
        source = find(image)
        await source.identify()
        return await source.fetch(self.store, silent)

    async def good(self):
        """A good image, fetched and looked at."""
        fetched = await self.fetch(f"tar:{self.place / 'good.tar.gz'}")
        tree = self.store.layer(fetched.adds[0]).tree
        assert (tree / "etc/below").read_bytes() == b"good\n"
        return fetched

    def look(self):
        """Everything beside and in the store, apart from its notes on which layer was unpacked from what."""
        found = {path: row for path, row in treelist.listing(self.around).items() if not path.startswith("store/downloads/chains")}
        return found, os.path.lexists("/tmp/canary"), sorted(os.listdir(self.around.parent))


@pytest.fixture
def ground(tmp_path):
    ground = Ground(tmp_path)
    yield ground
    ground.store.close()


def test_there_are_more_than_two_hundred_and_no_two_are_alike(tmp_path):
    """Distinct in their bytes, not only in their names."""
    names, contents = set(), set()
    for archive in hostile.archives(tmp_path / "around", tmp_path):
        path = Path(archive.image.partition(":")[2])
        whole = json.dumps(treelist.listing(path), sort_keys=True) if path.is_dir() else path.read_bytes().hex()[: 4 * MIB]
        names.add(archive.name)
        contents.add(hashlib.sha256(whole.encode()).digest())

    assert len(names) > 700
    assert len(contents) > 700


@pytest.mark.parametrize("group", hostile.GROUPS)
async def test_t22_a_hostile_archive_is_refused_and_touches_nothing(ground, group):
    await ground.good()
    (ground.place / "kept").mkdir()
    before = ground.look()
    accepted, touched = [], []
    for number, archive in enumerate(hostile.GROUPS[group](ground.around, ground.place)):
        try:
            accepted.append((archive.name, await ground.fetch(archive.image)))
        except (StageFailed, UsageError):
            pass  # anything else is a failure of ours, and fails the test
        if ground.look() != before:
            touched.append(archive.name)
            before = ground.look()
        if number % 10 == 0:
            await ground.good()
    await ground.good()

    assert accepted == []
    assert touched == []


def test_what_the_writer_of_hostile_archives_writes_is_otherwise_good(ground):
    """The same writer, the same packing, nothing hostile: accepted. Otherwise the refusals above would mean nothing."""
    base = hostile.good_layer(b"etc/below")
    for dialect in hostile.DIALECTS:
        tar = hostile.Tar(dialect, b"")
        tar.add(b"etc/", hostile.DIRECTORY, mode=0o755).add(b"etc/good", data=b"good\n").add(b"l", hostile.LINK, target=b"etc/good")
        tar.add(b"h", hostile.HARD, target=b"etc/good").add(b"p", hostile.FIFO).add(b"dev/null", hostile.CHARACTER, device=(1, 3))
        tar.add(b"d/" * 40 + b"n" * 90, data=b"deep")
        data = tar.bytes()
        for compress in hostile.COMPRESSIONS.values():
            for scheme in hostile.SCHEMES:
                archive = hostile._packed("good", scheme, compress(data), data, base, ground.place)
                fetched = asyncio.run(ground.fetch(archive.image))
                assert len(fetched.adds) == (1 if scheme == "tar" else 2)
                tree = ground.store.layer(fetched.adds[-1]).tree
                assert (tree / "h").read_bytes() == b"good\n"
                assert not (tree / "dev/null").exists()


# ---- bombs ----


def bytes_on_disk(tree):
    return sum(os.lstat(os.path.join(top, name)).st_blocks * 512 for top, _, names in os.walk(tree) for name in names)


@pytest.mark.parametrize("pack", [hostile.gz, hostile.xz], ids=["gzip", "xz"])
def test_r13_a_bomb_takes_no_more_of_the_disk_than_declared(tmp_path, pack):
    """Refused at the cap and not at the end: what was written until then is bounded by what was read."""
    bomb = hostile._bomb(pack, 10_240)
    (tmp_path / "bomb").write_bytes(bomb)
    (tmp_path / "tree").mkdir()
    read = []

    with open(tmp_path / "bomb", "rb", buffering=0) as source, pytest.raises(StageFailed, match="no more than 100 for each"):
        unpack(source, tmp_path / "tree", marks=MARKS, on_read=read.append)

    caps = Caps()
    assert 0 < bytes_on_disk(tmp_path / "tree") <= caps.slack_bytes + caps.ratio * read[-1] + MIB
    assert read[-1] < 16 * MIB


class Entries:
    """An archive of headers without end, made as it is read."""

    def __init__(self, header):
        self.header = header
        self.count = 0

    def read(self, size):
        blocks = size // 512
        self.count += blocks
        return self.header * blocks


@pytest.mark.slow
def test_r13_a_million_entries_are_too_many(tmp_path):
    """Of the cheapest kind there is, which leaves nothing on the disk; counted all the same."""
    source = Entries(hostile.Tar("gnu", b"").header(b"dev/null", hostile.CHARACTER, device=(1, 3)))

    with pytest.raises(StageFailed, match="more than 1000000 entries"):
        unpack(source, tmp_path, marks=MARKS)

    assert list(tmp_path.iterdir()) == []
    assert source.count < 1_002_000


def test_r13_empty_files_stop_at_the_declared_number(tmp_path):
    tar = hostile.Tar("ustar", b"")
    for number in range(3000):
        tar.add(b"f%d" % number)
    packed = hostile.gz(tar.bytes())
    (tmp_path / "bomb").write_bytes(packed)
    (tmp_path / "tree").mkdir()

    with open(tmp_path / "bomb", "rb") as source, pytest.raises(StageFailed, match="more than 2000 entries"):
        unpack(source, tmp_path / "tree", marks=MARKS, caps=Caps(entries=2000))

    assert len(packed) < 42_000
    assert len(list((tmp_path / "tree").iterdir())) == 2000


def test_r13_directories_that_only_names_speak_of_are_counted(tmp_path):
    """One entry can make as many as its name is deep: a hundred for one would be past the number of entries that is declared."""
    tar = hostile.Tar("pax", b"")
    for number in range(50):
        tar.add(b"%d/" % number + b"d/" * 100 + b"f")
    (tmp_path / "tree").mkdir()

    with pytest.raises(StageFailed, match="more than 2000 directories"):
        unpack(io.BytesIO(tar.bytes()), tmp_path / "tree", marks=MARKS, caps=Caps(entries=2000))

    assert sum(len(names) for _, names, _ in os.walk(tmp_path / "tree")) <= 2001


def test_r13_bombs_are_refused_in_a_process_with_little_memory(tmp_path):
    """No blob decides how much memory its reader needs: half a gigabyte of addresses is enough for all of them."""
    script = f"""
import asyncio, resource, sys
from pathlib import Path
from tests import hostile_archives as hostile
from tests.security.test_archives import Ground
from untax.core.errors import StageFailed, UsageError
ground = Ground(Path({str(tmp_path)!r}))
made = [("tar", data) for data in hostile._compressed(hostile.good_layer()).values()]
made += [("docker-archive", data) for data in hostile._outer(b"/nowhere").values()]
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
refused = 0
for scheme, data in made:
    archive = hostile._written("bomb", scheme, data, ground.place)
    try:
        asyncio.run(ground.fetch(archive.image))
    except (StageFailed, UsageError):
        refused += 1
print(refused, len(made))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})

    assert done.returncode == 0, done.stderr
    refused, made = done.stdout.split()
    assert refused == made


async def test_a_full_disk_is_said_and_leaves_nothing(ground, monkeypatch):
    """Not the archive's fault, so it may be tried again."""
    real = os.write

    def full(fd, data):
        if len(data) > 1000:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    tar = hostile.Tar("gnu", b"").add(b"f", data=b"x" * 5000)
    archive = hostile._written("full", "tar", tar.bytes(), ground.place)
    before = ground.look()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StageUnavailable, match="full"):
            await ground.fetch(archive.image)

    assert ground.look() == before
    assert (await ground.fetch(archive.image)).adds


# ---- names ----


@pytest.mark.parametrize(
    "name",
    ["--privileged", ";reboot", "$(id)", "a\nb", "-v/:/host", "host:", "host:x", "HOST", "", "tar", "file:/x", "../x", "/x", "tar:x", "tar:", "dir:", "oci:x",
     "docker-archive:x", "dir:x", "tar:/x\0y", "dir:/x\0y", "oci:/x\0y", "dir:/usr/../etc", "http://127.0.0.1/x"],
)  # fmt: skip
def test_a9_an_odd_name_is_a_usage_error(name):
    with pytest.raises(UsageError):
        find(name)


def test_a9_an_unknown_form_names_the_known_ones():
    with pytest.raises(UsageError, match=r"host, dir:/path, tar:/path\.tar, oci:"):
        find("floppy:a")


ODD = ("a,b", "a:b", "a\\b", "a=b", "a b", "upperdir=", "a\nb", "--x", "$(id)", "a:b:c", "%41", "ü", "a;b")


@pytest.mark.parametrize("name", ODD)
async def test_f15_odd_paths_are_paths(ground, name):
    """A path is taken as it is: no character in it is an option, a separator or a command."""
    (ground.place / name).write_bytes(hostile.good_layer())
    (ground.place / f"d{name}").write_bytes(hostile.plain_tar(hostile.docker_members([hostile.good_layer()])))
    (ground.place / f"dir{name}").mkdir()

    assert (await ground.fetch(f"tar:{ground.place / name}")).adds
    assert (await ground.fetch(f"docker-archive:{ground.place / f'd{name}'}")).adds
    assert (await ground.fetch(f"docker-archive:{ground.place / f'd{name}'}:test:latest")).adds
    root = await find(f"dir:{ground.place / f'dir{name}'}").root()
    assert root.layers == (str(ground.place / f"dir{name}"),)


@pytest.mark.parametrize(
    "path", ["/", "//", "/.", "/proc", "/proc/self", "/proc/1/root", "/sys", "/dev", "/etc", "/var", "/run", "/root", "/home", "/missing"]
)
async def test_a11_this_machine_is_not_an_image(path):
    with pytest.raises(UsageError):
        await find(f"dir:{path}").root()


async def test_a11_a_link_to_this_machine_is_not_an_image(tmp_path):
    (tmp_path / "l").symlink_to("/")

    with pytest.raises(UsageError, match="own"):
        await find(f"dir:{tmp_path / 'l'}").root()


@pytest.mark.parametrize("scheme", ["tar", "oci", "docker-archive"])
@pytest.mark.parametrize("what", ["/dev/zero", "/proc/kmsg", "/missing", "directory", "pipe"])
async def test_what_is_not_a_file_is_not_an_archive(ground, scheme, what):
    """And nobody waits for it: a FIFO has no writer, a device no end."""
    (ground.place / "directory").mkdir()
    os.mkfifo(ground.place / "pipe")
    path = what if what.startswith("/") else str(ground.place / what)

    with pytest.raises((UsageError, StageError)):
        async with asyncio.timeout(5):
            await ground.fetch(f"{scheme}:{path}")


# ---- configs are data ----


def config_of(**fields):
    return json.dumps({"config": fields, "rootfs": {"diff_ids": []}}).encode()


def test_a10_variables_of_every_kind_have_a_defined_result():
    """Names that no process could have are left out and said; whatever a name means to some loader, here it is a name."""
    read = read_config(config_of(Env=["LD_PRELOAD=/x.so", "A=B=C", "A\n=1", "=x", "", "NOVALUE", "N=\0", "EMPTY="]), "test")

    assert dict(read.config.env) == {"LD_PRELOAD": "/x.so", "A": "B=C", "A\n": "1", "EMPTY": ""}
    assert len(read.notes) == 4


def test_t22_nothing_in_a_config_is_run_or_opened(ground, monkeypatch):
    """Fields that engines have acted on: health checks, triggers, volumes, labels. Here they are not even kept, or kept as text."""
    config = {
        "Healthcheck": {"Test": ["CMD-SHELL", f"touch {ground.around}/owned"]},
        "OnBuild": [f"RUN touch {ground.around}/owned"],
        "Volumes": {"/": {}, "/proc": {}},
        "Labels": {"io.containerd.runc.v2.group": "x", "run": f"touch {ground.around}/owned"},
        "Entrypoint": ["sh", "-c", f"touch {ground.around}/owned"],
        "WorkingDir": "../../../etc",
        "User": "../../root",
    }
    layout = hostile.good_layout(**config)
    archive = hostile._as_tar("config", "oci", layout.members(), ground.place)
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: started.append(args))

    fetched = asyncio.run(ground.fetch(archive.image))

    assert fetched.config == ImageConfig(
        workdir="/etc", entrypoint=("sh", "-c", f"touch {ground.around}/owned"), labels=config["Labels"], user=None
    )
    assert any("user" in note for note in fetched.notes)
    assert not (ground.around / "owned").exists()
    assert started == []


def test_sources_are_told_apart_by_what_they_can_do(tmp_path):
    assert isinstance(find("tar:/x"), Source)
    assert not isinstance(find("dir:/x"), Source)


def test_xz_of_two_streams_is_one_archive(tmp_path):
    """What `xz -c a b` writes; the hostile ones above rely on such pieces being read."""
    data = hostile.good_layer()
    (tmp_path / "x").write_bytes(lzma.compress(data[:700]) + lzma.compress(data[700:]))
    (tmp_path / "tree").mkdir()

    with open(tmp_path / "x", "rb") as source:
        assert unpack(source, tmp_path / "tree", marks=MARKS).entries == 2
