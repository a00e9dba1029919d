"""Workloads as data: the tiers are what the documentation says, and a file that is wrong is refused with its place."""

import pytest

from untax.core.errors import UsageError
from untax.rollout import perform, workload
from untax.rollout.workload import Action, parse

HEAD = 'version = 1\nname = "W"\n'


def test_the_tiers_are_there():
    assert workload.names() == ["T0", "T1", "T2"]
    for name in workload.names():
        found = workload.load(name)
        assert (found.name, found.lengths) == (name, (10, 50, 150))
        for length in found.lengths:
            assert len(found.of_length(length)) == length


def test_the_mix_of_a_heavy_trajectory_is_the_documented_one():
    found = workload.load("T2")

    for length in found.lengths:
        tenth = length // 10
        assert found.mix(length) == {"inspect": 5 * tenth, "command": 2 * tenth, "edit": 2 * tenth, "test": tenth}


def test_inspection_only_inspects():
    found = workload.load("T1")

    assert found.preloaded
    assert {action.sort for length in (0, *found.lengths) for action in found.of_length(length)} == {"inspect"}


def test_the_heavy_tier_clones_reproduces_patches_tests_and_resets():
    found = workload.load("T2")

    assert "git clone" in str(found.setup[0])
    assert [action.sort for action in found.actions] == ["inspect"] * 4 + ["edit", "test", "edit", "test", "command"]
    assert [action.exits for action in found.actions if action.sort == "test"] == [(1,), (0,)]
    assert found.reset
    assert (found.source.sdist, found.source.fixed) == ("attrs==25.2.0", "attrs==25.3.0")


def test_every_block_leaves_the_files_as_it_found_them():
    """Two edits in each, of which the second undoes the first."""
    for block in workload.load("T2").blocks:
        edits = [action for action in block if action.sort == "edit"]
        assert len(edits) == 2
        undo = str(edits[1])
        assert "git checkout" in undo or "apply -R" in undo or undo == "run rm notes.md"


def test_a_change_of_any_action_changes_the_digest():
    one = parse(HEAD + 'actions = [{ run = ["true"] }]', origin="a")
    same = parse(HEAD + 'actions = [{ run = ["true"] }]', origin="b")
    other = parse(HEAD + 'actions = [{ run = ["true"], exit = 1 }]', origin="a")

    assert one.digest() == same.digest() != other.digest()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("= x", "not TOML"),
        ('name = "W"', "version = 1 is missing"),
        ('version = 2\nname = "W"', "version 1"),
        ("version = 1", "name is missing"),
        (HEAD, "nothing to do"),
        (HEAD + "actions = 3", "must be a list"),
        (HEAD + "actions = [3]", r"actions\[0\] must be a table"),
        (HEAD + "actions = [{ jump = 'x' }]", "none of them"),
        (HEAD + "actions = [{ run = ['a'], shell = 'b' }]", "run and shell"),
        (HEAD + "actions = [{ run = 'ls -l' }]", "must be a list"),
        (HEAD + "actions = [{ run = [] }]", "list of words"),
        (HEAD + "actions = [{ run = ['a', 3] }]", "list of words"),
        (HEAD + "actions = [{ shell = '' }]", "must not be empty"),
        (HEAD + "actions = [{ run = ['a'], sort = 'dream' }]", "inspect, command, edit, test"),
        (HEAD + "actions = [{ run = ['a'], exit = 'well' }]", "exit"),
        (HEAD + "actions = [{ run = ['a'], exit = 300 }]", "exit"),
        (HEAD + "actions = [{ run = ['a'], timeout_s = 0 }]", "timeout_s"),
        (HEAD + "actions = [{ run = ['a'], colour = 'red' }]", "colour is not known"),
        (HEAD + "actions = [{ edit = 'a', old = 'x' }]", "new is missing"),
        (HEAD + "actions = [{ search = 'a', how = 'magic' }]", "text, regex, symbol"),
        (HEAD + "colour = 'red'\nactions = [{ run = ['a'] }]", "colour is not known"),
        (HEAD + "actions = [{ run = ['a'] }]\n[limits]\nwheels = 4", "wheels is not known"),
        (HEAD + "actions = [{ run = ['a'] }]\n[limits]\ncpus = -1", "cpus"),
        (HEAD + "actions = [{ run = ['a'] }]\n[trajectory]\nlengths = [0]", "positive"),
        (HEAD + "actions = [{ run = ['a'] }]\n[trajectory]\nlengths = [10]", "no actions in its blocks"),
        (HEAD + "preloaded = true\nactions = [{ run = ['a'] }]", r"name one in \[source\]"),
        (HEAD + "actions = [{ run = ['a'] }]\n[source]\nurl = 'u'\nref = 'r'", "neither preloaded"),
        (HEAD + "preloaded = true\nactions = [{ run = ['a'] }]\n[source]\nurl = '--upload-pack=x'\nref = 'r'", "begin with '-'"),
        (HEAD + "packages = ['pytest']\nactions = [{ run = ['a'] }]", "pytest==8.4.2"),
        (HEAD + "packages = ['../x==1']\nactions = [{ run = ['a'] }]", "not a package"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_place(text, word):
    with pytest.raises(UsageError, match=word) as caught:
        parse(text, origin="mine.toml")
    assert "mine.toml" in str(caught.value)


def test_an_unknown_tier_names_those_that_there_are():
    with pytest.raises(UsageError, match="T0, T1, T2"):
        workload.load("T9")
    with pytest.raises(UsageError, match="No such file"):
        workload.load("/nowhere/x.toml")


def test_a_length_that_it_does_not_have():
    with pytest.raises(UsageError, match="10, 50, 150"):
        workload.load("T2").of_length(11)


def test_a_file_of_bytes_is_no_workload(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(UsageError, match="not UTF-8"):
        workload.load(str(tmp_path / "x.toml"))


@pytest.mark.parametrize(
    ("action", "argv"),
    [
        (Action("run", ("ls", "-l")), ["ls", "-l"]),
        (Action("shell", "a | b"), ["bash", "-c", "a | b"]),
        (Action("read", "-x"), ["cat", "--", "-x"]),
        (Action("list", "d"), ["ls", "-la", "--", "d"]),
        (Action("search", "-p", extra={"under": "src", "how": "text"}), ["grep", "-rn", "-F", "-e", "-p", "--", "src"]),
        (Action("write", "d/f", extra={"text": "it's"}), ["bash", "-c", "mkdir -p -- d && printf %s 'it'\"'\"'s' > d/f"]),
    ],
)
def test_every_action_has_a_form_as_a_command(action, argv):
    assert perform.command_of(action) == argv
