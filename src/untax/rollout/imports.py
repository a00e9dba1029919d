"""Workloads from what others recorded: a SWE-bench instance, a trajectory of SWE-agent or mini-swe-agent, a ledger of ours.

Commands are taken over as they are; what only exists in another agent's tools becomes the action of ours that does the same, and what has
no counterpart is left out and counted. Nothing of a file is run here: it is read, checked like any workload, and written as one.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from untax.core.errors import UsageError
from untax.rollout.workload import VERSION, Workload, parse

_MOST_BYTES = 256 << 20
_COMMANDS = ("run", "shell", "session", "batch", "start")  # names of ledger actions that ran something

Entry = dict[str, Any]
"""One action as its TOML table."""


@dataclass(slots=True)
class Imported:
    """What a file came to. `left_out` says what of it has no counterpart."""

    name: str
    summary: str
    format: str
    actions: list[Entry] = field(default_factory=list)
    source: dict[str, str] | None = None
    left_out: list[str] = field(default_factory=list)

    def to_toml(self, *, image: str | None = None) -> str:
        """The workload's file; it is read back before it is given, so that it can be carried out."""
        lines = [
            f"# From {_comment(self.format)}.",
            "",
            f"version = {VERSION}",
            f"name = {_toml(self.name)}",
            f"summary = {_toml(self.summary)}",
        ]
        if image is not None:
            lines.append(f"image = {_toml(image)}")
        if self.source is not None:
            lines.append("preloaded = true")
        lines += ["", "actions = [", *(f"    {_toml(action)}," for action in self.actions), "]"]
        if self.source is not None:
            lines += ["", "[source]", *(f"{name} = {_toml(value)}" for name, value in self.source.items())]
        text = "\n".join(lines) + "\n"
        parse(text, origin=self.name)
        return text

    def workload(self) -> Workload:
        return parse(self.to_toml(), origin=self.name)


def read(path: Path, *, instance: str | None = None) -> Imported:
    """What `path` holds, whichever of the formats it is; `UsageError` when it is none. `instance` picks one of many lines."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is larger than {_MOST_BYTES >> 20} MiB; that is no single trajectory")
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path} is not text") from exc
    document = _document(text, path, instance)
    for known, convert in _FORMATS:
        if known(document):
            found = convert(document, path)
            if not found.actions:
                raise UsageError(f"{path}: {found.format} without an action that could be repeated")
            return found
    raise UsageError(
        f"{path}: neither a SWE-bench instance (instance_id, repo, base_commit), nor a trajectory of SWE-agent (trajectory) or mini-swe-agent "
        "(messages), nor a ledger (untax_ledger)"
    )


def _document(text: str, path: Path, instance: str | None) -> dict[str, Any]:
    """One JSON object: the whole file, or one of its lines."""
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    lines = (
        [whole]
        if isinstance(whole, dict)
        else whole
        if isinstance(whole, list)
        else [_line(line, path) for line in text.splitlines() if line.strip()]
    )
    found = [one for one in lines if isinstance(one, dict)]
    if instance is not None:
        found = [one for one in found if instance in (one.get("instance_id"), one.get("rollout"))]
        if not found:
            raise UsageError(f"{path} has no instance {instance!r}")
    if not found:
        raise UsageError(f"{path} is not JSON, or empty")
    if len(found) > 1:
        names = ", ".join(str(one.get("instance_id", one.get("rollout", "?"))) for one in found[:5])
        raise UsageError(f"{path} has {len(found)} of them ({names} …); pick one with --instance")
    return found[0]


def _line(line: str, path: Path) -> Any:
    try:
        return json.loads(line)
    except ValueError as exc:
        raise UsageError(f"{path} is not JSON: {exc}") from None


# ---- SWE-bench ----


def _is_swe_bench(document: Mapping[str, Any]) -> bool:
    return {"instance_id", "repo", "base_commit"} <= document.keys()


def _swe_bench(document: Mapping[str, Any], path: Path) -> Imported:
    """Inspect what the patch touches, add the tests, see them fail, patch, see them pass."""
    name, repo, commit = (_string(document, key, path) for key in ("instance_id", "repo", "base_commit"))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        raise UsageError(f"{path}: repo must be owner/name and base_commit a commit's hash, not {repo!r} and {commit!r}")
    patch, test_patch = (document.get(key) or "" for key in ("patch", "test_patch"))
    found = Imported(name, f"{repo} at {commit[:12]}: reproduce, patch, test", "a SWE-bench instance")
    found.source = {"url": f"https://github.com/{repo}", "ref": commit}
    tests = _tests(document.get("FAIL_TO_PASS"), path)
    found.actions = [{"sort": "inspect", "run": ["ls", "-la"]}, {"sort": "inspect", "run": ["git", "log", "-1"]}]
    for file in _touched(str(patch)):
        found.actions += [{"sort": "inspect", "run": ["grep", "-c", "", file]}, {"sort": "inspect", "run": ["sed", "-n", "1,200p", file]}]
    # What the tests say depends on what is installed in the image that the user names.
    run_tests = {"sort": "test", "run": ["python3", "-m", "pytest", "-q", *tests], "exit": "any", "timeout_s": 1800.0}
    if test_patch:
        found.actions.append({"sort": "edit", "patch": test_patch})
    found.actions.append(dict(run_tests))
    if patch:
        found.actions += [{"sort": "edit", "patch": patch}, dict(run_tests)]
    found.actions.append({"sort": "command", "run": ["git", "diff", "--stat"]})
    return found


def _tests(given: object, path: Path) -> list[str]:
    """A list of test ids, which the data set keeps as a JSON string; files stand in for ids that are not pytest's."""
    try:
        tests = json.loads(given) if isinstance(given, str) else given or []
    except ValueError:
        raise UsageError(f"{path}: FAIL_TO_PASS is not a JSON list") from None
    if not isinstance(tests, list) or not all(isinstance(one, str) for one in tests):
        raise UsageError(f"{path}: FAIL_TO_PASS is not a list of test names")
    return [one for one in tests if "::" in one or one.endswith(".py")][:50]


def _touched(patch: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"^--- a/(.+?)\s*$", patch, re.MULTILINE)))[:10]


# ---- trajectories ----


def _is_swe_agent(document: Mapping[str, Any]) -> bool:
    return isinstance(document.get("trajectory"), list)


def _swe_agent(document: Mapping[str, Any], path: Path) -> Imported:
    found = Imported(path.name.partition(".")[0], "a recorded SWE-agent trajectory", "a SWE-agent trajectory")
    directory = None
    for step in document["trajectory"]:
        if not isinstance(step, dict) or not isinstance(step.get("action"), str):
            raise UsageError(f"{path}: a step of the trajectory has no action")
        entry = _from_tool(step["action"].strip())
        if entry is None:
            found.left_out.append(step["action"].strip().partition("\n")[0][:80])
        else:
            found.actions.append(_in_directory(entry, directory))
        directory = _working_directory(step.get("state")) or directory
    return found


def _working_directory(state: object) -> str | None:
    """Where the agent's shell was after a step: its commands are relative to that."""
    if isinstance(state, str):
        try:
            state = json.loads(state)
        except ValueError:
            return None
    where = state.get("working_dir") if isinstance(state, dict) else None
    return where if isinstance(where, str) and where.startswith("/") else None


def _in_directory(entry: Entry, directory: str | None) -> Entry:
    if directory is None or "shell" not in entry:
        return entry
    return {
        **entry,
        "shell": f"cd {shlex.quote(directory)} && {entry['shell']}"
        if "\n" not in entry["shell"]
        else f"cd {shlex.quote(directory)}\n{entry['shell']}",
    }


def _is_mini(document: Mapping[str, Any]) -> bool:
    return isinstance(document.get("messages"), list)


def _mini(document: Mapping[str, Any], path: Path) -> Imported:
    found = Imported(path.name.partition(".")[0], "a recorded mini-swe-agent trajectory", "a mini-swe-agent trajectory")
    for message in document["messages"]:
        if isinstance(message, dict) and message.get("role", "assistant") not in ("system", "user", "tool"):
            for command in _mini_commands(message):
                if "COMPLETE_TASK_AND_SUBMIT" in command:
                    found.left_out.append(command.partition("\n")[0][:80])
                else:
                    found.actions.append(_shell(command))
    return found


def _mini_commands(message: Mapping[str, Any]) -> list[str]:
    """Of the second format in `extra.actions`, of the first in the one code block of the answer."""
    extra = message.get("extra")
    actions = extra.get("actions") if isinstance(extra, dict) else None
    if isinstance(actions, list):
        return [
            one["command"].strip()
            for one in actions
            if isinstance(one, dict) and isinstance(one.get("command"), str) and one["command"].strip()
        ]
    content = message.get("content")
    if not isinstance(content, str):
        return []
    return [block.strip() for block in re.findall(r"```(?:bash|mswea_bash_command)\s*\n(.*?)\n```", content, re.DOTALL) if block.strip()]


def _shell(command: str) -> Entry:
    """Whatever a recorded command ended with is as expected: it was an agent's, and often failed there too."""
    return {"sort": sort_of(command), "shell": command.replace("\0", ""), "exit": "any"}


_INSPECTS = {
    "ls",
    "cat",
    "grep",
    "rg",
    "find",
    "head",
    "tail",
    "wc",
    "tree",
    "nl",
    "pwd",
    "file",
    "stat",
    "less",
    "awk",
    "diff",
    "which",
    "echo",
}
_EDITS = {"tee", "patch", "mv", "cp", "rm", "touch", "mkdir", "applypatch", "chmod", "ln"}


def sort_of(command: str) -> str:
    """Which part of the mix a line of shell belongs to, by what it begins with and whether it writes."""
    text = re.sub(r"^\s*cd\s+\S+\s*(&&|;|\n)\s*", "", command)
    words = text.split()
    first = words[0].rpartition("/")[2] if words else ""
    if re.search(r"\b(pytest|unittest|tox|nosetests|runtests\.py|manage\.py test)\b", text):
        return "test"
    if first in _EDITS or re.search(
        r"\bsed\s+(-\w*i|--in-place)|\bgit\s+(apply|checkout|stash|restore|reset)\b|(?<![<>&\d])>{1,2}\s*[^&\s]", text
    ):
        return "edit"
    if (
        first in _INSPECTS
        or first == "sed"
        or (first == "git" and len(words) > 1 and words[1] in ("log", "show", "diff", "status", "blame", "grep"))
    ):
        return "inspect"
    return "command"


def _from_tool(action: str) -> Entry | None:
    """A step of SWE-agent: its own tools as what does the same, everything else as shell; None for what only moves a window or ends."""
    head = action.partition("\n")[0]
    word = head.split(" ", 1)[0]
    if not action or word in (
        "submit",
        "exit_cost",
        "exit_context",
        "exit_format",
        "goto",
        "scroll_up",
        "scroll_down",
        "exit_error",
        "exit_forfeit",
    ):
        return None
    convert = _TOOLS.get(word)
    if convert is None:
        return _shell(action)
    try:
        return convert(shlex.split(action))
    except (ValueError, IndexError):
        return None


def _editor(words: list[str]) -> Entry | None:
    command, path = words[1], words[2]
    options = dict(zip((word.lstrip("-") for word in words[3::2]), words[4::2], strict=False)) if command != "view" else {}
    if command == "view":
        lines = re.findall(r"\d+", " ".join(words[3:]))
        shown = f"{lines[0]},{lines[1]}p" if len(lines) >= 2 else "1,$p"
        return {
            "sort": "inspect",
            "shell": f"test -d {shlex.quote(path)} && ls {shlex.quote(path)} || sed -n {shlex.quote(shown)} {shlex.quote(path)}",
            "exit": "any",
        }
    if command == "create":
        return {"sort": "edit", "write": path, "text": options.get("file_text", ""), "exit": "any"}
    if command == "str_replace" and options.get("old_str"):
        return {"sort": "edit", "edit": path, "old": options["old_str"], "new": options.get("new_str", ""), "exit": "any"}
    return None


def _search(flags: list[str], words: list[str]) -> Entry:
    return {"sort": "inspect", "run": ["grep", *flags, "-e", words[1], "--", *(words[2:3] or ["."])], "exit": "any"}


_TOOLS: Mapping[str, Callable[[list[str]], Entry | None]] = {
    "str_replace_editor": _editor,
    "open": lambda words: {"sort": "inspect", "run": ["sed", "-n", "1,100p", words[1]], "exit": "any"},
    "create": lambda words: {"sort": "edit", "write": words[1], "text": "\n", "exit": "any"},
    "find_file": lambda words: {"sort": "inspect", "run": ["find", *(words[2:3] or ["."]), "-name", words[1]], "exit": "any"},
    "search_dir": lambda words: _search(["-rn"], words),
    "search_file": lambda words: _search(["-n"], words) if len(words) > 2 else None,
    "edit": lambda words: None,  # noqa: ARG005  (lines of a window that is open elsewhere)
}


# ---- ledgers ----


def _is_ledger(document: Mapping[str, Any]) -> bool:
    return "untax_ledger" in document


def _ledger(document: Mapping[str, Any], path: Path) -> Imported:
    """A ledger knows how long commands took, and not what they were: they become sleeps that take as long inside."""
    if document["untax_ledger"] != 1:
        raise UsageError(f"{path}: a ledger of version {document['untax_ledger']!r}; this untax reads version 1")
    found = Imported(
        f"ledger-{document.get('rollout', 'unknown')}", "the actions of a recorded rollout, of the same length each", "a recorded ledger"
    )
    for action in document.get("actions", []):
        if not (isinstance(action, list) and len(action) == 6 and isinstance(action[0], str) and isinstance(action[4], int)):
            raise UsageError(f"{path}: an action of the ledger is not one")
        name, inside_ns = action[0], action[4]
        if name in _COMMANDS:
            found.actions.append(
                {"sort": "command", "run": ["sleep", f"{max(0, inside_ns) / 1e9:.6f}"], "timeout_s": max(300.0, inside_ns / 1e8)}
            )
        elif name in ("read", "stat"):
            found.actions.append({"sort": "inspect", "read": "/etc/passwd"})
        elif name in ("list", "search"):
            found.actions.append({"sort": "inspect", "list": "/etc"})
        elif name in ("write", "edit", "apply_patch", "mkdir", "move", "remove"):
            found.actions.append({"sort": "edit", "write": "untax-replay", "text": "x" * 1024})
        else:
            found.left_out.append(name)
    return found


_FORMATS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any], Path], Imported]], ...] = (
    (_is_ledger, _ledger),
    (_is_swe_bench, _swe_bench),
    (_is_swe_agent, _swe_agent),
    (_is_mini, _mini),
)


# ---- writing TOML ----


def _toml(value: object) -> str:
    if isinstance(value, str):
        clean = value.encode("utf-8", "replace").decode("utf-8")
        return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, list):
        return f"[{', '.join(_toml(one) for one in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_toml(one)}' for name, one in value.items())} }}"
    return str(value)


def _comment(text: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f]", " ", text)


def _string(document: Mapping[str, Any], name: str, path: Path) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{path}: {name} must be a string")
    return value
