"""Whether KVM is used: what becomes of a QEMU that boots, hangs or fails with it, and for how long that is known.

What stands in for QEMU here is a script, and for the device a file, so that every answer can be had on any machine; `cell confined`, which
starts it, is the real one. test_vm.py asks this machine's own QEMU.
"""

import os
import shlex
from pathlib import Path

import pytest

import untax
from untax import substrates
from untax.substrates import _host, _vm_probe
from untax.substrates._vm_boot import Kernel

BOOTS = f"echo {shlex.quote(_vm_probe._BOOTED.decode())}; exec sleep 600"  # as a guest does: it goes on until it is ended
HANGS = "echo 'SeaBIOS (version 1.16)'; exec sleep 600"
FAILS = "echo 'ioctl(KVM_CREATE_VM) failed: 16' >&2; echo 'qemu: failed to initialize kvm: Device or resource busy' >&2; exit 1"
REFUSAL = r"accel='kvm': .*{}.*; use accel='auto' for emulation"


@pytest.fixture(autouse=True)
def device(tmp_path, monkeypatch):
    if reason := _host.cell_missing_reason():
        pytest.skip(f"process: {reason}")
    device = tmp_path / "kvm"
    device.touch()
    monkeypatch.setattr(_vm_probe, "KVM", device)
    return device


class Stand:
    """A QEMU that does as it is told, and notes each time that it was asked to boot something."""

    def __init__(self, place: Path, does: str) -> None:
        self.path, self._notes = place / "qemu", place / "asked"
        self._notes.touch()
        self.path.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && exec echo "QEMU 0"\necho "$$ $@" >>{shlex.quote(str(self._notes))}\n{does}\n'
        )
        self.path.chmod(0o755)

    @property
    def asked(self) -> list[str]:
        return self._notes.read_text().splitlines()

    def is_running(self) -> bool:
        return any(os.path.exists(f"/proc/{line.split()[0]}") for line in self.asked)


@pytest.fixture
def kernel(tmp_path):
    """Enough of one to be taken for it: nobody boots it."""
    head = bytearray(0x1000)
    head[0x202:0x206], head[0x20E:0x210], head[0x600:0x606] = b"HdrS", (0x400).to_bytes(2, "little"), b"9.9.9\0"
    (tmp_path / "vmlinuz").write_bytes(head)
    return Kernel(tmp_path / "vmlinuz", "9.9.9")


# ---- one boot ----


def test_a_guest_that_says_so_has_booted_and_is_ended(tmp_path, kernel):
    """With the device, as the machines that come after it."""
    qemu = Stand(tmp_path, BOOTS)
    found = _vm_probe.probed(str(qemu.path), kernel, b"", None)

    assert found.works, found
    assert found.words.startswith("a probe booted in ")
    assert " -accel kvm " in qemu.asked[0]
    assert not qemu.is_running()


def test_a_guest_that_hangs_is_ended_and_said_not_to_have_booted(tmp_path, kernel, monkeypatch):
    """The device opens, and nothing runs: so it is on nested hosts whose owner has switched it off."""
    monkeypatch.setattr(_vm_probe, "_PROBE_S", 0.5)
    qemu = Stand(tmp_path, HANGS)
    found = _vm_probe.probed(str(qemu.path), kernel, b"", None)

    assert not found.works
    assert "did not boot within 0.5 s" in found.words
    assert len(qemu.asked) == 1
    assert not qemu.is_running()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (FAILS, "ended without booting: qemu: failed to initialize kvm: Device or resource busy"),
        ("exit 1", "ended without booting: without a word"),
        ("kill -SEGV $$", "ended without booting: without a word"),
        (f"echo 'as the mark: {_vm_probe._BOOTED.decode()[:-1]}'", "ended without booting: as the mark"),
    ],
)
def test_a_guest_that_ends_is_said_not_to_have_booted_with_its_last_words(tmp_path, kernel, does, words):
    found = _vm_probe.probed(str(Stand(tmp_path, does).path), kernel, b"", None)

    assert not found.works
    assert words in found.words


def test_a_qemu_that_cannot_be_executed_is_named(tmp_path, kernel):
    qemu = Stand(tmp_path, BOOTS)
    qemu.path.chmod(0o644)
    found = _vm_probe.probed(str(qemu.path), kernel, b"", None)

    assert not found.works
    assert f"{qemu.path}: Permission denied" in found.words


def test_without_a_device_that_opens_nothing_is_tried(tmp_path, kernel, device, monkeypatch):
    """And nothing is kept: a device may come to be, and a user into its group, without another boot of the host."""
    qemu = Stand(tmp_path, BOOTS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        closed = _vm_probe.probed(str(qemu.path), kernel, b"", tmp_path)
    device.unlink()
    missing = _vm_probe.probed(str(qemu.path), kernel, b"", tmp_path)
    asked = len(qemu.asked)
    device.touch()

    assert (closed.works, missing.works, asked) == (False, False, 0)
    assert "add it to the group kvm" in closed.words
    assert "there is no /dev/kvm" in missing.words
    assert _vm_probe.probed(str(qemu.path), kernel, b"", tmp_path).works


# ---- how long it is known ----


@pytest.mark.parametrize("does", [BOOTS, FAILS])
def test_the_answer_is_kept_until_a_program_changes_or_the_host_boots_anew(tmp_path, kernel, does, monkeypatch):
    qemu = Stand(tmp_path, does)

    def asked() -> int:
        answers.add(_vm_probe.probed(str(qemu.path), kernel, b"", tmp_path))
        return len(qemu.asked)

    answers = set()
    assert [asked(), asked()] == [1, 1]
    assert len(answers) == 1

    os.utime(qemu.path, ns=(1, 1))
    assert [asked(), asked()] == [2, 2]
    kernel.image.write_bytes(kernel.image.read_bytes() + b"newer")
    assert [asked(), asked()] == [3, 3]
    as_it_is = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *how: "another boot" if path.name == "boot_id" else as_it_is(path, *how))
    assert [asked(), asked()] == [4, 4]
    assert {one.works for one in answers} == {does == BOOTS}


@pytest.mark.parametrize("damage", ["", '{"works": tr', "[]", '{"works": true}', '{"works": true, "words": "", "more": 1}'])
def test_an_answer_that_cannot_be_read_is_asked_for_again(tmp_path, kernel, damage):
    """Half of one, of a full disk, or of another release."""
    qemu = Stand(tmp_path, FAILS)
    found = _vm_probe.probed(str(qemu.path), kernel, b"", tmp_path)
    (kept,) = tmp_path.glob("kvm-*.json")
    kept.write_text(damage)

    assert _vm_probe.probed(str(qemu.path), kernel, b"", tmp_path) == found
    assert _vm_probe.probed(str(qemu.path), kernel, b"", tmp_path) == found
    assert len(qemu.asked) == 2


def test_where_nothing_can_be_kept_it_is_asked_each_time(tmp_path, kernel):
    """A state directory that is full, or not there, is no reason to fail."""
    qemu = Stand(tmp_path, BOOTS)

    assert [_vm_probe.probed(str(qemu.path), kernel, b"", where).works for where in (None, tmp_path / "missing")] == [True, True]
    assert len(qemu.asked) == 2


# ---- what becomes of it ----


def a_substrate(tmp_path, qemu, kernel, **options):
    return substrates.load("vm", state_dir=str(tmp_path / "state"), qemu=str(qemu.path), kernel=str(kernel.image), **options)


@pytest.mark.parametrize(
    ("does", "words"), [(FAILS, "ended without booting: qemu: failed to initialize kvm"), (HANGS, "did not boot within 0.5 s")]
)
async def test_kvm_that_does_not_boot_is_refused_where_it_is_demanded_and_else_emulated(tmp_path, kernel, monkeypatch, does, words):
    """The first says what to do about it, the second is called what it is; both leave nothing, and ask once."""
    monkeypatch.setattr(_vm_probe, "_PROBE_S", 0.5)
    qemu = Stand(tmp_path, does)
    with pytest.raises(untax.SubstrateUnavailable, match=REFUSAL.format(words)):
        await a_substrate(tmp_path, qemu, kernel, accel="kvm").start()
    assert list((tmp_path / "state/vm").glob("engine-*")) == []

    emulated = a_substrate(tmp_path, qemu, kernel)
    told = "\n".join(emulated.evidence())
    await emulated.start()
    await emulated.aclose()

    assert emulated.name == "vm-emulated"
    assert emulated.is_slow_to_try
    assert "KVM: is not used" in told
    assert words in told
    assert len(qemu.asked) == 1


async def test_kvm_that_boots_is_used_and_the_name_says_nothing_of_emulation(tmp_path, kernel):
    qemu = Stand(tmp_path, BOOTS)
    for options, name in (({"accel": "kvm"}, "vm"), ({}, "vm"), ({"machine": "microvm"}, "vm-microvm"), ({"accel": "tcg"}, "vm-emulated")):
        substrate = a_substrate(tmp_path, qemu, kernel, **options)
        await substrate.start()
        await substrate.aclose()
        assert substrate.name == name
    assert "KVM: works: a probe booted" in "\n".join(substrate.evidence())
    assert not substrate.is_slow_to_try
    assert len(qemu.asked) == 1


async def test_whoever_asks_for_emulation_waits_for_no_probe(tmp_path, kernel):
    qemu = Stand(tmp_path, BOOTS)
    substrate = a_substrate(tmp_path, qemu, kernel, accel="tcg")
    await substrate.start()
    await substrate.aclose()

    assert qemu.asked == []
