"""Virtual machines through the public names: the machine without PCI, KVM or its refusal, and this machine's own software as their disk.

What every substrate promises is in tests/conformance, what is hostile in tests/security/test_vm.py, the judgement over KVM in test_vm_probe.py.
"""

import dataclasses
import json
import secrets
from pathlib import Path

import pytest
from tests.images import small_directory

import untax
from untax import substrates
from untax.core.root import View
from untax.layers.sources import host

READY_S = 150.0  # for a boot: emulated, and beside the rest of the suite
SPEC = untax.EnvSpec(image=f"dir:{small_directory()}", isolation="vm")


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """One for all, so that KVM is tried once."""
    if reason := substrates.load("vm").unavailable_reason():
        pytest.skip(f"vm: {reason}")
    return tmp_path_factory.mktemp("vm") / "state"


def an_engine(state, **options):
    return untax.Engine("vm", state_dir=state, ready_s=READY_S, **options)


def qemu_of(box) -> list[str]:
    return Path(f"/proc/{box.sandbox.pid}/cmdline").read_text().split("\0")


# ---- the machine without PCI ----


@pytest.mark.parametrize("start", ["cold", "restored"])
async def test_a_microvm_comes_up_either_way_and_is_called_so(state, start):
    """A row of its own: another machine, without PCI, and under a name of its own in every ledger."""
    async with an_engine(state, machine="microvm", start=start) as engine, engine.lease(SPEC) as box:
        said = await box.shell("echo up; cat /proc/sys/kernel/hostname")
        its = qemu_of(box)
    saved = [json.loads(path.read_text())["hardware"] for path in (state / "vm/saved").glob("*/about.json")]

    assert said.text == f"up\n{box.id}\n", said
    assert its[its.index("-M") + 1].startswith("microvm,")
    assert ("-incoming" in its) == (start == "restored")
    assert [hardware.partition(",")[0] for hardware in saved] == (["microvm"] if start == "restored" else [])
    assert box.ledger.substrate.removesuffix("-emulated") == "vm-microvm"


# ---- KVM, or its refusal ----


async def test_kvm_is_used_or_refused_as_its_probe_found_and_the_name_says_which(state):
    """A device that opens is no proof. Whoever demands what did not boot is told why, and what to do; the answer is kept for the next engine."""
    async with an_engine(state) as engine:
        name = engine.substrate.name
    kept = {path: path.stat().st_mtime_ns for path in (state / "vm").glob("kvm-*.json")}
    found = [json.loads(path.read_text()) for path in kept]  # nothing where there is no device to try

    assert name == ("vm" if found and found[0]["works"] else "vm-emulated")
    if name == "vm":
        async with an_engine(state, accel="kvm") as engine:
            assert engine.substrate.name == "vm"
    else:
        with pytest.raises(untax.SubstrateUnavailable, match=r"accel='kvm': .*/dev/kvm.*; use accel='auto' for emulation") as refused:
            await an_engine(state, accel="kvm").start()
        assert all(one["words"] in str(refused.value) for one in found)
        assert list((state / "vm").glob("engine-*")) == []
    assert {path: path.stat().st_mtime_ns for path in (state / "vm").glob("kvm-*.json")} == kept
    async with an_engine(state, accel="tcg") as engine:
        assert engine.substrate.name == "vm-emulated"


# ---- this machine's own software ----


def show_little(monkeypatch, tmp_path) -> Path:
    """The image `host` in small: its own skeleton, and views of this machine at /usr and /opt/view that are megabytes and not gigabytes.

    Gives the directory that is seen at /opt/view, with a program and a mark in it.
    """
    view, layer = tmp_path / "view", tmp_path / "layer"
    view.mkdir()
    (view / "tool").write_text("#!/bin/sh\ncat /opt/view/mark\n")
    (view / "tool").chmod(0o755)
    (view / "mark").write_text(secrets.token_hex(16))
    (layer / "opt/view").mkdir(parents=True)
    (layer / "usr").mkdir()
    (layer / "usr/lib64").symlink_to("lib")  # where the skeleton's link to the loader leads
    whole = host.host_root

    def little(cache):
        root = whole(cache)
        views = (View(str(small_directory() / "usr"), "/usr"), View(str(view), "/opt/view"))
        return dataclasses.replace(root, layers=(*root.layers, str(layer)), views=views)

    monkeypatch.setattr(host, "host_root", little)
    return view


async def test_the_host_s_own_software_is_made_into_one_disk_once(state, tmp_path, monkeypatch):
    """What is inside is what lies on this machine, and of /etc only what is listed."""
    view = show_little(monkeypatch, tmp_path)
    mark = (view / "mark").read_text()
    before = set((state / "vm/chains").glob("*.squashfs"))
    for _ in range(2):
        async with an_engine(state) as engine, engine.lease(untax.EnvSpec(image="host", isolation="vm")) as box:
            assert (await box.run(["/opt/view/tool"])).text == mark
            assert await box.read("/etc/ld.so.cache") == Path("/etc/ld.so.cache").read_bytes()
            assert (await box.shell("test -e /etc/shadow")).exit_code == 1
        (view / "mark").write_text("changed")  # this machine's packages have not, so that the disk is good for the next engine too
    assert len(set((state / "vm/chains").glob("*.squashfs")) - before) == 1
