"""Set-up commands in a real sandbox, frozen: what a lease finds of them, and what it does not."""

import asyncio
import os
import shlex

import pytest
from tests.gitserver import run_git
from tests.servers import package_index

import untax
from untax import substrates

SOURCE = "def answer():\n    return 41\n"


@pytest.fixture
def state(tmp_path):
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    return tmp_path / "state"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A repository with one package; its `.gitignore` knows nothing of compiled files."""
    work = tmp_path_factory.mktemp("project")
    run_git("init", "-q", "-b", "main", ".", cwd=work)
    (work / "package").mkdir()
    (work / "package" / "__init__.py").write_text(SOURCE)
    (work / "package" / "broken.py").write_text("this is no Python\n")
    run_git("add", "-A", cwd=work)
    run_git("commit", "-q", "-m", "one", cwd=work)
    return untax.Repo(str(work), run_git("rev-parse", "HEAD", cwd=work))


async def test_what_was_installed_is_there_compiled_and_the_caches_are_not(state, project, tmp_path):
    """From a package index on loopback that only the build may reach; the lease has no network at all."""
    with package_index(tmp_path, "untaxdemo", "1.0", "VALUE = 7\n") as index:
        certificate = shlex.quote(index.certificate.decode())
        pip = f".venv/bin/python -m pip install -q --no-compile --cert /tmp/c --index-url {index.url} untaxdemo"
        spec = untax.EnvSpec(
            repo=project, setup=(f"printf %s {certificate} > /tmp/c && python3 -m venv .venv && {pip}", "echo made > made; id -u > who")
        )
        async with untax.Engine(state_dir=state, setup_network=(index.pattern,)) as engine:
            async with engine.lease(spec) as box:
                program = "import untaxdemo, os; print(untaxdemo.VALUE, os.path.exists(untaxdemo.__cached__))"
                said = await box.run([".venv/bin/python", "-B", "-c", program])
                wheels = await box.shell("find / -xdev -name '*.whl' -path '*cache*' 2>/dev/null; ls -A /var/cache/untax /tmp 2>/dev/null")
                owner = await box.run(["stat", "-c", "%U", "made", "."])
                status = await box.run(["git", "status", "--porcelain"])
            ran_as = await _read(engine, spec, "who")

    assert said.check().text == "7 True\n"
    assert "whl" not in wheels.text and "pip" not in wheels.text
    assert owner.text == "user\nuser\n", "who works there can change what the set-up made"
    assert status.text == "?? .venv/\n?? made\n?? who\n", "compiled files are no change to the repository"
    assert ran_as == ("0\n" if os.geteuid() == 0 else "1000\n")


async def _read(engine, spec, name):
    async with engine.lease(spec) as box:
        return (await box.read(name)).decode()


async def test_builds_over_one_image_find_what_an_earlier_one_cached_and_leases_do_not(state):
    first = untax.EnvSpec(setup=('python3 -m pip cache dir && mkdir -p "$PIP_CACHE_DIR" && echo kept > "$PIP_CACHE_DIR/note"',))
    second = untax.EnvSpec(setup=('cp "$PIP_CACHE_DIR/note" /srv/found',))
    async with untax.Engine(state_dir=state) as engine:
        (await engine.prepare(first)).pin.close()
        async with engine.lease(second) as box:
            found = await box.read("/srv/found")
            cache = await box.shell("env | grep -c PIP_CACHE; ls -A /var/cache/untax")

    assert found == b"kept\n"
    assert "note" not in cache.text and "pip" not in cache.text and cache.text.startswith("0\n")


async def test_python_of_the_repository_is_compiled_and_an_edit_still_counts(state, project):
    import_it = ["python3", "-v", "-c", "import package; print(package.answer())"]
    async with untax.Engine(state_dir=state) as engine, engine.lease(untax.EnvSpec(repo=project, setup=("true",))) as box:
        compiled = await box.run(import_it)
        await box.write("package/__init__.py", SOURCE.replace("41", "42").encode())
        edited = await box.run(import_it)

    assert compiled.text == "41\n"
    assert b"__init__.cpython" in compiled.stderr and b"/workspace/package/__pycache__/" in compiled.stderr
    assert b"wrote '/workspace" not in compiled.stderr, "nothing was left to compile"
    assert edited.text == "42\n"


async def test_q10_128_leases_of_one_missing_stage_build_it_once(state, project):
    """The build writes a line into its cache, which outlives it; two engines of the same store ask at the same time."""
    spec = untax.EnvSpec(repo=project, setup=("echo built >> /var/cache/untax/journal; echo 1 > made",))

    async def read(engine):
        async with engine.lease(spec) as box:
            return await box.read("made")

    async with untax.Engine(state_dir=state) as one, untax.Engine(state_dir=state) as other:
        found = await asyncio.gather(*(read(engine) for engine in (one, other) for _ in range(64)))

    (journal,) = (state / "layers" / "caches").glob("*/journal")
    assert journal.read_text() == "built\n"
    assert found == [b"1\n"] * 128


async def test_a_set_up_that_fails_tells_every_lease_why_and_is_tried_again(state, project):
    spec = untax.EnvSpec(repo=project, setup=("echo the reason; false",))
    async with untax.Engine(state_dir=state) as engine:
        outcomes = await asyncio.gather(*(engine.acquire(spec) for _ in range(4)), return_exceptions=True)
        with pytest.raises(untax.StageFailed, match="the reason"):
            await engine.acquire(spec)
        async with engine.lease(untax.EnvSpec(repo=project)) as box:
            assert (await box.run(["git", "log", "--oneline"])).text.endswith("one\n")

    assert {type(one) for one in outcomes} == {untax.StageFailed}
    assert all(b"the reason" in one.log for one in outcomes)


async def test_f17_inside_a_sandbox_git_shows_nothing_newer(state, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    run_git("init", "-q", "-b", "trunk", ".", cwd=work)
    for at in range(3):
        (work / "f").write_text(f"{at}")
        run_git("add", "f", cwd=work)
        run_git("commit", "-q", "-m", f"number {at}", cwd=work)
        run_git("tag", f"v{at}", cwd=work)
    base = run_git("rev-parse", "HEAD~1", cwd=work)
    commands = [
        "git log --all --oneline",
        "git reflog --all",
        "git fsck --lost-found",
        "git stash list",
        "git for-each-ref",
        "git tag",
        "git remote -v",
    ]
    async with untax.Engine(state_dir=state) as engine, engine.lease(untax.EnvSpec(repo=untax.Repo(str(work), base))) as box:
        said = {command: await box.shell(command) for command in commands}
        objects = await box.shell("git rev-list --all --objects | wc -l; git cat-file --batch-all-objects --batch-check | wc -l")
        status = await box.shell("GIT_TRACE2_PERF=1 git status --porcelain 2>&1 | grep -o 'refresh/sum_scan:[0-9]*'")

    assert [line.partition(" ")[2] for line in said["git log --all --oneline"].text.splitlines()] == ["number 1", "number 0"]
    assert said["git for-each-ref"].text.split() == [base, "commit", "refs/heads/main"]
    assert [said[command].check().text for command in commands if command not in ("git log --all --oneline", "git for-each-ref")] == [
        ""
    ] * 5
    assert objects.text.split() == ["6", "6"]
    assert status.text == "refresh/sum_scan:0\n", "and reads no file to say that nothing has changed"


async def test_a_directory_of_wheels_serves_without_a_network(state, tmp_path):
    """pip finds them and asks no index; they are no part of the layer."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with package_index(wheels, "untaxdemo", "1.0", "VALUE = 7\n"):
        pass  # leaves its wheel in the directory
    spec = untax.EnvSpec(setup=("python3 -m venv --without-pip env && python3 -m pip --python env/bin/python install -q untaxdemo",))
    async with untax.Engine(state_dir=state, setup_wheels=wheels) as engine, engine.lease(spec) as box:
        said = await box.shell("env/bin/python -c 'import untaxdemo; print(untaxdemo.VALUE)'; ls -A /var/tmp")

    assert said.check().text == "7\n"


async def test_wheels_that_are_not_there_are_refused_at_once(tmp_path):
    with pytest.raises(untax.UsageError, match="pip download"):
        untax.Engine(state_dir=tmp_path, setup_wheels=tmp_path / "missing")
