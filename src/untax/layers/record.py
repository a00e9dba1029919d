"""A rung of the ladder as the store remembers it: versioned JSON, read back strictly."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from untax.core.errors import UsageError
from untax.core.root import ImageConfig
from untax.core.spec import FrozenEnv

_VERSION = 1
_LAYER_ID = re.compile(r"sha256-[0-9a-f]{64}")
# A key names files. Those of stages are hashes; a saved snapshot's may be any word.
_KEY = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")
SNAPSHOT = "snapshot"
"""The name of a rung that no recipe can build again."""


class Unreadable(ValueError):
    """Not a record, or not a whole one."""


class FromLaterRelease(Unreadable):
    """A record of a version that this release does not know; nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a stage adds to the one below it, and what it took to make. `name` is a stage's, or `snapshot` for a saved one."""

    key: str
    name: str
    parent: str | None
    adds: tuple[str, ...]
    """Layer ids, bottom first; none for a rung that changes nothing."""
    config: ImageConfig = field(default_factory=ImageConfig)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    cost_s: float = 0.0
    created: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    is_portable: bool = True
    log_tail: bytes = b""

    def __post_init__(self) -> None:
        require_key(self.key)
        if self.parent is not None:
            require_key(self.parent)
        object.__setattr__(self, "adds", tuple(require_layer_id(one) for one in self.adds))

    def to_json(self) -> str:
        config = self.config
        return json.dumps(
            {
                "version": _VERSION,
                "key": self.key,
                "name": self.name,
                "parent": self.parent,
                "adds": list(self.adds),
                "config": {
                    "env": dict(config.env),
                    "workdir": config.workdir,
                    "user": config.user,
                    "entrypoint": list(config.entrypoint),
                    "command": list(config.command),
                    "labels": dict(config.labels),
                },
                "recipe": dict(self.recipe),
                "cost_s": self.cost_s,
                "created": self.created,
                "is_portable": self.is_portable,
                "log_tail": self.log_tail.decode(errors="surrogateescape"),
            },
            indent=1,
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> StageRecord:
        """`Unreadable` for anything that `to_json` did not write."""
        try:
            value = json.loads(text)
            version = value["version"]
            if isinstance(version, int) and version > _VERSION:
                raise FromLaterRelease(f"version {version}")
            if version != _VERSION:
                raise Unreadable(f"version {version!r}")
            return cls(
                key=_a(str, value["key"]),
                name=_a(str, value["name"]),
                parent=_maybe(value["parent"]),
                adds=_texts(value["adds"]),
                config=_config(value["config"]),
                recipe=_a(dict, value["recipe"]),
                cost_s=_number(value["cost_s"]),
                created=_number(value["created"]),
                is_portable=_a(bool, value["is_portable"]),
                log_tail=str(_a(str, value["log_tail"])).encode(errors="surrogateescape"),
            )
        except Unreadable:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise Unreadable(f"{type(exc).__name__}: {exc}") from exc


def require_layer_id(value: object) -> str:
    if not isinstance(value, str) or not _LAYER_ID.fullmatch(value):
        raise UsageError(f"{value!r} is not the id of a layer, which is 'sha256-' and 64 hexadecimal digits")
    return value


def is_layer_id(value: str) -> bool:
    return _LAYER_ID.fullmatch(value) is not None


def require_key(value: object) -> str:
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise UsageError(f"{value!r} is not the key of a stage: letters, digits, '-' and '_', at most 128 of them")
    return value


def is_key(value: str) -> bool:
    return _KEY.fullmatch(value) is not None


def _config(value: Any) -> ImageConfig:
    return ImageConfig(
        env=_variables(value["env"]),
        workdir=_maybe(value["workdir"]),
        user=_maybe(value["user"]),
        entrypoint=_texts(value["entrypoint"]),
        command=_texts(value["command"]),
        labels=_variables(value["labels"]),
    )


def _a(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise Unreadable(f"{value!r:.80} where a {kind.__name__} belongs")
    return value


def _maybe(value: Any) -> str | None:
    return None if value is None else str(_a(str, value))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        raise Unreadable(f"{value!r:.80} where a number belongs")
    return float(value)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(_a(str, one)) for one in _a(list, value))


def _variables(value: Any) -> FrozenEnv:
    return FrozenEnv({str(name): str(_a(str, one)) for name, one in _a(dict, value).items()})
