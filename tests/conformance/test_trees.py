"""Uploads and downloads of trees, on every substrate. Both ends may be hostile; nothing leaves the directory it belongs to."""

import io
import os
import stat
import tarfile

import pytest

import untax


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "sub/deeper").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "a.txt").write_bytes(b"hello")
    (root / "sub/run.sh").write_bytes(b"#!/bin/sh\necho ran\n")
    (root / "sub/run.sh").chmod(0o755)
    (root / "sub/deeper/big.bin").write_bytes(bytes(range(256)) * 8192)  # 2 MiB
    (root / "zero").write_bytes(b"")
    (root / "link").symlink_to("sub/run.sh")
    with open(os.fsencode(root) + b"/\xff\xfename", "wb") as odd:
        odd.write(b"odd")
    (root / ("n" * 200)).write_bytes(b"long name")
    deep = root / "/".join(["d" * 60] * 5)
    deep.mkdir(parents=True)
    (deep / "leaf").write_bytes(b"deep")
    return root


def described(root) -> dict[bytes, tuple]:
    found = {}
    top = os.fsencode(root)
    for where, directories, files in os.walk(top):
        for name in directories + files:
            path = os.path.join(where, name)
            info = os.lstat(path)
            if stat.S_ISLNK(info.st_mode):
                found[os.path.relpath(path, top)] = ("link", os.readlink(path))
            elif stat.S_ISREG(info.st_mode):
                with open(path, "rb") as file:
                    found[os.path.relpath(path, top)] = (stat.S_IMODE(info.st_mode), file.read())
            else:
                found[os.path.relpath(path, top)] = (stat.S_IMODE(info.st_mode), stat.S_IFMT(info.st_mode))
    return found


async def test_a_tree_goes_up_and_comes_back_the_same(box, tree, tmp_path):
    """Names, kinds, modes and contents."""
    await box.upload(tree, "up")
    ran = await box.run(["./up/link"])
    await box.download("up", tmp_path / "back")

    assert ran.text == "ran\n"
    assert described(tmp_path / "back") == described(tree)


async def test_one_file_goes_up_and_comes_back(box, tmp_path):
    (tmp_path / "one").write_bytes(b"x" * 3_000_000)
    await box.upload(tmp_path / "one", "there")
    await box.download("there", tmp_path / "again")

    assert (await box.stat("there")).size == 3_000_000
    assert (tmp_path / "again").read_bytes() == (tmp_path / "one").read_bytes()


async def test_thousands_of_small_files_arrive(box, tmp_path):
    (tmp_path / "many").mkdir()
    for n in range(2000):
        (tmp_path / "many" / f"f{n}").write_bytes(b"%d" % n)
    await box.upload(tmp_path / "many", "many")

    assert (await box.shell("cat many/* | wc -c; ls many | wc -l")).text.split() == [str(sum(len(str(n)) for n in range(2000))), "2000"]


async def test_an_upload_of_something_missing_is_the_caller_s_mistake(box, tmp_path):
    with pytest.raises((untax.UsageError, FileNotFoundError)):
        await box.upload(tmp_path / "missing", "x")
    with pytest.raises(untax.NotFound):
        await box.download("missing", tmp_path / "y")
    assert not (tmp_path / "y").exists()


async def test_a_download_follows_no_link_out_of_the_local_directory(box, tmp_path):
    """What the workload named so that it would land elsewhere on the host does not."""
    outside = tmp_path / "outside"
    outside.mkdir()
    await box.shell(f"mkdir t; ln -s {outside} t/d; ln -s ../../outside t/e; echo x >t/f")
    await box.download("t", tmp_path / "in")

    assert list(outside.iterdir()) == []
    assert (tmp_path / "in" / "f").read_bytes() == b"x\n"


async def test_a_download_skips_or_refuses_what_is_no_file(box, tmp_path):
    """A pipe or a socket never makes the caller wait."""
    await box.shell("mkdir t; mkfifo t/pipe; echo x >t/f")
    try:
        await box.download("t", tmp_path / "t", timeout_s=10)
    except untax.ActionTimeout:
        raise
    except untax.UntaxError:
        return
    assert (tmp_path / "t" / "f").read_bytes() == b"x\n"


def hostile(*members: tuple[str, dict]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, fields in members:
            info = tarfile.TarInfo(name)
            data = fields.pop("data", b"")
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return raw.getvalue()
