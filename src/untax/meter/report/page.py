"""A report as one HTML page that needs nothing else: styles and pictures are in it, no script, nothing is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib import resources

from untax.meter import units
from untax.meter.figures import Figure
from untax.meter.figures._svg import CSS, NARROW, SHAPES, WIDE
from untax.meter.report.contents import Contents
from untax.meter.table import Table, as_html

# Nothing may be fetched and nothing may run, whatever a record's text should manage to smuggle in.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def as_page(contents: Contents) -> str:
    title = f"Rollout infrastructure tax: {', '.join(dict.fromkeys(s.substrate for s in contents.view.series)) or 'no plain case'}"
    body = "\n".join(_body(contents))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{CSS}{SHAPES}{_style()}</style></head>\n<body><main>\n{body}\n</main></body></html>\n'
    )


@cache
def _style() -> str:
    return resources.files("untax.meter.report").joinpath("style.css").read_text(encoding="utf-8")


def _body(contents: Contents) -> Iterator[str]:
    run = contents.run
    yield "<header><h1>The rollout infrastructure tax, measured here</h1>"
    host = run.run.host
    machine = ", ".join(str(host[name]) for name in ("cpu", "kernel") if host.get(name))
    yield f'<p class="lead">{run.trials:,} trials in {len(run.cases)} cases, begun {escape(_instant(run.run.started_at))}{escape(f" on {machine}" if machine else "")}.</p>'
    yield "</header>"
    if contents.cards:
        cards = "".join(f'<div class="card"><b>{escape(card.number)}</b><span>{escape(card.words)}</span></div>' for card in contents.cards)
        yield f'<div class="cards">{cards}</div>'
    if careful := [finding.name for finding in contents.findings if finding.level == "warn"]:
        yield f'<p class="care">Read with care: {escape(", ".join(dict.fromkeys(careful)))}. <a href="#trust">Why, and what to do about it</a></p>'
    yield (
        '<nav aria-label="Contents"><a href="#summary">Summary</a><a href="#trust">What to know</a><a href="#figures">Figures</a><a href="#paper">Paper</a>'
        '<a href="#differences">Differences</a><a href="#scale">At scale</a><a href="#behind">How it was measured</a></nav>'
    )
    yield f'<section id="summary"><h2>{escape(contents.summary.title)}</h2>{as_html(contents.summary)}</section>'
    yield from _checks(contents)
    yield '<section id="figures">'
    for figure in contents.figures:
        yield _figure(figure, contents)
    yield "</section>"
    yield '<section id="paper">' + "".join(map(_table, contents.paper)) + "</section>"
    yield f'<section id="differences">{_table(contents.differences)}</section>'
    yield from _scale(contents)
    yield from _behind(contents)


def _checks(contents: Contents) -> Iterator[str]:
    yield '<section id="trust"><h2>What to know before trusting this</h2><ul class="checks">'
    if not contents.findings:
        yield '<li class="good"><b>Nothing found.</b> The host was quiet, every case has enough trials, nothing drifted, and no case fell into two groups.</li>'
    for finding in contents.findings:
        cases = ""
        if len(finding.cases) > 1:
            items = "<br>".join(escape(case) for case in finding.cases)
            cases = f"<details><summary>{len(finding.cases)} cases</summary>{items}</details>"
        yield (
            f'<li class="is-{finding.level}"><b>{escape(finding.name)}:</b> {_with_code(finding.found)}.<small>{_with_code(finding.remedy)}.</small>{cases}</li>'
        )
    yield "</ul></section>"


def _figure(figure: Figure, contents: Contents) -> str:
    heading = f'<h2 id="figure-{figure.number}">Figure {figure.number}. {escape(figure.title)}</h2>'
    if figure.draw is None:
        return f'{heading}<figure data-figure="{figure.name}" class="missing">A gap: {_with_code(figure.missing)}</figure>'
    label = f"Figure {figure.number}. {figure.title}"
    pictures = "".join(figure.draw(width).svg(label, kind) for width, kind in ((WIDE, "wide"), (NARROW, "narrow")))
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>"
    tables = "".join(as_html(table) for table in figure.data)
    behind = f"<pre>{escape(contents.run.run.command or 'command not recorded')}</pre><p>Records: {escape(contents.run.path.name)}, {escape(figure.records)}.</p>"
    return (
        f'{heading}<figure data-figure="{figure.name}">{pictures}{caption}</figure>'
        f"<details><summary>Numbers, command and records behind this figure</summary>{behind}{tables}</details>"
    )


def _table(table: Table) -> str:
    return f"<h2>{escape(table.title)}</h2>{as_html(table)}"


def _scale(contents: Contents) -> Iterator[str]:
    yield '<section id="scale">'
    if contents.sensitivity:
        yield "<h2>Worker-hours by length and scale</h2><p>From 10 to 300 actions and from ten thousand to ten million trajectories, with 95 % intervals.</p>"
        for table in contents.sensitivity:
            yield f"<details><summary>{escape(table.title)}</summary>{as_html(table)}</details>"
    for further in (contents.stalls, contents.starts, contents.conditions, contents.against):
        if further is not None:
            yield _table(further)
    yield "</section>"


def _behind(contents: Contents) -> Iterator[str]:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in contents.facts)
    yield f'<section id="behind"><h2>How it was measured</h2><dl>{facts}</dl>'
    yield (
        "<p>Trials of all cases were interleaved in an order drawn from the seed; warm-up trials are left out. Neighbouring parts of a trial share one timestamp, commands "
        "are timed inside the sandbox, and what no part covers is reported as unattributed. Latencies are those of trials that went well; the time of "
        "failed ones, and of retries, is in the worker-hours. Worker-hours are trajectories × mean seconds ÷ 3600: the demand for rollout workers, without inference, rewards or queues elsewhere.</p>"
    )
    yield f"<details><summary>Every case ({len(contents.cases.rows)})</summary>{as_html(contents.cases)}</details></section>"
    span = units.seconds(contents.run.run.span_cost_ns * 1e-9)
    yield f"<footer>Written by <code>untax report</code> from {contents.run.records:,} records. Opening and closing a span cost {span} on this machine.</footer>"


def _instant(text: str) -> str:
    """An instant to the minute; what is none stays as it is."""
    return f"{text[:10]} {text[11:16]} UTC" if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*Z", text) else text


def _with_code(text: str) -> str:
    """Escaped, with what stands between backquotes as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
