"""Machines behind SSH, against an sshd of the tests' own in namespaces of its own: the two paths, providers, and what goes wrong."""

import asyncio
import os
import shlex
import sys
from pathlib import Path

import pytest
from tests.sshd import sshd  # noqa: F401

import untax
from untax import substrates
from untax.core.substrate import Incumbent

SPEC = untax.EnvSpec(isolation="none")


def left_there(sshd) -> list[str]:  # noqa: F811
    return sorted(path.name for path in (sshd.home / ".cache/untax").glob("sbx-*"))


@pytest.fixture
async def engine(sshd, tmp_path):  # noqa: F811
    async with untax.Engine("ssh", state_dir=tmp_path / "state", **sshd.options) as engine:
        yield engine


async def test_the_other_end_is_not_this_machine_s_own(engine, sshd):  # noqa: F811
    """Other processes, another home; and nothing is put into ours."""
    async with engine.lease(SPEC) as box:
        said = await box.shell("readlink /proc/self/ns/pid /proc/self/ns/mnt; cat /proc/1/comm; pwd")
        fresh = await box._sandbox.run_incumbent(["sh", "-c", "echo ~"], timeout_s=30)
    *spaces, first, place = said.check().text.split()

    assert place.startswith(f"{sshd.home}/.cache/untax/")
    assert fresh.text.strip() == str(sshd.home)
    if not sshd.is_apart:
        pytest.skip("unshare: this user can make no namespaces here, so its sshd is a process like any other")
    assert first == "sshd"
    assert not {os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/mnt")} & set(spaces)


async def test_both_paths_give_the_same_result(engine):
    """What an agent does today, and what the held session gives."""
    async with engine.lease(SPEC) as box:
        assert isinstance(box._sandbox, Incumbent)
        held = await box.run(["sh", "-c", "echo out; echo err >&2; pwd; exit 3"])
        fresh = await box._sandbox.run_incumbent(["sh", "-c", "echo out; echo err >&2; pwd; exit 3"], timeout_s=30)
        late = await box._sandbox.run_incumbent(["sleep", "30"], timeout_s=1)

    assert (fresh.exit_code, fresh.stdout, fresh.stderr) == (held.exit_code, held.stdout, held.stderr) == (3, held.stdout, b"err\n")
    assert fresh.round_trip_s > 0
    assert late.timed_out


async def test_the_directory_there_goes_with_the_session(engine, sshd):  # noqa: F811
    before = left_there(sshd)
    async with engine.lease(SPEC) as box:
        await box.write("f", b"x")
        assert box.id in left_there(sshd)

    assert left_there(sshd) == before


async def test_a_connection_that_is_cut_is_a_lost_sandbox(engine, sshd):  # noqa: F811
    before = left_there(sshd)
    async with engine.lease(SPEC) as box:
        running = asyncio.ensure_future(box.run(["sleep", "60"]))
        await box.run(["true"])
        box._sandbox._process.kill()
        with pytest.raises(untax.SandboxLost):
            await running
    for _ in range(100):  # the other end notices by itself, a moment later
        if left_there(sshd) == before:
            break
        await asyncio.sleep(0.05)

    assert box.ledger.verdict == "infra"
    assert left_there(sshd) == before


async def test_an_unknown_host_key_is_refused_with_the_remedy(sshd, tmp_path):  # noqa: F811
    (tmp_path / "empty").touch()
    async with untax.Engine("ssh", state_dir=tmp_path / "state", **{**sshd.options, "known_hosts": str(tmp_path / "empty")}) as engine:
        with pytest.raises(untax.SubstrateUnavailable, match="known_hosts"):
            await engine.acquire(SPEC)


async def test_a_key_that_does_not_let_in_is_said(sshd, tmp_path):  # noqa: F811
    stranger = tmp_path / "stranger"
    made = await asyncio.create_subprocess_exec("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger))
    await made.wait()
    async with untax.Engine("ssh", state_dir=tmp_path / "state", **{**sshd.options, "identity": str(stranger)}) as engine:
        with pytest.raises(untax.SubstrateUnavailable, match="identity="):
            await engine.acquire(SPEC)


async def test_a_machine_that_is_not_there_is_the_backend_s_failure(sshd, tmp_path):  # noqa: F811
    options = {**sshd.options, "host": "127.0.0.1:9"}
    async with untax.Engine("ssh", state_dir=tmp_path / "state", **options) as engine:
        with pytest.raises(untax.BackendError, match="is the machine up"):
            await engine.acquire(SPEC)


# ---- providers ----


def provider(sshd, log: Path, *, fails: bool = False) -> dict[str, object]:  # noqa: F811
    """Commands that write down what they were asked, and give the one machine there is."""
    port = sshd.address.rpartition(":")[2]
    answer = shlex.quote(f"{sshd.address}\n[127.0.0.1]:{port} {sshd.key}")
    create = f"echo create $1 >>{log}; " + ("echo no quota >&2; exit 1" if fails else f"printf '%s\\n' {answer}")
    return {
        "create": ["sh", "-c", create, "sh", "{name}"],
        "delete": ["sh", "-c", f"echo delete $1 >>{log}", "sh", "{name}"],
        "identity": sshd.identity,
    }


async def test_a_provider_makes_a_machine_for_each_sandbox_and_deletes_it(sshd, tmp_path):  # noqa: F811
    log = tmp_path / "log"
    async with untax.Engine("ssh", state_dir=tmp_path / "state", **provider(sshd, log)) as engine:
        async with engine.lease(untax.EnvSpec(isolation="vm")) as box:
            assert (await box.run(["echo", "there"])).text == "there\n"
            name = f"untax-{box.id}"

    assert log.read_text().split() == ["create", name, "delete", name]


async def test_a_machine_that_could_not_be_made_is_deleted_all_the_same(sshd, tmp_path):  # noqa: F811
    """Half of one may be there, and costs money."""
    log = tmp_path / "log"
    async with untax.Engine("ssh", state_dir=tmp_path / "state", **provider(sshd, log, fails=True)) as engine:
        with pytest.raises(untax.BackendError, match="no quota"):
            await engine.acquire(untax.EnvSpec(isolation="vm"))

    assert [line.split()[0] for line in log.read_text().splitlines()] == ["create", "delete"]


async def test_machines_of_a_killed_engine_are_deleted_by_the_next(sshd, tmp_path):  # noqa: F811
    log, state = tmp_path / "log", tmp_path / "state"
    options = provider(sshd, log)
    program = f"""
import asyncio, os, untax
async def main():
    engine = untax.Engine("ssh", state_dir={str(state)!r}, **{options!r})
    await engine.start()
    await engine.acquire(untax.EnvSpec(isolation="vm"))
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    await killed.wait()
    assert log.read_text().count("delete") == 0
    async with untax.Engine("ssh", state_dir=state, **options):
        pass

    created, deleted = (line.split()[1] for line in log.read_text().splitlines())
    assert created == deleted
    assert not list(state.rglob("*.machine"))


# ---- what is asked for wrongly ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "-oProxyCommand=touch /tmp/x"}, "not a machine"),
        ({"host": "a b"}, "not a machine"),
        ({"host": "h:99999"}, "not a machine"),
        ({"create": ["true"]}, "belong together"),
        ({"host": "h", "create": ["true"], "delete": ["true"]}, "one of the two"),
        ({"create": "true", "delete": "true"}, "lists of words"),
    ],
)
def test_bad_options_are_refused_with_words(options, words):
    with pytest.raises(untax.UsageError, match=words):
        substrates.load("ssh", **options)


async def test_another_image_or_user_is_refused_with_words(engine):
    with pytest.raises(untax.UsageError, match="image='host'"):
        await engine.acquire(untax.EnvSpec(image="dir:/tmp", isolation="none"))
    with pytest.raises(untax.UsageError, match="who logs in"):
        await engine.acquire(SPEC, user="somebody")
