"""The warmth ladder: `base → image → repo → deps`, and the keys by which a rung is known everywhere.

A key is a hash of the rung's recipe and of the key below it, so equal recipes over equal ground have equal keys on every
machine. What binds late (variables, user, files, limits, network) is in no recipe. The image enters by its *identity*,
which its source has found out before: a digest where there is one, the machine's own mark for what exists only there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from untax.core.spec import EnvSpec

StageName = Literal["base", "image", "repo", "deps", "snapshot"]
LADDER: tuple[StageName, ...] = ("base", "image", "repo", "deps")
"""The rungs that a spec may have. A snapshot is a ladder of its own, with one rung: nothing below it is a part of the way there."""

# Raised when what a recipe stands for changes: layers that an older release built are then built anew.
_RECIPE_VERSION = 1
WORKDIR = "/workspace"
"""Where a sandbox's commands start, and where its repository lies, unless the spec says otherwise."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What an image is, apart from how it was named. `is_portable` is false for what exists on one machine only."""

    text: str
    is_portable: bool = True


@dataclass(frozen=True, slots=True)
class Stage:
    name: StageName
    key: str
    recipe: Mapping[str, object]
    parent: str | None
    is_portable: bool
    """Whether another machine's layer of the same key would be the same; false for everything over `host` or `dir:`."""


class Fetched(float):
    """The seconds that a caller waited for a stage that came from another node, where any other number is of one that was built."""

    fetch_s: float
    """Of them, those of the fetch itself: the rest was spent waiting for the node that built it."""

    def __new__(cls, seconds: float, fetch_s: float) -> Fetched:
        made = super().__new__(cls, seconds)
        made.fetch_s = fetch_s
        return made

    def __reduce__(self) -> tuple[type[Fetched], tuple[float, float]]:
        return Fetched, (float(self), self.fetch_s)


def stages_of(spec: EnvSpec, image: Identity) -> tuple[Stage, ...]:
    """The rungs that this spec needs, lowest first. One without a repository or set-up has no such rung."""
    rungs = [_stage("base", {}, None, is_portable=True)]

    def add(name: StageName, recipe: Mapping[str, object]) -> None:
        rungs.append(_stage(name, recipe, rungs[-1].key, is_portable=image.is_portable))

    add("image", {"image": image.text})
    place = spec.workdir or WORKDIR
    if spec.repo is not None:
        add("repo", {"url": spec.repo.url, "commit": spec.repo.commit, "depth": spec.repo.depth, "at": place})
    if spec.setup:
        add("deps", {"steps": list(spec.setup), "at": place})
    return tuple(rungs)


def snapshot_rung(snapshot_id: str) -> Stage:
    """What a sandbox that begins from a snapshot has in place."""
    return Stage("snapshot", snapshot_id, {"snapshot": snapshot_id}, None, is_portable=False)


def _stage(name: StageName, recipe: Mapping[str, object], parent: str | None, *, is_portable: bool) -> Stage:
    return Stage(name, key_of({"v": _RECIPE_VERSION, "stage": name, "recipe": recipe, "parent": parent}), recipe, parent, is_portable)


def key_of(value: object) -> str:
    """The hash of plain data, the same on every machine."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()


def nearest(wanted: Sequence[Stage], present: frozenset[str]) -> Stage | None:
    """The warmest of the wanted rungs that is there."""
    return next((stage for stage in reversed(wanted) if stage.key in present), None)
