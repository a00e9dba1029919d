"""What a grader takes from a box that may lie, and where it puts it."""

import os
import stat

import pytest

import untax
from untax import grader
from untax.channel import wire
from untax.testing import LayeredFake


def is_taken(pattern, path):
    return grader.checked((pattern,))[0].is_match(path.split("/"))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("src/**", ["src/a", "src/b/c", "src/b/c/d.py"], ["src", "srcs/a", "a/src/b", "src/.git", "src/.git/config", "src/a/.x"]),
        ("**", ["a", "a/b/c"], [".git", ".git/config", "a/.b"]),
        ("**/*.py", ["a.py", "x/y/a.py"], ["a.pyc", ".a.py", ".x/a.py", "x/.a.py"]),
        ("*.py", ["a.py"], ["x/a.py", ".py", ".a.py"]),
        ("src/*/x?.[ch]", ["src/a/x1.c", "src/b/xy.h"], ["src/a/b/x1.c", "src/a/x.c", "src/a/x1.d"]),
        ("src/[!a]*", ["src/b"], ["src/a", "src/.b"]),
        (".github/**", [".github/w/a.yml"], [".github/.x"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["a/x", "b"]),
        ("a/**/**", ["a/x", "a/x/y"], ["b"]),
        ("weird [name", ["weird [name"], ["weird n"]),
        ("a+b(c).py", ["a+b(c).py"], ["aab(c).py", "a+bc.py"]),
        ("new\nline", ["new\nline"], ["new"]),
        ("[]]x", ["]x"], ["[]x"]),
    ],
)
def test_a_pattern_matches_as_in_a_shell(pattern, yes, no):
    assert [path for path in yes if not is_taken(pattern, path)] == []
    assert [path for path in no if is_taken(pattern, path)] == []


def test_only_directories_that_could_hold_a_match_are_gone_through():
    (pattern,) = grader.checked(("src/*/deep/**",))
    assert [pattern.may_lie_below(path.split("/")) for path in ("src", "src/a", "src/a/deep", "src/a/deep/er")] == [True] * 4
    assert not any(pattern.may_lie_below(path.split("/")) for path in ("tests", "src/a/shallow", "src/.git"))


def test_a_pattern_does_not_take_forever():
    """Its cost is places times names, however its stars lie."""
    (pattern,) = grader.checked(("/".join(["**", "*a*"] * 12) + "/b",))
    assert not pattern.is_match(["a"] * 60)


@pytest.fixture
def image(tmp_path):
    root = tmp_path / "image"
    (root / "workspace/tests").mkdir(parents=True)
    (root / "workspace/tests/test_it.py").write_text("honest")
    return root


@pytest.fixture
def fake(tmp_path):
    return LayeredFake(tmp_path / "fake")


@pytest.fixture
async def engine(fake, tmp_path):
    async with untax.Engine(fake, state_dir=tmp_path / "state") as engine:
        yield engine


@pytest.fixture
def spec(image):
    return untax.EnvSpec(image=f"dir:{image}")


async def test_f18_no_link_of_the_spec_s_own_leads_a_file_elsewhere(fake, engine, spec, image):
    """The image has links in src/ that lead to the tests; the workload put its own files and directories in their place."""
    (image / "workspace/src").mkdir()
    (image / "workspace/src/conf").symlink_to("../tests")
    (image / "workspace/src/test.py").symlink_to("../tests/test_it.py")
    (image / "workspace/src/was_a_directory").mkdir()
    (image / "workspace/src/was_a_directory/x").write_text("")
    async with engine.lease(spec) as box:
        for name in ("src/conf", "src/test.py"):
            await box.remove(name)
        await box.remove("src/was_a_directory", recursive=True)
        await box.write("src/conf/test_it.py", b"planted")
        await box.write("src/conf/sub/x.py", b"planted")
        await box.write("src/test.py", b"planted")
        await box.write("src/was_a_directory", b"now a file")
        async with engine.grader(box) as clean:
            assert await clean.read("tests/test_it.py") == b"honest"
            assert [entry.name for entry in await clean.list("tests")] == ["test_it.py"]
            assert await clean.read("src/conf/test_it.py") == b"planted"
            assert await clean.read("src/test.py") == b"planted"
            assert await clean.read("src/was_a_directory") == b"now a file"
            assert (await clean.stat("src/conf", follow=False)).type == "directory"


async def test_links_and_devices_are_not_taken(fake, engine, spec):
    async with engine.lease(spec) as box:
        await box.write("src/real", b"1")
        upper = fake.sandboxes[-1].upper / "workspace/src"
        (upper / "link").symlink_to("/etc/passwd")
        (upper / "directory").symlink_to("..")
        os.mkfifo(upper / "pipe")
        async with engine.grader(box) as clean:
            assert [entry.name for entry in await clean.list("src")] == ["real"]


@pytest.mark.parametrize(("mode", "kept"), [(0o4755, 0o755), (0o600, 0o644), (0o777, 0o755), (0o6711, 0o755), (0o466, 0o644)])
async def test_a_file_is_plain_or_executable_and_nothing_more(engine, spec, mode, kept):
    async with engine.lease(spec) as box:
        await box.write("src/a", b"1", mode=mode)
        async with engine.grader(box) as clean:
            assert (await clean.stat("src/a")).mode == kept


@pytest.mark.parametrize("name", ["../tests/test_it.py", "..", ".", "", "a/b", "/etc/x", "a\0b"])
async def test_a_directory_entry_that_is_no_name_is_nonsense(fake, engine, spec, name, monkeypatch):
    """The cell of the box is the workload's to replace: it may answer anything."""
    async with engine.lease(spec) as box:
        await box.write("src/a", b"1")
        entry = wire.blob(name.encode()) + b"f" + b"\0" * 28 + wire.blob(b"")
        monkeypatch.setattr(box._sandbox.cell, "_file_action", lambda kind, reader: wire.u8(0) + wire.u32(1) + entry)
        before = len(fake.sandboxes)
        with pytest.raises(untax.ProtocolError):
            await engine.grader(box, take=("**",))
        assert len(fake.sandboxes) == before


async def test_a_file_that_says_it_is_small_and_is_not_counts_as_what_came(engine, spec, monkeypatch):
    monkeypatch.setattr(grader, "MOST_BYTES", 1000)
    async with engine.lease(spec) as box:
        await box.write("src/a", b"x" * 600)
        real = box._sandbox.files.stat

        def small(path):
            found = real(path)
            return os.stat_result([*found[:6], 0 if stat.S_ISREG(found.st_mode) else found.st_size, *found[7:]])

        monkeypatch.setattr(box._sandbox.files, "stat", small)
        async with engine.grader(box) as clean:
            assert await clean.read("src/a") == b"x" * 600
        await box.write("src/b", b"x" * 600)
        with pytest.raises(untax.TooLarge):
            await engine.grader(box)


async def test_too_many_files_too_many_bytes_or_too_deep_is_too_large(fake, engine, spec, monkeypatch):
    async with engine.lease(spec) as box:
        for n in range(5):
            await box.write(f"src/{n}", b"x" * 100)
        for name, most in (("MOST_FILES", 4), ("MOST_BYTES", 499), ("_MOST_ENTRIES", 4), ("_DEEPEST", 1)):
            with monkeypatch.context() as patch:
                patch.setattr(grader, name, most)
                with pytest.raises(untax.TooLarge):
                    await engine.grader(box)
        async with engine.grader(box):
            pass
    assert not fake.live


async def test_a_grader_that_cannot_be_filled_is_given_back(fake, engine, spec, monkeypatch):
    async with engine.lease(spec) as box:
        await box.write("src/a", b"1")

        async def fail(box, taken):
            raise untax.PermissionDenied(13, "no", "src")

        monkeypatch.setattr(grader, "place_files", fail)
        with pytest.raises(untax.PermissionDenied):
            await engine.grader(box)
        assert fake.live == {box.id}
