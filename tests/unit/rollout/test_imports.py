"""Workloads from what others recorded. The files are in the shapes that their programs write."""

import json

import pytest

from untax import cli
from untax.core.errors import UsageError
from untax.rollout import imports
from untax.rollout.workload import parse

SWE_BENCH = {
    "instance_id": "owner__name-17",
    "repo": "owner/name",
    "base_commit": "0123456789abcdef0123456789abcdef01234567",
    "patch": "--- a/src/x.py\n+++ b/src/x.py\n@@ -1 +1 @@\n-a\n+b\n",
    "test_patch": "--- a/tests/test_x.py\n+++ b/tests/test_x.py\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": json.dumps(["tests/test_x.py::test_it"]),
    "PASS_TO_PASS": "[]",
    "problem_statement": 'it\'s "broken"\\',
    "version": "1.0",
}
SWE_AGENT = {
    "environment": "main",
    "trajectory": [
        {"action": "ls -F\n", "observation": "…", "state": '{"open_file": "n/a", "working_dir": "/testbed"}'},
        {"action": "str_replace_editor view /testbed/x.py --view_range 1 20", "observation": "…", "state": {"working_dir": "/testbed"}},
        {"action": "str_replace_editor create /testbed/r.py --file_text 'print(1)\n'", "observation": "…"},
        {"action": "str_replace_editor str_replace /testbed/x.py --old_str 'a = 1' --new_str 'a = 2'", "observation": "…"},
        {"action": "python -m pytest tests", "observation": "…"},
        {"action": "goto 30", "observation": "…"},
        {"action": "submit", "observation": "…"},
    ],
    "info": {"exit_status": "submitted"},
}
MINI_2 = {
    "info": {"exit_status": "Submitted"},
    "messages": [
        {"role": "system", "content": "```bash\nnot this one\n```"},
        {"role": "user", "content": "please"},
        {"role": "assistant", "content": "look", "extra": {"actions": [{"command": "cat x.py"}, {"command": "sed -i s/a/b/ x.py"}]}},
        {"role": "tool", "content": "…"},
        {"role": "assistant", "content": "", "extra": {"actions": [{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}]}},
    ],
    "trajectory_format": "mini-swe-agent-1.1",
}
MINI_1 = {
    "messages": [{"role": "assistant", "content": "THOUGHT: look\n\n```bash\ngrep -rn x .\n```"}],
    "trajectory_format": "mini-swe-agent-1",
}
LEDGER = {
    "untax_ledger": 1,
    "rollout": "abc",
    "actions": [
        ["run", 0, 5, 6, 250_000_000, "exited"],
        ["read", 6, 7, 8, 0, "ok"],
        ["write", 6, 7, 8, 0, "ok"],
        ["watch", 8, 9, 9, 0, "ok"],
    ],
}


def brought(tmp_path, document, name="x.traj", **options):
    path = tmp_path / name
    path.write_text(json.dumps(document), encoding="utf-8")
    found = imports.read(path, **options)
    return found, parse(found.to_toml(), origin="x.toml")


def test_a_swe_bench_instance_reproduces_patches_and_tests(tmp_path):
    _, workload = brought(tmp_path, SWE_BENCH)

    assert (workload.name, workload.preloaded) == ("owner__name-17", True)
    assert (workload.source.url, workload.source.ref) == ("https://github.com/owner/name", SWE_BENCH["base_commit"])
    verbs = [action.verb for action in workload.actions if action.sort in ("edit", "test")]
    assert verbs == ["patch", "run", "patch", "run"]
    assert workload.actions[-2].what[-1] == "tests/test_x.py::test_it"
    assert workload.actions[4].what == SWE_BENCH["test_patch"]


def test_one_of_many_instances_is_picked_by_its_name(tmp_path):
    lines = [SWE_BENCH, {**SWE_BENCH, "instance_id": "owner__name-18"}]
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))

    with pytest.raises(UsageError, match="--instance"):
        imports.read(path)
    assert imports.read(path, instance="owner__name-18").name == "owner__name-18"
    with pytest.raises(UsageError, match="no instance"):
        imports.read(path, instance="nobody")


def test_a_swe_agent_trajectory_keeps_its_commands_and_its_directory(tmp_path):
    found, workload = brought(tmp_path, SWE_AGENT, "owner__name-17.traj")

    assert workload.name == "owner__name-17"
    assert [(action.verb, action.sort) for action in workload.actions] == [
        ("shell", "inspect"), ("shell", "inspect"), ("write", "edit"), ("edit", "edit"), ("shell", "test"),
    ]  # fmt: skip
    assert workload.actions[0].what == "ls -F"
    assert "sed -n 1,20p /testbed/x.py" in workload.actions[1].what
    assert workload.actions[2].extra["text"] == "print(1)\n"
    assert (workload.actions[3].extra["old"], workload.actions[3].extra["new"]) == ("a = 1", "a = 2")
    assert workload.actions[4].what == "cd /testbed && python -m pytest tests"
    assert found.left_out == ["goto 30", "submit"]


@pytest.mark.parametrize(("document", "commands"), [(MINI_2, ["cat x.py", "sed -i s/a/b/ x.py"]), (MINI_1, ["grep -rn x ."])])
def test_a_mini_swe_agent_trajectory_of_either_format(tmp_path, document, commands):
    _, workload = brought(tmp_path, document)

    assert [action.what for action in workload.actions] == commands
    assert all(action.exits is None for action in workload.actions)


def test_a_ledger_becomes_actions_that_take_as_long(tmp_path):
    found, workload = brought(tmp_path, LEDGER)

    assert workload.actions[0].what == ("sleep", "0.250000")
    assert [action.verb for action in workload.actions] == ["run", "read", "write"]
    assert found.left_out == ["watch"]


@pytest.mark.parametrize(
    ("command", "sort"),
    [
        ("cd /x && grep -rn a .", "inspect"),
        ("sed -n 1,20p x", "inspect"),
        ("sed -i s/a/b/ x", "edit"),
        ("cat > x <<'E'\n1\nE", "edit"),
        ("python x.py 2>&1 | tail", "command"),
        ("python -m pytest -q", "test"),
        ("git diff", "inspect"),
        ("git checkout -- x", "edit"),
        ("pip install x", "command"),
    ],
)
def test_recorded_commands_are_sorted_by_what_they_do(command, sort):
    assert imports.sort_of(command) == sort


def test_whatever_a_recording_holds_is_written_as_toml_that_says_the_same(tmp_path):
    odd = "printf '\\x00 \"\"\" \\u2028 \u007f é' # \\ '''\n\tend"
    _, workload = brought(tmp_path, {"messages": [{"role": "assistant", "content": "", "extra": {"actions": [{"command": odd}]}}]})

    assert workload.actions[0].what == odd


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("not json", "not JSON"),
        ("[]", "not JSON, or empty"),
        ('{"a": 1}', "neither a SWE-bench"),
        ('{"untax_ledger": 7}', "version 7"),
        ('{"untax_ledger": 1, "actions": [[1]]}', "is not one"),
        ('{"trajectory": [3]}', "no action"),
        ('{"trajectory": [{"action": "submit"}]}', "without an action"),
        ('{"messages": []}', "without an action"),
        ('{"instance_id": "x", "repo": "../../etc", "base_commit": "abc1234"}', "owner/name"),
        ('{"instance_id": "x", "repo": "a/b", "base_commit": "--exec=x"}', "hash"),
        ('{"instance_id": "x", "repo": "a/b", "base_commit": "abc1234", "FAIL_TO_PASS": "x"}', "FAIL_TO_PASS"),
    ],
)
def test_a_file_that_is_none_of_them_is_refused(tmp_path, text, word):
    (tmp_path / "x").write_text(text)

    with pytest.raises(UsageError, match=word):
        imports.read(tmp_path / "x")


def test_the_command_writes_a_file_that_can_be_shown(tmp_path, capsys):
    (tmp_path / "x.traj").write_text(json.dumps(SWE_AGENT))
    out = str(tmp_path / "x.toml")

    assert cli.main(["workload", "import", str(tmp_path / "x.traj"), "-o", out, "--image", "dir:/x"]) == 0
    assert cli.main(["workload", "import", str(tmp_path / "x.traj"), "-o", out]) == 2  # is there already
    capsys.readouterr()
    assert cli.main(["workload", "show", "--json", out]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["image"], shown["actions"]) == ("dir:/x", 5)
    assert cli.main(["workload", "list"]) == 0
    assert "T2" in capsys.readouterr().out
