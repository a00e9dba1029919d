"""THREATS 4.5, as far as it concerns file actions and what a cycle leaves: F1–F6 and F16."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from tests import leftovers

import untax

LONG = os.environ.get("UNTAX_LONG") == "1"


@pytest.mark.parametrize(
    "path", ["../../etc/untax-x", "/etc/untax-x", "a/../../untax-x", "d/untax-x", "../../../../../../../../tmp/untax-x"]
)
async def test_f1_a_write_lands_inside_or_is_refused(box, path):
    """Also through a link that the workload made; the host's own directories stay as they are."""
    await box.shell("ln -s /etc d; mkdir -p a")
    before = {where: set(os.listdir(where)) for where in ("/etc", "/tmp", "/", ".")}
    try:
        await box.write(path, b"hostile")
    except untax.SandboxLost:
        raise
    except untax.UntaxError:
        pass
    for where, names in before.items():
        assert not [name for name in set(os.listdir(where)) - names if "untax-x" in name]


async def test_f2_a_link_shows_the_sandbox_s_own_file(box, canary):
    for target in ("/etc/shadow", *map(str, canary.files)):
        await box.shell(f"ln -sfn {target} s")
        try:
            data = await box.read("s")
        except untax.FileError:
            continue
        assert canary.bytes not in data
        if os.geteuid() == 0:
            assert data != Path(target).read_bytes()


async def test_f3_a_link_that_changes_under_a_read_never_leads_out(box, tmp_path):
    secret = tmp_path / "hostname"
    secret.write_text("the host's own")
    process = await box.start(["sh", "-c", f"while :; do ln -sfn {tmp_path} d; ln -sfn /tmp d; ln -sfn / d; done"])
    for _ in range(1000):
        try:
            assert await box.read("d/hostname", limit=1000) != b"the host's own"
        except untax.FileError:
            pass
    await process.signal(9)


@pytest.mark.parametrize("what", ["fifo", "directory", "socket", "/dev/zero", "/dev/tty", "/dev/ptmx"])
async def test_f4_a_read_of_something_else_ends_in_a_typed_error(box, what):
    await box.shell("mkfifo fifo; mkdir directory; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('socket')\"")
    began = time.monotonic()
    with pytest.raises(untax.UntaxError) as caught:
        await box.read(what)

    assert time.monotonic() - began < 2
    assert not isinstance(caught.value, untax.SandboxLost)


async def test_f5_odd_names_and_wrong_kinds(box):
    """Also in the conformance suite, one by one."""
    for name in (b"with space", b"new\nline", b"-dash", b"x" * 255, b"\xff\xfe", b"\x01\x02"):
        await box.write(name, b"1")
        assert await box.read(name) == b"1"
    with pytest.raises((untax.FileError, untax.UsageError)):
        await box.write(b"x" * 256, b"")
    await box.mkdir("dir")
    await box.write("file", b"")
    await box.shell("echo secret >locked; chmod 000 locked")
    with pytest.raises(IsADirectoryError):
        await box.read("dir")
    with pytest.raises(NotADirectoryError):
        await box.list("file")
    with pytest.raises(PermissionError):
        await box.read("locked")
    with pytest.raises(PermissionError):
        await box.read("/proc/1/environ")


async def test_f6_a_file_over_the_cap_is_refused_without_being_held(box):
    """64 MiB is the documented cap of one read; parts of a larger file may be asked for."""
    from tests import hostview

    await box.shell("truncate -s $((64*1024*1024+1)) big")
    before = hostview.resident_kib()
    with pytest.raises(untax.TooLarge):
        await box.read("big")

    assert hostview.resident_kib() - before < 16 * 1024
    assert len(await box.read("big", offset=64 << 20, limit=100)) == 1


async def test_f16_cycles_leave_everything_as_before(engine, state_dir):
    """Mounts, groups, processes, namespaces, loop devices, descriptors and entries, exactly."""
    count = 1000 if LONG else 100
    watch = leftovers.Watch(marks=(str(state_dir), f"-{os.getpid()}-"), state_dir=state_dir)
    before = watch.take()
    for _ in range(count // 10):
        await asyncio.gather(*(_cycle(engine) for _ in range(10)))
    left = await asyncio.to_thread(watch.wait_like, before, 10)

    assert not left


async def _cycle(engine) -> None:
    async with engine.lease() as box:
        assert (await box.shell("echo x >f; (sleep 100 &); cat f")).stdout == b"x\n"


async def test_f16_a_whole_engine_leaves_its_directory_as_it_was(tmp_path):
    """Started, used and closed: descriptors and processes of this one as before, nothing of a sandbox in the directory."""
    state = tmp_path / "state"
    watch = leftovers.Watch(marks=(str(state),), state_dir=None)

    async def once() -> None:
        async with untax.Engine("namespace", state_dir=state) as engine, engine.lease() as box:
            await box.run(["true"])

    await once()
    before = watch.take()
    entries = {str(p.relative_to(state)) for p in state.rglob("*")}
    await once()

    assert not await asyncio.to_thread(watch.wait_like, before, 10)
    assert {str(p.relative_to(state)) for p in state.rglob("*")} <= entries
    assert not [e for e in entries if "sbx" in e or "upper" in e]


async def test_f20_a_prepared_state_directory_is_refused(tmp_path):
    """A link in its place is not followed; a directory that others may write is not used."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").write_text("")
    for name in ("link", "open", "file"):
        with pytest.raises(untax.UntaxError) as caught:
            async with untax.Engine("namespace", state_dir=tmp_path / name):
                pass
        assert "state" in str(caught.value)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("name", ["a,b", "a:b", "a\\b", "a=b", "a b", "x,upperdir=", "lower\n"])
async def test_f15_mount_options_cannot_be_injected_by_a_name(engine, tmp_path, name):
    """The image's directory has the name; it works as it stands or is refused."""
    import shutil

    from tests.images import small_directory

    root = tmp_path / name
    shutil.copytree(small_directory(), root, symlinks=True)
    try:
        async with engine.lease(untax.EnvSpec(image=f"dir:{root}")) as box:
            assert (await box.shell("echo x >/tmp/f; cat /tmp/f")).text == "x\n"
    except untax.SandboxLost:
        raise
    except untax.UntaxError:
        pass
    assert not [p for p in root.rglob("*") if p.name in ("f", "work", "upper")]
