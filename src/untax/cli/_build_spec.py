"""What an image is built from, on the command line or in a TOML file; flags win over the file."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import untax
from untax.core.errors import UsageError

_LIMITS = tuple(limit.name for limit in dataclasses.fields(untax.Limits))
_KEYS = ("image", "repo", "setup", "workdir", "network", "limits")


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is put on it")
    group.add_argument("--repo", metavar="URL@COMMIT", help="a repository (URL, path or bundle) at a commit, in the working directory")
    group.add_argument("--depth", type=int, metavar="N", help="commits of its history (default: all up to that commit)")
    group.add_argument("--setup", action="append", metavar="CMD", help="a command that installs something; repeatable, in order")
    group.add_argument("--workdir", metavar="DIR", help="where the repository lies and the commands run (default: /workspace)")
    group.add_argument(
        "--network", action="append", metavar="POLICY", help="for the commands: none, all, or HOST:PORT; repeatable (default: none)"
    )
    for name in _LIMITS:
        kind = float if name == "cpus" else int
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N", help="limit for the commands")


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    spec: untax.EnvSpec
    network: Any
    """What the set-up commands may reach."""


def recipe_of(arguments: argparse.Namespace, *, image: str | None, file: str | None = None) -> Recipe:
    """The spec that was asked for; `UsageError` for a file that says something else."""
    said = _read(file) if file is not None else {}
    if image is not None:
        said["image"] = image
    if arguments.repo is not None:
        said["repo"] = _repo(arguments.repo)
    if arguments.depth is not None:
        if "repo" not in said:
            raise UsageError("--depth says how much history of a repository; name one with --repo URL@COMMIT")
        said["repo"] = {**said["repo"], "depth": arguments.depth}
    for name in ("setup", "workdir", "network"):
        if getattr(arguments, name) is not None:
            said[name] = getattr(arguments, name)
    given = {name: getattr(arguments, name) for name in _LIMITS if getattr(arguments, name) is not None}
    limits = {**_table(said.get("limits", {}), "limits", _LIMITS), **given}
    repo = _table(said["repo"], "repo", ("url", "commit", "depth")) if "repo" in said else None
    try:
        spec = untax.EnvSpec(
            image=said.get("image", "host"),
            repo=untax.Repo(**repo) if repo is not None else None,
            setup=tuple(_list(said.get("setup", ()), "setup")),
            workdir=said.get("workdir"),
            limits=untax.Limits(**limits),
        )
    except TypeError as exc:
        raise UsageError(f"repo needs url and commit: {exc}") from exc
    return Recipe(spec, _policy(said.get("network", "none")))


def _read(file: str) -> dict[str, Any]:
    try:
        said = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(f"{file}: {exc.strerror}") from exc
    except ValueError as exc:
        raise UsageError(f"{file} is not TOML: {exc}") from exc
    return dict(_table(said, file, _KEYS))


def _repo(text: str) -> dict[str, str]:
    url, at, commit = text.rpartition("@")
    if not at or not url or not commit:
        raise UsageError(f"--repo {text!r}: write URL@COMMIT, with the commit's full hash")
    return {"url": url, "commit": commit}


def _table(value: Any, where: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} must be a table with some of: {', '.join(known)}")
    if unknown := sorted(set(value) - set(known)):
        raise UsageError(f"{where}: {', '.join(unknown)} is not known; there are: {', '.join(known)}")
    return value


def _list(value: Any, where: str) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise UsageError(f"{where} must be a list of strings")
    return list(value)


def _policy(value: Any) -> Any:
    if isinstance(value, str):
        value = [value]
    given = _list(value, "network")
    return given[0] if len(given) == 1 and given[0] in ("none", "all") else tuple(given)
