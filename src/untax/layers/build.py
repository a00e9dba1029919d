"""From a spec to the layers it stands on: what is missing is built, once each, however many ask and from however many processes.

A rung is looked for in the store first. One that is missing is built by whoever asks first; others in this process wait for
the same flight, other processes for its lock. A failure is told to all who wait, with the log, and kept nowhere: the next
to ask tries again. A builder that dies leaves a draft that the store sweeps and a lock that the kernel drops.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from untax.core.errors import StageError, StageFailed, StageUnavailable, UsageError
from untax.core.root import ImageConfig, Root
from untax.core.span import Clock, now_ns
from untax.core.spec import EnvSpec, Repo
from untax.core.stage import WORKDIR, Fetched, Identity, Stage, key_of, stages_of
from untax.layers import deps, sources
from untax.layers._flights import Flights
from untax.layers._held import alone, blocking, held
from untax.layers.copy import copy_tree
from untax.layers.marks import Marks
from untax.layers.merged import lookup
from untax.layers.mirrors import Mirrors, check_commit, origin_of, without_password
from untax.layers.repo import check_place, fill
from untax.layers.sources import InPlace, Progress, Source
from untax.layers.spares import using
from untax.layers.store import Draft, LayerStore, Pin, StageRecord

log = logging.getLogger("untax.layers")


@dataclass(frozen=True, slots=True)
class Built:
    """What set-up commands left: the directory that has what they wrote, which nobody changes any more, and the end of what they printed."""

    tree: Path
    log: bytes = b""


class Workshop(Protocol):
    """Where set-up commands run; given by the engine."""

    def build(self, root: Root, spec: EnvSpec, cache: Path) -> AbstractAsyncContextManager[Built]:
        """What the set-up commands of `spec` write over `root`, frozen for as long as the block lasts.

        `cache` is seen, writable, at `deps.CACHE`; commands get `deps.ENV`. `StageFailed` with the log when one of them fails.
        """


class Obtained(NamedTuple):
    """A stage that came from another store."""

    record: StageRecord
    fetch_s: float
    """Without the wait for whoever built it."""


class StageSource(Protocol):
    """Where a stage that is not here may be had without building it; given by whoever knows of other stores."""

    def obtain(self, stage: Stage, progress: Progress) -> AbstractAsyncContextManager[Obtained | None]:
        """A record of this stage, whose layers are in the store by now and held for it; None when it is to be built here.

        While the block lasts nobody else in reach builds it; how the block ends is told to those who wait for it.
        """


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a spec stands on. Its layers stay in the store until `pin` is closed."""

    root: Root
    stages: tuple[Stage, ...]
    built: Mapping[str, float]
    """Stages that were missing and were put in place by this process while the caller waited, with the seconds each took (`Fetched`, if it came)."""
    pin: Pin


@dataclass(frozen=True, slots=True)
class RepoTree:
    """A repository's work tree as a directory in the store, for those who cannot stand on a layer. Nothing may be written to it."""

    path: Path
    pin: Pin


@dataclass(frozen=True, slots=True)
class _Image:
    source: Source | InPlace
    identity: Identity
    mark: object
    """What the file system says about the file it comes from, when it comes from one."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A rung that is in the store, held there."""

    record: StageRecord
    pin: Pin
    seconds: float | None = None
    """What putting it in place took, when that was done here."""


class _Parts(NamedTuple):
    """What a build gives: layer ids, bottom first, what the image says about itself, and what was printed on the way."""

    adds: tuple[str, ...]
    config: ImageConfig
    log: bytes = b""


class Stages:
    """The stages of one store. Without a workshop, a spec with set-up commands is a `UsageError`."""

    def __init__(
        self,
        store: LayerStore,
        workshop: Workshop | None = None,
        *,
        find: Callable[[str], Source | InPlace] | None = None,
        clock: Clock = now_ns,
    ) -> None:
        self._store = store
        self._workshop = workshop
        self._find = find or functools.partial(sources.find, cache=store.root / "host")
        self._clock = clock
        self.source: StageSource | None = None
        """Asked before a stage is built that is the same on every machine."""
        self._mirrors = Mirrors(store.mirrors)
        self._images: dict[str, _Image] = {}
        self._identifying: Flights[_Image] = Flights(drop=lambda _: None)
        self._building: Flights[_Made] = Flights(drop=lambda made: made.pin.close())

    async def root(self, spec: EnvSpec, *, progress: Progress | None = None, ask_again: bool = False) -> Prepared:
        """What `spec` stands on, built where it is missing. `StageError` says why it cannot be; `UsageError`, what is wrong with the spec.

        `progress` is told of a build by whoever began it. What an image's name stands for is asked once, and again when its file has changed
        or the caller wants to know.
        """
        self._check(spec)
        if ask_again:
            self._images.pop(spec.image, None)
        image = await self._identify(spec.image)
        stages = stages_of(_without_secrets(spec), image.identity)
        built: dict[str, float] = {}
        root, ids = Root(layers=()), tuple[str, ...]()
        pins: list[Pin] = []
        try:
            for stage in stages[1:]:  # the base is an empty directory
                if stage.name == "image" and isinstance(image.source, InPlace):
                    root = await image.source.root()
                    continue
                work = _Work(stage, spec, image, root, ids, stages[1].key, progress or _untold)
                async with self._rung(stage, functools.partial(self._parts, work), work.progress) as made:
                    pins.append(await self._pinned(made.record.adds))
                if made.seconds is not None:
                    built[stage.name] = made.seconds
                ids += made.record.adds
                root = self._grown(root, made.record)
            return Prepared(root, stages, built, await self._pinned(ids))
        finally:
            for pin in pins:
                pin.close()

    async def ladder(self, spec: EnvSpec) -> tuple[tuple[Stage, ...], frozenset[str]]:
        """The rungs of `spec`, and the keys of those that are here. Nothing is built."""
        self._check(spec)
        image = await self._identify(spec.image)
        stages = stages_of(_without_secrets(spec), image.identity)

        def look() -> frozenset[str]:
            in_place = stages[: 2 if isinstance(image.source, InPlace) else 1]
            return frozenset(stage.key for stage in stages if stage in in_place or self._store.stage(stage.key) is not None)

        return stages, await asyncio.to_thread(look)

    async def repo_tree(self, repo: Repo, *, progress: Progress | None = None) -> RepoTree:
        """A repository's work tree alone, for a sandbox that it is copied into."""
        check_commit(repo.commit)
        recipe = {"url": without_password(repo).url, "commit": repo.commit, "depth": repo.depth, "at": WORKDIR}
        stage = Stage("repo", key_of({"tree": recipe}), recipe, None, is_portable=True)

        async def parts() -> _Parts:
            return _Parts(await self._checked_out(repo, WORKDIR, Root(layers=()), progress or _untold), ImageConfig())

        async with self._rung(stage, parts, progress or _untold) as made:
            pin = await self._pinned(made.record.adds)
        return RepoTree(self._store.layer(made.record.adds[0]).tree / WORKDIR.strip("/"), pin)

    # ---- what an image is ----

    def _check(self, spec: EnvSpec) -> None:
        """Refuse before anything is fetched what would be refused later."""
        if spec.repo is not None:
            check_commit(spec.repo.commit)
            check_place(spec.workdir or WORKDIR)
            origin_of(spec.repo.url)
        if spec.setup and self._workshop is None:
            raise UsageError("setup: there is nowhere to run set-up commands ahead of a lease here")

    async def _identify(self, image: str) -> _Image:
        # In a thread: a file system that does not answer must hold up nobody but this caller.
        mark = await asyncio.to_thread(_mark_of, image) if image.partition(":")[0] in _OF_A_FILE else None
        known = self._images.get(image)
        if known is not None and known.mark == mark:
            return known

        async def ask() -> _Image:
            source = self._find(image)
            found = self._images[image] = _Image(source, await source.identify(), mark)
            return found

        async with self._identifying.join(image, ask) as found:
            return found

    # ---- one rung ----

    @contextlib.asynccontextmanager
    async def _rung(self, stage: Stage, parts: Callable[[], Awaitable[_Parts]], progress: Progress) -> AsyncIterator[_Made]:
        """The rung, found or built; held in the store for as long as the block lasts."""
        found = await blocking(functools.partial(self._found, stage.key), undo=_close)
        if found is not None:
            try:
                yield found
            finally:
                found.pin.close()
            return
        async with self._building.join(stage.key, functools.partial(self._make, stage, parts, progress)) as made:
            yield made

    def _found(self, key: str) -> _Made | None:
        record = self._store.stage(key)
        if record is None:
            return None
        try:
            pin = self._store.pin(record.adds)
        except StageUnavailable as exc:
            log.warning("stage %s is built again: %s", key[:12], exc.message)  # evicted this moment, or damaged and set aside
            return None
        self._store.used(key)
        return _Made(record, pin)

    async def _make(self, stage: Stage, parts: Callable[[], Awaitable[_Parts]], progress: Progress) -> _Made:
        made: _Made | None = None
        try:
            async with held(self._store.lock_stage(stage.key)):
                made = await blocking(functools.partial(self._found, stage.key), undo=_close)
                if made is None:  # nor has another process built it while we waited for it
                    made = await self._obtained_or_built(stage, parts, progress)
            return made
        except BaseException:
            _close(made)
            raise

    async def _obtained_or_built(self, stage: Stage, parts: Callable[[], Awaitable[_Parts]], progress: Progress) -> _Made:
        if self.source is None or not stage.is_portable:
            return await self._build(stage, parts)
        began_ns = self._clock()
        made: _Made | None = None
        try:
            async with self.source.obtain(stage, progress) as found:
                if found is None:
                    made = await self._build(stage, parts)
                    took: float = (self._clock() - began_ns) / 1e9  # with the question whether anybody has it
                else:
                    # What it is, is for this spec to say, whoever built it.
                    record = replace(
                        found.record, key=stage.key, name=stage.name, parent=stage.parent, recipe=stage.recipe, is_portable=True
                    )
                    took = Fetched((self._clock() - began_ns) / 1e9, found.fetch_s)
                    made = await blocking(functools.partial(self._put, record, took), undo=_close)
            return replace(made, seconds=took)
        except BaseException:
            _close(made)
            raise

    async def _build(self, stage: Stage, parts: Callable[[], Awaitable[_Parts]]) -> _Made:
        began_ns = self._clock()
        try:
            made = await parts()
        except StageError as exc:
            log.info("stage %s (%s) could not be built: %s", stage.name, stage.key[:12], exc.message)
            raise
        except OSError as exc:
            raise StageUnavailable(stage.name, f"the store {self._store.root}: {exc.strerror or exc}") from exc
        seconds = (self._clock() - began_ns) / 1e9
        record = StageRecord(
            stage.key,
            stage.name,
            stage.parent,
            made.adds,
            made.config,
            recipe=stage.recipe,
            cost_s=seconds,
            is_portable=stage.is_portable,
            log_tail=made.log,
        )
        return await blocking(functools.partial(self._put, record, seconds), undo=_close)

    def _put(self, record: StageRecord, seconds: float) -> _Made:
        pin = self._store.pin(record.adds)
        try:
            self._store.put_stage(record)
        except BaseException:
            pin.close()
            raise
        return _Made(record, pin, seconds)

    async def _pinned(self, ids: tuple[str, ...]) -> Pin:
        return await blocking(functools.partial(self._store.pin, ids), undo=Pin.close)

    def _grown(self, root: Root, record: StageRecord) -> Root:
        trees = tuple(str(self._store.layer(one).tree) for one in record.adds)
        if record.name == "image":
            return Root(layers=trees, config=record.config)
        return root.with_layers(*trees)

    # ---- what goes into one ----

    async def _parts(self, work: _Work) -> _Parts:
        # Whoever asked for this may leave while others wait on: the build itself holds what it stands on.
        pin = await self._pinned(work.below)
        try:
            if work.stage.name == "image":
                return await self._fetched(work)
            if work.stage.name == "repo":
                assert work.spec.repo is not None
                place = work.spec.workdir or WORKDIR
                return _Parts(await self._checked_out(work.spec.repo, place, work.root, work.progress), work.root.config)
            return await self._set_up(work)
        finally:
            pin.close()

    async def _fetched(self, work: _Work) -> _Parts:
        assert isinstance(work.image.source, Source)
        try:
            fetched = await work.image.source.fetch(self._store, work.progress)
        except StageError:
            # Perhaps it is no longer what it was: ask the next time.
            if self._images.get(work.spec.image) is work.image:
                del self._images[work.spec.image]
            raise
        for note in fetched.notes:
            log.warning("image %s: %s", work.spec.image, note)
        return _Parts(fetched.adds, fetched.config)

    async def _checked_out(self, repo: Repo, place: str, root: Root, progress: Progress) -> tuple[str, ...]:
        async with self._draft() as draft:
            await fill(
                self._mirrors,
                repo,
                draft.tree,
                at=place,
                marks=self._store.marks,
                standing=_standing(root, self._store.marks),
                progress=progress,
            )
            return ((await alone(draft.publish)).id,)

    async def _set_up(self, work: _Work) -> _Parts:
        assert self._workshop is not None
        cache = self._store.caches / _shared_by(work.image_key, work.spec.repo)
        place = work.spec.workdir or WORKDIR
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(held(using(cache)))
            cache.mkdir(mode=0o700, exist_ok=True)
            built = await stack.enter_async_context(self._workshop.build(work.root, deps.planned(work.spec), cache))
            draft = await stack.enter_async_context(self._draft())
            skip, owner = deps.left_out(), deps.owners(place, self._store.marks)
            try:
                await sources.in_thread(lambda stop: copy_tree(built.tree, draft.tree, skip=skip, owner=owner, check=stop.check))
            except OSError as exc:
                if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise StageFailed("deps", f"what the set-up left cannot be kept: {exc.filename or ''} {exc.strerror}") from exc
            return _Parts(((await alone(draft.publish)).id,), work.root.config, deps.own_log(built.log, place))

    @contextlib.asynccontextmanager
    async def _draft(self) -> AsyncIterator[Draft]:
        draft = await blocking(self._store.draft, undo=Draft.discard)
        try:
            yield draft
        except BaseException as exc:
            # The draft is removed; a disk that is full becomes a `StageUnavailable`, and older stages make room.
            await blocking(functools.partial(draft.__exit__, type(exc), exc, None))
            raise
        await blocking(draft.discard)


@dataclass(frozen=True, slots=True)
class _Work:
    """What building one rung needs to know."""

    stage: Stage
    spec: EnvSpec
    image: _Image
    root: Root
    below: tuple[str, ...]
    image_key: str
    progress: Progress


def _shared_by(image_key: str, repo: Repo | None) -> str:
    """The name of a package cache. Whatever runs in a set-up can write to it, a repository's own build script too: no other repository's build reads it."""
    if repo is None:
        return image_key
    return f"{image_key}-{key_of(without_password(repo).url)[:16]}"


def _untold(_what: str, _done: int, _total: int | None) -> None:
    pass


def _close(made: _Made | None) -> None:
    if made is not None:
        made.pin.close()


_OF_A_FILE = ("dir", "tar", "oci", "docker-archive")


def _mark_of(image: str) -> object:
    """What tells that the file an image comes from is another one now; None when there is none."""
    name = image.partition(":")[2]
    for path in (name, name.rpartition(":")[0]):
        for file in (os.path.join(path, "index.json"), path):
            with contextlib.suppress(OSError, ValueError):
                found = os.stat(file)
                return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return None


def _without_secrets(spec: EnvSpec) -> EnvSpec:
    """As it may be remembered. A password is no part of what a repository is, and another one is no reason to build again."""
    return spec if spec.repo is None else replace(spec, repo=without_password(spec.repo))


def _standing(root: Root, marks: Marks) -> Callable[[str], os.stat_result | None]:
    """What an image has at a path."""

    def look(path: str) -> os.stat_result | None:
        found = lookup(root, path, marks=marks) if root.layers or root.views else None
        return None if found is None else found.stat

    return look
