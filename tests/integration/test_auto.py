"""`Engine("auto")`: each spec runs on what suits it best of what this machine has, and the ledger says why."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading

import pytest
from tests.engines_fixture import docker, podman  # noqa: F401
from tests.images import small_directory
from tests.serving import started
from tests.variants import Variant, options_of

import untax
from untax import auto, substrates, sync
from untax.core.errors import UsageError
from untax.pool.choice import Expected
from untax.testing import FakeSubstrate

NOTHING_ELSE = {
    "vm": {"qemu": "/nonexistent/qemu"},
    "container": {"socket": "/nonexistent/socket"},
    "gvisor": {"runsc": "/nonexistent/runsc"},
}
"""So that neither a daemon nor an emulated machine of the machine that the tests run on has a say."""


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-such-file"))


@pytest.fixture(autouse=True)
def _needs_namespace():
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")


def an_engine(state_dir, **options):
    return untax.Engine("auto", state_dir=state_dir, options=NOTHING_ELSE, **options)


async def test_a_spec_runs_on_the_cheapest_substrate_that_is_strong_enough(tmp_path, caplog):
    caplog.set_level(logging.INFO, "untax.auto")
    async with an_engine(tmp_path / "state") as engine:
        assert isinstance(engine, untax.Engine)
        async with engine.lease() as box:  # EnvSpec's own isolation, and not the strongest there is
            assert (await box.run(["true"])).exit_code == 0
        async with engine.lease(untax.EnvSpec(isolation="none")) as plain:
            assert (await plain.run(["true"])).exit_code == 0
        assert engine.pools().substrate == "auto: namespace, process"
        assert engine.pools().leases == 2
    assert (box.ledger.substrate, plain.ledger.substrate) == ("namespace", "process")
    assert "'namespace' asked for" in json.loads(box.ledger.to_json())["choice"]
    assert "chosen: namespace" in str(box.ledger)
    assert "auto: namespace" in caplog.text


async def test_a_boundary_that_is_not_to_be_had_is_refused_and_never_weakened(tmp_path):
    async with an_engine(tmp_path / "state") as engine:
        with pytest.raises(UsageError, match=r"no usable substrate has isolation 'vm'.*container: .*namespace: its isolation.*vm: no "):
            await engine.acquire(untax.EnvSpec(isolation="vm"))
        with pytest.raises(UsageError, match="isolation 'container' or stronger"):
            await engine.warm(untax.EnvSpec(isolation="container"))
        with pytest.raises(UsageError, match="isolation 'container' or stronger"):
            engine.choice(untax.EnvSpec(isolation="container"))


@pytest.mark.parametrize("accel", ["auto", "tcg"])
async def test_an_emulated_machine_is_not_what_was_asked_for(tmp_path, caplog, accel):
    """QEMU is here and would start; only with KVM is its boundary one. The machine that a provider would make is dearer, and is one."""
    real = substrates.load("vm", state_dir=str(tmp_path / "state"))
    if reason := real.unavailable_reason():
        pytest.skip(f"vm: {reason}")
    only_vm = {**NOTHING_ELSE, "vm": {"accel": accel}}
    provider = {"ssh": {"create": ["false"], "delete": ["true"]}}
    has_boundary = accel == "auto" and not real.is_slow_to_try  # a host with KVM that works
    async with untax.Engine("auto", state_dir=tmp_path / "state", options={**only_vm, **provider}) as engine:
        served, choice = await engine.engine_for(untax.EnvSpec(isolation="vm"))
        assert choice.substrate == served.substrate.name == ("vm" if has_boundary else "ssh")
    if has_boundary:
        return
    assert "vm is left out where a boundary is asked for: " in caplog.text
    async with untax.Engine("auto", state_dir=tmp_path / "state", options=only_vm) as engine:
        for isolation in ("vm", "gvisor"):
            words = rf"isolation '{isolation}'.*; vm: .* only emulates machines, .*use a host on which `untax doctor` finds KVM working"
            with pytest.raises(UsageError, match=words):
                await engine.acquire(untax.EnvSpec(isolation=isolation))
    async with untax.Engine("auto", state_dir=tmp_path / "state", options=only_vm, least="vm") as engine:
        with pytest.raises(UsageError, match="only emulates machines"):
            await engine.acquire(untax.EnvSpec(isolation="none"))


@pytest.mark.parametrize("variant", [Variant("container", "docker"), Variant("gvisor")], ids=str)
async def test_a_stronger_boundary_is_a_real_one(request, tmp_path, variant):
    """Not only chosen: leased, and used."""
    own = options_of(request, variant)
    if reason := substrates.load(variant.substrate, **own).unavailable_reason():
        pytest.skip(f"{variant.substrate}: {reason}")
    spec = untax.EnvSpec(image=f"dir:{small_directory()}", isolation=variant.substrate)
    async with untax.Engine("auto", state_dir=tmp_path / "state", options={**NOTHING_ELSE, variant.substrate: own}) as engine:
        async with engine.lease(spec) as box:
            kernel = (await box.run(["uname", "-r"])).check().text.strip()
    assert (box.ledger.substrate, box.ledger.isolation) == (variant.substrate, variant.substrate)
    assert f"'{variant.substrate}' asked for" in box.ledger.choice
    assert (kernel == os.uname().release) == (variant.substrate == "container")


async def test_snapshots_forks_graders_and_warm_pools_work_as_on_one_substrate(tmp_path):
    async with an_engine(tmp_path / "state") as engine:
        await engine.warm(n=1)
        async with engine.lease() as box:
            assert box.ledger.hit.kind == "exact"
            await box.write("kept", b"1")
            snapshot = await box.snapshot()
            async with engine.fork(snapshot, 2) as group:
                assert [await one.read("kept") for one in group] == [b"1", b"1"]
            async with engine.grader(box, take=("kept",)) as clean:
                assert await clean.read("kept") == b"1"
            saved = await snapshot.save()
        async with engine.restore(saved) as again:
            assert await again.read("kept") == b"1"
        with pytest.raises(UsageError):
            await engine.find_snapshot("snap-none")


async def test_leases_at_once_start_one_engine(tmp_path):
    async with an_engine(tmp_path / "state") as engine:
        boxes = await asyncio.gather(*(engine.acquire() for _ in range(4)))
        assert len({box._engine for box in boxes}) == 1
        left = asyncio.ensure_future(engine.acquire(untax.EnvSpec(isolation="none")))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
    for box in boxes:
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])


async def test_what_does_not_start_is_left_out_with_its_reason(tmp_path, caplog):
    """A socket that is listened on looks like an engine, until it is asked something."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=_answers_nonsense, args=(listener,), daemon=True).start()
        options = {**NOTHING_ELSE, "container": {"engine": "docker", "socket": str(path), "answer_s": 2.0}}
        async with untax.Engine("auto", state_dir=tmp_path / "state", options=options) as engine:
            assert engine.choice(untax.EnvSpec(isolation="container")).substrate == "container"
            with pytest.raises(UsageError, match="container: it did not start: "):
                await engine.acquire(untax.EnvSpec(isolation="container"))
            async with engine.lease() as box:
                assert box.ledger.substrate == "namespace"
        listener.shutdown(socket.SHUT_RDWR)
    assert "container did not start and is left out" in caplog.text


async def test_the_start_of_an_engine_counts_as_waiting(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()  # and never answers
        options = {**NOTHING_ELSE, "container": {"engine": "docker", "socket": str(path), "answer_s": 1.0}}
        async with untax.Engine("auto", state_dir=tmp_path / "state", options=options) as engine:
            with pytest.raises(untax.PoolTimeout, match=r"wait_s=0\.2"):
                await engine.acquire(untax.EnvSpec(isolation="container"), wait_s=0.2)
            async with engine.lease(wait_s=10) as box:
                assert box.ledger.substrate == "namespace"


async def test_a_server_chooses_for_each_client_and_gives_none_less_than_a_namespace(tmp_path):
    """Who leases over a socket says what it accepts; running with the server's own rights is not for it to choose."""
    server = await started(tmp_path / "s.sock", tmp_path / "state", substrate="auto")
    try:
        async with untax.connect(server.url) as engine:
            assert engine.substrate.name == "auto"
            async with engine.lease() as box, engine.lease(untax.EnvSpec(isolation="none")) as bold:
                assert (box.ledger.substrate, bold.ledger.substrate) == ("namespace", "namespace")
                await box.write("kept", b"1")
                snapshot = await box.snapshot()
                async with engine.restore(snapshot) as again:
                    assert await again.read("kept") == b"1"
            await engine.warm(n=1)
            assert "namespace" in (await engine.pools()).substrate
    finally:
        assert await server.stop() == 0


def _answers_nonsense(listener):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):  # who only looked whether somebody listens is gone
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnope")


async def test_what_was_measured_here_decides(tmp_path, caplog):
    state = tmp_path / "state"
    slow = Expected("namespace", "namespace", start_s=9.0, action_s=9.0, source="measured")
    auto.keep_measured(state, [slow])
    auto.keep_measured(state, [Expected("process", "none", 0.1, 0.1, source="measured")])  # the other stays
    async with an_engine(state, actions=10) as engine:
        reason = engine.choice().reason
        assert "99 s beside its own commands (measured here)" in reason
        assert engine.choice(untax.EnvSpec(isolation="none")).left_out["namespace"].startswith("a rollout is expected to cost 99 s")
    (state / auto.MEASURED).write_text("{")
    async with an_engine(state) as engine:
        assert "not measured here" in engine.choice().reason
    assert "what was measured is not used" in caplog.text


async def test_what_pools_have_learnt_counts_where_nothing_was_measured(tmp_path):
    async with an_engine(tmp_path) as engine, engine.lease():
        pass
    async with an_engine(tmp_path) as engine:
        assert "its start learnt here" in engine.choice().reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"options": {"moon": {}}}, "there is no substrate 'moon'"),
        ({"options": {"container": {"moon": 1}}}, "its options are"),
        ({"options": {"container": "docker"}}, "must be a mapping"),
        ({"options": []}, "must be a mapping"),
        ({"actions": 0}, "actions must be a positive number"),
        ({"actions": float("nan")}, "actions must be a positive number"),
        ({"engine": "docker"}, "name it: options="),
        ({"limits": "some"}, "limits must be"),
        ({"store_budget_mib": -1}, "store_budget_mib"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        untax.Engine("auto", state_dir=tmp_path, **options)
    with pytest.raises(UsageError, match=words):
        sync.Engine("auto", state_dir=tmp_path, **options)


async def test_an_image_that_a_substrate_cannot_have_leaves_it_out(tmp_path):
    async with an_engine(tmp_path) as engine:
        with pytest.raises(UsageError, match="process: image 'dir:/x': the process substrate has only the host's own files"):
            engine._candidates.leave_out("namespace", "not here")
            engine.choice(untax.EnvSpec(image="dir:/x", isolation="none"))


async def test_before_the_start_and_after_the_end_nothing_is_leased(tmp_path):
    engine = an_engine(tmp_path)
    with pytest.raises(UsageError, match="not started"):
        await engine.acquire()
    async with engine:
        pass
    with pytest.raises(untax.PoolClosed):
        await engine.acquire()
    with pytest.raises(UsageError, match="make a new one"):
        await engine.start()


def test_a_substrate_of_that_name_given_as_an_object_is_not_a_choice():
    assert type(untax.Engine(FakeSubstrate())) is untax.Engine


def test_blocking(tmp_path):
    with sync.Engine("auto", state_dir=tmp_path, options=NOTHING_ELSE) as engine:
        with engine.lease() as box:
            assert box.run(["true"]).exit_code == 0
            snapshot = box.snapshot()
            with engine.fork(snapshot, 2) as group:
                assert [one.run(["true"]).exit_code for one in group] == [0, 0]
        assert "asked for" in box.ledger.choice
        assert engine.pools().leases == 1
        assert engine.quarantined == ()
