"""The shape of what is sent: one table that bodies and queries are checked by and the OpenAPI document is made of."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from untax.service.errors import Refused

Kind = Literal["text", "number", "whole", "truth", "texts", "variables", "base64", "files", "object", "policy"]

_JSON: dict[Kind, dict[str, Any]] = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "whole": {"type": "integer"},
    "truth": {"type": "boolean"},
    "texts": {"type": "array", "items": {"type": "string"}},
    "variables": {"type": "object", "additionalProperties": {"type": "string"}},
    "base64": {"type": "string", "contentEncoding": "base64"},
    "files": {"type": "object", "additionalProperties": {"type": "string", "contentEncoding": "base64"}},
    "policy": {"oneOf": [{"type": "string", "enum": ["none", "all"]}, {"type": "array", "items": {"type": "string"}}]},
}


@dataclass(frozen=True, slots=True)
class Field:
    """One name in a body or a query. `least` and `most` bound a number, or the length of a text."""

    kind: Kind
    about: str
    is_needed: bool = False
    is_nullable: bool = False
    default: Any = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    fields: Mapping[str, Field] = field(default_factory=dict)

    def schema(self) -> dict[str, Any]:
        found = object_schema(self.fields) if self.kind == "object" else dict(_JSON[self.kind])
        found["description"] = self.about
        if self.choices:
            found["enum"] = list(self.choices)
        low, high = ("minLength", "maxLength") if self.kind == "text" else ("minimum", "maximum")
        if self.least is not None:
            found[low] = self.least
        if self.most is not None:
            found[high] = self.most
        if self.default is not None:
            found["default"] = self.default
        if self.is_nullable:
            found = {"anyOf": [found, {"type": "null"}], "description": found.pop("description")}
        return found

    def read(self, name: str, value: Any) -> Any:
        """The value as the handlers want it; `Refused` with 400 otherwise."""
        if value is None and self.is_nullable:
            return None
        match self.kind:
            case "object" if isinstance(value, dict):
                return read(self.fields, value, name)
            case "text" if isinstance(value, str):
                self._check_range(name, len(value), "characters")
                if self.choices and value not in self.choices:
                    raise bad(f"{name} must be one of {', '.join(self.choices)}, not {value[:40]!r}")
                return value
            case "number" if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._check_range(name, value)
                return float(value)
            case "whole" if (
                isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value)
            ):  # 1.0 is an integer in JSON
                self._check_range(name, value)
                return int(value)
            case "truth" if isinstance(value, bool):
                return value
            case "texts" if isinstance(value, list) and all(isinstance(one, str) for one in value):
                return tuple(value)
            case "variables" if isinstance(value, dict) and all(isinstance(one, str) for one in value.values()):
                return value
            case "base64" if isinstance(value, str):
                return _decoded(name, value)
            case "files" if isinstance(value, dict) and all(isinstance(one, str) for one in value.values()):
                return {path: _decoded(f"{name}[{path[:80]!r}]", one) for path, one in value.items()}
            case "policy" if isinstance(value, str) and value in ("none", "all"):
                return value
            case "policy" if isinstance(value, list) and all(isinstance(one, str) for one in value):
                return tuple(value)
        raise bad(f"{name} must be {_WORDS[self.kind]}, not {_shown(value)}")

    def read_query(self, name: str, value: str) -> Any:
        """As `read`, of text."""
        try:
            if self.kind == "whole":
                return self.read(name, int(value) if len(value) <= 20 and value.lstrip("-").isdigit() and value.isascii() else value)
            if self.kind == "truth":
                return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        except (ValueError, KeyError):
            raise bad(f"{name} must be {_WORDS[self.kind]}, not {value[:40]!r}") from None
        return self.read(name, value)

    def _check_range(self, name: str, size: float, unit: str = "") -> None:
        if (self.least is not None and size < self.least) or (self.most is not None and size > self.most):
            bounds = f"{'' if self.least is None else f'{self.least:g}'} to {'' if self.most is None else f'{self.most:g}'} {unit}".strip()
            raise bad(f"{name} must be {bounds}, not {size:g}")


_WORDS: dict[Kind, str] = {
    "text": "a text",
    "number": "a number",
    "whole": "a whole number",
    "truth": "true or false",
    "texts": "a list of texts",
    "variables": "an object of texts",
    "base64": "base64",
    "files": "an object of paths with base64",
    "object": "an object",
    "policy": "'none', 'all' or a list of 'host:port' patterns",
}


def read(fields: Mapping[str, Field], given: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Every field with a value: given, or its default. Names that nobody knows are refused."""
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise bad(f"{unknown[0][:40]!r} is not known here; {', '.join(fields) or 'nothing'} is")
    found: dict[str, Any] = {}
    for name, one in fields.items():
        label = f"{within}.{name}" if within else name
        if name in given:
            found[name] = one.read(label, given[name])
        elif one.is_needed:
            raise bad(f"{label} is missing: {one.about}")
        else:
            found[name] = one.default
    return found


def object_schema(fields: Mapping[str, Field]) -> dict[str, Any]:
    needed = [name for name, one in fields.items() if one.is_needed]
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: one.schema() for name, one in fields.items()},
        "additionalProperties": False,
    }
    return found | ({"required": needed} if needed else {})


def bad(why: str) -> Refused:
    return Refused(400, "UsageError", why)


def _decoded(name: str, value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise bad(f"{name} is not base64") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
