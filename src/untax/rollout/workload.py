"""Workloads: what a rollout does, as data. The same actions on every substrate, whichever way they get there.

A workload is a TOML file (`docs/measurement.md` has the format). Those of the tiers are beside this module, in `workloads/`; users name
theirs by path. A file is checked whole when it is read: one that was loaded can be carried out.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from untax.core.errors import UsageError
from untax.core.spec import Limits, freeze_env, freeze_network

VERSION = 1
TIERS = Path(__file__).resolve().parent / "workloads"

Sort = Literal["inspect", "command", "edit", "test"]
SORTS: tuple[Sort, ...] = get_args(Sort)
"""What the mix of a trajectory is counted in."""

VERBS: Mapping[str, frozenset[str]] = {
    "run": frozenset(),
    "shell": frozenset(),
    "read": frozenset(),
    "list": frozenset(),
    "write": frozenset({"text"}),
    "edit": frozenset({"old", "new"}),
    "search": frozenset({"under", "how"}),
    "patch": frozenset(),
}
"""How an action is done, and what else each takes. `run` has an argv, the others a string."""

_NEEDED = {"write": ("text",), "edit": ("old", "new")}
_COMMON = frozenset({"sort", "exit", "timeout_s"})
_HOWS = ("text", "regex", "symbol")
_TIMEOUT_S = 300.0
_MOST_ACTIONS = 100_000


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that an agent does. `exits` are the exit codes that are as expected; None: whatever comes."""

    verb: str
    what: str | tuple[str, ...]
    sort: Sort = "command"
    extra: Mapping[str, str] = field(default_factory=dict)
    exits: tuple[int, ...] | None = (0,)
    timeout_s: float = _TIMEOUT_S

    def __str__(self) -> str:
        text = " ".join(self.what) if isinstance(self.what, tuple) else self.what
        first = text.strip().partition("\n")[0]
        return f"{self.verb} {first[:100]}"


@dataclass(frozen=True, slots=True)
class Source:
    """The repository that a workload works on: a public one at a ref, and the source distribution that stands in for it offline."""

    url: str
    ref: str
    sdist: str | None = None
    """`name==version`."""
    fixed: str | None = None
    """The next release, in which the bug is mended: kept beside it, and seen by no clone."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    summary: str = ""
    image: str = "host"
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    network: str | tuple[str, ...] = "none"
    """Beside the git server of the meter's own, which is always reached by those who clone."""
    source: Source | None = None
    preloaded: bool = False
    """Whether the repository is there when the first command runs, in cold trials too."""
    packages: tuple[str, ...] = ()
    """Python packages that the image must have, each `name==version`: pure ones, put in place before anything is timed."""
    setup: tuple[Action, ...] = ()
    """What a cold trial does before its actions, because the repository is not there: counted as `setup`."""
    actions: tuple[Action, ...] = ()
    """The tier itself."""
    blocks: tuple[tuple[Action, ...], ...] = ()
    """What trajectories are made of, in turn."""
    lengths: tuple[int, ...] = ()
    reset: bool = False
    """Whether the rollout ends with a reset."""
    origin: str = ""

    def of_length(self, length: int) -> tuple[Action, ...]:
        """The actions of a trajectory, or for 0 of the tier itself. `UsageError` for a length that it does not have."""
        if length == 0:
            return self.actions
        if length not in self.lengths:
            lengths = ", ".join(map(str, self.lengths)) or "none"
            raise UsageError(f"workload {self.name!r} has no trajectory of {length} actions; its lengths: {lengths}")
        given: list[Action] = []
        while len(given) < length:
            for block in self.blocks:
                given.extend(block)
        return tuple(given[:length])

    def mix(self, length: int) -> dict[str, int]:
        """How many actions of each sort."""
        counted = Counter(action.sort for action in self.of_length(length))
        return {sort: counted[sort] for sort in SORTS if counted[sort]}

    def digest(self) -> str:
        """Twelve characters that change when anything about it does, its origin apart."""
        text = json.dumps(asdict(replace(self, origin="")), sort_keys=True, default=sorted)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def names() -> list[str]:
    """The workloads that come with the package."""
    return sorted(path.stem for path in TIERS.glob("*.toml"))


def load(name: str) -> Workload:
    """A workload by its name, or by the path of its file."""
    if name in names():
        path = TIERS / f"{name}.toml"
    elif name.endswith(".toml"):
        path = Path(name)
    else:
        raise UsageError(f"no tier or workload {name!r}; there are {', '.join(names())}, and files by a path that ends in .toml")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path} is not UTF-8 text, so it is no workload") from exc
    return parse(text, origin=str(path))


def parse(text: str, *, origin: str) -> Workload:
    """A workload from the text of its file; `UsageError` says where it is wrong."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise UsageError(f"{origin} is not TOML: {exc}") from None
    try:
        return _workload(document, origin)
    except UsageError as exc:
        raise UsageError(f"{origin}: {exc}") from None


# ---- from TOML ----


def _workload(document: dict[str, Any], origin: str) -> Workload:
    known = {"version", "name", "summary", "image", "env", "limits", "network", "source", "preloaded", "packages", "setup", "actions"}
    _only(document, known | {"trajectory", "reset"}, "the file")
    if document.get("version") != VERSION:
        raise UsageError(f"version = {VERSION} is missing; this untax reads workloads of version {VERSION}")
    trajectory = _table(document.get("trajectory", {}), "trajectory")
    _only(trajectory, {"lengths", "blocks"}, "[trajectory]")
    blocks = tuple(
        _actions(one, f"trajectory.blocks[{n}]") for n, one in enumerate(_list(trajectory.get("blocks", []), "trajectory.blocks"))
    )
    found = Workload(
        name=_text(document, "name"),
        summary=_text(document, "summary", ""),
        image=_text(document, "image", "host"),
        env=freeze_env(_table(document.get("env", {}), "env")),
        limits=_limits(document.get("limits", {})),
        network=freeze_network(document.get("network", "none")),
        source=_source(document.get("source")),
        preloaded=_flag(document, "preloaded"),
        packages=tuple(_package(one) for one in _list(document.get("packages", []), "packages")),
        setup=_actions(document.get("setup", []), "setup"),
        actions=_actions(document.get("actions", []), "actions"),
        blocks=blocks,
        lengths=_lengths(trajectory.get("lengths", []), blocks),
        reset=_flag(document, "reset"),
        origin=origin,
    )
    if not found.actions and not found.lengths:
        raise UsageError("it has neither actions nor a trajectory: there is nothing to do")
    if found.source is not None and not found.preloaded and not found.setup:
        raise UsageError("it has a source that is neither preloaded = true nor brought by [[setup]] actions")
    if found.source is None and (found.preloaded or found.setup):
        raise UsageError("preloaded and [[setup]] are about a repository; name one in [source]")
    return found


def _actions(given: object, where: str) -> tuple[Action, ...]:
    found = tuple(_action(one, f"{where}[{n}]") for n, one in enumerate(_list(given, where)))
    if len(found) > _MOST_ACTIONS:
        raise UsageError(f"{where}: {len(found)} actions; at most {_MOST_ACTIONS}")
    return found


def _action(given: object, where: str) -> Action:
    one = _table(given, where)
    verbs = [verb for verb in VERBS if verb in one]
    if len(verbs) != 1:
        raise UsageError(f"{where}: an action is one of {', '.join(VERBS)}; this one has {' and '.join(verbs) or 'none of them'}")
    verb = verbs[0]
    _only(one, _COMMON | VERBS[verb] | {verb}, where)
    what: str | tuple[str, ...]
    if verb == "run":
        what = tuple(_list(one[verb], f"{where}.run"))
        if not what or not all(isinstance(word, str) and "\0" not in word for word in what):
            raise UsageError(f"{where}.run must be a list of words, as in run = ['ls', '-l']; for a line of shell say shell = 'ls -l'")
    else:
        what = _text(one, verb)
    extra = {name: _text(one, name, None if name in _NEEDED.get(verb, ()) else "", empty=name in ("new", "text")) for name in VERBS[verb]}
    if verb == "search":
        extra = {"under": extra["under"] or ".", "how": extra["how"] or "text"}
        if extra["how"] not in _HOWS:
            raise UsageError(f"{where}.how must be one of {', '.join(_HOWS)}, not {extra['how']!r}")
    sort = one.get("sort", "command")
    if sort not in SORTS:
        raise UsageError(f"{where}.sort must be one of {', '.join(SORTS)}, not {sort!r}")
    return Action(verb, what, sort, extra, _exits(one.get("exit", 0), where), _timeout(one.get("timeout_s", _TIMEOUT_S), where))


def _exits(given: object, where: str) -> tuple[int, ...] | None:
    if given == "any":
        return None
    codes = given if isinstance(given, list) else [given]
    if not codes or not all(isinstance(code, int) and not isinstance(code, bool) and 0 <= code <= 255 for code in codes):
        raise UsageError(f"{where}.exit must be an exit code, a list of them, or 'any', not {given!r}")
    return tuple(codes)


def _timeout(given: object, where: str) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not (0 < given < math.inf):
        raise UsageError(f"{where}.timeout_s must be a positive number, not {given!r}")
    return float(given)


def _lengths(given: object, blocks: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    lengths = _list(given, "trajectory.lengths")
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 < n <= _MOST_ACTIONS for n in lengths):
        raise UsageError(f"trajectory.lengths must be positive whole numbers, not {given!r}")
    if lengths and not any(blocks):
        raise UsageError("[trajectory] has lengths but no actions in its blocks")
    return tuple(sorted(set(lengths)))


def _source(given: object) -> Source | None:
    if given is None:
        return None
    table = _table(given, "source")
    _only(table, {"url", "ref", "sdist", "fixed"}, "[source]")
    for name in ("url", "ref"):
        if _text(table, name).startswith("-"):
            raise UsageError(f"source.{name} must not begin with '-', which git would take for an option")
    releases = {name: _package(table[name]) for name in ("sdist", "fixed") if name in table}
    return Source(table["url"], table["ref"], **releases)


def _package(given: object) -> str:
    name, _, version = given.partition("==") if isinstance(given, str) else ("", "", "")
    if not name or not version or any(c.isspace() or c in "/\\" for c in name + version) or name.startswith("-"):
        raise UsageError(f"{given!r} is not a package at a version, as in 'pytest==8.4.2'")
    return str(given)


def _limits(given: object) -> Limits:
    table = _table(given, "limits")
    _only(table, set(Limits.__dataclass_fields__), "[limits]")
    return Limits(**table)


def _table(given: object, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise UsageError(f"{where} must be a table, not {given!r}")
    return given


def _list(given: object, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise UsageError(f"{where} must be a list, not {given!r}")
    return given


def _text(table: Mapping[str, Any], name: str, default: str | None = None, *, empty: bool = False) -> str:
    value = table.get(name, default)
    if value is None:
        raise UsageError(f"{name} is missing")
    if not isinstance(value, str) or "\0" in value:
        raise UsageError(f"{name} must be a string, not {value!r}")
    if not value and name in table and not empty:
        raise UsageError(f"{name} must not be empty")
    return value


def _flag(table: Mapping[str, Any], name: str) -> bool:
    value = table.get(name, False)
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, not {value!r}")
    return value


def _only(table: Mapping[str, Any], known: set[str] | frozenset[str], where: str) -> None:
    if unknown := sorted(set(table) - known):
        raise UsageError(f"{where}: {', '.join(unknown)} is not known; there are: {', '.join(sorted(known))}")
