"""An image's config, read as data: whoever wrote it decides nothing but what its own sandbox finds.

A config that is not one is refused. A single field that no process could be given (a NUL, a variable without a name) is
left out, and said so: images have been built with such.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from untax.core.errors import StageFailed, UsageError
from untax.core.root import ImageConfig
from untax.core.spec import FrozenEnv, require_user
from untax.layers.sources._reference import Platform, is_digest, this_platform

MOST_BYTES = 8 << 20
MOST_LAYERS = 512  # a chain of more cannot be mounted
_MOST_STRINGS = 4096  # variables, words of a command, labels: each for itself
_LONGEST_STRING = 128 << 10  # what Linux gives one variable or argument at most
_LONGEST_PATH = 4095


@dataclass(frozen=True, slots=True)
class ReadConfig:
    digest: str
    config: ImageConfig
    diff_ids: tuple[str, ...]
    notes: tuple[str, ...]


def read_config(data: bytes, what: str, *, digest: str | None = None, platform: Platform | None = None) -> ReadConfig:
    """The config in `data`, which must hash to `digest`. `StageFailed` for one that is damaged, hostile or of another platform."""
    if len(data) > MOST_BYTES:
        raise _refused(what, f"a config of more than {MOST_BYTES} bytes")
    found = _hash_of(data, digest)
    if digest is not None and found != digest:
        raise _refused(what, f"its config is {found}, and {digest} was promised")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise _refused(what, "its config is not JSON") from None
    if not isinstance(document, dict):
        raise _refused(what, "its config is not an object")
    _require_platform(document, platform or this_platform(), what)
    reader = _Reader(_mapping(document, "config", what), what)
    config = ImageConfig(
        env=reader.env(),
        workdir=reader.workdir(),
        user=reader.user(),
        entrypoint=reader.words("Entrypoint"),
        command=reader.words("Cmd"),
        labels=reader.labels(),
    )
    return ReadConfig(found, config, _diff_ids(document, what), tuple(reader.notes))


def _hash_of(data: bytes, digest: str | None) -> str:
    name = digest.partition(":")[0] if digest is not None and is_digest(digest) else "sha256"
    return f"{name}:{hashlib.new(name, data).hexdigest()}"


def _diff_ids(document: dict[str, Any], what: str) -> tuple[str, ...]:
    found = _mapping(document, "rootfs", what).get("diff_ids") or []
    if not isinstance(found, list) or not all(is_digest(one) for one in found):
        raise _refused(what, "its config names layers by something that is not a digest")
    if len(found) > MOST_LAYERS:
        raise _refused(what, f"{len(found)} layers; at most {MOST_LAYERS} are taken")
    return tuple(found)


def _require_platform(document: dict[str, Any], wanted: Platform, what: str) -> None:
    """An image that says nothing about it may be for this machine."""
    values = [document.get(key) or getattr(wanted, key) for key in ("architecture", "variant", "os")]
    if not all(isinstance(value, str) for value in values):
        raise _refused(what, "its config names a platform by something that is not text")
    if not document.get("variant"):
        values[1] = ""
    said = Platform(*values)
    if wanted.fit(said) is None:
        raise _refused(what, f"it is for {str(said)[:80]!r}; this machine is {wanted}")


class _Reader:
    """The fields of the part of a config that says how the image wants to be used."""

    def __init__(self, fields: Mapping[str, Any], what: str) -> None:
        self._fields = fields
        self._what = what
        self.notes: list[str] = []

    def env(self) -> FrozenEnv:
        variables: dict[str, str] = {}
        for text in self._strings("Env"):
            name, equals, value = text.partition("=")
            if not name or not equals or "\0" in text:
                self._note(f"the variable {text[:80]!r}, which no process could be given")
            else:
                variables[name] = value
        return FrozenEnv(variables)

    def workdir(self) -> str | None:
        text = self._text("WorkingDir")
        if not text:
            return None
        if "\0" in text or len(text) > _LONGEST_PATH:
            self._note("its working directory, which is not a path")
            return None
        return posixpath.normpath("/" + text.lstrip("/"))

    def user(self) -> str | None:
        """The name or number; the group that may follow it is the user's own in /etc/passwd, or the number's."""
        text = self._text("User").partition(":")[0]
        if not text:
            return None
        try:
            return require_user(text)
        except UsageError:
            self._note(f"its user {text[:80]!r}, which is neither a name nor a number")
            return None

    def words(self, key: str) -> tuple[str, ...]:
        words = tuple(self._strings(key))
        if any("\0" in word for word in words):
            self._note(f"its {key}, which has a NUL in it")
            return ()
        return words

    def labels(self) -> FrozenEnv:
        labels = _mapping(self._fields, "Labels", self._what)
        if len(labels) > _MOST_STRINGS or not all(isinstance(value, str) for value in labels.values()):
            raise _refused(self._what, f"its labels are not texts, or more than {_MOST_STRINGS}")
        self._require_unicode([*labels, *labels.values()])
        return FrozenEnv(labels)

    def _strings(self, key: str) -> list[str]:
        value = self._fields.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, str) and len(one) <= _LONGEST_STRING for one in value):
            raise _refused(self._what, f"{key} in its config is not a list of texts, or one is longer than {_LONGEST_STRING}")
        if len(value) > _MOST_STRINGS:
            raise _refused(self._what, f"{key} in its config has {len(value)} entries; at most {_MOST_STRINGS} are taken")
        self._require_unicode(value)
        return value

    def _text(self, key: str) -> str:
        value = self._fields.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise _refused(self._what, f"{key} in its config is not text")
        self._require_unicode([value])
        return value

    def _require_unicode(self, texts: list[str]) -> None:
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:  # JSON can write half of a pair of surrogates, and no system call takes it
            raise _refused(self._what, "its config has text that cannot be encoded") from None

    def _note(self, what: str) -> None:
        if len(self.notes) < 100:
            self.notes.append(f"left out of the config: {what}")


def _mapping(document: Mapping[str, Any], key: str, what: str) -> dict[str, Any]:
    value = document.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _refused(what, f"{key} in its config is not an object")
    return value


def _refused(what: str, why: str) -> StageFailed:
    return StageFailed("image", f"{what}: {why}")
