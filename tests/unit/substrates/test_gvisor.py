"""What runsc is asked for, which runsc is taken, and what a copy is told first: with literal data."""

import asyncio
import json
import os
import select
import struct
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from untax.core.errors import CreateError, StageUnavailable, UsageError
from untax.core.root import Root
from untax.core.spec import Limits
from untax.substrates import _gvisor_groups, _gvisor_live, _gvisor_memory, _gvisor_runsc
from untax.substrates._gvisor_bundle import Wanted, config
from untax.substrates._gvisor_runsc import Runsc


def wanted(**limits):
    return Wanted("sbx-1", "/chains/a.erofs", "1000", ["/workspace"], Limits(**limits))


def test_a_sandbox_is_described_without_a_file_or_a_right_of_the_host_s():
    """The only path of the host in it is the image's; every right of the cell's is one of the kernel inside."""
    made = config(wanted())

    assert json.dumps(made).count("/chains/a.erofs") == 1
    assert {mount["type"] for mount in made["mounts"]} == {"proc", "tmpfs", "devpts", "sysfs"}
    assert made["process"]["noNewPrivileges"] is True
    assert {one["type"] for one in made["linux"]["namespaces"]} == {"pid", "network", "ipc", "uts", "mount"}
    assert made["hostname"] == "sbx-1"


def test_what_is_written_is_memory_and_no_more_than_there_is():
    def size(made):
        return made["annotations"]["dev.gvisor.spec.rootfs.options"]

    assert size(config(wanted(memory_mib=256, disk_mib=4096))) == f"size={256 << 20}"
    assert size(config(wanted(memory_mib=256, disk_mib=64))) == f"size={64 << 20}"


def test_processes_are_limited_inside_beside_the_cell_s_own():
    rlimits = {one["type"]: one["hard"] for one in config(wanted(pids=64))["process"]["rlimits"]}

    assert rlimits["RLIMIT_NPROC"] == 65
    assert rlimits["RLIMIT_CORE"] == 0


def test_an_old_runsc_is_refused_with_a_remedy(monkeypatch):
    for version, is_old in (
        ("release-20221219.0", True),
        ("0.0~20221219.0", True),
        ("release-20260224.0", False),
        ("VERSION_MISSING", False),
    ):
        monkeypatch.setattr(_gvisor_runsc, "runsc_version", lambda _, version=version: version)
        trouble = _gvisor_runsc.version_trouble("/usr/bin/runsc")
        assert (trouble is not None) == is_old
        assert trouble is None or "install a current one" in trouble


def test_what_runsc_says_is_shown_on_one_line_and_harmless():
    assert _gvisor_runsc.in_words(b"a\nb \x1b[2J\xff") == "a b ?[2J\N{REPLACEMENT CHARACTER}"
    assert _gvisor_runsc.in_words(b"") == "nothing was said"


def test_a_copy_is_told_its_name_before_anything_else():
    frame = _gvisor_live.first_words("sbx-2")
    length, number, kind, flags, zero = struct.unpack_from("<IIBBH", frame)

    assert (length, number, kind, flags, zero) == (len(frame) - 4, 0, 0x0A, 0, 0)
    assert frame[12:21] == b"\5\0\0\0sbx-2"
    assert _gvisor_live.first_words("sbx-2") != frame  # an identity of its own


def test_what_a_live_snapshot_settled_cannot_be_changed(tmp_path):
    memory, bundle = tmp_path / "memory", tmp_path / "bundle"
    (memory / "image").mkdir(parents=True), (memory / "state").mkdir(), bundle.mkdir()
    (memory / "image" / "image.erofs").touch()
    limits = Limits(pids=64, disk_mib=64)
    (memory / "state" / "about.json").write_text(json.dumps({"user": "1000", "limits": {"pids": 64, "disk_mib": 64}}))
    (memory / "state" / "config.json").write_text(json.dumps(config(wanted())))
    image = bundle / _gvisor_live.IMAGE

    words = _gvisor_live.lay_out(str(memory), bundle, "1000", limits)
    assert words[0] == "restore"
    assert json.loads((bundle / "config.json").read_text())["annotations"]["dev.gvisor.spec.rootfs.source"] == str(image)
    assert image.samefile(memory / "image" / "image.erofs")
    image.unlink(), image.parent.rmdir()
    for user, other in (("0", limits), ("1000", Limits(pids=65, disk_mib=64)), ("1000", Limits(pids=64, disk_mib=65))):
        with pytest.raises(UsageError):
            _gvisor_live.lay_out(str(memory), bundle, user, other)
        assert not image.exists()
    with pytest.raises(CreateError):
        _gvisor_live.lay_out(str(tmp_path / "gone"), bundle, "1000", limits)


def test_a_saved_live_snapshot_is_not_linked_to_but_pointed_at(tmp_path):
    """A second name would break the seal of the store's layer, for its own copies and for what is put down of those."""
    holding, bundle, stored = tmp_path / "holding", tmp_path / "bundle", (tmp_path / "a" / "tree", tmp_path / "b" / "tree")
    for place in (holding, bundle, *stored):
        place.mkdir(parents=True)
    (stored[0] / "image.erofs").touch()
    (stored[1] / "about.json").write_text(json.dumps({"user": "1000", "limits": asdict(Limits()), "made_with": {"runsc": "1"}}))
    (stored[1] / "config.json").write_text(json.dumps(config(wanted())))
    runsc = Runsc("/runsc", tmp_path, "systrap", False, {"runsc": "1"})

    taken = _gvisor_live.taken_up(holding, stored, Root(()), runsc)
    words = _gvisor_live.lay_out(taken.root.memory, bundle, "1000", Limits())

    assert _gvisor_live.parts(taken.root.memory) == stored
    assert words[-1] == f"--image-path={stored[1] / 'memory'}"
    assert (stored[0] / "image.erofs").stat().st_nlink == 1
    assert (bundle / "image").is_symlink()
    with pytest.raises(StageUnavailable, match="put down with runsc 1, and here is 2"):
        _gvisor_live.taken_up(holding, stored, Root(()), replace(runsc, made_with={"runsc": "2"}))


@pytest.mark.parametrize(
    ("at", "inside", "group", "place"),
    [
        ("/cg", "/", "/", "/cg"),
        ("/cg", "/", "/a/b", "/cg/a/b"),
        ("/cg", "/docker/x", "/docker/x/y", "/cg/y"),
        ("/cg", "/docker/x", "/docker/x", "/cg"),
    ],
)
def test_a_group_is_found_below_its_mount(at, inside, group, place):
    """Also where only a part of the tree is mounted, as in a container."""
    assert str(_gvisor_groups._below(at, inside, group)) == place


@pytest.fixture
def unified():
    """A group of a version 2 tree, without controllers."""
    tree = next((one for one in _gvisor_groups._trees() if one.is_unified), None)
    if tree is None:
        pytest.skip("cgroup2: no tree of version 2 that may be written to; root has one where it is mounted")
    group = tree.parent / f"untax.test-{os.getpid()}"
    group.mkdir()
    yield group
    group.rmdir()


def test_a_group_s_file_is_told_of_when_it_changes_and_not_while_it_is_idle(unified):
    changes = _gvisor_memory.Changes(unified / "cgroup.events")
    for told in ("0", "1", "0"):
        changes.seen()
        assert not select.select([changes], [], [], 0.05)[0]
        (unified / "cgroup.freeze").write_text(str(1 - int(told)))
        assert select.select([changes], [], [], 5)[0]
    changes.close()


async def test_a_loop_rests_while_a_sandbox_has_memory_left_and_is_told_when_it_has_not(unified, tmp_path, monkeypatch):
    """Or it would turn without a pause as long as a sandbox lives."""
    (tmp_path / "memory.events").symlink_to(unified / "cgroup.events")
    (tmp_path / "memory.stat").write_text("anon 0\n")
    told, shed = [], asyncio.Event()

    async def shedding():
        (tmp_path / "memory.stat").write_text("anon 0\n")
        shed.set()

    group = SimpleNamespace(memory=(tmp_path, True))
    guard = _gvisor_memory.MemoryGuard(group, 100, shedding, lambda: told.append("ended"))
    monkeypatch.setattr(guard, "_told", lambda really=guard._told: (told.append("told"), really()))
    guard.watch()
    await asyncio.sleep(0.1)
    assert len(told) <= 1
    (tmp_path / "memory.stat").write_text("anon 99\n")
    (unified / "cgroup.freeze").write_text("1")
    async with asyncio.timeout(5):
        await shed.wait()
        while guard._making_room is not None:
            await asyncio.sleep(0.01)
    guard.close()
    assert "ended" not in told
    assert len(told) <= 2


def test_a_process_of_another_namespace_is_nobody_s_number(tmp_path, monkeypatch):
    """The kernel shows such a one as 0, which means to kill(): whoever is in the caller's own process group."""
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    (tmp_path / "cgroup.procs").write_text("0\n7\n")
    _gvisor_groups._kill_each(tmp_path)

    assert killed == [7]
