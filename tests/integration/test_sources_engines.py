"""`docker:` and `podman:` against real engines of the tests' own, and what is said when there is none (X18)."""

import asyncio
import json
import os
import signal
import socket
import threading
import time

import pytest
from tests.engines_fixture import docker, podman  # noqa: F401
from tests.registries import MACHINE, digest_of, layer

from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.layers import sources
from untax.layers.sources.engine import EngineImage, find_socket
from untax.layers.store import LayerStore

BASE = layer({"etc/": None, "etc/os": b"tests\n", "etc/gone": b"x"})


def quiet(what, done, total):
    pass


@pytest.fixture
def store(tmp_path):
    opened = LayerStore(tmp_path / "layers", marks="trusted" if os.geteuid() == 0 else "user")
    yield opened
    opened.close()


def build(engine, tmp_path, name):
    """An image of two layers, the second deleting from the first: imported, then built upon without running anything."""
    (tmp_path / "base.tar").write_bytes(BASE)
    changes = [f"--change={one}" for one in ("ENV A=b", "WORKDIR /srv", "USER 1000", 'CMD ["true"]', "LABEL k=v")]
    engine("import", *changes, str(tmp_path / "base.tar"), f"{name}:base")
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text(f"FROM {name}:base\nCOPY added /etc/added\n")
    (context / "added").write_text("added\n")
    engine("build", "--network=none", "-q", "-t", f"{name}:top", str(context))


async def fetched(engine, name, store, **options):
    source = EngineImage(engine, name, **options)
    identity = await source.identify()
    seen = []
    found = await source.fetch(store, lambda *said: seen.append(said))
    assert seen and seen[-1][1] > 0
    return identity, found


def files(store, found):
    return [sorted(str(path.relative_to(tree)) for path in tree.rglob("*")) for tree in (store.layer(one).tree for one in found.adds)]


async def test_docker_an_image_of_a_real_engine_comes_with_its_layers_and_config(docker, tmp_path, store, monkeypatch):  # noqa: F811
    """Found through DOCKER_HOST; its identity is the id that the engine itself shows."""
    await asyncio.to_thread(build, docker, tmp_path, "tests/tool")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{docker.socket}")
    shown = docker("image", "inspect", "--format", "{{.Id}}", "tests/tool:top").decode().strip()

    source = sources.find("docker:tests/tool:top")
    identity = await source.identify()
    found = await source.fetch(store, quiet)

    assert identity == sources.image_identity(shown)
    assert files(store, found) == [["etc", "etc/gone", "etc/os"], ["etc", "etc/added"]]
    assert (found.config.env["A"], found.config.workdir, found.config.user) == ("b", "/srv", "1000")
    assert (found.config.command, found.config.labels) == (("true",), {"k": "v"})
    assert not [path for path in store.downloads.iterdir() if path.is_file()]


async def test_docker_an_image_can_be_named_by_its_id(docker, tmp_path, store):  # noqa: F811
    (tmp_path / "base.tar").write_bytes(BASE)
    shown = docker("import", str(tmp_path / "base.tar")).decode().strip()
    for name in (shown, shown.removeprefix("sha256:"), shown.removeprefix("sha256:")[:12]):
        identity, found = await fetched("docker", name, store, socket_path=str(docker.socket))
        assert identity == sources.image_identity(shown)
        assert len(found.adds) == 1


async def test_docker_what_was_identified_is_what_is_fetched_though_the_name_moves(docker, tmp_path, store):  # noqa: F811
    for name, content in (("first.tar", BASE), ("second.tar", layer({"other": b"y"}))):
        (tmp_path / name).write_bytes(content)
    docker("import", str(tmp_path / "first.tar"), "tests/moving:latest")
    source = EngineImage("docker", "tests/moving", socket_path=str(docker.socket))
    await source.identify()
    docker("import", str(tmp_path / "second.tar"), "tests/moving:latest")
    assert "etc/os" in files(store, await source.fetch(store, quiet))[0]


async def test_docker_what_the_engine_does_not_have_is_said(docker):  # noqa: F811
    with pytest.raises(StageFailed, match="docker has no image tests/missing"):
        await EngineImage("docker", "tests/missing", socket_path=str(docker.socket)).identify()


async def test_podman_images_of_both_kinds_keep_their_identity(podman, tmp_path, store, monkeypatch):  # noqa: F811
    """Podman keeps images as Docker or as OCI has them; each comes out in its own form, or it would be another image's."""
    (tmp_path / "base.tar").write_bytes(BASE)
    podman("import", "--change=ENV=A=b", str(tmp_path / "base.tar"), "localhost/tests/oci:latest")
    save_docker_archive(tmp_path / "image.tar", "localhost/tests/docker:latest")
    podman("load", "-i", str(tmp_path / "image.tar"))
    names = ("localhost/tests/oci", "localhost/tests/docker:latest")
    shown = [json.loads(podman("image", "inspect", name))[0] for name in names]
    assert len({one["ManifestType"] for one in shown}) == 2, shown
    monkeypatch.setenv("CONTAINER_HOST", f"unix://{podman.serve()}")  # from here on the client would go there too
    for name, inspected in zip(names, shown, strict=True):
        source = sources.find(f"podman:{name}")
        identity = await source.identify()
        found = await source.fetch(store, quiet)
        assert identity == sources.image_identity(f"sha256:{inspected['Id']}")
        assert files(store, found) == [["etc", "etc/gone", "etc/os"]]
        assert found.config.env["A"] == "b"


async def test_podman_a_short_name_is_found_as_podman_finds_it(podman, tmp_path, store):  # noqa: F811
    (tmp_path / "base.tar").write_bytes(BASE)
    podman("import", str(tmp_path / "base.tar"), "localhost/short:latest")
    _, found = await fetched("podman", "short", store, socket_path=str(podman.serve()))
    assert len(found.adds) == 1
    with pytest.raises(StageFailed, match="podman has no image missing"):
        await EngineImage("podman", "missing", socket_path=str(podman.serve())).identify()


def save_docker_archive(path, name):
    import io
    import tarfile

    config = json.dumps(
        {"architecture": MACHINE, "os": "linux", "config": {"Env": ["A=b"]}, "rootfs": {"type": "layers", "diff_ids": [digest_of(BASE)]}}
    ).encode()
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(path, "w") as tar:
        for member, data in (("config.json", config), ("layer.tar", BASE), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(member)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


# ---- engines that are not there, or not well ----


@pytest.mark.parametrize("engine", ["docker", "podman"])
async def test_an_engine_that_is_not_there_is_told_with_the_remedy(engine, tmp_path, monkeypatch):
    for name in ("DOCKER_HOST", "CONTAINER_HOST"):
        monkeypatch.setenv(name, "unix:///nonexistent/socket")
    source = sources.find(f"{engine}:name")
    with pytest.raises(StageUnavailable, match=r"no .* engine listens at /nonexistent/socket; start its service"):
        await source.identify()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "sock"))
    with pytest.raises(StageUnavailable, match="not running"):
        await EngineImage(engine, "name", socket_path=str(tmp_path / "sock")).identify()


@pytest.mark.parametrize("said", ["tcp://127.0.0.1:2375", "ssh://host", "unix://", "unix://relative", "/var/run/docker.sock"])
def test_only_an_engine_on_this_machine_is_asked(said):
    for engine, variable in (("docker", "DOCKER_HOST"), ("podman", "CONTAINER_HOST")):
        with pytest.raises(UsageError, match=f"{variable} must be unix"):
            find_socket(engine, {variable: said})


@pytest.mark.parametrize(
    "name", ["--privileged", ";reboot", "$(id)", "a\nb", "-v/:/host", "../../info", "name?all=1", "name/json#", "%2e%2e/x"]
)
def test_a9_what_is_no_name_is_refused_before_the_engine_is_asked(name):
    for engine in ("docker", "podman"):
        with pytest.raises(UsageError):
            sources.find(f"{engine}:{name}")


async def test_x18_a_frozen_engine_is_given_up_on_when_nobody_waits_any_more(docker, tmp_path):  # noqa: F811
    """A stopped daemon accepts connections and says nothing; the caller who leaves is let go at once."""
    os.kill(docker._daemon.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(EngineImage("docker", "name", socket_path=str(docker.socket)).identify(), 0.5)
        assert time.monotonic() - began < 3
    finally:
        os.kill(docker._daemon.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 3\r\n\r\nbad", StageUnavailable, "bad"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", StageFailed, "does not describe"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n" + b'{"Id": "../etc/x"}  ', StageFailed, "does not describe"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{", StageUnavailable, "broke off"),
        (b"nonsense\r\n\r\n", StageUnavailable, "engine at"),
        (b"", StageUnavailable, "engine at"),
    ],
)
async def test_an_engine_that_talks_nonsense_is_told(tmp_path, answer, error, words):
    path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def serve():
            with listening.accept()[0] as one:
                one.recv(65536)
                one.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(error, match=words):
            await EngineImage("docker", "name", socket_path=path).identify()
        server.join(5)
