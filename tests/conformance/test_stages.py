"""What a spec asks to have in place is there when the lease begins, on every substrate, built ahead of it or not."""

import subprocess
from dataclasses import replace

import pytest

import untax
from untax.core.substrate import Layered


@pytest.fixture
def repo(tmp_path):
    """A repository with a past and a future around the commit that is wanted."""
    place = tmp_path / "origin"

    def git(*argv):
        return subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", place, *argv], check=True, capture_output=True, text=True
        ).stdout.strip()

    place.mkdir()
    git("init", "-q", "-b", "trunk")
    for n, name in enumerate(("past", "wanted", "future")):
        (place / "file").write_text(name)
        (place / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (place / "run.sh").chmod(0o755)
        git("add", ".")
        git("commit", "-q", "-m", name)
        if n == 1:
            commit = git("rev-parse", "HEAD")
    git("tag", "the-fix")
    return untax.Repo(str(place), commit)


async def test_a_repository_is_in_the_working_directory_at_its_commit(engine, spec, repo):
    async with engine.lease(replace(spec, repo=repo), files={"late": b"1"}) as box:
        assert await box.read("file") == b"wanted"
        assert (await box.run(["./run.sh"])).text == "ran\n"
        assert sorted(entry.name for entry in await box.list(".")) == [".git", "file", "late", "run.sh"]
        await box.write("file", b"changed")
        await box.reset()
        assert (await box.read("file"), await box.read("late")) == (b"wanted", b"1")


async def test_set_up_commands_have_run_in_the_repository(engine, spec, repo):
    wanted = replace(spec, repo=repo, setup=("cat file >>made", "./run.sh >>made; umask 077; mkdir -p sub; echo x >sub/y"))
    for _ in range(2):
        async with engine.lease(wanted, env={"LATE": "1"}) as box:
            assert await box.read("made") == b"wantedran\n"
            await box.write("made", b"mine now")  # the user's, whoever ran the set-up
            await box.write("sub/z", b"")


async def test_a_set_up_command_that_fails_is_told_with_its_words(engine, spec):
    broken = replace(spec, setup=("echo fine", "echo because >&2; exit 3"))
    with pytest.raises((untax.StageFailed, untax.CreateError), match="because"):
        await engine.acquire(broken)
    if isinstance(engine.substrate, Layered):
        with pytest.raises(untax.StageFailed) as failed:
            await engine.acquire(broken)
        assert failed.value.stage == "deps"
        assert failed.value.log.splitlines() == [b"$ echo fine", b"fine", b"$ echo because >&2; exit 3", b"because"]


async def test_a_commit_that_is_not_there_is_told(engine, spec, repo):
    with pytest.raises(untax.StageError) as failed:
        await engine.acquire(replace(spec, repo=untax.Repo(repo.url, "0" * 40)))
    assert failed.value.stage == "repo"
