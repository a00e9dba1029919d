"""Containers on real engines: images, bad input, ownership, and that nothing is left."""

import asyncio
import dataclasses
import hashlib
import io
import json
import os
import secrets
import signal
import subprocess
import tarfile
import time

import pytest
from tests.enginehost import engine_host
from tests.engines_fixture import docker, podman  # noqa: F401
from tests.images import small_directory
from tests.registries import MACHINE
from tests.variants import Variant, options_of

import untax
from untax import substrates
from untax.core.root import Root, View
from untax.core.stage import Stage
from untax.core.substrate import Incumbent
from untax.ground import Ground
from untax.substrates._container_api import Refused
from untax.substrates._container_sandbox import ContainerSandbox

SMALL = untax.EnvSpec(image=f"dir:{small_directory()}", isolation="container")


@pytest.fixture(scope="module", params=[Variant("container", "docker"), Variant("container", "podman")], ids=str)
def options(request):
    return options_of(request)


@pytest.fixture(scope="module")
def engine(options, _runner, tmp_path_factory):
    if reason := substrates.load("container", **options).unavailable_reason():
        pytest.skip(f"container: {reason}")
    engine = untax.Engine("container", state_dir=tmp_path_factory.mktemp("state"), **options)
    _runner.run(engine.start())
    yield engine
    assert _runner.run(ours(engine)) == []
    _runner.run(engine.aclose())


@pytest.fixture
def api(engine):
    return engine.substrate.api


async def ours(engine):
    substrate = engine.substrate
    return await substrate._list(substrate._labels)


async def inspected(engine, box):
    return await engine.substrate.api.ask("GET", f"/containers/{box._sandbox.container}/json")


# ---- how one is made ----


async def test_a_container_is_made_as_the_threat_list_has_it(engine):
    """By its own engine's account, and not by what was asked for."""
    async with engine.lease(SMALL, limits=untax.Limits(memory_mib=128, pids=40, cpus=0.5)) as box:
        found = await inspected(engine, box)
        facts = await box.shell(
            "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null; ls -A /sys/class/net"
        )
    host = found["HostConfig"]

    assert host["NetworkMode"] == "none"
    assert not host["Privileged"]
    assert not host["Binds"]
    assert host["AutoRemove"]
    assert {name.removeprefix("CAP_") for name in host["CapAdd"]} <= {
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "SETGID",
        "SETUID",
        "SETPCAP",
    }
    assert host["Memory"] == 128 << 20
    assert host["PidsLimit"] == 42
    assert facts.text.split()[:1] == [str(128 << 20)]
    assert set(facts.text.split()[1:]) <= {"lo", "sit0", "tunl0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6gre0"}
    assert found["Config"]["Labels"]["untax.sandbox"] == box.id


async def test_one_exec_of_the_engine_is_the_other_way(engine):
    """The incumbent path gives the same results as the held channel, one exec each."""
    async with engine.lease(SMALL) as box:
        sandbox = box._sandbox
        assert isinstance(sandbox, Incumbent)
        said = await sandbox.run_incumbent(["sh", "-c", "pwd; id -u; echo $HOME; echo no >&2; exit 3"], timeout_s=20)
        assert (said.exit_code, said.stdout, said.stderr, said.outcome) == (3, b"/workspace\n1000\n/home/user\n", b"no\n", "exited")
        assert said.round_trip_s > 0
        assert (await sandbox.run_incumbent(["no-such-program"], timeout_s=20)).exit_code == 127
        assert (await sandbox.run_incumbent(["sleep", "30"], timeout_s=0.3)).timed_out
        assert (await sandbox.run_incumbent(["sh", "-c", "kill -9 $$"], timeout_s=20)).exit_code == 137
        much = await sandbox.run_incumbent(["sh", "-c", "head -c 3000000 /dev/zero"], timeout_s=20)
        assert len(much.stdout) + much.dropped_stdout == 3_000_000
        assert much.truncated
    with pytest.raises(untax.SandboxLost):
        await sandbox.run_incumbent(["true"], timeout_s=20)


async def test_limits_can_be_bound_late(engine):
    """A container that was made ahead takes the limits of its lease."""
    async with engine.lease(SMALL) as box:
        left = await box._sandbox.bind_limits(untax.Limits(memory_mib=64, pids=30, cpus=0.25))
        found = (await inspected(engine, box))["HostConfig"]
        limit = await box.shell("cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null")
    assert {one.name for one in left} <= {"disk_mib"}
    assert limit.text.split() == [str(64 << 20)]
    assert found["PidsLimit"] in (32, 0, 514)  # Podman shows what it began with


async def test_starts_are_capped(engine, options, tmp_path, monkeypatch):
    """However many ask, no more than that many are between created and greeting."""
    under_way, most = set(), {"create": 0, "start": 0}

    def counted(step, do):
        """What the engine is asked for meanwhile; those that only wait for their turn have not begun it."""

        async def doing(*arguments):
            one = object()
            under_way.add(one)
            most[step] = max(most[step], len(under_way))
            try:
                return await do(*arguments)
            finally:
                under_way.discard(one)

        return doing

    async with untax.Engine("container", state_dir=tmp_path / "s", starts=2, **options) as narrow:
        await narrow.prepare(SMALL)  # so that all of them come to the cap together
        monkeypatch.setattr(narrow.substrate, "_make", counted("create", narrow.substrate._make))
        for step in ("_asked", "_wait_greeting"):
            monkeypatch.setattr(ContainerSandbox, step, counted("start", getattr(ContainerSandbox, step)))

        async def one():
            async with narrow.lease(SMALL) as box:
                assert (await box.run(["true"])).exit_code == 0

        await asyncio.gather(*(one() for _ in range(6)))
    assert most == {"create": 2, "start": 2}
    assert not under_way


# ---- images ----


async def load(api, tar):
    await api.send_tar("POST", "/images/load", io.BytesIO(tar), len(tar), query={}, patience_s=60)


def image_tar(name, *, machine=MACHINE, files=None, config=None):
    """A docker-archive of one layer."""

    def packed(members):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for member, (data, mode) in members.items():
                entry = tarfile.TarInfo(member)
                entry.size, entry.mode = len(data), mode
                tar.addfile(entry, io.BytesIO(data))
        return out.getvalue()

    layer = packed({name: (data, 0o755) for name, data in (files or {"only": b"x"}).items()})
    rootfs = {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]}
    described = json.dumps({"architecture": machine, "os": "linux", "config": config or {}, "rootfs": rootfs}).encode()
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    return packed({"config.json": (described, 0o644), "layer.tar": (layer, 0o644), "manifest.json": (manifest, 0o644)})


async def test_an_image_of_the_engine_is_used_as_it_is(engine, api):
    """Its layers are the engine's own, with one more for the cell; variables, user and directory are the image's."""
    busybox = subprocess.run(["sh", "-c", "command -v busybox"], capture_output=True, text=True).stdout.strip()
    if not busybox or b"statically" not in subprocess.run(["file", busybox], capture_output=True).stdout + b"statically":
        pytest.skip("needs busybox-static")
    with open(busybox, "rb") as program:
        data = program.read()
    config = {"Env": ["GREETING=hello there"], "WorkingDir": "/srv", "User": "1234", "Cmd": ["sh"], "Volumes": {"/data": {}}}
    await load(api, image_tar("localhost/tests/direct:1", files={"bin/sh": data, "srv/x": b"y"}, config=config))
    spec = untax.EnvSpec(image=f"{api.engine}:localhost/tests/direct:1", isolation="container")
    for _ in range(2):
        async with engine.lease(spec) as box:
            assert (await box.shell("echo $GREETING; pwd; echo x >/data/x", user="root")).text == "hello there\n/srv\n"
            assert box.image.user == "1234"
            status = (await box.read("/proc/self/status")).decode()
            assert "Uid:\t1234" in status
            volumes = [mount["Name"] for mount in (await inspected(engine, box))["Mounts"] if mount.get("Type") == "volume"]
        assert "import" not in box.ledger.stages
    for name in volumes:  # a volume goes with its container
        with pytest.raises(Refused) as gone:
            await api.ask("GET", f"/volumes/{name}")
        assert gone.value.status == 404


async def test_an_image_without_a_shell_runs_what_it_has(engine, api):
    """The cell needs nothing of the image; what does is told what is missing."""
    await load(api, image_tar("localhost/tests/bare:1"))
    async with engine.lease(untax.EnvSpec(image=f"{api.engine}:localhost/tests/bare:1", isolation="container")) as box:
        assert await box.read("/only") == b"x"
        await box.write("made", b"1")
        assert (await box.run(["/only"])).exit_code == 126
        told = await box.shell("echo hi")
        assert (told.exit_code, told.stdout) == (127, b"")


async def test_an_image_for_another_processor_is_refused_with_the_remedy(engine, api):
    other = "arm64" if MACHINE == "amd64" else "amd64"
    await load(api, image_tar("localhost/tests/other:1", machine=other))
    with pytest.raises(untax.StageFailed, match=rf"linux/{other}.*linux/{MACHINE}"):
        await engine.acquire(untax.EnvSpec(image=f"{api.engine}:localhost/tests/other:1", isolation="container"))
    assert await ours(engine) == []


async def test_a_missing_image_is_told(engine, api):
    with pytest.raises(untax.StageFailed, match=r"has no image tests/missing; .* pull"):
        await engine.acquire(untax.EnvSpec(image=f"{api.engine}:tests/missing", isolation="container"))
    for name in ("--privileged", ";reboot", "../../info", "a b"):
        with pytest.raises(untax.UsageError):
            await engine.acquire(untax.EnvSpec(image=f"{api.engine}:{name}", isolation="container"))


async def test_chains_are_taken_in_once_and_share_their_layers(engine, api, tmp_path):
    """The stages of a spec are those of every other substrate; images that share some share them in the engine too."""
    (tmp_path / "origin").mkdir()

    def git(*argv):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", tmp_path / "origin", *argv],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "origin/file").write_text("here\n")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    repo = untax.Repo(str(tmp_path / "origin"), git("rev-parse", "HEAD"))
    specs = [SMALL, dataclasses.replace(SMALL, repo=repo), dataclasses.replace(SMALL, repo=repo, setup=("cat file >made",))]
    layers, imports = [], []
    for spec in [*specs, specs[2]]:
        async with engine.lease(spec) as box:
            imports.append("import" in box.ledger.stages)
            if spec.setup:
                assert await box.read("made") == b"here\n"
                assert (await box.stat("made")).uid == 1000
            image = (await inspected(engine, box))["Image"]
        layers.append((await api.ask("GET", f"/images/{image}/json"))["RootFS"]["Layers"])
    assert imports[1:] == [True, True, False]
    assert [len(one) for one in layers] == [2, 3, 4, 4]
    # the last is the cell's; below it each image is the one before with one more layer
    assert layers[0][:1] == layers[1][:1]
    assert layers[1][:2] == layers[2][:2]
    assert layers[0][-1] == layers[1][-1] == layers[2][-1]


async def test_an_image_that_was_removed_is_taken_in_again(engine, api):
    async with engine.lease(SMALL) as box:
        image = (await inspected(engine, box))["Image"]
    await api.ask("DELETE", f"/images/{image}", query={"force": "true"})
    with pytest.raises(untax.CreateError, match="anew"):
        await engine.acquire(SMALL)
    async with engine.lease(SMALL) as box:
        assert (await box.run(["true"])).exit_code == 0


async def test_only_so_many_images_are_kept(options, tmp_path):
    async with untax.Engine("container", state_dir=tmp_path / "s", keep_images=1, **options) as engine:
        api, tags = engine.substrate.api, []
        for n in range(2):
            place = tmp_path / f"image{n}"
            place.mkdir()
            (place / "n").write_text(str(n))
            async with engine.lease(untax.EnvSpec(image=f"dir:{place}", isolation="container")) as box:
                assert await box.read("/n") == str(n).encode()
                image = (await inspected(engine, box))["Image"]
                tags.append((await api.ask("GET", f"/images/{image}/json"))["RepoTags"][0])
        left = {tag for one in await engine.substrate.images._listed() for tag in one["RepoTags"] or ()}
        assert tags[0] not in left
        assert tags[1] in left


# ---- this machine's own software ----


def over_a_view(tmp_path):
    """What `host` is, in small: a layer, and a directory of this machine that is seen in it."""
    place = tmp_path / "view"
    (place / "bin").mkdir(parents=True)
    (place / "bin/tool").write_text("#!/bin/sh\necho poured\n")
    (place / "bin/tool").chmod(0o755)
    (place / "bin/same").hardlink_to(place / "bin/tool")
    (place / "large").write_bytes(os.urandom(3 << 20))
    (tmp_path / "layer/opt/view").mkdir(parents=True)
    return Root((str(small_directory()), str(tmp_path / "layer")), views=(View(str(place), "/opt/view"),))


async def test_what_stands_on_views_of_the_host_is_poured_in_once_and_told_of(engine, api, tmp_path):
    """Straight from the files into the engine: nothing of that size lies in the state directory."""
    root, told = over_a_view(tmp_path), []
    key = secrets.token_hex(8)
    grounds = engine.warehouse._grounds
    ground = Ground(root, (Stage("image", key, {}, None, False),), 1, ())
    taken = await asyncio.gather(*(grounds._take_in(ground, lambda *said: told.append(said)) for _ in range(3)))
    assert len({one.root.layers for one, _ in taken}) == 1
    assert told[-1][0] == "export"
    sandbox = await engine.substrate.create_on(untax.EnvSpec(image="host", isolation="container"), taken[0][0].root)
    try:
        await sandbox.wait_ready()
        ran = await sandbox.run_incumbent(["/opt/view/bin/same"], timeout_s=30)
        assert (ran.stdout, ran.stderr) == (b"poured\n", b"")
        found = await api.ask("GET", f"/images/{taken[0][0].root.layers[0]}/json")
        assert len(found["RootFS"]["Layers"]) == 1
        assert found["Config"]["Labels"]["untax.host"] == "1"
    finally:
        await sandbox.destroy()


async def test_half_of_a_tree_is_no_image(engine, api, tmp_path):
    """Whoever writes it fails in the middle, where a tar could end just as well."""
    key = secrets.token_hex(8)

    def broken(root, target, name, labels, /, to=None):
        assert to == "tar"
        with target.open("wb") as out, tarfile.open(fileobj=out, mode="w|") as tar:
            tar.add(tmp_path / "view/bin", "bin")
            raise untax.StageUnavailable("export", "a file changed while it was read")

    with pytest.raises(untax.StageUnavailable, match="changed while it was read"):
        await engine.substrate.take_in(key, over_a_view(tmp_path), broken)
    assert await engine.substrate.images.find(key, Root(())) is None


# ---- bad input ----


async def test_no_engine_a_wrong_socket_and_an_unknown_runtime_are_told(options, engine, tmp_path):
    with pytest.raises(untax.SubstrateUnavailable, match="start its service"):
        await untax.Engine("container", state_dir=tmp_path / "a", socket=str(tmp_path / "none")).start()
    wrong = tmp_path / "wrong"
    server = await asyncio.start_unix_server(lambda r, w: w.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), str(wrong))
    with pytest.raises(untax.SubstrateUnavailable, match="is this the socket of a container engine"):
        await untax.Engine("container", state_dir=tmp_path / "b", socket=str(wrong), engine=options["engine"]).start()
    server.close()
    async with untax.Engine("container", state_dir=tmp_path / "c", runtime="no-such-runtime", **options) as other:
        with pytest.raises(untax.UntaxError, match="no-such-runtime"):
            await other.acquire(SMALL)
        assert await ours(other) == []


async def test_an_unknown_user_is_told_and_leaves_nothing(engine):
    with pytest.raises(untax.UsageError, match="no such user"):
        await engine.acquire(SMALL, user="nobody-at-all")
    assert await ours(engine) == []


async def test_a_set_up_step_that_fails_is_told_as_everywhere(engine):
    with pytest.raises(untax.StageFailed, match="because") as failed:
        await engine.acquire(dataclasses.replace(SMALL, setup=("echo because >&2; exit 3",)))
    assert failed.value.stage == "deps"


async def test_there_are_no_snapshots_and_it_is_said(engine):
    async with engine.lease(SMALL) as box:
        with pytest.raises(untax.UsageError, match="cannot take a snapshot"):
            await box.snapshot()


# ---- ownership ----


async def test_what_a_killed_engine_left_is_gone_by_itself_and_swept(options, request, tmp_path):
    """Its containers end with its end of the stream; those that cannot (frozen here) go with the next start, and nobody else's do."""
    state = tmp_path / "state"
    async with engine_host(state, substrate="container", options=options) as host:
        for name in ("one", "two"):
            await host.lease(name, {"image": SMALL.image})
        probe = untax.Engine("container", state_dir=state, **options)
        await probe.start()  # a living neighbour with the same state directory: it sweeps nothing of the other's
        api = probe.substrate.api
        there = await probe.substrate._list({"untax.state": str(state)})
        assert len(there) == 2
        await api.ask("POST", f"/containers/{there[0]['Id']}/pause")
        host.kill(signal.SIGKILL)
        await host.process.wait()
    gone = there[1]["Id"]
    with pytest.raises(Refused):
        while True:
            await api.ask("POST", f"/containers/{gone}/wait", query={"condition": "removed"})
    assert [one["Id"] for one in await probe.substrate._list({"untax.state": str(state)})] == [there[0]["Id"]]
    await probe.aclose()
    async with untax.Engine("container", state_dir=state, **options) as after:
        assert await after.substrate._list({"untax.state": str(state)}) == []


async def test_x19_c9_a_container_removed_by_hand_is_lost_and_replaced(engine, api):
    """Whoever holds it is told at once, and a reset gives another."""
    async with engine.lease(SMALL) as box:
        running = asyncio.create_task(box.run(["sleep", "60"]))
        await box.run(["true"])
        await api.ask("DELETE", f"/containers/{box._sandbox.container}", query={"force": "true"})
        with pytest.raises(untax.SandboxLost):
            await asyncio.wait_for(running, 5)
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        assert box.ledger.verdict == "infra"
    async with engine.lease(SMALL) as another:
        assert (await another.run(["true"])).exit_code == 0


async def test_x25_the_clock_goes_on_while_a_container_is_paused(engine):
    """It has the host's own: after a pause it is right at once."""
    async with engine.lease(SMALL) as box:
        await box.pause()
        await asyncio.sleep(1.2)
        await box.resume()
        before_s = time.time()
        inside_s = float((await box.run(["date", "+%s.%N"])).text)
        assert before_s <= inside_s <= time.time()
