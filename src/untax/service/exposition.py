"""Texts for Prometheus of several nodes as one: each family is described once, and every sample says whose it is. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ABOUT = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) ")


def merged(texts: Iterable[tuple[str, str]]) -> str:
    """`texts` are pairs of a node's name and what it said. Lines that are neither a sample nor about one are left out."""
    about: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for node, text in texts:
        family = ""
        for line in text.splitlines():
            if found := _ABOUT.match(line):
                family = found[2]
                about.setdefault(family, {}).setdefault(found[1], line)
            elif (labelled := _labelled(line, node)) is not None:
                samples.setdefault(family, []).append(labelled)
    return "".join(f"{line}\n" for line in _lines(about, samples))


def _lines(about: dict[str, dict[str, str]], samples: dict[str, list[str]]) -> Iterator[str]:
    for family in {**about, **samples}:
        yield from about.get(family, {}).values()
        yield from samples.get(family, ())


def _labelled(line: str, node: str) -> str | None:
    name = _NAME.match(line)
    if name is None:
        return None
    label, rest = f'node="{escaped(node)}"', line[name.end() :]
    if rest.startswith("{"):
        return f"{name[0]}{{{label}{rest[1:] if rest[1:2] == '}' else ',' + rest[1:]}"
    return f"{name[0]}{{{label}}}{rest}" if rest.startswith(" ") else None


def escaped(value: str) -> str:
    """A label's value, quotes aside."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
