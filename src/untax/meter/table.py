"""A table as data, and its four forms: for a terminal, Markdown, HTML and CSV. Pure.

Whatever stands in a cell may have come from outside (a substrate's name, an error's message), so every form escapes it in its own way.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape


@dataclass(frozen=True, slots=True)
class Value:
    """A cell: what people read, the number behind it for machines, and smaller lines below it."""

    text: str
    raw: float | int | str | None = None
    under: str = ""

    def __str__(self) -> str:
        return self.text


Cell = str | Value


@dataclass(slots=True)
class Table:
    """`name` is its file name; `key` says how many columns on the left name the row."""

    name: str
    title: str
    head: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    key: int = 1

    def add(self, *cells: Cell) -> None:
        assert len(cells) == len(self.head), (cells, self.head)
        self.rows.append(cells)


def as_text(table: Table) -> str:
    """Columns side by side; second lines in brackets."""
    lines = [[_flat(cell) for cell in row] for row in (list(table.head), *table.rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(table.head))]
    out = []
    for line in lines:
        cells = [cell.ljust(widths[n]) if n < table.key else cell.rjust(widths[n]) for n, cell in enumerate(line)]
        out.append("  ".join(cells).rstrip())
    return "\n".join([*([table.title] if table.title else []), *out, *table.notes])


def as_markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = line(["---" if n < table.key else "---:" for n in range(len(table.head))])
    rows = [line([markdown_escape(_flat(cell)) for cell in row]) for row in table.rows]
    notes = [f"\n{markdown_escape(note)}" for note in table.notes]
    return "\n".join([line([markdown_escape(cell) for cell in table.head]), rule, *rows, *notes])


def as_html(table: Table) -> str:
    def cell(tag: str, content: Cell, is_key: bool) -> str:
        under = f"<small>{escape(content.under).replace(chr(10), '<br>')}</small>" if isinstance(content, Value) and content.under else ""
        scope = ' scope="row"' if tag == "th" and is_key else ""
        text = escape(str(content)).replace(" · ", "\u00a0· ")  # a line that is too long breaks behind the dot
        return f"<{tag}{scope}>{text}{under}</{tag}>"

    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in table.head)
    body = "".join(
        "<tr>" + "".join(cell("th" if n == 0 else "td", one, n == 0) for n, one in enumerate(row)) + "</tr>\n" for row in table.rows
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    return f'<div class="scroll" tabindex="0"><table class="key{table.key}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>{notes}'


def as_csv(table: Table) -> str:
    """Numbers as numbers in their base unit; text such that no spreadsheet takes it for a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_harmless(title) for title in table.head])
    for row in table.rows:
        writer.writerow([_plain(cell) for cell in row])
    return out.getvalue()


def markdown_escape(text: str) -> str:
    for special in "\\`*_[]<>|#":
        text = text.replace(special, f"\\{special}")
    return text.replace("\n", " ")


def _flat(cell: Cell) -> str:
    if isinstance(cell, Value) and cell.under:
        return f"{cell.text} ({cell.under.replace(chr(10), ', ')})"
    return str(cell).replace("\n", " ")


def _plain(cell: Cell) -> str | float | int:
    raw = cell.raw if isinstance(cell, Value) and cell.raw is not None else str(cell)
    if isinstance(raw, float):
        return "" if math.isnan(raw) else raw
    return _harmless(raw) if isinstance(raw, str) else raw


def _harmless(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
