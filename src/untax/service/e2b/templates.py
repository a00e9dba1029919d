"""Templates: what sandboxes are made from, by name. Snapshots of sandboxes are templates too, as E2B has it.

A template is a build: an image and layers of ours over it, frozen into a saved snapshot, and how commands begin in it. The register is one
file in the state directory; the layers are the store's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from untax.core.errors import BackendError, UsageError
from untax.core.spec import EnvSpec, Limits
from untax.layers._durable import replace_whole
from untax.service.e2b.models import ENVD_VERSION, moment
from untax.service.e2b.sandbox import DEFAULT_USER, Manner
from untax.service.errors import Refused
from untax.service.hosting import BUSY_S
from untax.service.tenants import Tenant

log = logging.getLogger("untax.service.e2b")

DEFAULT_TAG = "default"
BASE = "base"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_LOGS_MAX = 20_000
_LOGS_PAGE = 100
_FORGOTTEN_S = 3600.0  # a build that was asked for so long ago and never begun has been given up
_FORMAT = 1
# The words before the colon of an image of ours; whatever else is a name in a registry.
_FORMS = ("host", "debian", "registry", "dir", "tar", "oci", "docker-archive", "docker", "podman")


@dataclass(slots=True)
class Build:
    """One making of a template; what sandboxes begin with, once it is ready."""

    id: str = field(default_factory=lambda: secrets.token_hex(16))
    status: str = "waiting"
    image: str = "host"
    snapshot: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str = DEFAULT_USER
    workdir: str | None = None
    start_cmd: str | None = None
    ready_cmd: str | None = None
    cpus: float | None = None
    memory_mib: int | None = None
    created: float = field(default_factory=time.time)
    reason: dict[str, Any] | None = None
    logs: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_LOGS_MAX))

    def say(self, message: str, level: str = "info", step: str | None = None) -> None:
        entry = {"timestamp": moment(time.time()), "level": level, "message": message}
        self.logs.append(entry if step is None else {**entry, "step": step})

    def spec(self, isolation: str, hands: str | None) -> EnvSpec:
        """As an engine wants it; the policy is the sandbox's own, and stands above this."""
        limits = Limits()
        if self.cpus is not None:
            limits = replace(limits, cpus=float(self.cpus))
        if self.memory_mib is not None:
            limits = replace(limits, memory_mib=self.memory_mib)
        return EnvSpec(image=self.image, user=hands, workdir="/home/user", limits=limits, network="all", isolation=isolation)

    def shown(self, template_id: str, offset: int) -> dict[str, Any]:
        entries = list(self.logs)[offset : offset + _LOGS_PAGE]
        shown: dict[str, Any] = {
            "templateID": template_id,
            "buildID": self.id,
            "status": self.status,
            "logs": [entry["message"] for entry in entries],
            "logEntries": entries,
        }
        if self.reason is not None:
            shown["reason"] = self.reason
        return shown


@dataclass(slots=True)
class Template:
    id: str
    tenant: str
    name: str | None = None
    tags: dict[str, Build] = field(default_factory=dict)
    pending: dict[str, tuple[Build, tuple[str, ...]]] = field(default_factory=dict)
    """Builds that are not ready, by id, and the tags that they will have."""
    origin: str | None = None
    """The sandbox that it is a snapshot of."""
    created: float = field(default_factory=time.time)
    spawned: int = 0

    @property
    def names(self) -> list[str]:
        return [self.name] if self.name else []

    @property
    def latest(self) -> Build | None:
        return self.tags.get(DEFAULT_TAG) or next(iter(self.tags.values()), None)

    def manner(self, build: Build) -> Manner:
        return Manner(self.id, self.name, dict(build.env), build.user, build.workdir)

    def shown(self) -> dict[str, Any]:
        build = self.latest or next((pending[0] for pending in self.pending.values()), Build())
        return {
            "templateID": self.id,
            "buildID": build.id,
            "cpuCount": max(1, round(build.cpus or Limits().cpus)),
            "memoryMB": build.memory_mib or Limits().memory_mib,
            "diskSizeMB": Limits().disk_mib,
            "public": False,
            "aliases": self.names,
            "names": self.names,
            "createdAt": moment(self.created),
            "updatedAt": moment(build.created),
            "createdBy": None,
            "lastSpawnedAt": None,
            "spawnCount": self.spawned,
            "buildCount": len(self.tags) + len(self.pending),
            "envdVersion": ENVD_VERSION,
            "buildStatus": build.status,
        }


class Templates:
    """The register. `image` is what the template `base` stands for, and what names in `images` stand for is the operator's word."""

    def __init__(
        self, place: Path, image: str, images: Mapping[str, str] | None = None, admit: Callable[[EnvSpec], None] | None = None
    ) -> None:
        self._place = place
        self._admit = admit
        self._image = image
        self._images = dict(images or {})
        self._all: dict[str, Template] = {}
        self._writing = asyncio.Lock()
        self._base = Template(BASE, "", BASE, {DEFAULT_TAG: Build(BASE, "ready", image)})

    # ---- finding ----

    def __iter__(self) -> Iterator[Template]:
        return iter(list(self._all.values()))

    def find(self, tenant: str, name: str) -> Template:
        """By its id or name, with or without a tag; 404 for somebody else's as for none."""
        bare = name.partition(":")[0]
        if bare == BASE:
            return self._base
        found = self._all.get(bare)
        if found is None or found.tenant != tenant:
            found = next((one for one in self._all.values() if one.name == bare and one.tenant == tenant), None)
        if found is None:
            raise Refused(404, "NotFound", f"template '{name[:200]}' not found")
        return found

    def ready(self, tenant: str, name: str) -> tuple[Template, Build]:
        """What a sandbox of that name begins with."""
        template = self.find(tenant, name)
        _, colon, tag = name.partition(":")
        build = template.tags.get(tag) if colon else template.latest
        if build is None:
            raise Refused(404, "NotFound", f"template '{name[:200]}' not found, or not built yet")
        return template, build

    def image_for(self, name: str) -> str:
        """An image as builders name it, as one of ours. `Refused` with 403 for one that the operator did not allow."""
        if not isinstance(name, str) or not name or len(name) > 512 or not name.isprintable() or name.startswith("-") or " " in name:
            raise UsageError("the image's name is none")
        if name in self._images:
            return self._images[name]
        if name == BASE or name.startswith("e2bdev/base"):
            return self._image
        image = name if name.partition(":")[0] in _FORMS else f"registry:{name}"
        if self._admit is not None:
            self._admit(EnvSpec(image=image))
        return image

    def has_snapshot(self, snapshot_id: str) -> bool:
        """Whether a template begins with it."""
        return any(build.snapshot == snapshot_id for one in self._all.values() for build in one.tags.values())

    def snapshots(self, tenant: str) -> int:
        """How many the templates of `tenant` begin with."""
        return len({build.snapshot for one in self._all.values() if one.tenant == tenant for build in one.tags.values()} - {None})

    # ---- making ----

    def request(self, tenant: Tenant, body: Mapping[str, Any]) -> tuple[Template, Build]:
        """A template of that name, new or another build of it. `Refused` with 429 above what the tenant may have."""
        name, _, tag = str(body.get("name") or body.get("alias") or "").partition(":")
        tags = body.get("tags") or []
        if not _NAME.fullmatch(name) or name == BASE:
            raise UsageError("the template's name must begin with a letter or digit, and have only letters, digits and '._/-'")
        if (
            not isinstance(tags, list)
            or not all(isinstance(one, str) and _TAG.fullmatch(one) for one in tags)
            or (tag and not _TAG.fullmatch(tag))
        ):
            raise UsageError("tags are names of letters, digits and '._-'")
        template = next((one for one in self._all.values() if one.name == name and one.tenant == tenant.name), None)
        build = Build(cpus=_number(body, "cpuCount", 64), memory_mib=_number(body, "memoryMB", 1 << 20))
        self._make_room(tenant)
        if template is None:
            self.check_room(tenant)
            template = self.add(Template("t" + secrets.token_hex(9), tenant.name, name))
        template.pending[build.id] = build, tuple(dict.fromkeys([*([tag] if tag else []), *tags])) or (DEFAULT_TAG,)
        return template, build

    def check_room(self, tenant: Tenant) -> None:
        """`Refused` with 429 when a further template would be one too many."""
        most = tenant.allowance.templates
        if sum(one.tenant == tenant.name for one in self._all.values()) >= most:
            raise Refused(429, "TooMany", f"{tenant.name} has {most} templates already: delete some of them", retry_after_s=BUSY_S)

    def _make_room(self, tenant: Tenant) -> None:
        """For one more build: those that failed, or were never begun, are forgotten before another is refused; one under way is not."""
        pending = [(one, build) for one in self._all.values() if one.tenant == tenant.name for build, _ in one.pending.values()]
        most = tenant.allowance.builds
        if len(pending) < most:
            return
        since = time.time() - _FORGOTTEN_S
        over = [pair for pair in pending if pair[1].status == "error" or (pair[1].status == "waiting" and pair[1].created < since)]
        if not over:
            raise Refused(
                429, "TooMany", f"{most} builds of {tenant.name} are under way already: wait for some of them", retry_after_s=BUSY_S
            )
        template, build = min(over, key=lambda pair: pair[1].created)
        del template.pending[build.id]

    def add(self, template: Template) -> Template:
        self._all[template.id] = template
        return template

    async def finished(self, template: Template, build: Build) -> None:
        """It is what its tags stand for from now on."""
        _, tags = template.pending.pop(build.id)
        for tag in tags:
            template.tags[tag] = build
        if DEFAULT_TAG not in template.tags:
            template.tags[DEFAULT_TAG] = build
        await self.save()

    def build_of(self, tenant: str, template_id: str, build_id: str) -> tuple[Template, Build]:
        template = self.find(tenant, template_id)
        pending = template.pending.get(build_id)
        if pending is not None:
            return template, pending[0]
        for build in template.tags.values():
            if build.id == build_id:
                return template, build
        raise Refused(404, "NotFound", "there is no such build")

    async def remove(self, template: Template) -> list[str]:
        """Gives the snapshots that nobody needs any more."""
        if template is self._base:
            raise Refused(403, "Refused", "the template 'base' is the server's own")
        self._all.pop(template.id, None)
        await self.save()
        kept = {build.snapshot for one in self._all.values() for build in one.tags.values()}
        return sorted({build.snapshot for build in template.tags.values() if build.snapshot and build.snapshot not in kept})

    # ---- tags ----

    async def assign(self, tenant: str, target: str, tags: object) -> Build:
        template, build = self.ready(tenant, target)
        if template is self._base or not isinstance(tags, list) or not all(isinstance(t, str) for t in tags):
            raise UsageError("tags are a list of names, for a template of one's own")
        for tag in tags:
            tag = tag.rpartition(":")[2]
            if not _TAG.fullmatch(tag):
                raise UsageError(f"{tag!r} is not a tag")
            template.tags[tag] = build
        await self.save()
        return build

    async def unassign(self, tenant: str, name: str, tags: object) -> None:
        template = self.find(tenant, name)
        if template is self._base or not isinstance(tags, list):
            raise UsageError("tags are a list of names, for a template of one's own")
        for tag in tags:
            template.tags.pop(str(tag), None)
        await self.save()

    # ---- the file ----

    def load(self) -> None:
        try:
            found = _read(self._place)
        except FileNotFoundError:
            return
        except UsageError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            aside = self._place.with_suffix(".damaged")
            self._place.rename(aside)
            log.warning("%s is damaged (%s) and was moved to %s: its templates have to be built again", self._place, exc, aside.name)
            return
        for template in found:
            self.add(template)

    async def save(self) -> None:
        """Whole or not at all, also when the machine dies."""
        async with self._writing:
            try:
                await asyncio.to_thread(_write, self._place, self._document())
            except OSError as exc:
                raise BackendError("", f"{self._place}: {exc.strerror}") from exc

    def _document(self) -> bytes:
        """What is being built is not in it."""
        templates = []
        for one in self._all.values():
            builds = {build.id: {**asdict(replace(build, logs=deque())), "logs": []} for build in one.tags.values()}
            tags = {tag: build.id for tag, build in one.tags.items()}
            if builds:
                templates.append(
                    {
                        "id": one.id,
                        "tenant": one.tenant,
                        "name": one.name,
                        "origin": one.origin,
                        "created": one.created,
                        "builds": list(builds.values()),
                        "tags": tags,
                    }
                )
        return json.dumps({"format": _FORMAT, "templates": templates}).encode()


def _write(place: Path, document: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    replace_whole(place, document)


def _read(place: Path) -> list[Template]:
    document = json.loads(place.read_bytes())
    if document["format"] != _FORMAT:
        raise UsageError(f"{place} is of another release; move it away, and build the templates again")
    found = []
    for data in document["templates"]:
        builds = {one["id"]: Build(**{**one, "logs": deque(maxlen=_LOGS_MAX)}) for one in data["builds"]}
        tags = {tag: builds[build] for tag, build in data["tags"].items()}
        found.append(Template(data["id"], data["tenant"], data["name"], tags, origin=data["origin"], created=data["created"]))
    return found


def _number(body: Mapping[str, Any], name: str, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise UsageError(f"{name} must be a whole number between 1 and {most}")
    return value
