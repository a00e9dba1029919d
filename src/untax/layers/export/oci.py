"""A chain as an image for container engines: one tar that Docker, Podman and containerd load.

It is an OCI layout, and for engines that do not read one a docker-archive whose members are the same blobs. Each layer of the chain is
one layer of the image, so that engines share what they have already; a chain that says what tar cannot (directories that were
renamed in place, views of the host) becomes one layer. Nothing in it depends on the clock: equal layers give equal bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from untax.core.errors import StageUnavailable, UsageError
from untax.core.root import Root
from untax.layers.export import _tar
from untax.layers.export._tree import Item, Job, Losses, has_redirect, merged_items, own_items
from untax.layers.marks import Marks

_EPOCH = "1970-01-01T00:00:00Z"
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
# What Docker takes for a name: lower case, and for a first part that is a host also a port.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?{_PART}(?:/{_PART})*:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}}")
# Docker's own limit is 125, and a container needs some of them.
_MOST_LAYERS = 100

Items = Callable[[Losses], Iterator[Item]]


class Output(Protocol):
    """A file, which is gone back in, or anything else that takes bytes."""

    def write(self, data: bytes, /) -> int: ...


@dataclass(frozen=True, slots=True)
class _Blob:
    digest: str
    size: int

    @property
    def member(self) -> str:
        return f"blobs/sha256/{self.digest}"

    def described(self, kind: str) -> dict[str, object]:
        return {"mediaType": kind, "digest": f"sha256:{self.digest}", "size": self.size}


def checked_name(name: str) -> str:
    """`name[:tag]` with its tag; `UsageError` for what an engine would refuse."""
    full = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    if not _NAME.fullmatch(full) or len(full) > 255:
        raise UsageError(f"{name!r} is not a name for an image: write lower-case letters, digits and '-', as in localhost/mine:1")
    return full


def write_oci(job: Job, out: Output, *, name: str, labels: Mapping[str, str]) -> None:
    """Write the whole archive to `out`. Where that cannot seek, every layer is read twice: its digest comes before its content."""
    archive = _Archive(out)
    archive.add("oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    layers = [archive.add_layer(items, job) for items in _layers(job.root, job.marks)]
    config = archive.add_blob(_json(_config(job.root, layers, labels)))
    described = {"config": config.described(_CONFIG), "layers": [layer.described(_LAYER) for layer in layers]}
    manifest = archive.add_blob(_json({"schemaVersion": 2, "mediaType": _MANIFEST, **described}))
    # containerd reads the first annotation, Podman the second.
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    entry = {**manifest.described(_MANIFEST), "annotations": names}
    archive.add("index.json", _json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [entry]}))
    archive.add("manifest.json", _json([{"Config": config.member, "RepoTags": [name], "Layers": [layer.member for layer in layers]}]))
    out.write(_tar.END)


def _config(root: Root, layers: list[_Blob], labels: Mapping[str, str]) -> dict[str, object]:
    said = root.config
    env = dict(said.env)
    if root.path is not None:
        env.setdefault("PATH", root.path)
    config = {
        "Env": [f"{variable}={value}" for variable, value in sorted(env.items())],
        "Entrypoint": list(said.entrypoint) or None,
        "Cmd": list(said.command) or None,
        "WorkingDir": said.workdir,
        "User": said.user,
        "Labels": dict(sorted({**said.labels, **labels}.items())) or None,
    }
    return {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "created": _EPOCH,
        "config": {field: value for field, value in config.items() if value},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in layers]},
        "history": [{"created": _EPOCH, "created_by": "untax image export"} for _ in layers],
    }


# ---- layers ----


def _layers(root: Root, marks: Marks) -> list[Items]:
    """What each layer of the image holds, as something that can be gone through more than once."""
    bottom, *upper = root.layers
    if root.views or len(upper) >= _MOST_LAYERS or any(has_redirect(layer, marks) for layer in upper):
        return [lambda losses: _named(merged_items(root, marks, losses))]
    # Below the lowest there is nothing to delete. It may be a directory in use, where other file systems are mounted: they are not part of it.
    lowest = Root((bottom,))
    return [lambda losses: _named(merged_items(lowest, marks, losses)), *(partial(_layer, layer, marks) for layer in upper)]


def _layer(directory: str, marks: Marks, losses: Losses) -> Iterator[Item]:
    """One layer, with what it deletes as files whose names say so."""
    for item in _named(own_items(directory, marks, losses)):
        parent, slash, name = item.path.rpartition(b"/")
        if item.kind == "whiteout":
            yield Item(parent + slash + _WHITEOUT + name, "file", 0o600)
            continue
        yield item
        if item.is_opaque:
            yield Item(item.path + b"/" + _OPAQUE, "file", 0o600)


def _named(items: Iterator[Item]) -> Iterator[Item]:
    for item in items:
        if item.path.rpartition(b"/")[2].startswith(_WHITEOUT):
            raise UsageError(
                f"{item.path.decode(errors='backslashreplace')}: in an image for container engines a name that begins with .wh. means a "
                "deletion; remove it, or export to squashfs or ext4"
            )
        yield item


# ---- the archive ----


class _Archive:
    """A tar whose members are named by their digests, written in one go."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._blobs: set[str] = set()
        for directory in ("blobs/", "blobs/sha256/"):
            out.write(_tar.plain_header(directory.encode(), 0, is_directory=True))

    def add(self, member: str, data: bytes) -> None:
        self._out.write(_tar.plain_header(member.encode(), len(data)) + data + _tar.padding(len(data)))

    def add_blob(self, data: bytes) -> _Blob:
        blob = _Blob(hashlib.sha256(data).hexdigest(), len(data))
        if blob.digest not in self._blobs:
            self._blobs.add(blob.digest)
            self.add(blob.member, data)
        return blob

    def add_layer(self, items: Items, job: Job) -> _Blob:
        """A layer's tar as a blob; one that is there already is not written again."""
        if not isinstance(self._out, io.BufferedIOBase):
            return self._add_measured(items, job)
        start = self._out.tell()
        self._out.write(bytes(_tar.BLOCK))  # for the header, which is known once the content is
        digested = _Digested(self._out.write)
        _tar.write_tar(items(job.losses), digested.write, job.losses, on_bytes=job.on_bytes)
        blob = digested.blob()
        if blob.digest in self._blobs:
            self._out.seek(start)
            self._out.truncate()
            return blob
        self._blobs.add(blob.digest)
        self._out.write(_tar.padding(blob.size))
        end = self._out.tell()
        self._out.seek(start)
        self._out.write(_tar.plain_header(blob.member.encode(), blob.size))
        self._out.seek(end)
        return blob

    def _add_measured(self, items: Items, job: Job) -> _Blob:
        measured = _Digested(len)
        _tar.write_tar(items(job.losses), measured.write, job.losses)
        blob = measured.blob()
        if blob.digest in self._blobs:
            return blob
        self._blobs.add(blob.digest)
        self._out.write(_tar.plain_header(blob.member.encode(), blob.size))
        digested = _Digested(self._out.write)
        _tar.write_tar(items(Losses()), digested.write, Losses(), on_bytes=job.on_bytes)
        if digested.blob() != blob:
            raise StageUnavailable("export", "the files changed while they were read; try again when nobody writes to them")
        self._out.write(_tar.padding(blob.size))
        return blob


class _Digested:
    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self._size += len(data)
        self._write(data)

    def blob(self) -> _Blob:
        return _Blob(self._hash.hexdigest(), self._size)


def _json(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
