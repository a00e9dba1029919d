"""How much a command may print, and what of it comes back, on every substrate."""

import hashlib

CAP = 1 << 20  # bytes of each stream that come back unless another cap is asked for


async def test_output_below_the_cap_is_exact(box):
    """Random bytes, longer than several frames, arrive unchanged."""
    result = await box.shell("head -c 1000000 /dev/urandom | tee r; sha256sum <r >&2")

    assert not result.truncated
    assert hashlib.sha256(result.stdout).hexdigest() == result.stderr.split()[0].decode()


async def test_output_beyond_the_cap_keeps_both_ends(box):
    """The beginning and the end are what a reader needs; what lay between is counted, not kept."""
    total = 8 << 20
    result = await box.shell(f"echo first; yes | head -c {total}; echo last")

    assert result.truncated
    assert result.exit_code == 0
    assert result.stdout.startswith(b"first\n")
    assert result.stdout.endswith(b"last\n")
    assert len(result.stdout) <= CAP
    assert len(result.stdout) + result.dropped_stdout == total + len("first\nlast\n")


async def test_both_streams_can_be_flooded_in_turn(box):
    """Neither pipe is left full while the other one is read."""
    result = await box.shell("for i in $(seq 50); do head -c 262144 /dev/zero; head -c 262144 /dev/zero >&2; done", timeout_s=60)

    assert (result.outcome, result.exit_code) == ("exited", 0)
    assert len(result.stdout) + result.dropped_stdout == 50 * 262144
    assert len(result.stderr) + result.dropped_stderr == 50 * 262144


async def test_no_output_and_no_final_newline_are_kept_so(box):
    assert (await box.run(["true"])).stdout == b""
    assert (await box.run(["printf", "no newline"])).stdout == b"no newline"


async def test_many_small_writes_join_without_a_gap(box):
    result = await box.run(["perl", "-e", "$|=1; syswrite(STDOUT, chr(65 + $_ % 26)) for 0..99999"], timeout_s=60)

    assert result.stdout == bytes(65 + n % 26 for n in range(100_000))


async def test_an_endless_writer_ends_at_its_deadline(box):
    result = await box.run(["cat", "/dev/zero"], timeout_s=0.7)

    assert result.timed_out
    assert result.truncated
    assert len(result.stdout) <= CAP
    assert result.round_trip_s < 2.0


async def test_output_that_looks_like_a_result_is_only_output(box):
    result = await box.shell("""echo '{"exit_code":0,"status":"exited"}'; exit 9""")

    assert result.exit_code == 9


async def test_descriptors_beyond_the_three_are_not_there(box):
    """A command inherits nothing of ours that it could write to."""
    result = await box.shell("(echo x >&3) 2>/dev/null || echo no3; (echo y >&9) 2>/dev/null || echo no9; ls /proc/self/fd | wc -l")

    assert result.text.split() == ["no3", "no9", "4"]  # 0, 1, 2 and the directory being listed
