"""One action of a workload carried out: over the held channel, or as a command the way a substrate's users do it today.

Every action has a form as a command. File actions are the channel's own where there is a channel; their commands are what an agent
without one would run.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from untax.box import Box
from untax.core.errors import ActionError, UntaxError
from untax.core.result import CommandResult
from untax.core.substrate import Incumbent
from untax.rollout.workload import Action

_INSIDE = b"untax-inside "

# The only clock that every image with a bash has and that costs no process: two readings of a variable around the command.
_TIMED = """
s=$EPOCHREALTIME
"$@"
c=$?
e=$EPOCHREALTIME
printf '\\nuntax-inside %s %s\\n' "${s/[.,]/}" "${e/[.,]/}" >&2
exit $c
"""
_SHELL = ("bash", "-c")


@dataclass(frozen=True, slots=True)
class Done:
    """How an action ended. `inside_ns` is the command's own time; None where nobody inside could tell."""

    exit_code: int
    inside_ns: int | None
    round_trip_ns: int | None
    said: str = ""


class Unexpected(UntaxError):
    """An action of a workload did not end as the workload says: the trial failed, and not for the infrastructure."""


def command_of(action: Action) -> list[str]:
    """The action as an argv."""
    what, extra = action.what, action.extra
    if isinstance(what, tuple):
        return list(what)
    if action.verb == "shell":
        return [*_SHELL, what]
    if action.verb == "read":
        return ["cat", "--", what]
    if action.verb == "list":
        return ["ls", "-la", "--", what]
    if action.verb == "search":
        return _search_command(what, extra["under"], extra["how"])
    if action.verb == "write":
        return [*_SHELL, f"{_parents(what)}printf %s {shlex.quote(extra['text'])} > {shlex.quote(what)}"]
    if action.verb == "edit":
        return ["python3", "-c", _EDIT, what, extra["old"], extra["new"]]
    return [*_SHELL, f"patch -s -p1 <<'UNTAX_END'\n{what.rstrip(chr(10))}\nUNTAX_END"]


_EDIT = """import pathlib, sys
path, old, new = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
text = path.read_text(encoding="utf-8")
if text.count(old) != 1:
    sys.exit(f"{path}: the text is there {text.count(old)} times")
path.write_text(text.replace(old, new), encoding="utf-8")
"""


def _search_command(pattern: str, under: str, how: str) -> list[str]:
    if how == "symbol":
        return ["grep", "-rnE", "--include=*.py", rf"^\s*(async def|def|class) {pattern}\b", "--", under]
    return ["grep", "-rn", "-F" if how == "text" else "-E", "-e", pattern, "--", under]


def _parents(path: str) -> str:
    directory = path.rpartition("/")[0]
    return f"mkdir -p -- {shlex.quote(directory)} && " if directory else ""


async def over_channel(box: Box, action: Action) -> Done:
    """Carry `action` out in `box`. What the workload is to blame for is a `Done`; what the substrate is to blame for is raised."""
    what, extra, timeout_s = action.what, action.extra, action.timeout_s
    if isinstance(what, tuple):
        return _done(await box.run(what, timeout_s=timeout_s))
    if action.verb == "shell":
        return _done(await box.shell(what, timeout_s=timeout_s))
    try:
        if action.verb == "read":
            await box.read(what)
        elif action.verb == "list":
            await box.list(what)
        elif action.verb == "search":
            await box.search(what, extra["under"], how=extra["how"], timeout_s=timeout_s)  # type: ignore[arg-type]
        elif action.verb == "write":
            await box.write(what, extra["text"].encode())
        elif action.verb == "edit":
            await box.edit(what, extra["old"], extra["new"])
        else:
            await box.apply_patch(what)
    except ActionError as exc:
        return Done(1, 0, None, str(exc))
    return Done(0, 0, None)


async def by_incumbent(sandbox: Incumbent, action: Action, prefix: str = "") -> Done:
    """Carry `action` out by one exec. `prefix` is a line of shell that sets up what the channel would have been configured with."""
    argv = [*_SHELL, prefix + _TIMED, "untax", *command_of(action)]
    result = await sandbox.run_incumbent(argv, timeout_s=action.timeout_s)
    return _done(result, inside_ns=_inside(result.stderr))


def check(action: Action, done: Done) -> None:
    """`Unexpected` unless it ended as its workload says."""
    if action.exits is not None and done.exit_code not in action.exits:
        wanted = " or ".join(map(str, action.exits))
        raise Unexpected(f"{action}: exit code {done.exit_code} where the workload has {wanted}" + (f": {done.said}" if done.said else ""))


def _done(result: CommandResult, inside_ns: int | None = -1) -> Done:
    said = ""
    if result.exit_code != 0:
        said = (result.stderr + result.stdout)[-400:].decode("utf-8", "replace").strip()
    inside = int(result.elapsed_s * 1e9) if inside_ns == -1 else inside_ns
    return Done(result.exit_code, inside, int(result.round_trip_s * 1e9) or None, said)


def _inside(stderr: bytes) -> int | None:
    """Microseconds from the line that the wrapper printed last; None when the image has no bash that knows the time."""
    _, found, rest = stderr.rpartition(_INSIDE)
    words = rest.split()
    if not found or len(words) < 2 or not (words[0].isdigit() and words[1].isdigit()):
        return None
    return max(0, int(words[1]) - int(words[0])) * 1000
