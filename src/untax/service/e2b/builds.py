"""Building a template: its steps one after another in a sandbox of their own, each frozen into a layer that later builds begin from.

A layer's key is a hash of its step and of the key below it, as for every stage; a build runs what is not there yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import posixpath
import re
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from untax.channel import actions, tree
from untax.channel.egress import Policy
from untax.core.errors import NotFound, UntaxError, UsageError
from untax.core.spec import freeze_env
from untax.leases import usual_isolation
from untax.service.e2b.models import resolved
from untax.service.e2b.sandbox import DEFAULT_USER
from untax.service.e2b.templates import Build, Template, Templates
from untax.service.errors import Refused
from untax.service.hosting import BUSY_S, TTL_MAX_S, Hosting
from untax.service.tenants import Tenant

if TYPE_CHECKING:
    from untax.box import Box
    from untax.snapshot import Snapshot
    from untax.tenancy import Tenancy

log = logging.getLogger("untax.service.e2b")

STEP_TIMEOUT_S = 3600.0
UPLOAD_S = 3600  # that a link to upload to is good for
_FORGOTTEN_S = 86_400.0  # after which files that no build came for are removed
CONTEXT_MAX = 2 << 30  # bytes of one upload of files for a build
_STEPS_MAX = 1000
_KEPT_MAX = 256  # layers of steps that are kept for later builds
_HASH = re.compile(r"[0-9a-f]{64}")
_HOMES = {"root": "/root"}
# What a COPY does with the files of its context, which lie unpacked in the directory it is run in. Unquoted, $1 is expanded as a pattern and,
# without separators, as nothing else.
_COPY = r"""
set -e
IFS=
chown -R "$3" .
if [ -n "$4" ]; then chmod -R "$4" .; fi
count=0
for one in $1; do
    count=$((count + 1))
    if [ -d "$one" ] && [ ! -L "$one" ]; then
        mkdir -p "$2"
        cp -a "$one/." "$2/"
    else
        case "$2" in
            */) mkdir -p "$2" ;;
            *) mkdir -p "$(dirname "$2")" ;;
        esac
        cp -a "$one" "$2"
    fi
done
"""


class StepFailed(Exception):
    """A step's own doing; `step` is its number, as SDKs look it up."""

    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True)
class Position:
    """Where a build stands: what later steps begin with."""

    key: str
    user: str = DEFAULT_USER
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def home(self) -> str:
        return _HOMES.get(self.user, f"/home/{self.user}")

    @property
    def cwd(self) -> str:
        return self.workdir or self.home

    def after(self, step: Mapping[str, Any]) -> Position:
        """What a step leaves, apart from files."""
        kind, args = step["type"], step["args"]
        key = hashlib.sha256(json.dumps([self.key, kind, args, step.get("filesHash")], sort_keys=True).encode()).hexdigest()
        if kind == "ENV":
            return replace(self, key=key, env={**self.env, **dict(zip(args[::2], args[1::2], strict=False))})
        if kind == "USER":
            return replace(self, key=key, user=args[0])
        if kind == "WORKDIR":
            return replace(self, key=key, workdir=resolved(args[0], self.home, self.cwd))
        return replace(self, key=key)


def checked_steps(steps: object) -> list[dict[str, Any]]:
    """`UsageError` for what no builder would send."""
    if not isinstance(steps, list) or len(steps) > _STEPS_MAX:
        raise UsageError(f"steps are a list of at most {_STEPS_MAX}")
    checked = []
    for number, step in enumerate(steps, 1):
        args = step.get("args") or [] if isinstance(step, dict) else None
        least = {"RUN": 1, "ENV": 2, "WORKDIR": 1, "USER": 1, "COPY": 2}.get(str(step.get("type"))) if isinstance(step, dict) else None
        if (
            least is None
            or not isinstance(args, list)
            or len(args) < least
            or not all(isinstance(one, str) and "\0" not in one for one in args)
        ):
            raise UsageError(f"step {number} is none of RUN, ENV, WORKDIR, USER and COPY with the arguments that they take")
        if step["type"] == "ENV":
            freeze_env(dict(zip(args[::2], args[1::2], strict=False)))
        if step["type"] == "COPY" and not _HASH.fullmatch(str(step.get("filesHash"))):
            raise UsageError(f"step {number} is a COPY without the hash of its files")
        checked.append({"type": step["type"], "args": args, "filesHash": step.get("filesHash"), "force": bool(step.get("force"))})
    return checked


class Contexts:
    """Files that were uploaded for COPY steps, by the hash that their builder gave them and whose they are.

    They go with the last build that they were announced for; those of builders that never came back when their links are void.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._announced: Counter[Path] = Counter()
        self._arriving: Counter[str] = Counter()

    def announce(self, tenant: str, files_hash: str) -> bool:
        """One step of a build to come needs these files. Whether they are there."""
        place = self.path(tenant, files_hash)
        self._announced[place] += 1
        return place.exists()

    def done(self, tenant: str, hashes: Iterable[str]) -> None:
        """A build is over whose steps needed these, one hash for each."""
        for place in (self.path(tenant, one) for one in hashes):
            self._announced[place] -= 1
            if self._announced[place] <= 0:
                del self._announced[place]
                place.unlink(missing_ok=True)

    def path(self, tenant: str, files_hash: str) -> Path:
        if not _HASH.fullmatch(files_hash):
            raise Refused(400, "UsageError", "the hash of files is 64 hexadecimal digits")
        return self._place / hashlib.sha256(tenant.encode()).hexdigest()[:16] / files_hash

    async def store(self, tenant: Tenant, files_hash: str, body: AsyncIterator[bytes]) -> None:
        place = self.path(tenant.name, files_hash)
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(f".{files_hash}.{id(body):x}")
        most, size = self._room(tenant, place), 0
        try:
            with draft.open("wb") as file:
                async for piece in body:
                    size += len(piece)
                    self._arriving[tenant.name] += len(piece)
                    if size > CONTEXT_MAX:
                        raise Refused(413, "TooLarge", f"the files of one step may take {CONTEXT_MAX} bytes")
                    if self._arriving[tenant.name] > most:
                        raise _too_many(tenant)
                    await asyncio.to_thread(file.write, piece)
            if self._arriving[tenant.name] > self._room(tenant, place):  # others came to lie here meanwhile
                raise _too_many(tenant)
            draft.replace(place)
        finally:
            self._arriving[tenant.name] -= size
            draft.unlink(missing_ok=True)

    def _room(self, tenant: Tenant, wanted: Path) -> int:
        """Bytes that may lie at `wanted` and be on their way, once what nobody will ask for any more is gone."""
        room = tenant.allowance.uploads_mib << 20
        for one in wanted.parent.iterdir():
            if one == wanted or one.name.startswith("."):
                continue
            with contextlib.suppress(FileNotFoundError):
                found = one.stat()
                if found.st_mtime < time.time() - _FORGOTTEN_S:
                    del self._announced[one]
                    one.unlink()
                else:
                    room -= found.st_size
        return room


def _too_many(tenant: Tenant) -> Refused:
    most = tenant.allowance.uploads_mib
    return Refused(429, "TooMany", f"files for builds of {tenant.name} may take {most} MiB: wait for some of them", retry_after_s=BUSY_S)


class Builder:
    """Carries builds out, several at once; each step's layer is kept for those that come after."""

    def __init__(self, hosting: Hosting, templates: Templates, contexts: Contexts, hands: Callable[[], str | None]) -> None:
        self._hosting = hosting
        self._engine = hosting.engine
        self._templates = templates
        self._contexts = contexts
        self._hands = hands
        self._kept: OrderedDict[tuple[str, str], Snapshot] = OrderedDict()
        """By tenant and key: what a key stands for is its tenant's word."""
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, tenant: Tenant, template: Template, build: Build, body: Mapping[str, Any]) -> None:
        """Check what is asked for and begin; how it goes is in the build."""
        if build.status != "waiting":
            raise Refused(409, "Conflict", "that build was started already")
        steps = checked_steps(body.get("steps") or [])
        self._hosting.kept.check_room(tenant)
        parent: Build | None = None
        if body.get("fromTemplate"):
            _, parent = self._templates.ready(template.tenant, str(body["fromTemplate"]))
            build.image = parent.image
            position = Position(f"template:{parent.id}", parent.user, parent.workdir, dict(parent.env))
        else:
            if body.get("fromImageRegistry"):
                raise UsageError("credentials of a registry are the operator's to give (docs/images.md), not a build's")
            build.image = self._templates.image_for(str(body.get("fromImage") or "base"))
            position = Position(f"image:{build.image}")
        build.start_cmd, build.ready_cmd = (str(body[name]) if body.get(name) else None for name in ("startCmd", "readyCmd"))
        build.status = "building"
        task = asyncio.ensure_future(self._build(tenant, template, build, parent, position, steps, force=bool(body.get("force"))))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._contexts.done(tenant.name, (one["filesHash"] for one in steps if one["type"] == "COPY")))

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for snapshot in self._kept.values():
            await snapshot.drop()

    async def _build(
        self,
        tenant: Tenant,
        template: Template,
        build: Build,
        parent: Build | None,
        position: Position,
        steps: list[dict[str, Any]],
        *,
        force: bool,
    ) -> None:
        step = "base"
        try:
            build.say(f"Building {template.name} from {parent.id if parent else build.image}")
            begun = parent.snapshot if parent is not None else None
            done = 0
            where = position
            if not force:
                for number, one in enumerate(steps, 1):
                    if one["force"]:
                        break
                    where = where.after(one)
                    if (template.tenant, where.key) in self._kept:
                        done, position = number, where
            found: Snapshot | str | None = self._kept[template.tenant, position.key] if done else begun
            for number in range(1, done + 1):
                build.say(f"CACHED [{number}/{len(steps)}] {_words(steps[number - 1])}", step=str(number))
            held = await self._hosting.hold(
                tenant, lambda: self._box(build, found), dialect="build", ttl_s=self._hosting.settings.ttl_max_s
            )
            box = cast("Tenancy", held.box)
            try:
                for number, one in enumerate(steps[done:], done + 1):
                    step = str(number)
                    build.say(f"[{number}/{len(steps)}] {_words(one)}", step=step)
                    position = await self._step(box, build, template.tenant, position, one, step)
                step = "finalize"
                await self._finish(box, build, position, begun if not steps else None)
            finally:
                await self._hosting.release(held)
            build.status = "ready"
            build.say("Build finished")
            await self._templates.finished(template, build)
        except asyncio.CancelledError:
            _failed(build, step, "the server was stopped")
            raise
        except StepFailed as exc:
            _failed(build, exc.step, str(exc))
        except (UntaxError, OSError) as exc:
            _failed(build, step, str(exc))
        except Exception as exc:  # a bug here, or files that are none: its builder waits for an end, and the log says where
            log.exception("a build broke at its step %s", step)
            _failed(build, step, f"the build broke: {type(exc).__name__}")

    async def _box(self, build: Build, found: Snapshot | str | None) -> Box:
        spec = build.spec(usual_isolation(self._engine.offer), self._hands())
        if found is None:
            box = await self._engine.acquire(spec, ttl_s=TTL_MAX_S)
        else:
            box = await self._engine.restore(found, network="all", limits=spec.limits, ttl_s=TTL_MAX_S)
        if not self._hosting.settings.admission.networks:
            cast("Tenancy", box).police(Policy())
        return box

    async def _step(self, box: Tenancy, build: Build, tenant: str, position: Position, step: Mapping[str, Any], number: str) -> Position:
        kind, args = step["type"], step["args"]
        after = position.after(step)
        if kind == "RUN":
            user = args[1] if len(args) > 1 and args[1] else position.user
            await self._run(box, build, ["/bin/bash", "-l", "-c", args[0]], replace(position, user=user, workdir=position.cwd), number)
        elif kind == "WORKDIR":
            await self._run(box, build, ["/bin/mkdir", "-p", "--", after.cwd], replace(position, user="root", workdir="/"), number)
            await self._run(box, build, ["/bin/chown", after.user, "--", after.cwd], replace(position, user="root", workdir="/"), number)
        elif kind == "USER":
            await self._run(box, build, ["/bin/true"], replace(position, user=after.user, workdir="/"), number)  # there is one of that name
        elif kind == "COPY":
            await self._copy(box, build, tenant, position, step, number)
        if kind in ("ENV", "USER"):
            return after  # nothing was written
        await self._keep((tenant, after.key), await box.snapshot())
        return after

    async def _run(self, box: Tenancy, build: Build, argv: list[str], position: Position, step: str) -> None:
        env = {"HOME": position.home, "USER": position.user, **position.env}
        hands = self._hands() or DEFAULT_USER
        process = await box.start(
            argv, cwd=position.cwd, env=env, user=None if position.user == hands else position.user, stdin=False, timeout_s=STEP_TIMEOUT_S
        )
        rest = {"stdout": b"", "stderr": b""}
        async for output in process:
            *lines, rest[output.stream] = (rest[output.stream] + output.data)[-65536:].split(b"\n")
            for line in lines:
                build.say(line.decode(errors="replace"), "info" if output.stream == "stdout" else "warn", step)
        for stream, line in rest.items():
            if line:
                build.say(line.decode(errors="replace"), "info" if stream == "stdout" else "warn", step)
        result = await process.wait()
        if result.exit_code:
            raise StepFailed(step, f"failed to run command {argv[-1]!r}: exit status {result.exit_code}")

    async def _copy(self, box: Tenancy, build: Build, tenant: str, position: Position, step: Mapping[str, Any], number: str) -> None:
        source, target, owner, mode = (*step["args"], "", "")[:4]
        place = self._contexts.path(tenant, step["filesHash"])
        if not place.exists():
            raise StepFailed(number, f"the files of COPY {source} were not uploaded")
        if not re.fullmatch(r"[0-7]{0,5}", mode):
            raise StepFailed(number, f"{mode!r} is not a mode")
        at = f"/tmp/untax-copy-{number}"
        whole = resolved(target, position.home, position.cwd) + ("/" if target.endswith(("/", "/.")) or target in (".", "") else "")
        await self._upload(box, place, at)
        arguments = [posixpath.normpath(source), whole, owner or position.user, mode]
        await self._run(box, build, ["/bin/sh", "-c", _COPY, "copy", *arguments], replace(position, user="root", workdir=at), number)
        try:
            await box.remove(at, recursive=True)
        except NotFound:
            pass

    async def _upload(self, box: Tenancy, place: Path, at: str) -> None:
        """The tar as it was sent, unpacked by the cell, which refuses what would leave `at`."""
        with place.open("rb") as file:
            call = actions.upload(at, _unpacked(file), max_bytes=tree.MAX_BYTES, max_entries=tree.MAX_ENTRIES, timeout_s=STEP_TIMEOUT_S)
            await box._act(call, "upload")

    async def _keep(self, key: tuple[str, str], snapshot: Snapshot) -> None:
        old = self._kept.pop(key, None)
        self._kept[key] = snapshot
        if old is not None:
            await old.drop()
        while len(self._kept) > _KEPT_MAX:
            await self._kept.popitem(last=False)[1].drop()

    async def _finish(self, box: Tenancy, build: Build, position: Position, unchanged: str | None) -> None:
        build.env, build.user, build.workdir = dict(position.env), position.user, position.workdir
        if position.key.startswith("image:"):
            return  # no step: the image itself, which pools can hold
        if unchanged is not None:
            build.snapshot = unchanged
            return
        snapshot = await box.snapshot()
        build.snapshot = await snapshot.save()


def _failed(build: Build, step: str, message: str) -> None:
    """It stays pending, to be asked about."""
    build.say(message, "error", step)
    build.status, build.reason = "error", {"message": message, "step": step}


def _unpacked(file: Any) -> Iterator[bytes]:
    """The bytes of a tar that may be packed with gzip."""
    first = file.read(2)
    file.seek(0)
    if first != b"\x1f\x8b":
        while data := file.read(1 << 16):
            yield data
        return
    unpacker = zlib.decompressobj(31)
    while data := file.read(1 << 16):
        while data:
            if piece := unpacker.decompress(data, 1 << 16):
                yield piece
            data = unpacker.unconsumed_tail
    if piece := unpacker.flush():
        yield piece


def _words(step: Mapping[str, Any]) -> str:
    return f"{step['type']} {' '.join(step['args'])}"[:300]
