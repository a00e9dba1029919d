"""Repositories at a commit, through real git: from paths, bundles and a smart HTTP server of our own on loopback."""

import asyncio
import contextlib
import json
import os
import shutil
import stat
import subprocess
import threading
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from tests import hostview
from tests.gitserver import git_server, run_git
from tests.unit.layers import private

from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.core.root import Root
from untax.core.spec import EnvSpec, Repo
from untax.core.stage import Identity
from untax.layers import marks, mirrors, repo
from untax.layers.build import Stages
from untax.layers.copy import copy_tree
from untax.layers.store import LayerStore

KIND = marks.of_this_process()
CANARY = "the-fix-that-nobody-may-see"
DATE = "2020-02-02T02:02:02Z"


class Here:
    def __init__(self, path):
        self.path = path

    async def identify(self):
        return Identity(f"dir:{self.path}", is_portable=False)

    async def root(self):
        return Root(layers=(str(self.path),))


class History:
    """A repository with a past, a commit to work from, and everything that could give the future away."""

    def __init__(self, directory: Path) -> None:
        self.bare = directory / "served" / "project.git"
        self.work = work = directory / "work"
        work.mkdir(parents=True)
        self.bare.parent.mkdir()

        def git(*argv):
            return run_git(*argv, cwd=work, GIT_AUTHOR_DATE=DATE, GIT_COMMITTER_DATE=DATE)

        git("init", "-q", "-b", "trunk", ".")
        (work / "src").mkdir()
        (work / "src" / "a.py").write_text("x = 1\n" * 500)
        (work / "run.sh").write_text("#!/bin/sh\n")
        (work / "run.sh").chmod(0o755)
        os.symlink("src/a.py", work / "link")
        (work / "crlf.txt").write_bytes(b"a\r\nb\r\n")
        (work / ".gitattributes").write_text("crlf.txt eol=crlf\n*.bin filter=lfs\n")
        (work / "data.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        git("add", "-A")
        git("commit", "-q", "-m", "first")
        (work / "src" / "b.py").write_text("bug = True\n")
        git("add", "-A")
        git("commit", "-q", "-m", "second")
        git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
        git("commit", "-q", "-m", "base, with a submodule")
        self.base = git("rev-parse", "HEAD")
        self.past = git("rev-list", "HEAD").split()
        git("branch", "old", "HEAD~1")

        def future(name):
            (work / "src" / "b.py").write_text(f"# {CANARY} {name}\n")
            git("commit", "-q", "-a", "-m", f"{CANARY} {name}")
            return git("rev-parse", "HEAD")

        self.future = [future("one")]
        git("tag", "-a", "v2", "-m", CANARY)
        git("notes", "add", "-m", CANARY, self.base)
        git("checkout", "-q", "-b", f"feature-{CANARY}", self.base)
        self.future.append(future("two"))
        (work / "src" / "a.py").write_text(CANARY)
        git("stash")
        (work / "loose").write_text(f"{CANARY} dangling")
        git("hash-object", "-w", "loose")
        (work / "loose").unlink()
        git("checkout", "-q", "trunk")
        self.future.append(future("three"))
        git("repack", "-q", "-a", "-d")  # everything that has a ref or a reflog in one pack
        git("clone", "-q", "--mirror", str(work), str(self.bare))
        self.bundle = directory / "project.bundle"
        git("bundle", "create", "-q", str(self.bundle), "--all")


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    return History(tmp_path_factory.mktemp("history"))


@pytest.fixture
def served(history):
    with git_server(history.bare.parent) as server:
        yield server


@pytest.fixture
def stages(tmp_path):
    return stages_in(tmp_path)


def stages_in(tmp_path, name="layers"):
    image = tmp_path / "image"
    image.mkdir(exist_ok=True)
    return Stages(LayerStore(tmp_path / name, marks=KIND), find=lambda _: Here(image))


def url_of(history, served, way):
    return {
        "path": str(history.work),
        "file": f"file://{history.bare}",
        "bundle": str(history.bundle),
        "http": f"{served.url}/project.git",
    }[way]


def inside(tree: Path, *argv: str) -> str:
    return run_git(*argv, cwd=tree)


def files_of(tree: Path) -> set[str]:
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if not path.is_dir() or path.is_symlink()}


# ---- nothing newer ----


@pytest.mark.parametrize("depth", [None, 1, 2])
@pytest.mark.parametrize("way", ["path", "file", "bundle", "http"])
async def test_f17_nothing_newer_than_the_commit_is_there_in_any_form(history, served, stages, way, depth):
    url = url_of(history, served, way)
    made = await stages.repo_tree(Repo(url, history.base, depth))
    tree = made.path
    past = history.past[:depth]

    assert inside(tree, "rev-parse", "HEAD") == history.base
    assert inside(tree, "symbolic-ref", "HEAD") == "refs/heads/main"
    assert inside(tree, "log", "--all", "--format=%H").split() == past
    assert inside(tree, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    for silent in (("reflog", "--all"), ("stash", "list"), ("remote", "-v"), ("tag",), ("notes", "list"), ("status", "--porcelain")):
        assert inside(tree, *silent) == "", silent
    assert inside(tree, "fsck", "--full", "--lost-found", "--unreachable", "--no-progress") == ""
    everything = inside(tree, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    reachable = inside(tree, "rev-list", "--all", "--objects", "--no-object-names").split()
    assert sorted(everything) == sorted(reachable)
    assert not set(everything) & set(history.future)
    contents = inside(tree, "cat-file", "--batch", "--batch-all-objects", "--buffer")
    assert "bug = True" in contents and CANARY not in contents
    for path in sorted(tree.rglob("*")):
        if path.is_file() and not path.is_symlink():
            assert CANARY.encode() not in path.read_bytes() and url.encode() not in path.read_bytes(), path
    left = {name for name in files_of(tree / ".git") if not name.startswith("objects/pack/")}
    shallow = {"shallow"} if depth is not None and depth < len(history.past) else set()
    assert left == {"HEAD", "config", "index", "info/exclude", "refs/heads/main"} | shallow
    assert {name.rpartition(".")[2] for name in os.listdir(tree / ".git/objects/pack")} == {"pack", "idx"}


async def test_f17_a_mirror_that_knows_the_future_gives_none_of_it(history, served, stages):
    """The next stage of the same repository comes from a mirror that has everything."""
    url = f"{served.url}/project.git"
    newest = await stages.repo_tree(Repo(url, history.future[2]))
    base = await stages.repo_tree(Repo(url, history.base))
    again = served.packs
    shallow = await stages.repo_tree(Repo(url, history.base, 1))

    assert CANARY in (newest.path / "src/b.py").read_text()
    assert inside(base.path, "log", "--all", "--format=%H").split() == history.past
    assert inside(shallow.path, "log", "--all", "--format=%H").split() == history.past[:1]
    for tree in (base.path, shallow.path):
        assert CANARY not in inside(tree, "cat-file", "--batch", "--batch-all-objects", "--buffer")
    assert served.packs == again, "a mirror with the whole history serves the short ones too"


async def test_the_work_tree_is_as_git_makes_it(history, stages):
    tree = (await stages.repo_tree(Repo(str(history.work), history.base))).path

    assert files_of(tree) - files_of(tree / ".git") >= {"src/a.py", "src/b.py", "run.sh", "link", "crlf.txt", "data.bin", ".gitattributes"}
    assert os.readlink(tree / "link") == "src/a.py"
    assert (stat.S_IMODE((tree / "run.sh").stat().st_mode), stat.S_IMODE((tree / "src/a.py").stat().st_mode)) == (0o755, 0o644)
    assert (tree / "crlf.txt").read_bytes() == b"a\r\nb\r\n"
    assert (tree / "data.bin").read_text().startswith("version https://git-lfs"), "a pointer stays a pointer"
    assert list((tree / "sub").iterdir()) == []
    when = int(time.mktime(time.strptime(DATE, "%Y-%m-%dT%H:%M:%SZ"))) - time.timezone
    assert {path.lstat().st_mtime for path in tree.rglob("*") if path.name != "index"} == {float(when)}
    who = (1000, 1000) if KIND == "trusted" else (os.geteuid(), os.getegid())
    assert {(path.lstat().st_uid, path.lstat().st_gid) for path in (tree, *tree.rglob("*"))} == {who}


async def test_the_same_commit_is_the_same_layer_whatever_image_it_stands_on(history, tmp_path):
    store = LayerStore(tmp_path / "layers", marks=KIND)
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made = Stages(store, find=lambda _, name=name: Here(tmp_path / name))
        found.append(await made.root(EnvSpec(image=f"dir:{name}", repo=Repo(str(history.bare), history.base))))

    assert found[0].stages[-1].key != found[1].stages[-1].key
    assert found[0].root.layers[1:] == found[1].root.layers[1:]
    assert len(store.layers()) == 1


async def test_git_status_inside_reads_no_contents_after_a_copy_and_still_sees_every_change(history, stages, tmp_path):
    """Other inodes, other change times, another owner, another device perhaps: nothing that git is told to look at."""
    made = await stages.repo_tree(Repo(str(history.work), history.base))
    copy = tmp_path / "copy"
    copy.mkdir()
    copy_tree(made.path, copy)
    if os.geteuid() == 0:
        for path in (copy, *copy.rglob("*")):
            os.chown(path, 4321, 4321, follow_symlinks=False)
    index = (copy / ".git/index").read_bytes()
    events = tmp_path / "events"
    clean = run_git("status", "--porcelain", cwd=copy, GIT_TRACE2_EVENT=str(events))
    scans = [json.loads(line) for line in events.read_text().splitlines()]

    assert clean == ""
    assert {event["key"]: event["value"] for event in scans if event.get("category") == "index" and event["event"] == "data"}[
        "refresh/sum_scan"
    ] == "0"
    if shutil.which("strace"):  # git's own word for it, checked against the kernel's
        trace = ["strace", "-f", "-e", "trace=openat", "git", "-c", "safe.directory=*", "status"]
        traced = subprocess.run(trace, cwd=copy, capture_output=True, text=True, check=True)
        assert ".git/index" in traced.stderr and "a.py" not in traced.stderr
    assert (copy / ".git/index").read_bytes() == index, "nothing to refresh, so nothing was written"
    (copy / "src/b.py").write_text("bug = Fals\n")  # as many bytes as before
    (copy / "new").touch()
    assert run_git("status", "--porcelain", cwd=copy).split("\n") == ["M src/b.py", "?? new"]
    run_git("commit", "-q", "-a", "-m", "works", cwd=copy)
    assert run_git("log", "-1", "--format=%s", cwd=copy) == "works"


async def test_compiled_python_is_no_change_to_a_repository(history, stages, tmp_path):
    made = await stages.repo_tree(Repo(str(history.work), history.base))
    copy = tmp_path / "copy"
    copy.mkdir()
    copy_tree(made.path, copy)
    (copy / "src/__pycache__").mkdir()
    (copy / "src/__pycache__/a.cpython-311.pyc").touch()

    assert run_git("status", "--porcelain", cwd=copy) == ""


# ---- where it lies ----


async def test_the_layer_has_the_sandboxs_own_directories_and_hides_what_the_image_has_in_its_place(history, tmp_path):
    image = tmp_path / "image"
    (image / "opt" / "task" / ".git").mkdir(parents=True)
    (image / "opt").chmod(0o711)
    made = await stages_in(tmp_path).root(EnvSpec(image="dir:x", repo=Repo(str(history.bare), history.base), workdir="/opt/task/"))
    layer = Path(made.root.layers[-1])

    assert made.root.is_furnished and set(made.built) == {"repo"}
    assert stat.S_IMODE((layer / "opt").stat().st_mode) == 0o711, "as the image has it"
    assert os.getxattr(layer / "opt/task", marks.opaque(KIND)) == b"y"
    assert sorted(os.listdir(layer)) == ["home", "opt", "workspace"]
    if KIND == "trusted":
        owners = {str(path): path.stat().st_uid for path in map(layer.joinpath, ("opt", "opt/task", "home", "home/user", "workspace"))}
        assert list(owners.values()) == [0, 1000, 0, 1000, 1000]


async def test_a_work_tree_in_the_users_home_or_around_it(history, tmp_path):
    made = stages_in(tmp_path)
    home = await made.root(EnvSpec(image="dir:x", repo=Repo(str(history.bare), history.base), workdir="/home/user/project"))
    around = await made.root(EnvSpec(image="dir:x", repo=Repo(str(history.bare), history.base), workdir="/home"))

    assert (Path(home.root.layers[-1]) / "home/user/project/run.sh").exists()
    assert inside(Path(around.root.layers[-1]) / "home", "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("place", "words"),
    [("/", "root"), ("/tmp/x", "own"), ("/proc", "own"), ("/a/../etc", r"\.\."), ("/through/x", "link"), ("/file/x", "link or a file")],
)
async def test_places_where_no_work_tree_can_be(history, tmp_path, place, words):
    (tmp_path / "image").mkdir()
    os.symlink("/etc", tmp_path / "image" / "through")
    (tmp_path / "image" / "file").touch()
    with pytest.raises(UsageError, match=words):
        await stages_in(tmp_path).root(EnvSpec(image="dir:x", repo=Repo(str(history.bare), history.base), workdir=place))


# ---- what is asked for ----


@pytest.mark.parametrize(
    "url",
    [
        "ext::sh -c touch% /tmp/x",
        "git://127.0.0.2/x",
        "relative/path",
        "http://",
        "ftp://h/x",
        "http://h/a\nb",
        "ssh://-oProxyCommand=x/y",
        "fd::17",
    ],
)
async def test_a9_a_url_of_no_known_form_is_refused_before_anything_runs(stages, url):
    with pytest.raises(UsageError, match=r"Repo\.url"):
        await stages.repo_tree(Repo(url, "0" * 40))


@pytest.mark.parametrize("commit", ["main", "v1.0", "HEAD", "abc", "HEAD~1", "0" * 41, "refs/heads/main", "deadbeef^{commit}", "a\nb"])
async def test_only_a_hash_names_a_commit(history, stages, commit):
    with pytest.raises(UsageError, match="not a commit hash"):
        await stages.repo_tree(Repo(str(history.bare), commit))


async def test_an_abbreviated_hash_is_enough_unless_it_may_be_several(history, stages, tmp_path):
    short = await stages.repo_tree(Repo(str(history.bare), history.base[:9].upper()))
    assert inside(short.path, "rev-parse", "HEAD") == history.base

    many = tmp_path / "many"
    many.mkdir()
    run_git("init", "-q", ".", cwd=many)
    tree = run_git("hash-object", "-t", "tree", "-w", "/dev/null", cwd=many)
    seen, parent = {}, ()
    for at in range(2000):
        one = run_git("commit-tree", tree, "-m", str(at), *parent, cwd=many)
        parent = ("-p", one)
        if one[:4] in seen:
            break
        seen[one[:4]] = one
    run_git("update-ref", "refs/heads/main", one, cwd=many)
    with pytest.raises(UsageError, match="give more digits"):
        await stages.repo_tree(Repo(str(many), one[:4]))
    empty = await stages.repo_tree(Repo(str(many), one))
    assert os.listdir(empty.path) == [".git"] and inside(empty.path, "status", "--porcelain") == ""


async def test_f15_names_that_mean_something_to_a_shell_a_url_or_a_mount_are_names(history, tmp_path):
    odd = tmp_path / "o d,d:=\\%41$(id)#?'\"\nname"
    shutil.copytree(history.bare, odd)
    with pytest.raises(UsageError, match="control characters"):
        await stages_in(tmp_path).repo_tree(Repo(str(odd), history.base))
    plain = odd.rename(tmp_path / odd.name.replace("\n", ""))
    place = "/a b,c:d\\e=f/upperdir=/$(id)"
    made = await stages_in(tmp_path).root(EnvSpec(image="dir:x", repo=Repo(str(plain), history.base), workdir=place))
    quoted = await stages_in(tmp_path).repo_tree(Repo("file://" + quote(str(plain)), history.base))

    assert inside(Path(made.root.layers[-1]) / place[1:], "rev-parse", "HEAD") == history.base
    assert inside(quoted.path, "rev-parse", "HEAD") == history.base


async def test_a_path_may_be_named_from_where_the_program_works(history, stages, monkeypatch):
    monkeypatch.chdir(history.work.parent)
    made = await stages.repo_tree(Repo("work", history.base))

    assert inside(made.path, "rev-parse", "HEAD") == history.base


async def test_a_repository_that_is_shallow_itself_gives_what_it_has(history, stages, tmp_path):
    clone = tmp_path / "clone"
    run_git("clone", "-q", "--depth", "1", "--branch", "old", f"file://{history.bare}", str(clone), cwd=tmp_path)
    tip = run_git("rev-parse", "HEAD", cwd=clone)
    with pytest.raises(StageFailed, match="depth="):
        await stages.repo_tree(Repo(str(clone), tip))
    made = await stages.repo_tree(Repo(str(clone), tip, 1))

    assert inside(made.path, "log", "--all", "--format=%H").split() == [tip]


async def test_a_commit_that_is_not_there_is_the_recipes_failure(history, served, stages):
    for url in (str(history.bare), f"{served.url}/project.git", str(history.bundle)):
        with pytest.raises(StageFailed, match="has no commit"):
            await stages.repo_tree(Repo(url, "12345678" * 5))
    for url in ("/nowhere", f"{served.url}/other.git", "/etc/passwd"):
        with pytest.raises(StageFailed, match="cannot fetch") as told:
            await stages.repo_tree(Repo(url, history.base))
        assert told.value.log


async def test_a_repository_with_longer_hashes(stages, tmp_path):
    work = tmp_path / "long"
    work.mkdir()
    run_git("init", "-q", "--object-format=sha256", "-b", "main", ".", cwd=work)
    (work / "f").write_text("f")
    run_git("add", "f", cwd=work)
    run_git("commit", "-q", "-m", "one", cwd=work)
    commit = run_git("rev-parse", "HEAD", cwd=work)
    made = await stages.repo_tree(Repo(str(work), commit))

    assert len(commit) == 64 and inside(made.path, "rev-parse", "HEAD") == commit
    assert inside(made.path, "status", "--porcelain") == ""


# ---- mirrors and servers ----


async def test_a_server_is_asked_once_for_what_it_has_given(history, served, tmp_path):
    """By eight at once, by another image, by another engine: one transfer."""
    url = f"{served.url}/project.git"
    one, other = stages_in(tmp_path), stages_in(tmp_path)
    await asyncio.gather(*(made.repo_tree(Repo(url, history.base)) for made in (one, other) for _ in range(8)))
    packs = served.packs
    requests = len(served.requests)
    await other.root(EnvSpec(image="dir:x", repo=Repo(url, history.base)))
    await other.repo_tree(Repo(url, history.past[1]))

    assert packs <= 3  # what is there, what is had, the objects
    assert len(served.requests) == requests, "an older commit is in the mirror already"


async def test_an_old_server_that_gives_only_what_a_ref_points_to(history, served, stages):
    served.is_old = True
    made = await stages.repo_tree(Repo(f"{served.url}/project.git", history.base))
    shallow = await stages.repo_tree(Repo(f"{served.url}/project.git", history.past[1], 1))

    assert inside(made.path, "log", "--all", "--format=%H").split() == history.past
    assert inside(shallow.path, "log", "--all", "--format=%H").split() == history.past[1:2]


async def test_x20_a_server_that_fails_at_first_is_asked_again(history, served, stages, monkeypatch):
    monkeypatch.setattr(mirrors, "_BACK_OFF_S", 0.01)
    served.failures = [503, 429, 500]
    made = await stages.repo_tree(Repo(f"{served.url}/project.git", history.base))

    assert inside(made.path, "rev-parse", "HEAD") == history.base


async def test_x20_a_server_that_only_fails_is_unavailable_and_says_so_once_for_all(history, served, stages, monkeypatch):
    monkeypatch.setattr(mirrors, "_BACK_OFF_S", 0.01)
    served.failures = [500] * 100
    outcomes = await asyncio.gather(
        *(stages.repo_tree(Repo(f"{served.url}/project.git", history.base)) for _ in range(16)), return_exceptions=True
    )

    assert {type(one) for one in outcomes} == {StageUnavailable}
    assert b"500" in outcomes[0].log and outcomes[0].retryable
    assert len(served.requests) == mirrors._ATTEMPTS


async def test_x20_an_answer_that_is_cut_off_leaves_nothing_that_counts(history, served, stages, monkeypatch):
    monkeypatch.setattr(mirrors, "_BACK_OFF_S", 0.01)
    served.cut_at = 700
    with pytest.raises((StageUnavailable, StageFailed)):
        await stages.repo_tree(Repo(f"{served.url}/project.git", history.base))
    served.cut_at = None
    made = await stages.repo_tree(Repo(f"{served.url}/project.git", history.base))

    assert inside(made.path, "fsck", "--full", "--no-progress") == ""


async def test_a15_a_password_reaches_the_server_and_no_file_no_message_no_command_line(history, served, stages, tmp_path):
    served.password = "user:s3cr3t %"
    url = served.url.replace("//", "//user:s3cr3t%20%25@") + "/project.git"
    served.hangs = threading.Event()
    task = asyncio.ensure_future(stages.root(EnvSpec(image="dir:x", repo=Repo(url, history.base))))
    while not served.requests:
        await asyncio.sleep(0.01)
    lines = [_line(child.pid) for child in hostview.below(os.getpid())]
    served.hangs.set()
    made = await task

    assert any(b"project.git" in line for line in lines), "git was there to be looked at"
    assert not any(b"s3cr3t" in line or b"dXNlcjpz" in line for line in lines)
    assert (Path(made.root.layers[-1]) / "workspace/run.sh").exists()
    assert "s3cr3t" not in json.dumps([stage.recipe for stage in made.stages])
    for path in (tmp_path / "layers").rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert b"s3cr3t" not in path.read_bytes() and b"dXNlcjpz" not in path.read_bytes(), path
    with pytest.raises(StageFailed) as told:
        await stages.repo_tree(Repo(url.replace("s3cr3t", "s3cr3t2"), "12345678" * 5))
    assert "s3cr3t" not in str(told.value)


async def test_a15_a_password_goes_nowhere_but_to_the_server_it_is_for(history, served, stages):
    """A server, or whoever answers in its place, may send git to another; without a password that is followed."""
    with git_server(history.bare.parent) as other:
        served.redirect = other.url
        url = served.url.replace("//", "//user:s3cr3t@") + "/project.git"
        with pytest.raises(StageFailed, match="elsewhere"):
            await stages.repo_tree(Repo(url, history.base))
        assert served.authorizations[0] is not None
        assert [one for one in other.authorizations if one is not None] == []

        made = await stages.repo_tree(Repo(f"{served.url}/project.git", history.base))
        assert (made.path / "run.sh").exists()


def _line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


async def test_x34_cancelled_while_a_server_hangs_git_ends_with_all_it_started(history, served, stages):
    served.hangs = threading.Event()
    before = {child.pid for child in hostview.below(os.getpid())}
    task = asyncio.ensure_future(stages.repo_tree(Repo(f"{served.url}/project.git", history.base)))
    while not served.requests:
        await asyncio.sleep(0.01)
    started = {child.pid for child in hostview.below(os.getpid())} - before
    task.cancel()
    await asyncio.wait([task])
    for _ in range(500):
        left = [pid for pid in started if Path(f"/proc/{pid}").exists() and b"git" in _line(pid)]
        if not left:
            break
        await asyncio.sleep(0.01)

    assert task.cancelled() and len(started) >= 2 and not left
    served.hangs.set()
    served.hangs = None
    made = await stages.repo_tree(Repo(f"{served.url}/project.git", history.base))
    assert inside(made.path, "rev-parse", "HEAD") == history.base


async def test_a_server_that_never_answers_is_given_up_in_time(history, served, stages, monkeypatch):
    monkeypatch.setattr(mirrors, "_FETCH_PATIENCE_S", 0.5)
    served.hangs = threading.Event()
    began = time.monotonic()
    with pytest.raises(StageUnavailable, match="did not finish"):
        await stages.repo_tree(Repo(f"{served.url}/project.git", history.base))
    served.hangs.set()

    assert time.monotonic() - began < 30
    assert not [child for child in hostview.below(os.getpid()) if b"remote-http" in _line(child.pid)]


async def test_nothing_of_the_engines_own_git_settings_reaches_git(history, stages, monkeypatch, tmp_path):
    """Neither its configuration nor the variables of a git that happens to have started it."""
    (tmp_path / ".gitconfig").write_text('[url "/nowhere/"]\n\tinsteadOf = /\n[core]\n\tautocrlf = true\n[transfer]\n\thideRefs = refs\n')
    for name, value in {
        "HOME": str(tmp_path),
        "GIT_CONFIG_GLOBAL": str(tmp_path / ".gitconfig"),
        "GIT_DIR": "/nowhere",
        "GIT_WORK_TREE": "/nowhere",
        "GIT_INDEX_FILE": "/nowhere/index",
        "GIT_OBJECT_DIRECTORY": "/nowhere/objects",
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": "/nowhere/objects",
        "GIT_NAMESPACE": "other",
        "GIT_TRACE": str(tmp_path / "trace"),
    }.items():
        monkeypatch.setenv(name, value)
    made = await stages.repo_tree(Repo(str(history.work), history.base))
    monkeypatch.undo()

    assert inside(made.path, "status", "--porcelain") == ""
    assert (made.path / "src/a.py").read_bytes() == b"x = 1\n" * 500
    assert not (tmp_path / "trace").exists()


async def test_what_a_killed_fetch_left_in_a_mirror_is_in_nobodys_way(history, served, stages, tmp_path):
    url = f"{served.url}/project.git"
    await stages.repo_tree(Repo(url, history.past[2]))
    (mirror,) = (path for path in (tmp_path / "layers/mirrors").iterdir() if (path / "HEAD").exists())
    for name in ("shallow.lock", "packed-refs.lock", f"refs/untax/{history.base}.lock", "config.lock", "objects/pack/tmp_pack_abc"):
        (mirror / name).write_bytes(b"")
    made = await stages.repo_tree(Repo(url, history.base))

    assert inside(made.path, "rev-parse", "HEAD") == history.base
    assert not list(mirror.rglob("*.lock")) and not list(mirror.rglob("tmp_*"))


async def test_a_damaged_mirror_is_made_anew(history, served, stages, tmp_path, caplog):
    url = f"{served.url}/project.git"
    await stages.repo_tree(Repo(url, history.base))
    (mirror,) = (path for path in (tmp_path / "layers/mirrors").iterdir() if (path / "HEAD").exists())
    for pack in (mirror / "objects/pack").glob("*.pack"):
        pack.chmod(0o600)
        data = bytearray(pack.read_bytes())
        data[len(data) // 2 : len(data) // 2 + 64] = os.urandom(64)
        pack.write_bytes(data)
    made = await stages.repo_tree(Repo(url, history.base, 3))

    assert inside(made.path, "fsck", "--full", "--no-progress") == ""
    assert "damaged" in caplog.text


async def test_mirrors_that_nobody_uses_any_more_are_removed_with_other_garbage(history, stages, tmp_path):
    root = tmp_path / "layers/mirrors"
    store = LayerStore(tmp_path / "layers", marks=KIND)
    await stages.repo_tree(Repo(str(history.bare), history.base))
    await stages.repo_tree(Repo(str(history.work), history.base))
    kept, old = (mirrors.origin_of(str(path)).name for path in (history.bare, history.work))
    assert all(spare.bytes > 0 for spare in store.spares())
    os.utime(root / f"{old}.use", (1, 1))

    assert store.evict().spares == (f"mirrors/{old}",)
    assert (root / kept).is_dir()
    assert [path.name for path in root.glob(f"{old}*")] == []
    await stages.repo_tree(Repo(str(history.work), history.past[1]))
    assert (root / old).is_dir()


def _fill_a_small_disk(history, place):
    """In a process of its own, over a file system of 1 MiB."""
    private.mount("tmpfs", place, "size=1m")

    async def build():
        made = Stages(LayerStore(place / "layers", marks=KIND), find=lambda _: Here(place))
        with pytest.raises(StageUnavailable) as told:
            await made.repo_tree(Repo(str(history.work), history.base))
        assert "room" in told.value.message or "full" in told.value.message, told.value
        assert not list((place / "layers/drafts").iterdir()) and not list((place / "layers/trees").iterdir())
        (place / "ballast").unlink()
        assert (await made.repo_tree(Repo(str(history.work), history.base))).path.is_dir()

    LayerStore(place / "layers", marks=KIND).close()
    with contextlib.suppress(OSError), (place / "ballast").open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
    asyncio.run(build())


def test_x9_a_full_disk_is_unavailable_and_leaves_nothing_in_the_way(history, tmp_path):
    private.require_root()
    private.in_private_mounts(_fill_a_small_disk, history, tmp_path)


async def test_progress_is_told_in_bytes(history, served, tmp_path):
    told = []
    await stages_in(tmp_path).repo_tree(Repo(f"{served.url}/project.git", history.base), progress=lambda *said: told.append(said))

    assert all(isinstance(done, int) and total is None and "project.git" in what for what, done, total in told)


# ---- hostile repositories ----


async def test_t8_nothing_that_a_repository_says_is_run(history, stages, tmp_path):
    """Hooks, filters, monitors and helpers, in the repository that is fetched from and in the tree that is checked out."""
    hostile = tmp_path / "hostile"
    shutil.copytree(history.work, hostile, symlinks=True)
    marker = tmp_path / "marker"
    shout = f"touch {marker}"
    for hook in ("post-checkout", "pre-receive", "post-index-change", "reference-transaction", "pre-auto-gc", "fsmonitor-watchman"):
        (hostile / ".git/hooks").mkdir(exist_ok=True)
        (hostile / ".git/hooks" / hook).write_text(f"#!/bin/sh\n{shout}\n")
        (hostile / ".git/hooks" / hook).chmod(0o755)
    (hostile / ".gitattributes").write_text("* filter=evil diff=evil merge=evil\n")
    (hostile / ".gitmodules").write_text(f'[submodule "x"]\n\tpath = sub\n\turl = {hostile}\n\tupdate = checkout\n')
    run_git("add", ".gitattributes", ".gitmodules", cwd=hostile)
    run_git("update-index", "--add", "--cacheinfo", f"160000,{history.base},sub", cwd=hostile)
    run_git("commit", "-q", "-m", "hostile", "--no-verify", cwd=hostile)
    commit = run_git("rev-parse", "HEAD", cwd=hostile)
    with (hostile / ".git/config").open("a") as config:
        config.write(
            f'[core]\n\tfsmonitor = "{shout}"\n\thooksPath = hooks\n\tsshCommand = "{shout}"\n\talternateRefsCommand = "{shout}"\n'
        )
        config.write(f'[uploadpack]\n\tpackObjectsHook = "{shout}"\n[filter "evil"]\n\tsmudge = "{shout}"\n\tclean = "{shout}"\n')
        config.write(f'[credential]\n\thelper = "!{shout}"\n[include]\n\tpath = /dev/null\n[gc]\n\tauto = 1\n')
    marker.unlink(missing_ok=True)
    if os.geteuid() == 0:  # root reads what belongs to somebody else, whom it has no reason to trust
        for path in (hostile, *hostile.rglob("*")):
            os.chown(path, 4321, 4321, follow_symlinks=False)
    made = await stages.repo_tree(Repo(str(hostile), commit))

    assert not marker.exists()
    assert (made.path / "src/b.py").exists() and list((made.path / "sub").iterdir()) == []
    run_git("status", cwd=hostile)
    assert marker.exists(), "an ordinary git would have run something"


async def test_t8_a_repository_that_lacks_objects_fetches_them_from_nowhere(history, stages, tmp_path):
    """A partial clone names where the rest is and by which program to get it; git that serves it would run that, as this user."""
    hostile = tmp_path / "partial.git"
    upload = "git -c uploadpack.allowFilter=true upload-pack"
    run_git("clone", "-q", "--bare", "--filter=blob:none", f"--upload-pack={upload}", f"file://{history.bare}", str(hostile), cwd=tmp_path)
    marker = tmp_path / "marker"
    run_git("config", "remote.origin.uploadpack", f"touch {marker}; git-upload-pack", cwd=hostile)

    with pytest.raises(StageFailed):
        await stages.repo_tree(Repo(str(hostile), history.base))
    assert not marker.exists()
    run_git("cat-file", "-p", f"{history.base}:run.sh", cwd=hostile)
    assert marker.exists(), "an ordinary git in there would have run it"


def _tree(work: Path, entries: list[tuple[str, str, str]]) -> str:
    """A tree that git itself may not want to write."""
    (work / "raw").write_bytes(b"".join(f"{mode} {name}".encode() + b"\0" + bytes.fromhex(oid) for mode, name, oid in entries))
    return run_git("hash-object", "-t", "tree", "-w", "--literally", "raw", cwd=work)


def _commit(work: Path, tree: str) -> str:
    commit = run_git("commit-tree", tree, "-m", "hostile", cwd=work)
    run_git("update-ref", "refs/heads/main", commit, cwd=work)
    return commit


@pytest.mark.parametrize("trick", ["../up", ".git", ".GIT", "git~1", "a/b", ".", "link", ".gitmodules"])
async def test_t8_trees_that_lead_out_of_the_work_tree_are_refused(stages, tmp_path, trick):
    work = tmp_path / "tricky"
    work.mkdir()
    run_git("init", "-q", "-b", "main", ".", cwd=work)
    (work / "blob").write_text("planted")
    (work / "to").write_text(str(tmp_path / "outside"))
    blob, target = (run_git("hash-object", "-w", name, cwd=work) for name in ("blob", "to"))
    inner = _tree(work, [("100644", "planted", blob)])
    if trick == "link":
        entries = [("120000", "link", target), ("40000", "link", inner)]
    elif trick == ".gitmodules":
        entries = [("120000", ".gitmodules", target)]
    else:
        entries = [("40000", trick, inner)]
    commit = _commit(work, _tree(work, entries))
    (tmp_path / "outside").mkdir()
    with pytest.raises((StageFailed, StageUnavailable)):
        await stages.repo_tree(Repo(str(work), commit))

    assert list((tmp_path / "outside").iterdir()) == []
    assert not list(tmp_path.rglob("up")) and not list((tmp_path / "layers/drafts").iterdir())


async def test_r_a_few_kilobytes_that_unfold_to_billions_of_files_are_refused_before_they_are_written(stages, tmp_path, monkeypatch):
    monkeypatch.setattr(repo, "_MOST_FILES", 20_000)
    work = tmp_path / "bomb"
    work.mkdir()
    run_git("init", "-q", "-b", "main", ".", cwd=work)
    (work / "blob").write_text("boom")
    oid = run_git("hash-object", "-w", "blob", cwd=work)
    for level in range(10):
        oid = _tree(work, [("40000" if level else "100644", f"d{at}", oid) for at in range(10)])
    commit = _commit(work, oid)
    with pytest.raises(StageFailed, match="20,000 files"):
        await stages.repo_tree(Repo(str(work), commit))

    assert not list((tmp_path / "layers/drafts").iterdir())


async def test_slips_of_old_tools_in_a_history_are_no_reason_to_refuse_it(stages, tmp_path):
    """A zero before the mode, a time zone that is none: many repositories have them."""
    work = tmp_path / "old"
    work.mkdir()
    run_git("init", "-q", "-b", "main", ".", cwd=work)
    (work / "f").write_text("f")
    blob = run_git("hash-object", "-w", "f", cwd=work)
    inner = _tree(work, [("100644", "f", blob)])
    tree = _tree(work, [("040000", "d", inner)])
    (work / "raw").write_text(f"tree {tree}\nauthor t <t@example.org> 1 +051800\ncommitter t <t@example.org> 1 +0000\n\nold\n")
    commit = run_git("hash-object", "-t", "commit", "-w", "--literally", "raw", cwd=work)
    run_git("update-ref", "refs/heads/main", commit, cwd=work)
    made = await stages.repo_tree(Repo(str(work), commit))

    assert (made.path / "d/f").read_text() == "f"
    assert (made.path / "d/f").stat().st_mtime > 315_532_800, "no file is older than zip can say"
