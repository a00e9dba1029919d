"""Workloads: list those that there are, show one, make one from a recorded trajectory.

docs/measurement.md has their format and how to add one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from untax.cli._terminal import one_line
from untax.core.errors import UsageError
from untax.rollout import imports
from untax.rollout import workload as workloads
from untax.rollout.workload import Action, Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, act: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=summary, description=summary)
        # Not to hide what was said before the action.
        made.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document on standard output")
        made.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="log what happens on standard error")
        made.set_defaults(act=act)
        return made

    action("list", _list, "the workloads that come with untax")
    shown = action("show", _show, "one workload: what it stands on, its actions and their mix")
    shown.add_argument("workload", metavar="NAME|FILE.toml")
    shown.add_argument("--length", type=int, default=0, metavar="N", help="of the trajectory (default: the tier itself)")
    brought = action("import", _import, "a workload from a SWE-bench instance, a SWE-agent or mini-swe-agent trajectory, or a ledger")
    brought.add_argument("file", metavar="FILE", help="JSON, or JSON lines")
    brought.add_argument("--instance", metavar="ID", help="which, of a file with several")
    brought.add_argument("--image", metavar="IMAGE", help="what it runs on (default: host)")
    brought.add_argument("--name", metavar="NAME", help="what it is called (default: from the file)")
    brought.add_argument("-o", "--output", metavar="FILE.toml", help="where to (default: standard output)")


def carry_out(arguments: argparse.Namespace) -> int:
    code: int = arguments.act(arguments)
    return code


def _list(arguments: argparse.Namespace) -> int:
    found = [workloads.load(name) for name in workloads.names()]
    if arguments.json:
        print(json.dumps({"untax_workloads": 1, "workloads": [_about(one) for one in found]}))
        return 0
    for one in found:
        lengths = ", ".join(map(str, one.lengths))
        print(f"{one.name:<6}{len(one.actions):>3} actions; trajectories of {lengths}; {one.summary}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    found = workloads.load(arguments.workload)
    given = found.of_length(arguments.length)
    if arguments.json:
        print(json.dumps({"untax_workload": 1, **_about(found), "length": arguments.length, "shown": [_plain(one) for one in given]}))
        return 0
    print(f"{found.name} ({found.digest()}): {one_line(found.summary)}")
    print(
        f"image {found.image}"
        + (f", {found.source.url} at {found.source.ref}" if found.source else "")
        + (", preloaded" if found.preloaded else "")
    )
    if found.packages:
        print(f"packages: {', '.join(found.packages)}")
    for step in found.setup:
        print(f"  setup    {one_line(str(step))}")
    for one in given:
        print(f"  {one.sort:<8} {one_line(str(one))}")
    print(", ".join(f"{count} {sort}" for sort, count in found.mix(arguments.length).items()))
    return 0


def _import(arguments: argparse.Namespace) -> int:
    found = imports.read(Path(arguments.file), instance=arguments.instance)
    if arguments.name:
        found.name = arguments.name
    text = found.to_toml(image=arguments.image)
    if arguments.output:
        _write(Path(arguments.output), text)
    elif not arguments.json:
        sys.stdout.write(text)
    if arguments.json:
        document = {
            "untax_import": 1,
            "format": found.format,
            "name": found.name,
            "actions": len(found.actions),
            "left_out": found.left_out,
        }
        print(json.dumps({**document, "file": arguments.output, "toml": None if arguments.output else text}))
    said = f"untax: {found.format}: {len(found.actions)} actions"
    print(
        said + (f", {len(found.left_out)} left out ({one_line(', '.join(found.left_out[:3]))})" if found.left_out else ""), file=sys.stderr
    )
    return 0


def _write(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}; name another file with -o") from exc
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as exc:
        path.unlink(missing_ok=True)
        raise UsageError(f"{path}: {exc.strerror}") from exc


def _about(found: Workload) -> dict[str, Any]:
    return {
        "name": found.name,
        "summary": found.summary,
        "digest": found.digest(),
        "image": found.image,
        "source": asdict(found.source) if found.source else None,
        "preloaded": found.preloaded,
        "packages": list(found.packages),
        "actions": len(found.actions),
        "lengths": list(found.lengths),
        "mix": {str(length): found.mix(length) for length in (0, *found.lengths)},
        "file": found.origin,
    }


def _plain(action: Action) -> dict[str, Any]:
    return {
        "verb": action.verb,
        "what": action.what,
        **action.extra,
        "sort": action.sort,
        "exit": action.exits,
        "timeout_s": action.timeout_s,
    }
