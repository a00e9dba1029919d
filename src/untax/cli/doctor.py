"""Say which substrates this machine can use, what stands in the way of the others, and what to do about it.

The exit code is 0 when at least one substrate with isolation can be used, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from untax import substrates
from untax.cli import EXIT_NO
from untax.cli._terminal import one_line
from untax.core.substrate import Diagnosing
from untax.meter import host
from untax.substrates._host import chosen_state_dir

_MARKS = {"ok": "ok  ", "note": "note", "warn": "WARN", "bad": "BAD "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", metavar="DIR", help="the state directory to look at")


def carry_out(arguments: argparse.Namespace) -> int:
    state_dir = chosen_state_dir(arguments.state_dir)
    found = [_examined(name) for name in substrates.names()]
    findings = host.findings(state_dir)
    if arguments.json:
        print(json.dumps({"untax_doctor": 1, "substrates": found, "host": host.as_json(findings), "facts": host.facts()}))
    else:
        _show(found, findings)
    return 0 if any(one["usable"] and one["isolation"] != "none" for one in found) else EXIT_NO


def _examined(name: str) -> dict[str, Any]:
    substrate = substrates.load(name)
    reason = substrate.unavailable_reason()
    evidence = list(substrate.evidence()) if isinstance(substrate, Diagnosing) else []
    return {"name": name, "isolation": substrate.isolation, "usable": reason is None, "reason": reason, "evidence": evidence}


def _show(found: list[dict[str, Any]], findings: list[host.Finding]) -> None:
    print("Substrates")
    for one in found:
        print(f"  {'ok  ' if one['usable'] else 'NO  '}  {one['name']:<12} isolation: {one['isolation']}")
        if one["reason"]:
            print(f"          {one_line(one['reason'])}")
        for line in one["evidence"]:
            print(f"          {one_line(line)}")
    print("This machine")
    for finding in findings:
        print(f"  {_MARKS[finding.status]}  {finding.name}: {one_line(finding.found)}")
        if finding.remedy:
            print(f"          → {finding.remedy}")
