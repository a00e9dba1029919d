"""`untax image` as a user calls it: what it prints where, its exit codes, and nothing left after Ctrl-C."""

import hashlib
import io
import json
import os
import signal
import subprocess
import tarfile
from pathlib import Path

import pytest
from tests import treelist
from tests.chains import rich_chain
from tests.engines_fixture import docker  # noqa: F401
from tests.images import small_directory
from tests.integration.test_cli import PATHS, command, on_terminal, untax, wait_for

from untax import Engine, EnvSpec, substrates
from untax.cli import image as image_command
from untax.cli._progress import human

_IS_ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("image")


@pytest.fixture(scope="module")
def tar(home):
    """A small root file system as a tar."""
    with tarfile.open(home / "root.tar", "w") as archive:
        archive.add(small_directory(), arcname=".")
    return f"tar:{home}/root.tar"


@pytest.fixture(scope="module")
def repo(home):
    at = home / "repo"
    at.mkdir()

    def git(*words):
        return subprocess.run(
            ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *words], cwd=at, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q", ".")
    (at / "file").write_text("first")
    git("add", ".")
    git("commit", "-qm", "first")
    return f"{at}@{git('rev-parse', 'HEAD').strip()}"


@pytest.fixture
def image(tmp_path):
    """Runs `untax image …` on a store of its own."""

    def run(action, *arguments, **options):
        return untax("image", action, "--state-dir", str(tmp_path / "state"), *map(str, arguments), **options)

    run.layers = tmp_path / "state" / "layers"
    return run


def needs_namespace():
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")


# ---- pull, list, show ----


def test_pull_prints_the_key_and_brings_the_image_once(image, tar):
    first = image("pull", tar)
    second = image("pull", tar, "--json")

    document = json.loads(second.stdout)
    assert first.returncode == second.returncode == 0
    assert first.stdout.strip() == document["key"]
    assert "built in" in first.stderr
    assert [(stage["name"], stage["stored"], stage["built_s"]) for stage in document["stages"]] == [("image", True, None)]
    assert document["portable"] is True


def test_list_and_show_say_what_is_there_and_what_it_takes(image, tar):
    key = image("pull", tar).stdout.strip()

    [row] = json.loads(image("list", "--json").stdout)["stages"]
    shown = json.loads(image("show", key[:10], "--json").stdout)
    by_name = json.loads(image("show", tar, "--json").stdout)
    table, page = image("list"), image("show", key)
    assert row["key"] == shown["key"] == by_name["key"] == key
    assert row["bytes"] == shown["bytes"] == sum(layer["bytes"] for layer in shown["layers"]) > 1 << 20
    assert key[:12] in table.stdout
    assert human(row["bytes"]) in table.stdout
    assert human(row["bytes"]) in table.stderr  # all layers together
    assert shown["layers"][0]["id"] in page.stdout


def test_the_host_is_used_in_place(image):
    pulled = image("pull", "host", "--json")
    document = json.loads(pulled.stdout)

    assert (document["portable"], document["layers"], document["bytes"]) == (False, [], 0)
    assert image("show", "host").returncode == 2
    assert json.loads(image("list", "--json").stdout)["stages"] == []


# ---- build ----


def test_build_puts_a_repository_on_an_image(image, tar, repo):
    built = json.loads(image("build", "--image", tar, "--repo", repo, "--json").stdout)
    listed = json.loads(image("list", "--json").stdout)

    assert [stage["name"] for stage in built["stages"]] == ["image", "repo"]
    assert [row["stage"] for row in listed["stages"]] == ["image", "repo"]
    shown = json.loads(image("show", built["key"], "--json").stdout)
    assert Path(shown["layers"][-1]["path"], "workspace/file").read_text() == "first"


def test_build_takes_its_recipe_from_a_file_and_flags_win(image, tar, repo, tmp_path):
    url, _, commit = repo.rpartition("@")
    spec = tmp_path / "spec.toml"
    spec.write_text(f'image = "docker:not-asked"\nworkdir = "/src"\n[repo]\nurl = "{url}"\ncommit = "{commit}"\ndepth = 1\n')
    built = json.loads(image("build", spec, "--image", tar, "--json").stdout)

    shown = json.loads(image("show", built["key"], "--json").stdout)
    assert shown["recipe"] == {"url": url, "commit": commit, "depth": 1, "at": "/src"}


def test_build_runs_set_up_commands_and_keeps_what_they_leave(image, repo):
    needs_namespace()
    done = image("build", "--repo", repo, "--setup", "echo made > made", "--setup", "cat file made > both", "--json")
    built = json.loads(done.stdout)

    shown = json.loads(image("show", built["key"], "--json").stdout)
    assert [stage["name"] for stage in built["stages"] if stage["built_s"] is not None] == ["repo", "deps"]
    assert Path(shown["layers"][-1]["path"], "workspace/both").read_text() == "firstmade\n"
    assert shown["stands_on"] == built["stages"][0]["key"]


def test_a_set_up_command_that_fails_is_1_with_its_log(image, repo):
    needs_namespace()
    failed = image("build", "--repo", repo, "--setup", "echo so far so good", "--setup", "echo no way >&2; exit 7", "--json")

    document = json.loads(failed.stdout)
    assert failed.returncode == 1
    assert (document["error"], document["stage"], document["exit_code"]) == ("StageFailed", "deps", 1)
    assert "no way" in document["log"]
    assert "no way" in failed.stderr
    assert [row["stage"] for row in json.loads(image("list", "--json").stdout)["stages"]] == ["repo"]


def test_a_commit_that_is_not_there_is_1(image, tar, repo):
    missing = image("build", "--image", tar, "--repo", repo[:-40] + "0123456789" * 4)

    assert missing.returncode == 1
    assert "repo failed" in missing.stderr


def test_a_source_that_does_not_answer_is_125(image):
    assert image("pull", "registry:127.0.0.1:9/none:1").returncode == 125


@pytest.mark.parametrize(
    "arguments",
    [("pull",), ("pull", "no-such-form:x"), ("pull", "tar:relative"), ("build", "--repo", "without-commit"), ("build", "--depth", "1"),
     ("build", "/no/such/file.toml"), ("show", "abcdef"), ("show", "ab"), ("export", "host"), ("export", "abcdef", "-o", "x"),
     ("export", "host", "-o", "x", "--init", "/no/such/file", "--format", "initramfs"), ("export", "host", "-o", "x", "--free-mib", "3"),
     ("gc", "--budget", "some"), ("gc", "--remove", "abcdef"), ("nothing",), ()],
)  # fmt: skip
def test_wrong_usage_is_2_and_says_what_to_write(image, arguments):
    done = image(*arguments) if arguments else untax("image")

    assert done.returncode == 2
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


def test_a_spec_file_with_a_key_that_is_none_is_refused_with_those_there_are(image, tmp_path):
    (tmp_path / "spec.toml").write_text('images = "host"\n')
    done = image("build", tmp_path / "spec.toml")

    assert done.returncode == 2
    assert "images" in done.stderr
    assert "setup" in done.stderr


# ---- export ----


def test_an_export_comes_back_as_the_same_tree(image, tmp_path):
    """Through our own reader too: what was exported can be pulled, and is what it was."""
    if not _IS_ROOT:
        pytest.skip("root: an ordinary user's layers hold no owners to compare")
    layers = rich_chain(tmp_path)
    rows = treelist.of_chain(layers)
    subprocess.run(["cp", "-a", str(layers[0]), str(tmp_path / "dir")], check=True)
    exported = image("export", f"dir:{tmp_path}/dir", "-o", tmp_path / "image.tar", "--json")
    key = image("pull", f"oci:{tmp_path}/image.tar").stdout.strip()

    document = json.loads(exported.stdout)
    assert (document["format"], document["portable"], document["bytes"]) == ("oci", False, (tmp_path / "image.tar").stat().st_size)
    shown = json.loads(image("show", key, "--json").stdout)
    assert shown["config"]["labels"] == {"untax.reproducible": "false"}
    got = treelist.of_chain([Path(layer["path"]) for layer in shown["layers"]])
    want = treelist.of_chain([tmp_path / "dir"])
    want["data/modes/600"].pop("xattrs")  # an attribute without a value, which tar has no way to say
    want["data/listed"].pop("xattrs")  # an access list, which our reader leaves out
    assert rows["data/hard"]["names"]
    assert got == want


def test_a_stage_is_exported_by_its_key_with_what_it_stands_on(image, tar, repo, tmp_path):
    key = json.loads(image("build", "--image", tar, "--repo", repo, "--json").stdout)["key"]
    by_key = image("export", key[:16], "-o", tmp_path / "one.tar", "--name", "localhost/mine:1")
    by_name = image("export", tar, "--repo", repo, "-o", tmp_path / "two.tar", "--name", "localhost/mine:1")

    assert (by_key.returncode, by_name.returncode) == (0, 0)
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as archive:
        [entry] = json.load(archive.extractfile("manifest.json"))
        config = json.load(archive.extractfile(entry["Config"]))["config"]
    assert len(entry["Layers"]) == 2
    assert (entry["RepoTags"], config["WorkingDir"]) == (["localhost/mine:1"], "/workspace")


def test_a_stage_over_the_host_is_exported_by_its_key_too(image, repo, tmp_path):
    """The part below, which is not in the store, is found again."""
    key = json.loads(image("build", "--repo", repo, "--json").stdout)["key"]
    small = tmp_path / "small"
    small.mkdir()
    shown = json.loads(image("show", key, "--json").stdout)
    assert shown["stands_on"] is not None
    import asyncio

    from untax.layers.build import Stages
    from untax.layers.chain import find_chain, root_of
    from untax.layers.store import LayerStore

    store = LayerStore(image.layers, marks="trusted" if _IS_ROOT else "user")
    made = asyncio.run(root_of(store, find_chain(store, key), Stages(store)))
    assert [view.at for view in made.root.views][:1] == ["/usr"]
    assert made.root.layers[-1] == shown["layers"][-1]["path"]
    made.pin.close()


async def test_a_saved_snapshot_is_exported_with_what_it_stands_on(image, tmp_path):
    needs_namespace()
    small = f"dir:{small_directory()}"
    async with Engine(state_dir=image.layers.parent) as engine, engine.lease(EnvSpec(image=small)) as box:
        await box.write("/workspace/left", b"by the box")
        key = await (await box.snapshot()).save()
    done = image("export", key, "-o", tmp_path / "image.tar")

    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "image.tar") as archive:
        [entry] = json.load(archive.extractfile("manifest.json"))
        found = {}
        for layer in entry["Layers"]:
            with tarfile.open(fileobj=archive.extractfile(layer)) as inner:
                found |= {member.name: inner.extractfile(member).read() for member in inner if member.isfile()}
    assert found["workspace/left"] == b"by the box"
    assert "usr/bin/bash" in found


def test_standard_output_gets_the_archive_and_nothing_else(image, tar, tmp_path):
    image("pull", tar)
    piped = subprocess.run(
        command("image", "export", "--state-dir", str(tmp_path / "state"), tar, "-o", "-", "--json"),
        capture_output=True,
        timeout=60,
        check=True,
    )
    image("export", tar, "-o", tmp_path / "file.tar")

    assert piped.stdout == (tmp_path / "file.tar").read_bytes()


def test_what_a_sandbox_built_runs_in_docker_with_the_same_tree(image, tar, repo, docker, tmp_path):  # noqa: F811
    """Layers as set-up commands leave them: with deletions, replaced directories, owners, and a directory that was renamed."""
    needs_namespace()
    steps = (
        "rm /usr/bin/yes; rm -r /home/other; mkdir /home/other; perl -e 'chown 1001, 1001, \"/home/other\"'",
        "mv /home/user /home/moved; cat file > /opt-made; ln /opt-made both",
    )
    built = json.loads(
        image("build", "--image", tar, "--repo", repo, *(word for step in steps for word in ("--setup", step)), "--json").stdout
    )
    assert image("export", built["key"], "-o", tmp_path / "image.tar", "--name", "localhost/built:1").returncode == 0
    docker("load", "-i", str(tmp_path / "image.tar"))

    assert (
        docker("run", "--rm", "localhost/built:1", "sh", "-c", "pwd; cat both; ls /home; ls /usr/bin/yes || true")
        == b"/workspace\nfirstmoved\nother\n"
    )
    layers = [Path(layer["path"]) for layer in json.loads(image("show", built["key"], "--json").stdout)["layers"]]
    container = docker("create", "localhost/built:1", "true").decode().strip()
    with tarfile.open(fileobj=io.BytesIO(docker("export", container))) as archive:
        got = {member.name: facts(archive, member) for member in archive}
    docker("rm", container)
    own = (".dockerenv", "dev", "proc", "sys", "etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/mtab")
    want = {
        name: (int(row["mode"], 8), *row["owner"], row.get("target") or row.get("content"))
        for name, row in treelist.of_chain(layers).items()
        if name and not name.startswith(own)
    }
    assert {name: row for name, row in got.items() if not name.startswith(own)} == want
    assert {"home/moved", "workspace/both", "workspace/.git/HEAD"} < want.keys()


def facts(archive, member):
    """Mode, owners, and where it points or what it holds; what is linked to another name holds what that one does."""
    content = hashlib.sha256(archive.extractfile(member).read()).hexdigest() if member.isreg() or member.islnk() else None
    return member.mode & 0o7777, member.uid, member.gid, member.linkname if member.issym() else content


def test_disks_cannot_be_piped(image, tar):
    assert image("export", tar, "-o", "-", "--format", "squashfs").returncode == 2


def test_what_is_lost_is_said(image, tmp_path):
    top = tmp_path / "dir"
    (top / "usr").mkdir(parents=True)
    (top / "usr/file").write_text("x")
    os.setxattr(top / "usr/file", "user.note", b"1")
    done = image("export", f"dir:{top}", "-o", tmp_path / "ram", "--format", "initramfs")

    assert done.returncode == 0
    assert "1 × without extended attributes" in done.stderr


def test_ctrl_c_ends_an_export_and_leaves_nothing(image, tmp_path):
    """Files of many gigabytes that take no space are long in the packing, and come to little."""
    top, out = tmp_path / "dir", tmp_path / "out"
    (top / "usr").mkdir(parents=True)
    out.mkdir()
    for number in range(20):
        with open(top / f"usr/huge-{number}", "wb") as huge:
            huge.truncate(3 << 30)
    running = subprocess.Popen(
        command("image", "export", "--state-dir", str(tmp_path / "state"), f"dir:{top}", "-o", str(out / "ram"), "--format", "initramfs"),
        env={**os.environ, "PYTHONPATH": PATHS},
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_for(lambda: any(path.stat().st_size > 0 for path in out.iterdir()), 30)
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130
    finally:
        running.kill()
        running.wait()
    assert list(out.iterdir()) == []


def test_ctrl_c_ends_a_build_and_leaves_nothing(image, repo):
    needs_namespace()
    running = subprocess.Popen(
        command("image", "build", "--state-dir", str(image.layers.parent), "--repo", repo, "--setup", "sleep 4322.5"),
        env={**os.environ, "PYTHONPATH": PATHS},
        stderr=subprocess.DEVNULL,
    )
    from tests.integration.test_cli import sleepers

    try:
        assert wait_for(lambda: sleepers("4322.5"), 30)
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130
    finally:
        running.kill()
        running.wait()
    assert wait_for(lambda: not sleepers("4322.5"))
    assert list((image.layers / "drafts").iterdir()) == []
    assert [row["stage"] for row in json.loads(image("list", "--json").stdout)["stages"]] == ["repo"]


# ---- gc ----


def test_gc_keeps_within_a_budget_and_says_first_what_it_would_do(image, tar, repo):
    built = json.loads(image("build", "--image", tar, "--repo", repo, "--json").stdout)
    before = json.loads(image("list", "--json").stdout)["total"]["bytes"]

    dry = json.loads(image("gc", "--budget", "1M", "--dry-run", "--json").stdout)
    untouched = json.loads(image("list", "--json").stdout)["total"]["bytes"]
    wet = json.loads(image("gc", "--budget", "1M", "--json").stdout)
    assert untouched == before
    assert {name: dry[name] for name in ("stages", "freed_bytes", "bytes")} == {
        name: wet[name] for name in ("stages", "freed_bytes", "bytes")
    }
    assert set(wet["stages"]) == {stage["key"] for stage in built["stages"]}
    assert json.loads(image("list", "--json").stdout)["stages"] == []


def test_gc_without_a_budget_removes_only_what_nothing_needs(image, tar, repo):
    built = json.loads(image("build", "--image", tar, "--repo", repo, "--json").stdout)
    assert json.loads(image("gc", "--json").stdout)["stages"] == []

    removed = json.loads(image("gc", "--remove", built["key"][:12], "--json").stdout)
    assert removed["stages"] == [built["key"]]
    assert removed["freed_bytes"] > 0
    assert [row["stage"] for row in json.loads(image("list", "--json").stdout)["stages"]] == ["image"]


def test_gc_that_cannot_keep_the_budget_is_1(image, tar):
    """What an engine stands on stays."""
    from untax.layers.store import LayerStore

    image("pull", tar)
    store = LayerStore(image.layers, marks="trusted" if _IS_ROOT else "user")
    with store.pin(layer.id for layer in store.layers()):
        done = image("gc", "--budget", "1M", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["over_budget_bytes"] > 0
    store.close()


# ---- what people see ----


def test_a_bar_on_a_terminal_and_lines_elsewhere(image, tar):
    shown = on_terminal("image", "export", "--state-dir", str(image.layers.parent), tar, "-o", str(image.layers.parent / "x.tar"))
    plain = image("export", tar, "-o", image.layers.parent / "x.tar").stderr

    assert b"\r\x1b[K" in shown
    assert b"100%" in shown
    assert b" of " in shown
    assert "\r" not in plain
    assert "untax: export to oci" in plain


def test_every_action_and_option_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    section = text.partition("## untax image")[2]

    for action in ("pull", "build", "list", "show", "export", "gc"):
        assert f"untax image {action}" in section
        words = untax("image", action, "--help").stdout.replace("[", " ").replace("]", " ").split()
        options = {word.rstrip(",") for word in words if word.startswith("--") and len(word) > 2} - {"--help"}
        assert {option for option in options if f"`{option}" not in text} == set()


@pytest.mark.parametrize(
    ("text", "size"), [("1K", 1024), ("1.5 MiB", 3 << 19), ("20G", 20 << 30), ("7", 7), ("2tb", 2 << 40), ("512MB", 512 << 20)]
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert image_command._size(text) == size
