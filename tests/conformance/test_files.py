"""File actions, on every substrate. Bytes in, bytes out; a file's trouble is an exception of its own kind."""

import asyncio
import contextlib
import errno
import os
import stat
import time

import pytest

import untax


async def test_what_is_written_is_read_back(box):
    data = bytes(range(256)) * 5000  # several frames

    await box.write("a.bin", data)

    assert await box.read("a.bin") == data
    assert (await box.run(["wc", "-c", "a.bin"])).stdout.split()[0] == str(len(data)).encode()


async def test_an_empty_file_is_a_file(box):
    await box.write("empty", b"")

    assert await box.read("empty") == b""
    assert (await box.stat("empty")).size == 0


async def test_a_file_gets_the_mode_asked_for(box):
    await box.write("run.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
    await box.write("plain", b"")

    assert (await box.run(["./run.sh"])).text == "ran\n"
    assert stat.S_IMODE((await box.stat("run.sh")).mode) == 0o755
    assert stat.S_IMODE((await box.stat("plain")).mode) == 0o644


async def test_writing_again_replaces_all_of_it(box):
    await box.write("f", b"long content")
    await box.write("f", b"short")

    assert await box.read("f") == b"short"


async def test_a_command_sees_a_write_at_once_and_the_reverse(box):
    await box.write("from-host", b"1")
    await box.shell("cat from-host >from-inside; echo 2 >>from-inside")

    assert await box.read("from-inside") == b"12\n"


@pytest.mark.parametrize(
    "name",
    [
        "with space",
        "-leading-dash",
        "new\nline",
        "quote'\"",
        "naïve-😀",
        "x" * 255,
        b"\xff\xfe-not-utf8",
        "$(id)",
        "*",
        "\\back",
    ],
    ids=ascii,
)
async def test_any_name_that_the_kernel_takes_works(box, name):
    """Written, listed, described, moved and removed, byte for byte."""
    text = os.fsdecode(name)
    await box.mkdir("d")
    path = b"d/" + os.fsencode(name)

    await box.write(path, b"content")
    listed = [entry.name for entry in await box.list("d")]

    assert listed == [text]
    assert await box.read("d/" + text) == b"content"
    assert (await box.stat(path)).size == 7
    await box.move(path, "d/other")
    await box.remove("d/other")
    assert not list(await box.list("d"))


async def test_a_name_that_is_too_long_is_refused(box):
    with pytest.raises((untax.FileError, untax.UsageError)):
        await box.write("x" * 256, b"")


@pytest.mark.parametrize("action", ["read", "stat", "list", "remove"])
async def test_a_missing_file_is_not_found(box, action):
    with pytest.raises(untax.NotFound) as caught:
        await getattr(box, action)("no/such/file")

    assert isinstance(caught.value, FileNotFoundError)
    assert "no/such/file" in str(caught.value)


async def test_a_directory_is_no_file_and_a_file_no_directory(box):
    await box.mkdir("d")
    await box.write("f", b"")

    with pytest.raises(IsADirectoryError):
        await box.read("d")
    with pytest.raises(IsADirectoryError):
        await box.write("d", b"")
    with pytest.raises(NotADirectoryError):
        await box.list("f")
    with pytest.raises(NotADirectoryError):
        await box.read("f/x")


async def test_no_permission_is_said_so(box, isolated):
    """The worker acts with the workload's own rights, no others."""
    await box.shell("echo x >locked; chmod 000 locked")

    with pytest.raises(PermissionError):
        await box.read("locked")
    with pytest.raises(PermissionError):
        await box.read("/proc/1/environ")


@pytest.mark.parametrize("special", ["fifo", "/dev/zero", "socket"])
async def test_a_read_of_something_that_is_no_file_ends(box, special):
    """A pipe without a writer, an endless device, a socket: a typed error within two seconds, never a wait."""
    if special == "fifo":
        await box.run(["mkfifo", "fifo"])
    elif special == "socket":
        made = "socket(S,1,1,0) && bind(S, pack('S a108', 1, 'socket')) or die"
        (await box.run(["perl", "-e", made])).check()
    began = time.monotonic()

    with pytest.raises(untax.UntaxError):
        await box.read(special)

    assert time.monotonic() - began < 2


async def test_a_listing_describes_every_kind_of_entry(box):
    await box.shell("mkdir d; cd d; echo hello >f; chmod 640 f; mkdir sub; ln -s f link; mkfifo pipe")
    entries = {entry.name: entry for entry in await box.list("d")}

    assert {name: e.type for name, e in entries.items()} == {"f": "file", "sub": "directory", "link": "link", "pipe": "fifo"}
    assert (entries["f"].size, stat.S_IMODE(entries["f"].mode)) == (6, 0o640)
    assert entries["link"].target == "f"
    assert abs(entries["f"].mtime_ns / 1e9 - time.time()) < 60


async def test_a_directory_of_thousands_is_listed_whole(box):
    await box.shell("mkdir many; cd many; seq 5000 | while read n; do : >f$n; done", timeout_s=60)

    assert len(list(await box.list("many"))) == 5000


async def test_directories_are_made_with_their_parents_when_asked(box):
    with pytest.raises(untax.NotFound):
        await box.mkdir("a/b/c", parents=False)
    await box.mkdir("a/b/c", parents=True)
    await box.mkdir("a/b/c", parents=True)  # as mkdir -p
    with pytest.raises(untax.Exists):
        await box.mkdir("a/b/c", parents=False)

    assert (await box.stat("a/b/c")).is_dir


async def test_a_tree_is_removed_only_when_asked(box):
    await box.shell("mkdir -p t/a/b; echo x >t/a/b/f; ln -s / t/root; chmod 500 t/a/b; chmod 700 t/a/b")
    with pytest.raises(untax.FileError):
        await box.remove("t")
    await box.remove("t", recursive=True)

    assert "t" not in [entry.name for entry in await box.list(".")]
    assert (await box.run(["ls", "/"])).exit_code == 0  # the link was removed, not followed


async def test_a_move_replaces_only_when_asked(box):
    await box.write("a", b"a")
    await box.write("b", b"b")

    with pytest.raises(untax.Exists):
        await box.move("a", "b", overwrite=False)
    assert await box.read("b") == b"b"
    await box.move("a", "b", overwrite=True)

    assert await box.read("b") == b"a"
    with pytest.raises(untax.NotFound):
        await box.stat("a")


async def test_a_link_can_be_described_or_followed(box):
    await box.shell("echo 12345 >f; ln -s f l; ln -s nowhere broken")

    assert (await box.stat("l")).type in ("link", "file")
    assert (await box.stat("l", follow=False)).type == "link"
    assert (await box.stat("l", follow=True)).size == 6
    with pytest.raises(untax.NotFound):
        await box.stat("broken", follow=True)


async def test_paths_stay_inside_the_sandbox(box, isolated, tmp_path):
    """Dots and links lead at most to the sandbox's own root."""
    secret = tmp_path / "secret"
    secret.write_text("host")
    await box.shell(f"ln -s {secret} s; ln -s /etc d")

    for path in ("s", str(secret), "../../../../../.." + str(secret)):
        with pytest.raises(untax.NotFound):
            await box.read(path)
    with contextlib.suppress(untax.FileError):  # or it lands inside
        await box.write(f"../../../../..{secret}", b"changed")
    assert secret.read_text() == "host"


async def test_file_actions_do_not_wait_for_a_command(box):
    """They share the channel, not a queue."""
    task = asyncio.create_task(box.run(["sleep", "5"], timeout_s=20))
    began = time.monotonic()
    await box.write("f", b"x")
    assert await box.read("f") == b"x"

    assert time.monotonic() - began < 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_many_writes_at_once_do_not_mix(box):
    await asyncio.gather(*(box.write(f"w{n}", bytes([n]) * 300_000) for n in range(20)))
    found = await asyncio.gather(*(box.read(f"w{n}") for n in range(20)))

    assert [set(data) for data in found] == [{n} for n in range(20)]
    assert {len(data) for data in found} == {300_000}


async def test_a_rewrite_keeps_the_mode_of_a_file(box):
    """A script that is edited stays executable; a mode that is given is set."""
    await box.write("script", b"#!/bin/sh\necho one\n", mode=0o755)
    await box.write("script", b"#!/bin/sh\necho two\n")
    kept = await box.stat("script")
    await box.write("script", b"#!/bin/sh\necho three\n", mode=0o600)
    given = await box.stat("script")
    await box.write("new", b"")
    fresh = await box.stat("new")

    assert [entry.mode & 0o7777 for entry in (kept, given, fresh)] == [0o755, 0o600, 0o644]


async def test_a_file_can_be_marked_and_its_marks_read(box):
    """Attributes of one prefix are replaced as a whole; others, and other files, stay as they are."""
    await box.write("marked", b"x")
    await box.write("plain", b"x")
    try:
        await box.mark("marked", prefix="user.test.", attributes={"a": "1", "b": "two=2"})
    except untax.FileError as exc:
        assert exc.errno == errno.EOPNOTSUPP  # a file system without them, such as tmpfs before Linux 6.6
        return
    await box.mark("marked", prefix="user.other.", attributes={"c": "3"})
    assert await box.marks(["marked", "plain", "missing"], "user.test.") == [{"a": "1", "b": "two=2"}, {}, {}]
    await box.mark("marked", prefix="user.test.")
    assert await box.marks(["marked"], "user.test.") == [{}]
    assert await box.marks(["marked"], "user.other.") == [{"c": "3"}]
    with pytest.raises(untax.NotFound):
        await box.mark("missing", prefix="user.test.", attributes={"a": "1"})
