"""Bad input gets a typed error that names the remedy, starts nothing, and the next call works. The same everywhere."""

import dataclasses
import math
import time

import pytest

import untax


@pytest.fixture
async def box(box):
    """After each of these the box must still work."""
    yield box
    assert (await box.run(["echo", "fine"])).stdout == b"fine\n"


@pytest.mark.parametrize("argv", ["true", b"true", [], [""], None, 5, ["sh", 5], [None], {"a": 1}], ids=repr)
async def test_a_command_that_is_no_list_of_words_is_refused(box, argv):
    with pytest.raises(untax.UsageError):
        await box.run(argv)


@pytest.mark.parametrize("timeout_s", [-1, 0, math.nan, math.inf, -math.inf, 1e308, "5", True], ids=repr)
async def test_a_timeout_that_is_no_time_is_refused(box, timeout_s):
    with pytest.raises(untax.UsageError) as caught:
        await box.run(["true"], timeout_s=timeout_s)

    assert "timeout" in str(caught.value)


async def test_no_timeout_lasts_as_long_as_the_lease(box):
    assert (await box.run(["true"], timeout_s=None)).exit_code == 0


@pytest.mark.parametrize("path", ["a\0b", "", "x" * 5000, 7, None], ids=lambda p: repr(p)[:20])
async def test_a_path_that_is_none_is_refused(box, path):
    with pytest.raises(untax.UsageError):
        await box.read(path)
    with pytest.raises(untax.UsageError):
        await box.write(path, b"")


async def test_a_nul_is_refused_wherever_the_kernel_would_end_the_word(box):
    with pytest.raises(untax.UsageError):
        await box.run(["echo", "a\0b"])
    with pytest.raises(untax.UsageError):
        await box.run(["true"], env={"A\0": "1"})
    with pytest.raises(untax.UsageError):
        await box.run(["true"], env={"A": "1\0"})
    with pytest.raises(untax.UsageError):
        await box.run(["true"], cwd="a\0b")
    with pytest.raises(untax.UsageError):
        await box.shell("echo a\0b")


@pytest.mark.parametrize("name", ["", "A=B", "=A"], ids=repr)
async def test_a_name_that_no_variable_can_have_is_refused(box, name):
    with pytest.raises(untax.UsageError):
        await box.run(["true"], env={name: "x"})


async def test_an_argument_of_200_kib_is_refused_with_its_size(box):
    """The kernel takes 128 KiB in one argument."""
    with pytest.raises(untax.UsageError) as caught:
        await box.run(["echo", "x" * (200 << 10)])

    assert str(200 << 10) in str(caught.value)


async def test_the_largest_argument_that_the_kernel_takes_works(box):
    result = await box.run(["printf", "%s", "x" * ((128 << 10) - 1)])

    assert len(result.stdout) == (128 << 10) - 1


async def test_3_mib_of_arguments_are_refused(box):
    with pytest.raises(untax.UsageError):
        await box.run(["true", *["x" * 100_000] * 31])


async def test_3_mib_of_variables_are_refused(box):
    with pytest.raises(untax.UsageError):
        await box.run(["true"], env={f"V{n}": "x" * 100_000 for n in range(31)})


@pytest.fixture(params=[b"x", "x"], ids=["bytes", "text"])
def gigabyte(request):
    """Asked for before the box: to fill so many pages may take longer than a server waits for a client that says nothing."""
    return request.param * (1 << 30)


async def test_a_gigabyte_in_one_argument_is_refused_without_being_sent(gigabyte, box):
    """At once, also as text: it is not encoded first."""
    began = time.monotonic()
    with pytest.raises(untax.UsageError):
        await box.run(["true", gigabyte])
    assert time.monotonic() - began < 0.2


async def test_ten_thousand_variables_are_a_defined_result(box):
    result = await box.shell("env | grep -c ^V", env={f"V{n}": "x" for n in range(10_000)})

    assert result.text.strip() == "10000"


@pytest.mark.parametrize("data", ["text", 5, None, [1]], ids=repr)
async def test_content_that_is_not_bytes_is_refused(box, data):
    with pytest.raises(untax.UsageError):
        await box.write("f", data)


async def test_a_lone_surrogate_is_refused_and_other_text_is_not(box):
    with pytest.raises(untax.UsageError):
        await box.shell("echo \ud800")

    assert (await box.run(["echo", "\u202eRTL 😀"])).text == "\u202eRTL 😀\n"


@pytest.mark.parametrize(
    "image",
    ["no-such-image", "dir:/no/such/directory", "dir:relative", "dir:", "--privileged", ";reboot", "$(id)", "a\nb", "-v/:/host"],
    ids=repr,
)
async def test_an_unknown_image_is_refused_with_its_name(engine, spec, image):
    with pytest.raises(untax.UntaxError) as caught:
        await engine.acquire(dataclasses.replace(spec, image=image))

    assert not isinstance(caught.value, untax.SandboxLost)
    assert "image" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"memory_mib": -1},
        {"memory_mib": 1.5},
        {"pids": 0},
        {"cpus": math.nan},
        {"cpus": 0},
        {"cpus": 1e9},
        {"disk_mib": True},
        {"memory_mib": 10**400},
    ],
    ids=lambda f: repr(f)[:30],
)
def test_limits_that_are_none_are_refused(fields):
    with pytest.raises(untax.UsageError):
        untax.Limits(**fields)


@pytest.mark.parametrize("network", ["some", "", ("no-port",), ("h:99999",), ("a b:1",), 5, ("*.*.com:1",)], ids=repr)
def test_a_network_policy_that_is_none_is_refused(network):
    with pytest.raises(untax.UsageError):
        untax.EnvSpec(network=network)


def test_an_unknown_substrate_is_an_error_and_never_a_default():
    with pytest.raises(untax.UsageError) as caught:
        untax.Engine("no-such-substrate")

    assert "process" in str(caught.value)
