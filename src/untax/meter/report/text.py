"""A report as Markdown, and its summary for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from untax.meter.report.contents import Contents
from untax.meter.table import Table, as_markdown, as_text, markdown_escape


def as_document(contents: Contents, pictures: dict[str, str]) -> str:
    """`pictures` says where the file of each figure is, as seen from the document."""
    return "\n".join(_lines(contents, pictures)) + "\n"


def _lines(contents: Contents, pictures: dict[str, str]) -> Iterator[str]:
    run = contents.run
    yield "# The rollout infrastructure tax, measured here\n"
    yield f"{run.trials:,} trials in {len(run.cases)} cases, begun {markdown_escape(run.run.started_at)}.\n"
    for card in contents.cards:
        yield f"- **{markdown_escape(card.number)}** {markdown_escape(card.words)}"
    yield from _section(contents.summary)
    yield "\n## What to know before trusting this\n"
    if not contents.findings:
        yield "Nothing found."
    for finding in contents.findings:
        yield f"- **{markdown_escape(finding.name)}**: {markdown_escape(finding.found)}. *{markdown_escape(finding.remedy)}.*"
    for figure in contents.figures:
        yield f"\n## Figure {figure.number}. {figure.title}\n"
        if figure.name not in pictures:
            yield f"A gap: {figure.missing}"
            continue
        yield f"![Figure {figure.number}]({pictures[figure.name]})\n\n{figure.caption}\n"
        for table in figure.data:
            yield as_markdown(table)
        yield f"\nRecords: {markdown_escape(run.path.name)}, {figure.records}. Command: {markdown_escape(run.run.command or 'not recorded')}"
    for table in (*contents.paper, contents.differences):
        yield from _section(table)
    if contents.sensitivity:
        yield "\n## Worker-hours by length and scale"
        for table in contents.sensitivity:
            yield f"\n### {markdown_escape(table.title)}\n\n{as_markdown(table)}"
    for further in (contents.stalls, contents.starts, contents.conditions, contents.against):
        if further is not None:
            yield from _section(further)
    yield "\n## How it was measured\n"
    for name, value in contents.facts:
        yield f"- {markdown_escape(name)}: {markdown_escape(value)}"


def _section(table: Table) -> Iterator[str]:
    yield f"\n## {markdown_escape(table.title)}\n"
    yield as_markdown(table)


def as_summary(contents: Contents) -> str:
    """The summary table without intervals, and how much there is to know before trusting it."""
    short = Table("", "", [head or "series" for head in contents.summary.head])
    for row in contents.summary.rows:
        short.add(*(str(cell) for cell in row))
    warnings = [finding for finding in contents.findings if finding.level == "warn"]
    lines = [as_text(short), *(note for note in contents.summary.notes if note.startswith(("*", "†")))]
    lines += [f"! {finding.name}: {finding.found}" for finding in warnings[:5]]
    if len(warnings) > 5:
        lines.append(f"! and {len(warnings) - 5} more: see the report")
    return "\n".join(lines)
