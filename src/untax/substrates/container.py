"""Containers of a Docker or Podman engine, over its socket: the boundary that most rollouts have today.

The cell is the first process of each container and is spoken to over one held attach; the engine is asked when a container begins and
when it ends, and never for an action. `run_incumbent` is the other way, one exec of the engine each, for comparison. docs/containers.md
says what a container is made with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from untax._remove import remove_tree
from untax.core.errors import BackendError, CreateError, SubstrateUnavailable, UsageError
from untax.core.root import Root
from untax.core.spec import EnvSpec, require_duration
from untax.core.substrate import Export, Typical, Unenforced
from untax.substrates._container_api import EngineApi, EngineKind, Refused, find_socket, socket_trouble
from untax.substrates._container_body import Wanted, docker_body, podman_body
from untax.substrates._container_evidence import lines_about
from untax.substrates._container_images import EngineImages
from untax.substrates._container_sandbox import ContainerSandbox, remove_container
from untax.substrates._host import Holding, cell_missing_reason, chosen_state_dir, ensure_private_dir, sweep
from untax.substrates._seccomp import profile
from untax.substrates._tenant import Tenant

log = logging.getLogger("untax.container")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*")

STATE_LABEL, OWNER_LABEL, SANDBOX_LABEL = "untax.state", "untax.owner", "untax.sandbox"
# On two processors 1, 2, 4, 8 and 16 starts at once gave 3.9, 4.4, 4.8, 5.1 and 4.7 containers a second with Docker (benchmarks/container.py):
# more than this only makes each of them wait longer.
_STARTS_PER_CPU = 2
_ANSWER_S = 20.0  # less than a destroy is waited for
_READY_S = 30.0
_KEEP_IMAGES = 32
_SETTLE_S = 2.0  # a thawed engine first works off what it was asked while it stood
_DISK = Unenforced(
    "disk_mib",
    "the engine's storage cannot limit one container",
    "keep the engine's data on XFS mounted with pquota (overlay), or on btrfs or ZFS; a single file is limited all the same",
)

_NO_GROUPS = tuple(
    Unenforced(name, "the engine's runtime is told to ignore control groups", "take --ignore-cgroups out of its runtimeArgs")
    for name in ("memory_mib", "cpus")
)


def make(
    state_dir: str | None = None,
    engine: Literal["auto", "docker", "podman"] = "auto",
    socket: str | None = None,
    runtime: str | None = None,
    starts: int | None = None,
    answer_s: float = _ANSWER_S,
    keep_images: int = _KEEP_IMAGES,
) -> ContainerSubstrate:
    """`engine` and `socket` say whom to ask, by default the first that is found; `runtime` is one that the engine knows by that name.

    At most `starts` containers are started at once; the engine has `answer_s` for each answer; `keep_images` is how many of
    the images that were made for containers are kept in it.
    """
    if engine not in ("auto", "docker", "podman"):
        raise UsageError(f"engine must be 'auto', 'docker' or 'podman', not {engine!r}")
    if socket is not None and not os.path.isabs(socket):
        raise UsageError(f"socket must be the absolute path of a Unix socket, not {socket!r}")
    for name, count in (("starts", starts), ("keep_images", keep_images)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise UsageError(f"{name} must be a whole number from 1, not {count!r}")
    return ContainerSubstrate(
        chosen_state_dir(state_dir), engine, socket, runtime, starts, require_duration("answer_s", answer_s), keep_images
    )


class ContainerSubstrate:
    name = "container"
    isolation = "container"
    typical = Typical(start_s=0.35, action_s=0.0004)
    builder = "namespace"
    takes: Literal["oci", "squashfs", "erofs"] = "oci"
    binds_late: frozenset[Literal["limits", "disk", "user"]] = frozenset({"limits"})

    def __init__(
        self,
        state_dir: Path,
        engine: Literal["auto", "docker", "podman"],
        socket_path: str | None,
        runtime: str | None,
        starts: int | None,
        answer_s: float,
        keep_images: int,
    ) -> None:
        self._state_dir = state_dir
        self._root = state_dir / self.name
        self._asked: tuple[EngineKind, ...] = ("docker", "podman") if engine == "auto" else (engine,)
        self._socket = socket_path
        self._runtime = runtime
        self._starts = starts or _STARTS_PER_CPU * (os.cpu_count() or 1)
        self._answer_s = answer_s
        self._keep_images = keep_images
        self._holding: Holding | None = None
        self._live: dict[str, ContainerSandbox | None] = {}  # by sandbox id; None while the engine is being asked
        self._tidying: set[asyncio.Task[None]] = set()
        self._has_disk_limit = True  # until the engine says no
        self._lacking: tuple[Unenforced, ...] = ()
        self._labels: dict[str, str] = {}

    # ---- what this machine offers ----

    def unavailable_reason(self) -> str | None:
        if not sys.platform.startswith("linux"):
            return "needs Linux; connect to a server that runs on it"
        if reason := cell_missing_reason():
            return reason
        found = self._find()
        return found if isinstance(found, str) else None

    def _find(self) -> tuple[EngineKind, str] | str:
        """The engine and its socket, or why there is none."""
        if self._socket is not None:
            engine = self._asked[0] if len(self._asked) == 1 else "podman" if "podman" in self._socket else "docker"
            return socket_trouble(engine, self._socket) or (engine, self._socket)
        troubles = []
        for engine in self._asked:
            place = find_socket(engine, os.environ)
            trouble = f"no socket of {engine} found" if place is None else socket_trouble(engine, place)
            if place is not None and trouble is None:
                return engine, place
            troubles.append(trouble)
        return (
            f"{'; '.join(str(one) for one in troubles)}; install and start docker.io or podman "
            "(systemctl enable --now docker.socket, or podman.socket), or name the socket with socket=…"
        )

    @property
    def unenforced(self) -> tuple[Unenforced, ...]:
        """As far as the container engine has said by now; whether it limits disks is known with the first container."""
        return self._lacking if self._has_disk_limit else (*self._lacking, _DISK)

    def evidence(self) -> Sequence[str]:
        found = self._find()
        if isinstance(found, str):
            return []
        return lines_about(*found)

    # ---- its life ----

    async def start(self) -> None:
        if self._holding is not None:
            return
        found = self._find()
        if isinstance(found, str):
            raise SubstrateUnavailable("", f"{self.name}: {found}")
        self.api = EngineApi(*found, self._answer_s, self._on_recovery)
        ensure_private_dir(self._state_dir)
        self._holding = Holding.take(self._root)
        try:
            await self._set_up()
        except BaseException:
            await self.aclose()
            raise

    async def _set_up(self) -> None:
        assert self._holding is not None
        self._starting = asyncio.Semaphore(self._starts)
        self._profile = profile()
        self._profile_path = self._holding.path / "seccomp.json"
        await asyncio.to_thread(self._profile_path.write_text, json.dumps(self._profile))
        self.images = EngineImages(self.api, self._root / "used", self._keep_images)
        self._labels = {STATE_LABEL: str(self._state_dir), OWNER_LABEL: self._holding.path.name}
        try:
            version = await self.api.ask("GET", "/version")
            if self.api.engine == "docker" and any("podman" in str(one.get("Name")).lower() for one in version.get("Components") or ()):
                self.api.engine = "podman"  # which also listens where Docker would
            if self._runtime is not None and self.api.engine == "docker":
                await self._look_at_runtime()
            await self._sweep()
        except (Refused, AttributeError) as exc:
            raise SubstrateUnavailable(
                "", f"{self.api.engine} at {self.api.path}: {exc}; is this the socket of a container engine?"
            ) from exc

    async def _look_at_runtime(self) -> None:
        """What the engine says its runtime is decides what boundary may be claimed, and which limits."""
        known = (await self.api.ask("GET", "/info")).get("Runtimes") or {}
        about = known.get(self._runtime) or {}
        if os.path.basename(about.get("path") or "") == "runsc":
            self.isolation = "gvisor"
            if "--ignore-cgroups" in (about.get("runtimeArgs") or ()):
                self._lacking = _NO_GROUPS

    async def _sweep(self) -> None:
        """Remove what dead engines with this state directory left in the container engine."""
        left: dict[str, list[str]] = {}
        for one in await self._list({STATE_LABEL: str(self._state_dir)}):
            left.setdefault((one.get("Labels") or {}).get(OWNER_LABEL, ""), []).append(one["Id"])
        await asyncio.to_thread(sweep, self._root, remove_tree)  # the directories of the dead; ours and other living ones' stay
        for owner in [owner for owner in left if not owner or not (self._root / owner).is_dir()]:
            log.info("removing %d containers of the engine %s, which is no more", len(left[owner]), owner)
            await self._remove_all(left[owner])

    async def _list(self, labels: dict[str, str]) -> list[Any]:
        filters = json.dumps({"label": [f"{name}={value}" for name, value in labels.items()]})
        found = await self.api.ask("GET", "/containers/json", query={"all": "true", "filters": filters}) or []
        if not isinstance(found, list) or not all(isinstance(one, dict) and "Id" in one for one in found):
            raise Refused(200, "what it answers is no list of containers")
        return found

    async def _remove_all(self, containers: Sequence[str]) -> None:
        for outcome in await asyncio.gather(*(remove_container(self.api, one) for one in containers), return_exceptions=True):
            if isinstance(outcome, (Refused, BackendError)):
                log.warning("a container was left behind: %s; the next start tries again", outcome)
            elif outcome is not None:
                raise outcome

    async def aclose(self) -> None:
        holding, self._holding = self._holding, None
        if holding is None:
            return
        for task in self._tidying:
            task.cancel()
        if self._tidying:
            await asyncio.wait(self._tidying)
        with contextlib.suppress(BackendError, Refused):
            if self._labels:
                await self._remove_all([one["Id"] for one in await self._list(self._labels)])
        await self.api.aclose()
        await asyncio.to_thread(holding.close)

    def _on_recovery(self) -> None:
        """The engine answers again. What it was asked for in vain meanwhile it may have made all the same."""
        task = asyncio.ensure_future(self._tidy())
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    async def _tidy(self) -> None:
        for pause_s in (0.0, _SETTLE_S):
            await asyncio.sleep(pause_s)
            with contextlib.suppress(BackendError, Refused):
                unknown = [
                    one["Id"] for one in await self._list(self._labels) if (one.get("Labels") or {}).get(SANDBOX_LABEL) not in self._live
                ]
                await self._remove_all(unknown)

    # ---- images ----

    @property
    def image_sockets(self) -> Mapping[str, str]:
        return {self.api.engine: self.api.path} if self._holding is not None else {}

    async def own_root(self, image: str) -> Root | None:
        """What to stand on for an image that the engine has itself; None for any other."""
        scheme, _, name = image.partition(":")
        if scheme != self.api.engine:
            return None
        if not _NAME.fullmatch(name) or ".." in name:
            raise UsageError(f"image {image!r}: {name!r} is not a name that an engine could have for an image")
        return await self.images.own(name)

    async def take_in(self, key: str, root: Root, export: Export) -> Root:
        assert self._holding is not None
        return await self.images.take_in(key, root, export, self._holding.path)

    async def discard(self, root: Root) -> None:
        await self.images.discard(root.layers[-1])

    # ---- sandboxes ----

    async def create(self, spec: EnvSpec) -> ContainerSandbox:
        root = await self.own_root(spec.image)
        if root is None:
            raise UsageError(f"image {spec.image!r}: without an engine's layers only '{self.api.engine}:name' can be used")
        return await self.create_on(spec, root)

    async def create_on(self, spec: EnvSpec, root: Root, *, cache: Path | None = None) -> ContainerSandbox:
        del cache  # stages are built elsewhere
        if self._holding is None:
            raise BackendError("", "the container substrate is not started, or closed")
        tenant = Tenant.of(spec, root)
        sandbox_id = f"sbx-{secrets.token_hex(6)}"
        self._live[sandbox_id] = None
        try:
            async with self._starting:
                container = await self._make(sandbox_id, spec, root.layers[-1], tenant)
        except BaseException:
            del self._live[sandbox_id]
            raise
        sandbox = ContainerSandbox(
            self.api, self._starting, sandbox_id, container, tenant.user, tenant.facts, self.unenforced, _READY_S, self._forget
        )
        self._live[sandbox_id] = sandbox
        return sandbox

    async def _make(self, sandbox_id: str, spec: EnvSpec, image: str, tenant: Tenant) -> str:
        labels = {**self._labels, SANDBOX_LABEL: sandbox_id}
        while True:
            limited = self._has_disk_limit
            wanted = Wanted(sandbox_id, image, tenant.user, tenant.own, labels, spec.limits, self._runtime, limited)
            try:
                return str((await self._ask_for(wanted))["Id"])
            except Refused as exc:
                if limited and ("storage-opt" in exc.words or "storage option" in exc.words.lower() or "pquota" in exc.words):
                    self._has_disk_limit = False
                    continue
                raise self._create_error(sandbox_id, image, exc) from exc
            except BackendError as exc:
                raise BackendError(sandbox_id, exc.message) from exc

    async def _ask_for(self, wanted: Wanted) -> Any:
        if self.api.engine == "docker":
            return await self.api.ask("POST", "/containers/create", docker_body(wanted, self._profile), query={"name": wanted.name})
        made = await self.api.ask("POST", "/containers/create", podman_body(wanted, str(self._profile_path)), native=True)
        if self._runtime is not None:
            await self._require_runtime(made["Id"])
        return made

    async def _require_runtime(self, container: str) -> None:
        """Some Podmans take the service's own without a word: a boundary is never weaker than its name."""
        has = (await self.api.ask("GET", f"/containers/{container}/json", native=True)).get("OCIRuntime")
        if has != self._runtime:
            await remove_container(self.api, container)
            raise UsageError(f"runtime {self._runtime!r}: podman gave {has!r}; start its service with --runtime {self._runtime}")

    def _create_error(self, sandbox_id: str, image: str, exc: Refused) -> Exception:
        if "runtime" in exc.words.lower() and self._runtime is not None:
            return UsageError(f"runtime {self._runtime!r}: {exc.words}; `{self.api.engine} info` lists those that the engine knows")
        if exc.status == 404 or "image not known" in exc.words:
            return CreateError(sandbox_id, f"the engine has the image {image[:19]} no more: {exc.words}; the next lease makes it anew")
        return CreateError(sandbox_id, f"{self.api.engine}: {exc}")

    def _forget(self, sandbox_id: str) -> None:
        self._live.pop(sandbox_id, None)
