"""Variables, users and what binds late, on every substrate."""

import dataclasses
import os

import pytest

import untax


def variables(result) -> dict[str, str]:
    return dict(line.split("=", 1) for line in result.text.split("\0") if line)


async def test_the_environment_is_built_and_not_inherited(box, monkeypatch):
    """Nothing of the engine's own environment reaches a command."""
    monkeypatch.setenv("UNTAX_TEST_SECRET", "leak")
    found = variables(await box.run(["env", "-0"]))

    assert "UNTAX_TEST_SECRET" not in found
    assert not set(found) & (
        set(os.environ)
        - {
            "PATH",
            "HOME",
            "USER",
            "LANG",
            "TERM",
            "SHELL",
            "PAGER",
            "PWD",
            "SHLVL",
            "_",
            "GIT_PAGER",
            "GIT_TERMINAL_PROMPT",
            "DEBIAN_FRONTEND",
            "PIP_NO_INPUT",
            "LOGNAME",
        }
    )


async def test_the_base_environment_suits_programs_without_a_terminal(box):
    found = variables(await box.run(["env", "-0"]))

    wanted = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0", "PIP_NO_INPUT": "1"}
    assert wanted.items() <= found.items()
    assert {"PATH", "HOME", "USER", "LANG", "DEBIAN_FRONTEND", "SHELL"} <= set(found)
    assert not [name for name in found if "proxy" in name.lower()]  # the network is off


async def test_a_command_s_own_variables_are_its_own(box):
    first = variables(await box.run(["env", "-0"], env={"MARK": "one", "EMPTY": "", "LINES": "a\nb=c"}))
    second = variables(await box.run(["env", "-0"]))

    assert (first["MARK"], first["EMPTY"], first["LINES"]) == ("one", "", "a\nb=c")
    assert "MARK" not in second


async def test_variables_bind_at_the_spec_then_the_lease_then_the_command(engine, spec):
    """The narrower wins."""
    spec = dataclasses.replace(spec, env={"A": "spec", "B": "spec", "C": "spec"})
    async with engine.lease(spec, env={"B": "lease", "C": "lease"}) as box:
        found = variables(await box.run(["env", "-0"], env={"C": "command"}))

    assert [found[name] for name in "ABC"] == ["spec", "lease", "command"]


async def test_values_that_are_not_utf_8_arrive_as_they_are(box):
    value = b"\xff\xfe ok".decode("utf-8", "surrogateescape")
    result = await box.run(["sh", "-c", 'printf %s "$RAW"'], env={"RAW": value})

    assert result.stdout == b"\xff\xfe ok"


async def test_files_given_to_a_lease_are_there_at_the_first_command(engine, spec):
    async with engine.lease(spec, files={"notes/a.txt": b"hello", "b.bin": b"\0\xff"}) as box:
        assert await box.read("notes/a.txt") == b"hello"
        assert (await box.run(["cat", "b.bin"])).stdout == b"\0\xff"


async def test_a_user_that_does_not_exist_is_refused(box):
    """A typed error: the command never ran as somebody else."""
    with pytest.raises(untax.UntaxError) as caught:
        await box.run(["touch", "ran"], user="no-such-user-here")

    assert not isinstance(caught.value, untax.SandboxLost)
    assert (await box.run(["test", "-e", "ran"])).exit_code == 1


async def test_commands_are_not_run_as_the_super_user_unless_asked(box, isolated):
    result = await box.run(["id", "-u"])

    assert result.text.strip() != "0"


async def test_a_command_may_run_as_another_user_of_the_image(engine, box, isolated):
    try:
        result = await box.run(["id", "-un"], user="other")
    except untax.Gone as exc:
        assert "not root" in str(exc)
        pytest.skip(f"the substrate {engine.test_substrate!r} has no users but one, unless its pod is root's: {exc}")
    except untax.UsageError as exc:
        pytest.skip(f"this host gives a sandbox one user only: {exc}")

    assert result.text.strip() == "other"


async def test_home_is_a_directory_that_can_be_written(box):
    result = await box.shell('cd ~ && echo x >.probe && cat .probe && [ "$HOME" = "$PWD" ]')

    assert (result.exit_code, result.text) == (0, "x\n")


async def test_the_working_directory_can_be_written(box):
    assert (await box.shell("echo x >probe && cat probe")).text == "x\n"


async def test_a_weaker_boundary_than_asked_for_is_refused(engine, spec):
    """A level may be unavailable; it may not be silently weaker than its name."""
    if spec.isolation == "vm":
        pytest.skip(f"the substrate {engine.test_substrate!r} has no boundary above its own")
    with pytest.raises(untax.UntaxError) as caught:
        await engine.acquire(dataclasses.replace(spec, isolation="vm"))

    assert "isolation" in str(caught.value)
