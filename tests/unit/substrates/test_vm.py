"""The parts of virtual machines and SSH that are plain data: archives, addresses, words."""

import os
from pathlib import Path

import pytest

from untax.core.errors import BackendError, SubstrateUnavailable, UsageError
from untax.core.spec import Limits
from untax.substrates import _ssh_client as client
from untax.substrates import _vm_boot, _vm_files, _vm_qemu
from untax.substrates._vm_sandbox import Birth


def bzimage(version: bytes) -> bytes:
    head = bytearray(0x1000)
    head[0x202:0x206] = b"HdrS"
    head[0x20E:0x210] = (0x400).to_bytes(2, "little")
    head[0x600 : 0x600 + len(version)] = version
    return bytes(head)


def test_a_kernel_says_its_own_release(tmp_path):
    """So that one of any name is booted with its own modules."""
    (tmp_path / "k").write_bytes(bzimage(b"6.1.0-9-amd64 (builder) #1 SMP\0"))
    found = _vm_boot.find_kernel(str(tmp_path / "k"))

    assert isinstance(found, _vm_boot.Kernel)
    assert found.release == "6.1.0-9-amd64"


def test_what_is_no_kernel_is_said(tmp_path):
    (tmp_path / "k").write_bytes(b"#!/bin/sh\n")

    assert "not a bzImage" in str(_vm_boot.find_kernel(str(tmp_path / "k")))
    assert "No such file" in str(_vm_boot.find_kernel(str(tmp_path / "none")))


def test_kernels_are_ordered_by_their_numbers():
    names = ["vmlinuz-6.1.0-9-amd64", "vmlinuz-6.1.0-10-amd64", "vmlinuz-5.19.0-1-amd64"]

    assert max(map(Path, names), key=_vm_boot._by_version).name == "vmlinuz-6.1.0-10-amd64"


def entries(archive: bytes) -> list[tuple[str, int, bytes]]:
    """As the kernel reads them: a header of hexadecimal fields, the name, the content, each up to a multiple of four."""
    found, at = [], 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = archive[at + 110 : at + 110 + fields[11] - 1].decode()
        start = at + 110 + fields[11] + (-(110 + fields[11]) % 4)
        if name == "TRAILER!!!":
            return found
        found.append((name, fields[1], archive[start : start + fields[6]]))
        at = start + fields[6] + (-fields[6] % 4)


def test_the_archive_is_one_that_a_kernel_reads():
    wanted = [("dir", 0o040755, b""), ("dir/odd", 0o100755, b"12345"), ("empty", 0o100644, b""), ("last", 0o100644, b"x" * 4096)]

    assert entries(b"".join(_vm_boot._cpio(wanted))) == wanted


def test_a_birth_tells_a_fresh_seed_each_time_and_the_limits_exactly():
    birth = Birth("sbx-1", Limits(cpus=0.5, memory_mib=64, pids=7), "1000", ["/workspace"])
    one, two = (dict(line.split("=", 1) for line in birth.words().strip().splitlines()) for _ in range(2))

    assert one["seed"] != two["seed"]
    assert one["machine-id"] != two["machine-id"]
    assert len(bytes.fromhex(one["seed"])) == 64
    assert (one["memory"], one["pids"], one["cpu"], one["hostname"], one["own"]) == (
        str(64 << 20),
        "8",  # and the cell's own
        "50000 100000",
        "sbx-1",
        "/workspace",
    )


def test_a_name_cannot_add_a_line_to_what_a_machine_is_told():
    with pytest.raises(UsageError, match="line break"):
        Birth("sbx-1", Limits(), "user\nmemory=max", []).words()


def test_a_console_s_last_lines_are_shown_without_what_a_terminal_acts_on():
    said = _vm_qemu._harmless(b"first\r\n\x1b[2J\x1b]0;title\x07" + b"\n".join(b"line %d" % n for n in range(100)) + b"\n")

    assert said.splitlines()[-1] == "line 99"
    assert len(said.splitlines()) == 20
    assert said.isprintable() or set(said) - {"\n"} == {c for c in said if c.isprintable()}


def test_a_copy_leaves_holes_where_they_were(tmp_path):
    source = _vm_files.nameless(tmp_path)
    os.ftruncate(source, 64 << 20)
    os.pwrite(source, b"here", 8 << 20)
    target = _vm_files.nameless(tmp_path)
    copied = _vm_files.copy_sparse(source, target)

    assert copied < 1 << 20
    assert os.fstat(target).st_size == 64 << 20
    assert os.pread(target, 4, 8 << 20) == b"here"
    assert list(tmp_path.iterdir()) == []


def test_sealed_memory_cannot_be_written_to_by_whoever_gets_it():
    fd = _vm_files.sealed("probe", b"shared")

    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    assert os.pread(fd, 6, 0) == b"shared"


@pytest.mark.parametrize(
    ("text", "user", "host", "port"),
    [("h", None, "h", None), ("u@h.example.org:22", "u", "h.example.org", 22), ("u@[::1]:2222", "u", "::1", 2222)],
)
def test_an_address_is_read_as_people_write_it(text, user, host, port):
    found = client.Address.parse(text)

    assert (found.user, found.host, found.port) == (user, host, port)


@pytest.mark.parametrize("text", ["", "-oProxyCommand=x", "u@-h", "h:0", "h:70000", "a b", "h;x", "u@h\n"])
def test_what_is_no_address_never_reaches_ssh(text):
    with pytest.raises(UsageError):
        client.Address.parse(text)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Host key verification failed.", SubstrateUnavailable),
        ("u@h: Permission denied (publickey).", SubstrateUnavailable),
        ("ssh: connect to host h port 22: Connection refused", BackendError),
        ("", BackendError),
    ],
)
def test_what_ssh_says_becomes_an_error_of_its_kind(words, kind):
    assert type(client.failure("sbx-1", client.Address("h"), words)) is kind
