"""Where this machine's own apt gets Debian from, so that nobody else's choice of a mirror is in our code. Pure but for `read_sources`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

_SOURCES = Path("/etc/apt")
_LINE = re.compile(r"deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)(?P<components>(?:\s+[^\s#]+)*)\s*(?:#.*)?")
# What decides whether a repository is believed. The rest (architectures, languages) is about this machine, not about the image.
_KEPT_OPTIONS = ("signed-by", "trusted", "check-valid-until")
_DEBIAN_KEYS = "/usr/share/keyrings/debian-archive"
_SCHEMES = ("http", "https", "file")
_PASSED_ON = re.compile(r'Acquire::(?:http|https|Retries|Check-Valid-Until)\b[A-Za-z0-9:.-]* "[^"\n]*";')


@dataclass(frozen=True, slots=True)
class Source:
    """One suite of one repository."""

    uri: str
    suite: str
    components: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()

    def line(self, suite: str | None = None) -> str:
        """As sources.list has it."""
        options = " ".join(f'{name}="{value}"' for name, value in self.options)
        return " ".join(("deb", *([f"[{options}]"] if options else []), self.uri, suite or self.suite, *self.components))

    def public(self) -> Source:
        """As an image may have it: without the name and password that a URI may hold, and without keys that are not Debian's own package's."""
        parts = urlsplit(self.uri)
        bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        return Source(bare, self.suite, self.components, tuple(one for one in self.options if one[1].startswith(_DEBIAN_KEYS)))


def read_sources(directory: Path = _SOURCES) -> list[Source]:
    """What apt would read below `directory`; files that cannot be read say nothing."""
    found: list[Source] = []
    parts = sorted((directory / "sources.list.d").glob("*")) if (directory / "sources.list.d").is_dir() else []
    for path in (directory / "sources.list", *parts):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        if path.suffix == ".list":
            found += parse_lines(text)
        elif path.suffix == ".sources":
            found += parse_stanzas(text)
    return found


def parse_lines(text: str) -> Iterator[Source]:
    """The one-line form: `deb [options] uri suite component…`."""
    for line in text.splitlines():
        found = _LINE.fullmatch(line.strip())
        if found is None:
            continue
        options = dict(option.split("=", 1) for option in (found["options"] or "").split() if "=" in option)
        if source := _source(found["uri"], found["suite"], found["components"].split(), {k.lower(): v for k, v in options.items()}):
            yield source


def parse_stanzas(text: str) -> Iterator[Source]:
    """The form of fields: `Types:`, `URIs:`, `Suites:`, `Components:`."""
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                fields[name] = f"{fields.get(name, '')}\n{line.strip()}"
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false", "0", "off"):
            continue
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                if source := _source(uri, suite, fields.get("components", "").split(), fields):
                    yield source


def _source(uri: str, suite: str, components: Iterable[str], options: dict[str, str]) -> Source | None:
    if urlsplit(uri).scheme not in _SCHEMES or suite.endswith("/"):
        return None  # one without suites, or on a medium to be put in
    # A key that stands in the field itself has no path that a line could name.
    kept = tuple((name, options[name]) for name in _KEPT_OPTIONS if name in options and re.fullmatch(r"[^\s\"\]]+", options[name]))
    return Source(uri, suite, tuple(components), kept)


def for_suite(sources: Iterable[Source], suite: str) -> list[Source]:
    """The repositories to make `suite` from: with its updates and its security fixes where apt has them; empty when apt knows no Debian.

    A suite that apt is not set up for is looked for where it gets the machine's own.
    """
    debian = [source for source in sources if "main" in source.components and _is_debian(source)]
    exact = [source for source in debian if source.suite in (suite, f"{suite}-updates", f"{suite}-security", f"{suite}/updates")]
    if any(source.suite == suite for source in exact):
        return exact
    for source in debian:
        if re.fullmatch(r"[a-z]+", source.suite):
            return [Source(source.uri, suite, ("main",), source.options)]
    return []


def _is_debian(source: Source) -> bool:
    """Others name their suites after Debian's. Debian's own is signed by its keyring, or lies in a directory of that name."""
    keys = dict(source.options).get("signed-by", "")
    return "debian-archive" in keys or re.search(r"/debian(?:-security)?/?$", urlsplit(source.uri).path) is not None


def passed_on() -> list[str]:
    """What apt is told about reaching and believing its repositories: proxies, retries, dates."""
    try:
        dumped = subprocess.run(
            ["apt-config", "dump"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.removesuffix(";") for line in dumped.splitlines() if _PASSED_ON.fullmatch(line) and not line.endswith(' "";')]
