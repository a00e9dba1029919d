"""`tar:`, `oci:` and `docker-archive:`, images in files: a root file system, an OCI layout, what `docker save` writes.

All three may be compressed as a whole, and a layout may also be a directory. Nothing of the outer archive is ever unpacked to
a name of its choosing: its members are read where they lie.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.core.root import ImageConfig
from untax.core.spec import require_text
from untax.core.stage import Identity
from untax.layers.sources import Fetched, Progress, Stop, _manifest, image_identity, in_thread, progress_from_thread
from untax.layers.sources._chain import Chain
from untax.layers.sources._http import printable
from untax.layers.sources._image import PackedLayer
from untax.layers.sources._members import Directory, Folder, look_through, unpacked
from untax.layers.sources._reference import is_digest, this_platform
from untax.layers.sources.config import MOST_BYTES, ReadConfig, read_config
from untax.layers.unpack import unpack

if TYPE_CHECKING:
    from untax.layers.store import LayerStore

_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # without waiting for whoever might write to a FIFO of that name
_CHUNK = 1 << 20
_MOST_DOCUMENT = 4 << 20
_DEEPEST_INDEX = 3
_REF_NAME = "org.opencontainers.image.ref.name"
_MOST_REMEMBERED = 256

_remembered: dict[object, Any] = {}
"""What a file was found to be, by where it lies and when it was last changed."""


def make(scheme: str, name: str) -> RootArchive | LayoutImage | DockerArchive:
    if not require_text("image", name).startswith("/"):
        raise UsageError(f"image {f'{scheme}:{name}'!r}: give the file by an absolute path")
    if scheme == "tar":
        return RootArchive(name)
    return LayoutImage(name) if scheme == "oci" else DockerArchive(name)


# ---- tar: ----


class RootArchive:
    """A tar of a whole root file system. It is what its bytes are."""

    def __init__(self, name: str) -> None:
        self._path = name
        self._digest: str | None = None

    async def identify(self) -> Identity:
        self._digest = await in_thread(self._hash)
        return Identity(f"tar:{self._digest}")

    async def fetch(self, store: LayerStore, progress: Progress) -> Fetched:
        if self._digest is None:
            await self.identify()
        note = progress_from_thread(progress)
        return await in_thread(lambda stop: self._unpack(store, note, stop))

    def _hash(self, stop: Stop) -> str:
        with _open_file(self._path) as file, _told(self._path):
            return _remember(("tar", *_which(file)), lambda: _sha256(file, stop))

    def _unpack(self, store: LayerStore, progress: Progress, stop: Stop) -> Fetched:
        def on_read(read: int) -> None:
            stop.check()
            progress("unpacking", read, total)

        with _open_file(self._path) as file, store.draft() as draft:
            total = os.fstat(file.fileno()).st_size
            try:
                found = unpack(file, draft.tree, marks=store.marks, has_whiteouts=False, digest=self._digest, on_read=on_read)
            except StageFailed as exc:
                raise StageFailed("image", f"{self._path}: {exc.message}") from exc
            if not found.entries:
                raise StageFailed("image", f"{self._path}: it is empty")
            return Fetched((draft.publish().id,), ImageConfig(), tuple(f"left out: {note}" for note in found.notes))


# ---- images with layers ----


class _Image(NamedTuple):
    what: str
    config: ReadConfig
    layers: tuple[tuple[str, str | None], ...]
    """The names of the layers' files and, where the image has them, digests."""


class _Packaged(abc.ABC):
    """What `oci:` and `docker-archive:` share: a path, maybe a name behind it, and an image in there to be found."""

    scheme = ""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: str | None = None

    async def identify(self) -> Identity:
        self._found = await in_thread(self._digest)
        return image_identity(self._found)

    async def fetch(self, store: LayerStore, progress: Progress) -> Fetched:
        note = progress_from_thread(progress)
        return await in_thread(lambda stop: self._put(store, note, stop))

    def _digest(self, stop: Stop) -> str:
        path, wanted = _split(self._name, self.scheme)
        if os.path.isdir(path):
            with Directory(path) as folder:
                return self._image(folder, wanted).config.digest
        with _open_file(path) as file, _told(path):
            key = (self.scheme, *_which(file), wanted)
            return _remember(key, lambda: self._image(look_through(file, path, stop), wanted).config.digest)

    def _put(self, store: LayerStore, progress: Progress, stop: Stop) -> Fetched:
        path, wanted = _split(self._name, self.scheme)
        with _told(path), contextlib.ExitStack() as open_files:
            if os.path.isdir(path):
                folder: Folder = open_files.enter_context(Directory(path))
            else:
                file = open_files.enter_context(_open_file(path))
                folder = open_files.enter_context(unpacked(file, path, store.downloads, stop, progress))
            image = self._image(folder, wanted)
            if self._found not in (None, image.config.digest):
                raise StageUnavailable("image", f"{image.what}: it is another image now than when it was asked about; ask again")
            layers = [PackedLayer(functools.partial(folder.open, name), folder.size(name), digest) for name, digest in image.layers]
            if len(layers) != len(image.config.diff_ids):
                raise StageFailed("image", f"{image.what}: it has {len(layers)} layers and its config names {len(image.config.diff_ids)}")
            return Chain(store, image.what, image.config).put(layers, check=stop.check, progress=progress)

    @abc.abstractmethod
    def _image(self, folder: Folder, wanted: str | None) -> _Image:
        """Read what the folder says of its image; `StageFailed` for what is none, or not the `wanted` one."""


class LayoutImage(_Packaged):
    """An OCI image layout: `index.json` names manifests, and everything else is a blob by its digest."""

    scheme = "oci"

    def _image(self, folder: Folder, wanted: str | None) -> _Image:
        what = f"{self.scheme}:{self._name}"
        if "oci-layout" not in folder:
            raise StageFailed("image", f"{what}: it is not an OCI layout: there is no file oci-layout")
        _object(folder.read("oci-layout", 4096), f"{what}: oci-layout")
        document = _object(folder.read("index.json", _MOST_DOCUMENT), f"{what}: index.json")
        digest = _chosen(_entries(document, what), wanted, what)
        for _ in range(_DEEPEST_INDEX):
            body = folder.read(_blob_name(digest), _MOST_DOCUMENT)
            _manifest.require_digest(body, digest, what)
            document = _manifest.parse(body, what)
            if not _manifest.is_index(document):
                break
            digest = _chosen(_entries(document, what), None, what)
        else:
            raise StageFailed("image", f"{what}: lists of lists, more than {_DEEPEST_INDEX} deep")
        manifest = _manifest.read(document, what)
        data = folder.read(_blob_name(manifest.config.digest), MOST_BYTES)
        config = read_config(data, what, digest=manifest.config.digest)
        return _Image(what, config, tuple((_blob_name(layer.digest), layer.digest) for layer in manifest.layers))


class DockerArchive(_Packaged):
    """What `docker save` and `podman save` write: `manifest.json` names a config and layers by their paths in the archive."""

    scheme = "docker-archive"

    def _image(self, folder: Folder, wanted: str | None) -> _Image:
        what = f"{self.scheme}:{self._name}"
        if "manifest.json" not in folder:
            raise StageFailed("image", f"{what}: it is not an archive of images: there is no file manifest.json")
        entry = _image_of(_parsed(folder.read("manifest.json", _MOST_DOCUMENT), what), wanted, what)
        config, layers = entry.get("Config"), entry.get("Layers")
        if not isinstance(config, str) or not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
            raise StageFailed("image", f"{what}: its manifest.json does not say where config and layers are")
        return _Image(what, read_config(folder.read(config, MOST_BYTES), what), tuple((layer, None) for layer in layers))


def _entries(document: dict[str, Any], what: str) -> list[dict[str, Any]]:
    entries = document.get("manifests")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and is_digest(entry.get("digest")) for entry in entries):
        raise StageFailed("image", f"{what}: its index does not name images by their digests")
    return entries


def _chosen(entries: list[dict[str, Any]], wanted: str | None, what: str) -> str:
    """The digest of the one that is asked for, or of the only one; of several for several platforms, of this machine's."""
    if wanted is not None:
        names = [_ref_name(entry) for entry in entries]
        entries = [entry for entry, name in zip(entries, names, strict=True) if name == wanted]
        if not entries:
            known = _listed({name for name in names if name})
            raise UsageError(f"{what}: there is no image {wanted!r} in it" + (f"; there are: {known}" if known else ""))
    if len(entries) == 1:
        return str(entries[0]["digest"])
    return _manifest.choose({"manifests": entries}, this_platform(), what)


def _ref_name(entry: dict[str, Any]) -> str | None:
    annotations = entry.get("annotations")
    name = annotations.get(_REF_NAME) if isinstance(annotations, dict) else None
    return name if isinstance(name, str) else None


def _image_of(document: object, wanted: str | None, what: str) -> dict[str, Any]:
    """The entry of manifest.json that is asked for, or the only one."""
    entries = [entry for entry in document if isinstance(entry, dict)] if isinstance(document, list) else []
    tags = [[tag for tag in tags if isinstance(tag, str)] if isinstance(tags := entry.get("RepoTags"), list) else [] for entry in entries]
    found = [entry for entry, names in zip(entries, tags, strict=True) if wanted is None or wanted in names or f"{wanted}:latest" in names]
    if len(found) == 1:
        return found[0]
    if not entries:
        raise StageFailed("image", f"{what}: its manifest.json is not a list of images")
    known = _listed({name for names in tags for name in names}) or "none has a name"
    raise UsageError(
        f"{what}: {'no one image is' if wanted is None else f'{wanted!r} is not'} the one; write its name behind the path; there are: {known}"
    )


def _listed(names: Iterable[str]) -> str:
    """A few of the names that somebody gave to images, as they may be shown."""
    return ", ".join(printable(name, 100) for name in sorted(names)[:10])


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _object(data: bytes, what: str) -> dict[str, Any]:
    found = _parsed(data, what)
    if not isinstance(found, dict):
        raise StageFailed("image", f"{what}: it is not an object")
    return found


def _parsed(data: bytes, what: str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise StageFailed("image", f"{what}: it is not JSON") from None


# ---- files ----


def _split(name: str, scheme: str) -> tuple[str, str | None]:
    """The path that is there, and the name behind the colon after it. Both may have colons of their own: the longest path wins."""
    end = len(name)
    while end > 0:
        path, wanted = name[:end], name[end + 1 :]
        if os.path.lexists(path) and (end == len(name) or wanted):
            return path, wanted or None
        end = name.rfind(":", 0, end)
    raise UsageError(f"image {f'{scheme}:{name}'!r}: there is no such file or directory")


def _open_file(path: str) -> BinaryIO:
    try:
        fd = os.open(path, _OPEN)
    except FileNotFoundError:
        raise UsageError(f"image {path!r}: there is no such file") from None
    except (OSError, ValueError) as exc:
        raise UsageError(f"image {path!r}: {exc}") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"image {path!r}: it is not a file")
    return open(fd, "rb", buffering=0)


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    """What the disk, or whatever else lies behind a path, refuses to give."""
    try:
        yield
    except OSError as exc:
        raise StageUnavailable("image", f"{path}: it cannot be read: {exc.strerror}") from exc


def _which(file: BinaryIO) -> tuple[int, ...]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _remember(key: object, find_out: Callable[[], str]) -> str:
    if key not in _remembered:
        found = find_out()
        if len(_remembered) >= _MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = found
    return str(_remembered[key])


def _sha256(file: BinaryIO, stop: Stop) -> str:
    found = hashlib.sha256()
    while data := file.read(_CHUNK):
        stop.check()
        found.update(data)
    return f"sha256:{found.hexdigest()}"
