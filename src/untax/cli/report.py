"""Write a run's report: one self-contained HTML page, and the same as Markdown, pictures and CSV.

The paper's figures and tables from your own numbers, what to know before trusting them, and how they compare with what it published.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from untax.cli._progress import Progress
from untax.cli._terminal import one_line
from untax.meter import report
from untax.meter.gather import gather
from untax.meter.report import _png
from untax.meter.report.contents import compile_contents
from untax.meter.report.text import as_summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory or records.jsonl of `untax bench`")
    parser.add_argument("--out", metavar="DIR", help="where to (default: `report` beside the records)")
    parser.add_argument("--tier", action="append", metavar="T", help="only this one (repeatable)")
    parser.add_argument("--substrate", action="append", metavar="NAME", help="only this one (repeatable)")
    parser.add_argument("--against", metavar="RUN", help="also say whether the cases that another run has too agree with it")
    parser.add_argument("--png", action="store_true", help="demand PNG pictures (default: where the extra untax[png] is installed)")


def carry_out(arguments: argparse.Namespace) -> int:
    place = Path(arguments.run)
    if arguments.png:
        _png.demand()
    with Progress() as progress:
        run = gather(
            place,
            tiers=arguments.tier or (),
            substrates=arguments.substrate or (),
            tell=lambda done, of: progress("reading records", done, of),
        )
        other = gather(Path(arguments.against)) if arguments.against else None
    contents = compile_contents(run, other)
    out = Path(arguments.out) if arguments.out else run.path.parent / "report"
    files = report.write_contents(contents, out, png=True if arguments.png else None)
    if arguments.json:
        findings = [
            {"name": one.name, "level": one.level, "found": one.found, "remedy": one.remedy, "cases": list(one.cases)}
            for one in contents.findings
        ]
        document = {
            "untax_report": 1,
            "run": run.run.run,
            "files": [str(file) for file in files],
            "trials": run.trials,
            "complete": run.end is not None and not run.truncated,
            "findings": findings,
            "disagreeing": [str(row[0]) for row in contents.against.rows if row[-1] == "no"] if contents.against else None,
            "missing_figures": [figure.name for figure in contents.figures if figure.draw is None],
        }
        print(json.dumps(document))
        return 0
    print("\n".join(one_line(line) for line in as_summary(contents).splitlines()))
    if contents.against is not None:
        print(one_line(contents.against.notes[0]))
    print(files[0])
    return 0
