"""Say which substrates this machine can use, what stands in the way of the others, and what to do about it.

Each is tried: a sandbox is made below the state directory, runs one command, and is removed. The exit code is 0 when at
least one substrate with isolation can be used, 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import untax
from untax import substrates
from untax.auto import Candidates
from untax.cli import EXIT_NO
from untax.cli._terminal import one_line
from untax.core.errors import UntaxError, UsageError
from untax.core.spec import ISOLATION_LEVELS, EnvSpec
from untax.core.substrate import Diagnosing, Fastidious, Reluctant, said_together
from untax.meter import host
from untax.pool.choice import ACTIONS
from untax.substrates._host import chosen_state_dir

# A sandbox takes milliseconds; the first one of a state directory makes its images as well.
_TRIAL_PATIENCE_S = 30.0
_MARKS = {"ok": "ok  ", "note": "note", "warn": "WARN", "bad": "BAD "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", metavar="DIR", help="the state directory to look at")


def carry_out(arguments: argparse.Namespace) -> int:
    state_dir = chosen_state_dir(arguments.state_dir)
    if not arguments.verbose:
        logging.getLogger("untax").setLevel(logging.ERROR)  # what is not enforced is said below, as evidence
    found = [_examined(name, state_dir) for name in substrates.names()]
    hosted = [_asked_for(name) for name in substrates.HOSTED]
    findings = host.findings(state_dir)
    chosen = _chosen(found, state_dir)
    if arguments.json:
        said = {"substrates": found, "hosted": hosted, "auto": chosen, "host": host.as_json(findings), "facts": host.facts()}
        print(json.dumps({"untax_doctor": 1, **said}))
    else:
        _show(found, hosted, chosen, findings)
    return 0 if any(one["usable"] and one["isolation"] != "none" for one in found) else EXIT_NO


def _examined(name: str, state_dir: Path) -> dict[str, Any]:
    substrate = substrates.load(name)
    reason = substrate.unavailable_reason()
    evidence = list(substrate.evidence()) if isinstance(substrate, Diagnosing) else []
    if reason is None and isinstance(substrate, Fastidious) and substrate.image_trouble("host"):
        evidence.append("not tried: it has no image of its own to try with; name one: Engine(…).lease(EnvSpec(image=…))")
    elif reason is None:
        is_slow = isinstance(substrate, Reluctant) and substrate.is_slow_to_try
        try:
            evidence += _looked_at(state_dir) if is_slow else asyncio.run(_tried(name, state_dir))
        except UntaxError as exc:
            reason = f"tried, and failed: {exc}"
        except OSError as exc:
            reason = f"state directory {state_dir}: {exc.strerror}; name another with --state-dir"
    return {"name": name, "isolation": substrate.isolation, "usable": reason is None, "reason": reason, "evidence": evidence}


def _asked_for(name: str) -> dict[str, Any]:
    """A provider is not tried: each sandbox of one is paid for."""
    substrate = substrates.load(name)
    reason = substrate.unavailable_reason()
    evidence = list(substrate.evidence()) if isinstance(substrate, Diagnosing) else []
    if reason is None:
        evidence.append(f"not tried: its sandboxes may cost money; try one with `untax run --substrate {name} -- true`")
    return {"name": name, "isolation": substrate.isolation, "usable": reason is None, "reason": reason, "evidence": evidence}


def _looked_at(state_dir: Path) -> list[str]:
    """For what is too slow to be tried by the way: that there is a place for its sandboxes at least."""
    with tempfile.TemporaryDirectory(prefix=".untax-doctor-", dir=host.existing(state_dir)):
        return []


async def _tried(name: str, state_dir: Path) -> list[str]:
    """What came of one sandbox on the file system of the state directory, in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix=".untax-doctor-", dir=host.existing(state_dir)) as scratch:
        async with untax.Engine(name, state_dir=scratch) as engine:
            # An image that has to be taken in is an empty one here: the host's own software would be copied as a whole.
            nothing = EnvSpec(image=f"dir:{_empty(scratch)}", isolation=engine.substrate.isolation) if engine.importing else None
            async with engine.lease(nothing, wait_s=_TRIAL_PATIENCE_S) as box:
                if nothing is None:
                    (await box.run(["true"], timeout_s=_TRIAL_PATIENCE_S)).check()
                else:
                    await box.list("/")
            if nothing is not None:
                await engine.warehouse.discard(nothing)
    what = "ran a command" if nothing is None else "answered"
    lines = [f"tried: a sandbox was made, {what} and was removed in {box.ledger.total_s * 1e3:.1f} ms"]
    return lines + [f"not enforced: {names}: {reason}; {remedy}" for names, reason, remedy in said_together(box.ledger.unenforced)]


def _empty(scratch: str) -> Path:
    place = Path(scratch) / "image"
    place.mkdir()
    return place


def _chosen(found: list[dict[str, Any]], state_dir: Path) -> dict[str, str]:
    """What `Engine("auto")` would use for each isolation that a spec with the host's software may ask for, and why."""
    candidates = Candidates(str(state_dir), {}, ACTIONS)
    for one in found:
        if one["usable"]:
            candidates.look_at(one["name"])
        else:
            candidates.leave_out(one["name"], one["reason"])
    chosen = {}
    for level in ISOLATION_LEVELS:
        try:
            chosen[level] = candidates.choose(EnvSpec(isolation=level)).reason
        except UsageError as exc:
            chosen[level] = f"nothing: {exc}"
    return chosen


def _show(found: list[dict[str, Any]], hosted: list[dict[str, Any]], chosen: dict[str, str], findings: list[host.Finding]) -> None:
    for title, those in (("Substrates", found), ("Providers", hosted)):
        print(title)
        for one in those:
            print(f"  {'ok  ' if one['usable'] else 'NO  '}  {one['name']:<14} isolation: {one['isolation']}")
            if one["reason"]:
                print(f"          {one_line(one['reason'])}")
            for line in one["evidence"]:
                print(f"          {one_line(line)}")
    print("Engine('auto')")
    for level, reason in chosen.items():
        print(f"  {level:<10}  {one_line(reason)}")
    print("This machine")
    for finding in findings:
        print(f"  {_MARKS[finding.status]}  {finding.name}: {one_line(finding.found)}")
        if finding.remedy:
            print(f"          → {finding.remedy}")
