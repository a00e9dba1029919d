"""THREATS 3: the file system below the engine is frozen, hung, full, read-only or broken.

A fault of the infrastructure is an exception of its own kind and never a command's exit code; afterwards nothing is left.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import textwrap
import time

import pytest
from tests.enginehost import Refused, engine_host
from tests.security.faults.ground import (
    INFRASTRUCTURE,
    fill,
    loop_file_system,
    works,
)


async def test_x7_a_frozen_file_system_holds_up_nobody_but_its_user(tmp_path, as_root, engine, box):
    """The command sits in uninterruptible sleep; its caller is told on time, others do not notice (P19)."""
    with loop_file_system(tmp_path, mib=512) as where:
        async with engine_host(where / "state") as host:
            await host.lease("a")
            await host.run("a", ["true"])
            subprocess.run(["fsfreeze", "-f", str(where)], check=True)
            began = time.monotonic()
            try:
                result = await asyncio.wait_for(
                    host.run("a", ["sh", "-c", "for i in 1 2 3; do dd if=/dev/zero of=f$i bs=1M count=8 oflag=direct; done"], timeout_s=1),
                    10,
                )
                assert result["outcome"] == "timeout", result
            except Refused as refused:
                assert refused.kind == "SandboxLost", refused
            took = time.monotonic() - began
            other = await box.run(["echo", "fine"])
            subprocess.run(["fsfreeze", "-u", str(where)], check=True)
        assert took < 3
        assert other.round_trip_s < 1


async def test_p19_the_engine_of_a_frozen_file_system_answers_on_time(tmp_path, as_root):
    """Also what the engine itself does there (a create, a destroy) is bounded by the caller's own deadline."""
    with loop_file_system(tmp_path, mib=512) as where:
        async with engine_host(where / "state") as host:
            await host.lease("a")
            subprocess.run(["fsfreeze", "-f", str(where)], check=True)
            began = time.monotonic()
            try:
                await asyncio.wait_for(host.lease("b", {}, wait_s=1.0), 10)
            except Refused as refused:
                assert set(refused.families) & INFRASTRUCTURE, refused
            assert time.monotonic() - began < 3
            assert (await asyncio.wait_for(host.call("ping"), 2))["pid"] == host.pid
            subprocess.run(["fsfreeze", "-u", str(where)], check=True)


async def test_x8_an_image_on_a_hung_file_system_holds_up_nobody_else(tmp_path, as_root):
    """A FUSE file system whose daemon never answers: the lease that wants it ends at its own deadline."""
    where = tmp_path / "hung"
    where.mkdir()
    daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", FUSE_DAEMON, str(where), stdout=asyncio.subprocess.PIPE)
    try:
        said = (await asyncio.wait_for(daemon.stdout.readline(), 5)).decode().split()
        if not said or said[0] != "up":
            pytest.skip("FUSE cannot be mounted here")
        async with engine_host(tmp_path / "state") as host:
            await host.lease("a")
            try:
                began = time.monotonic()
                with pytest.raises(Refused) as caught:
                    await asyncio.wait_for(host.lease("b", {"image": f"dir:{where}"}, wait_s=1.0), 10)
                took = time.monotonic() - began
                assert set(caught.value.families) & INFRASTRUCTURE, caught.value
                fine = await asyncio.wait_for(host.run("a", ["echo", "fine"]), 5)
                await asyncio.wait_for(host.lease("c", {}, wait_s=5.0), 10)
            finally:
                daemon.kill()  # the kernel then answers for it: everybody who waits gets an error
                await daemon.wait()
        assert took < 4
        assert fine["stdout"] == b"fine\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            daemon.kill()
        await daemon.wait()
        subprocess.run(["umount", "-l", str(where)], capture_output=True)


FUSE_DAEMON = textwrap.dedent(
    """
    import ctypes, os, struct, sys, threading
    fd = os.open('/dev/fuse', os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f'fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other'.encode()
    if libc.mount(b'hung', sys.argv[1].encode(), b'fuse.hung', 0, options):
        print('no', os.strerror(ctypes.get_errno()), flush=True)
        sys.exit(1)
    print('up', flush=True)
    while True:
        request = os.read(fd, 1 << 17)
        length, opcode, unique = struct.unpack_from('<IIQ', request)
        if opcode == 26:  # INIT is answered, so that later requests really hang
            body = struct.pack('<IIIIHHIIHHI', 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0) + bytes(28)
            os.write(fd, struct.pack('<IiQ', 16 + len(body), 0, unique) + body)
    """
)


async def test_x9_a_full_state_directory_is_a_typed_error_and_recovers(scratch):
    """Existing sandboxes keep running commands; a new one is refused or works; space that returns is used."""
    async with engine_host(scratch / "state") as host:
        await host.lease("a")
        filler = fill(scratch)
        try:
            await host.lease("b")
            await host.run("b", ["true"])
        except Refused as refused:
            assert "SubstrateError" in refused.families, refused
        assert (await host.run("a", ["echo", "still"]))["stdout"] == b"still\n"
        filler.unlink()
        (scratch / "filler2").unlink(missing_ok=True)
        await host.lease("c")
        assert (await host.run("c", ["true"]))["exit_code"] == 0


async def test_x9_an_engine_that_starts_on_a_full_disk_says_so(scratch):
    fill(scratch)
    try:
        async with engine_host(scratch / "state") as host:
            await host.lease("a")
            await host.run("a", ["true"])
    except Refused as refused:
        assert set(refused.families) & INFRASTRUCTURE, refused
        assert "space" in refused.message.lower() or "disk" in refused.message.lower(), refused


async def test_x10_no_inodes_left_is_a_typed_error(tmp_path, as_root):
    with loop_file_system(tmp_path, options=("-N", "1000")) as where:
        async with engine_host(where / "state") as host:
            await host.lease("a")
            made = 0
            with contextlib.suppress(OSError):
                for made in range(2000):
                    (where / f"i{made}").touch()
            assert made > 100
            try:
                await host.lease("b")
            except Refused as refused:
                assert "SubstrateError" in refused.families, refused
            assert (await host.run("a", ["echo", "still"]))["stdout"] == b"still\n"
            for n in range(made):
                (where / f"i{n}").unlink(missing_ok=True)
            await host.lease("c")


async def test_x11_a_state_directory_that_turns_read_only(scratch):
    async with engine_host(scratch / "state") as host:
        await host.lease("a")
        subprocess.run(["mount", "-o", "remount,abort", str(scratch)], check=True)  # "ro" is refused while anything is written
        with pytest.raises(OSError, match="Read-only"):
            (scratch / "probe").touch()
        try:
            await host.lease("b", {}, wait_s=5.0)
        except Refused as refused:
            assert set(refused.families) & INFRASTRUCTURE, refused
        assert (await host.call("ping"))["pid"] == host.pid
        with contextlib.suppress(Refused):
            await host.run("a", ["echo", "still"], timeout_s=5)


async def test_x11_an_engine_that_starts_on_a_read_only_directory_names_the_remedy(scratch):
    subprocess.run(["mount", "-o", "remount,ro", str(scratch)], check=True)
    with pytest.raises(Refused) as caught:
        async with engine_host(scratch / "state"):
            pass
    assert set(caught.value.families) & INFRASTRUCTURE
    assert "state_dir" in caught.value.message


async def test_x12_input_and_output_errors_below_the_state_directory(tmp_path, as_root):
    """The backing file shrinks under it: what is lost is lost in a typed way, the engine lives, another directory works."""
    with loop_file_system(tmp_path, mib=256) as where:
        async with engine_host(where / "state") as host:
            await host.lease("a")
            os.truncate(tmp_path / "disk.img", 4 << 20)
            subprocess.run(["sync", "-f", str(where)], capture_output=True)
            for argv in (["sh", "-c", "dd if=/dev/zero of=f bs=1M count=20 conv=fsync"], ["cat", "f"]):
                with contextlib.suppress(Refused):
                    await asyncio.wait_for(host.run("a", argv, timeout_s=5), 10)
            with contextlib.suppress(Refused):
                await asyncio.wait_for(host.lease("b", {}, wait_s=5.0), 10)
            assert (await host.call("ping"))["pid"] == host.pid
    assert await works(tmp_path / "other")
