"""`docker:` and `podman:`, images of an engine on this machine, over the HTTP API on its socket; no client program is run.

The engine is trusted no more than a file it would have written: what it hands out is read by the same code as an archive.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.core.stage import Identity
from untax.layers.sources import Fetched, Progress, archive, image_identity, progress_from_thread
from untax.layers.sources._blobs import require_ok
from untax.layers.sources._http import Halt, Patience, Reply, Transient, in_thread, printable, send
from untax.layers.sources._reference import is_digest, parse_local

if TYPE_CHECKING:
    from untax.layers.store import LayerStore

# An engine answers questions at once; before it hands out an image it may copy all of it first (dockerd does).
_ASKING = Patience(connect_s=5, answer_s=30, stall_s=30)
_EXPORTING = Patience(connect_s=5, answer_s=900, stall_s=300)
_LARGEST_ANSWER = 8 << 20
_MOST_BYTES = 128 << 30
_OCI = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True, slots=True)
class _Kind:
    variable: str
    sockets: Callable[[Mapping[str, str]], list[str]]
    prefix: str
    """Of the API's paths. Docker's own without a version is the engine's newest; Podman wants one and serves older ones."""


def _docker_sockets(env: Mapping[str, str]) -> list[str]:
    runtime = env.get("XDG_RUNTIME_DIR")
    return ["/var/run/docker.sock", *([f"{runtime}/docker.sock"] if runtime else [])]


def _podman_sockets(env: Mapping[str, str]) -> list[str]:
    runtime = env.get("XDG_RUNTIME_DIR")
    own = [f"{runtime}/podman/podman.sock"] if runtime else []
    return ["/run/podman/podman.sock", *own] if os.geteuid() == 0 else own


_KINDS = {
    "docker": _Kind("DOCKER_HOST", _docker_sockets, ""),
    "podman": _Kind("CONTAINER_HOST", _podman_sockets, "/v4.0.0/libpod"),
}


def make(scheme: str, name: str) -> EngineImage:
    return EngineImage(scheme, parse_local(name, scheme))


def find_socket(engine: str, env: Mapping[str, str]) -> str:
    """Where the engine listens: what its variable says, or the first usual place that exists. `UsageError` for other than a socket."""
    kind = _KINDS[engine]
    said = env.get(kind.variable)
    if said:
        if not said.startswith("unix://") or not said.removeprefix("unix://").startswith("/"):
            raise UsageError(f"{engine} images are read from an engine on this machine: {kind.variable} must be unix:///path, or unset")
        return said.removeprefix("unix://")
    places = kind.sockets(env)
    return next((place for place in places if os.path.exists(place)), places[0] if places else f"/run/{engine}.sock")


class EngineImage:
    """One image of one engine. What `identify` found is what `fetch` brings, even when the name is given to another image in between."""

    def __init__(self, engine: str, name: str, *, socket_path: str | None = None) -> None:
        self._engine, self._name, self._socket = engine, name, socket_path
        self._found: tuple[str, str] | None = None

    async def identify(self) -> Identity:
        halt = Halt()
        self._found = await in_thread(halt, lambda: self._inspect(halt))
        return image_identity(self._found[0])

    async def fetch(self, store: LayerStore, progress: Progress) -> Fetched:
        if self._found is None:
            await self.identify()
        with _spool(store.downloads) as file:
            halt, note = Halt(), progress_from_thread(progress)
            form = await in_thread(halt, lambda: self._receive(file, note, halt))
            name = f"/proc/self/fd/{file.fileno()}"
            try:
                return await archive.make(form, name).fetch(store, progress)
            except (StageFailed, StageUnavailable) as exc:
                message = exc.message.replace(f"{form}:{name}", f"{self._engine}:{self._name}").replace(name, self._name)
                raise type(exc)("image", message, exc.log) from exc

    def _inspect(self, halt: Halt) -> tuple[str, str]:
        """The image's id, and the form in which the engine can hand it out unchanged."""
        with self._open(f"/images/{quote(self._name, safe='/:@')}/json", _ASKING, halt) as reply:
            if reply.status == 404:
                raise StageFailed("image", f"{self._engine} has no image {self._name}; pull or build it there first, or use registry:")
            require_ok(reply, f"{self._engine} image {self._name}")
            body = self._whole(reply)
        try:
            said: Any = json.loads(body)
            found = said["Id"] if said["Id"].startswith("sha256:") else f"sha256:{said['Id']}"
            # Podman would write the config anew to change its form, and then it would be another image's.
            form = "oci" if said.get("ManifestType") == _OCI else "docker-archive"
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            found = form = ""
        if not is_digest(found):
            raise StageFailed("image", f"{self._engine} answered with something that does not describe an image")
        return found, form

    def _receive(self, file: BinaryIO, note: Progress, halt: Halt) -> str:
        """Have the engine write the image to `file`; gives the form it is in. By its id: the name may be another image's by now."""
        assert self._found is not None
        found, form = self._found
        query = {"oci": "?format=oci-archive", "docker-archive": "?format=docker-archive"}[form] if self._engine == "podman" else ""
        with self._open(f"/images/{found.removeprefix('sha256:')}/get{query}", _EXPORTING, halt) as reply:
            if reply.status == 404:
                raise StageUnavailable("image", f"{self._engine} image {self._name}: it was removed meanwhile")
            require_ok(reply, f"{self._engine} image {self._name}")
            self._keep(reply, file, note)
        return form

    def _keep(self, reply: Reply, file: BinaryIO, note: Progress) -> None:
        done = 0
        try:
            for data in reply.chunks():
                done += len(data)
                if done > _MOST_BYTES:
                    raise StageFailed("image", f"{self._engine} image {self._name}: more than {_MOST_BYTES} bytes")
                file.write(data)
                note(f"copy {self._name} from {self._engine}", done, None)
            file.flush()
        except Transient as exc:
            raise StageUnavailable("image", f"{self._engine}: {exc}") from exc
        except OSError as exc:
            raise StageUnavailable("image", f"cannot keep a copy of {self._name}: {exc.strerror}") from exc

    def _whole(self, reply: Reply) -> bytes:
        try:
            return reply.read(_LARGEST_ANSWER)
        except Transient as exc:
            raise StageUnavailable("image", f"{self._engine}: {exc}") from exc

    def _open(self, target: str, patience: Patience, halt: Halt) -> Reply:
        path = self._socket or find_socket(self._engine, os.environ)
        url = f"http://{self._engine}{_KINDS[self._engine].prefix}{target}"
        try:
            reply = send(lambda: _UnixConnection(path, patience.connect_s), "GET", url, {}, None, patience, halt)
        except Transient as exc:
            raise StageUnavailable("image", _unreachable(self._engine, path, exc)) from exc
        if reply.status >= 500:
            with reply:
                said = printable(self._whole(reply).decode(errors="replace").strip(), 200)
            raise StageUnavailable("image", f"{self._engine} failed: {said}")
        return reply


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._path)
        except BaseException:
            self.sock.close()
            raise


def _unreachable(engine: str, path: str, exc: Transient) -> str:
    cause = exc.__cause__
    if isinstance(cause, FileNotFoundError):
        return f"no {engine} engine listens at {path}; start its service, or name its socket in {_KINDS[engine].variable}"
    if isinstance(cause, ConnectionRefusedError):
        return f"the {engine} engine at {path} is not running; start its service"
    if isinstance(cause, PermissionError):
        return f"this user may not speak to the {engine} engine at {path}"
    return f"the {engine} engine at {path}: {exc}"


@contextlib.contextmanager
def _spool(directory: Path) -> Iterator[BinaryIO]:
    """A file without a name, gone when it is closed, however that comes about."""
    try:
        file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed below
    except OSError as exc:
        raise StageUnavailable("image", f"cannot keep a copy in {directory}: {exc.strerror}") from exc
    with file:
        yield file
