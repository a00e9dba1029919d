"""The images that containers are made of: each has the cell in it, put there once.

A chain of layers is taken in as a whole, under its stage's key. An image that the engine has already gets one layer more, with the cell. Either is
found again by its name, across engines and restarts, and the least recently used ones go when there are too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import os
import platform
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from untax.core.errors import BackendError, StageFailed, StageUnavailable
from untax.core.root import ImageConfig, Root
from untax.core.spec import FrozenEnv
from untax.core.substrate import Export
from untax.substrates._container_api import EngineApi, Refused
from untax.substrates._container_body import CELL
from untax.substrates._host import cell_path

log = logging.getLogger("untax.container")

REPOSITORY = "localhost/untax"
LABEL = "untax.image"
_HOST_LABEL = "untax.host"
_KEEP_HOSTS = 2  # images of this machine's own software, which are gigabytes and out of date with the next package
_LOAD_PATIENCE_S = 900.0  # an engine unpacks some 100 MB a second, and says nothing meanwhile
_MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


class EngineImages:
    """`used` is a directory whose entries remember when each image was last asked for."""

    def __init__(self, api: EngineApi, used: Path, keep: int) -> None:
        self._api = api
        self._used = used
        self._keep = keep
        self._cell = hashlib.sha256(Path(cell_path()).read_bytes()).hexdigest()
        self._busy: dict[str, asyncio.Lock] = {}

    # ---- images of the engine's own ----

    async def own(self, name: str) -> Root:
        """What the engine has under `name`, with the cell in it. `StageFailed` when it has no such image, or one for another processor."""
        found = await self._inspect(name)
        if found is None:
            engine = self._api.engine
            raise StageFailed("image", f"{engine} has no image {name}; `{engine} pull` or build it there first, or use registry:")
        self._check_machine(name, found)
        tag = self._tag(str(found["Id"]))
        async with self._alone(tag):
            with_cell = await self._inspect(f"{REPOSITORY}:{tag}")
            if with_cell is None:
                await self._add_cell(str(found["Id"]), tag)
                with_cell = await self._inspect(f"{REPOSITORY}:{tag}")
        return self._root(tag, with_cell, Root((), config=_config(found)))

    async def _add_cell(self, image: str, tag: str) -> None:
        """By a container that never runs: this needs no file of this machine to be visible to the engine."""
        body = {"Image": image, "Entrypoint": [CELL], "Cmd": ["version"], "Labels": {LABEL: tag}, "HostConfig": {"NetworkMode": "none"}}
        made = await self._refusable(f"image {image}", "POST", "/containers/create", body)
        container = made["Id"]
        try:
            data = _cell_tar()
            await self._api.send_tar(
                "PUT", f"/containers/{container}/archive", io.BytesIO(data), len(data), query={"path": "/"}, patience_s=self._api.answer_s
            )
            query = {"container": container, "repo": REPOSITORY, "tag": tag, "pause": "0", "comment": "untax: the cell"}
            await self._api.ask("POST", "/commit", {"Labels": {LABEL: tag}}, query=query)
        except Refused as exc:
            raise StageUnavailable("image", f"the cell could not be put into {image}: {exc}") from exc
        finally:
            with contextlib.suppress(Refused, BackendError):
                await self._api.ask("DELETE", f"/containers/{container}", query={"force": "1", "v": "1"})

    # ---- chains ----

    async def find(self, key: str, root: Root) -> Root | None:
        """The image that the chain `root` was taken in as under `key`, when the engine still has it."""
        tag = self._tag(key)
        found = await self._inspect(f"{REPOSITORY}:{tag}")
        return None if found is None else self._root(tag, found, root)

    async def take_in(self, key: str, root: Root, export: Export, scratch: Path) -> Root:
        """Have `export` write the chain with the cell on top, and the engine load it, once for all who ask. Gives what containers are made of."""
        tag = self._tag(key)
        async with self._alone(tag):
            if (found := await self.find(key, root)) is not None:
                return found
            await asyncio.to_thread(self._require_room, scratch)
            with tempfile.TemporaryDirectory(prefix="export-", dir=scratch) as place:
                layer = await asyncio.to_thread(cell_layer, Path(place))
                whole = root.with_layers(str(layer))
                if root.views:
                    await self._pour(tag, whole, export)
                else:
                    archive = Path(place) / "image.tar"
                    await asyncio.to_thread(export, whole, archive, f"{REPOSITORY}:{tag}", {LABEL: tag})
                    await self._load(archive)
            found = await self.find(key, root)
            if found is None:
                raise StageUnavailable("image", f"{self._api.engine} took the image in and does not have it")
        await self._forget_old()
        return found

    async def _pour(self, tag: str, root: Root, export: Export) -> None:
        """One layer, from the host's files straight into the engine: gigabytes lie nowhere in between, and are read once."""
        log.info("%s takes this machine's own software in, once until it changes", self._api.engine)
        reader = asyncio.StreamReader()
        ours, its = os.pipe()  # and no FIFO: whoever opens that for writing waits for somebody who reads, for ever if need be

        def write() -> None:
            try:
                export(root, Path(f"/proc/self/fd/{its}"), f"{REPOSITORY}:{tag}", {}, to="tar")
            finally:
                os.close(its)

        source, loop = os.fdopen(ours, "rb", buffering=0), asyncio.get_running_loop()
        try:
            transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
        except BaseException:
            os.close(its)
            raise
        exporting = asyncio.ensure_future(asyncio.to_thread(write))
        labels = [("changes", f"LABEL {name}={value}") for name, value in ((LABEL, tag), (_HOST_LABEL, "1"))]
        query = [("fromSrc", "-"), ("repo", f"{REPOSITORY}:{tag}"), *labels]
        try:
            said = await self._api.send_stream("/images/create", reader, exporting, query=query, patience_s=_LOAD_PATIENCE_S)
        except Refused as exc:
            raise StageUnavailable("image", f"{self._api.engine} did not take the image in: {exc}; is its disk full?") from exc
        finally:
            transport.close()  # whoever still writes is told so by the pipe
            await asyncio.wait([exporting])
            if not exporting.cancelled():
                exporting.exception()  # it was raised above, or is of a pipe that nobody reads
        _check_taken(self._api.engine, said)

    async def _load(self, archive: Path) -> None:
        size = archive.stat().st_size
        with archive.open("rb") as file:
            try:
                said = await self._api.send_tar("POST", "/images/load", file, size, query={"quiet": "1"}, patience_s=_LOAD_PATIENCE_S)
            except Refused as exc:
                raise StageUnavailable("image", f"{self._api.engine} did not take the image in: {exc}; is its disk full?") from exc
        _check_taken(self._api.engine, said)

    async def discard(self, image: str) -> None:
        with contextlib.suppress(Refused):  # not there, or in use
            await self._api.ask("DELETE", f"/images/{image}", query={"force": "false"})

    # ---- inside ----

    def _tag(self, key: str) -> str:
        return hashlib.sha256(f"{key} {self._cell}".encode()).hexdigest()[:40]

    def _root(self, tag: str, found: Any, chain: Root) -> Root:
        """As the chain says of itself, with the engine's image for its layers."""
        self._note_use(tag)
        image = found["Id"] if found is not None else f"{REPOSITORY}:{tag}"
        return replace(chain, layers=(str(image),), views=())

    async def _inspect(self, name: str) -> Any:
        try:
            return await self._api.ask("GET", f"/images/{name}/json")
        except Refused as exc:
            if exc.status == 404:
                return None
            raise StageUnavailable("image", f"{self._api.engine} image {name}: {exc}") from exc

    async def _refusable(self, what: str, method: str, target: str, body: object) -> Any:
        try:
            return await self._api.ask(method, target, body)
        except Refused as exc:
            raise StageUnavailable("image", f"{what}: {exc}") from exc

    def _check_machine(self, name: str, found: Any) -> None:
        needed, has = _MACHINES.get(platform.machine(), platform.machine()), found.get("Architecture") or ""
        if found.get("Os", "linux") not in ("", "linux") or (has and has != needed):
            raise StageFailed(
                "image",
                f"image {name} is for {found.get('Os', 'linux')}/{has}, and this engine runs linux/{needed}; pull or build it for that",
            )

    @contextlib.asynccontextmanager
    async def _alone(self, tag: str) -> AsyncIterator[None]:
        async with self._busy.setdefault(tag, asyncio.Lock()):
            yield

    def _require_room(self, scratch: Path) -> None:
        try:
            scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise StageUnavailable("image", f"{scratch}: {exc.strerror}; name another state_dir") from exc

    # ---- which are kept ----

    def _note_use(self, tag: str) -> None:
        with contextlib.suppress(OSError):
            self._used.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._used / tag).touch()

    async def _forget_old(self) -> None:
        """Beyond those that are to be kept, the least recently used; one that a container stands on stays."""
        try:
            listed = {
                tag.rpartition(":")[2]: _HOST_LABEL in (one.get("Labels") or {})
                for one in await self._listed()
                for tag in one.get("RepoTags") or ()
                if tag.startswith(f"{REPOSITORY}:")
            }
            names, hosts = list(listed), [tag for tag, is_host in listed.items() if is_host]
            when = {tag: self._last_use(tag) for tag in names}
            for tag in {*_oldest(names, when, self._keep), *_oldest(hosts, when, _KEEP_HOSTS)}:
                with contextlib.suppress(Refused):
                    await self._api.ask("DELETE", f"/images/{REPOSITORY}:{tag}")
                    (self._used / tag).unlink(missing_ok=True)
        except (BackendError, Refused, OSError) as exc:
            log.info("old images were not looked for: %s", exc)

    async def _listed(self) -> list[Any]:
        found = await self._api.ask("GET", "/images/json", query={"filters": f'{{"label":["{LABEL}"]}}'})
        return found or []

    def _last_use(self, tag: str) -> float:
        try:
            return (self._used / tag).stat().st_mtime
        except OSError:
            return 0.0


def _oldest(tags: Sequence[str], when: Mapping[str, float], keep: int) -> list[str]:
    return sorted(tags, key=when.__getitem__)[: max(0, len(tags) - keep)]


def _check_taken(engine: str, said: Any) -> None:
    """An engine that has begun to answer tells of its failures in what it says."""
    for line in said if isinstance(said, list) else [said]:
        if isinstance(line, dict) and line.get("error"):
            raise StageUnavailable("image", f"{engine} did not take the image in: {line['error']}")


def cell_layer(place: Path) -> Path:
    """A layer with nothing in it but the cell."""
    layer = place / "layer"
    target = layer / CELL.lstrip("/")
    target.parent.mkdir(parents=True)
    target.write_bytes(Path(cell_path()).read_bytes())
    for path, mode in ((layer, 0o755), (target.parent, 0o755), (target, 0o555)):
        path.chmod(mode)
    os.utime(target, (0, 0))  # equal cells, equal layers: engines share them
    return layer


def _cell_tar() -> bytes:
    data = Path(cell_path()).read_bytes()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        parent = tarfile.TarInfo(CELL.rpartition("/")[0].lstrip("/"))
        parent.type, parent.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(parent)
        cell = tarfile.TarInfo(CELL.lstrip("/"))
        cell.size, cell.mode = len(data), 0o555
        tar.addfile(cell, io.BytesIO(data))
    return out.getvalue()


def _config(found: Any) -> ImageConfig:
    said = found.get("Config") or {}
    pairs = (text.partition("=") for text in said.get("Env") or () if isinstance(text, str))
    env = {name: value for name, equals, value in pairs if name and equals and "\0" not in value}
    return ImageConfig(
        env=FrozenEnv(env),
        workdir=said.get("WorkingDir") or None,
        user=said.get("User") or None,
        entrypoint=tuple(said.get("Entrypoint") or ()),
        command=tuple(said.get("Cmd") or ()),
        labels=FrozenEnv({str(k): str(v) for k, v in (said.get("Labels") or {}).items()}),
    )
