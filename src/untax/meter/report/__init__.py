"""A run's records as a report: one HTML page, Markdown, pictures and CSV. `write` makes the files, `summary` a table for a terminal."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from untax.core.errors import UsageError
from untax.meter.figures._svg import WIDE
from untax.meter.gather import gather
from untax.meter.report import _png
from untax.meter.report.contents import Contents, compile_contents
from untax.meter.report.page import as_page
from untax.meter.report.text import as_document, as_summary
from untax.meter.table import as_csv

PAGE, DOCUMENT = "report.html", "report.md"


def write(
    run_path: Path,
    out_dir: Path,
    *,
    tiers: Iterable[str] = (),
    substrates: Iterable[str] = (),
    png: bool | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Report on a run; give the files that were written, the page first.

    `png`: None makes pictures of that kind where the extra for it is installed, True demands them. `RecordError` for what is no run, `UsageError` for a
    filter that matches nothing, a directory that cannot be written, or a missing extra.
    """
    if png:
        _png.demand()
    return write_contents(compile_contents(gather(run_path, tiers=tiers, substrates=substrates, tell=tell)), out_dir, png=png)


def write_contents(contents: Contents, out_dir: Path, *, png: bool | None = None) -> list[Path]:
    """The same, of what was compiled already."""
    has_png = _png.is_there() if png is None else png
    files: dict[str, str | bytes] = {PAGE: as_page(contents)}
    pictures = {}
    for figure in contents.figures:
        if figure.draw is None:
            continue
        name = f"figures/{figure.number}-{figure.name}"
        svg = figure.draw(WIDE).file(f"Figure {figure.number}. {figure.title}")
        files[f"{name}.svg"] = svg
        pictures[figure.name] = f"{name}.svg"
        if has_png:
            files[f"{name}.png"] = _png.drawn(svg)
    files[DOCUMENT] = as_document(contents, pictures)
    for table in contents.all_tables():
        files[f"data/{table.name}.csv"] = as_csv(table)
    return [_put(out_dir / name, data) for name, data in files.items()]


def summary(run_path: Path) -> str:
    """The summary table, with the warnings that belong to it."""
    return as_summary(compile_contents(gather(run_path)))


def _put(path: Path, data: str | bytes) -> Path:
    """Whole or not at all: a full disk leaves the report that was there before."""
    raw = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=".report-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(raw)
            os.chmod(made, 0o644)
            os.replace(made, path)
        except BaseException:
            os.unlink(made)
            raise
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}; free some space or name another directory with --out") from exc
    return path
