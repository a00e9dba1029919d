"""Manifests as data: what a registry or a layout says that an image consists of, taken at its word only where a digest holds it to it. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from untax.core.errors import StageFailed
from untax.layers.sources._blobs import Descriptor
from untax.layers.sources._http import printable
from untax.layers.sources._reference import Platform, is_digest

INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
ACCEPT = ", ".join((*INDEXES, *MANIFESTS))

LARGEST_MANIFEST = 4 << 20  # the size up to which the distribution specification has registries take them
LARGEST_CONFIG = 8 << 20
MOST_LAYERS = 512  # four times what overlay-based engines can make
MOST_BYTES = 64 << 30  # compressed, in all layers together

_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
# Compression is told by the bytes themselves; the type must only say that they are a layer, and one that registries hold.
_LAYERS = ("application/vnd.oci.image.layer.v1.tar", "application/vnd.docker.image.rootfs.diff.tar")
_FOREIGN = ("nondistributable", "foreign")


@dataclass(frozen=True, slots=True)
class Manifest:
    config: Descriptor
    layers: tuple[Descriptor, ...]

    @property
    def bytes(self) -> int:
        return sum({layer.digest: layer.size for layer in self.layers}.values())


def require_digest(body: bytes, digest: str, what: str) -> None:
    algorithm = digest.partition(":")[0]
    if f"{algorithm}:{hashlib.new(algorithm, body).hexdigest()}" != digest:
        raise StageFailed("image", f"{what}: its bytes are not those of {digest}; refused")


def parse(body: bytes, what: str) -> dict[str, Any]:
    """A manifest or index as a mapping; `StageFailed` for anything else."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise StageFailed("image", f"{what}: what should be its manifest is none")
    if document.get("schemaVersion") == 1:
        raise StageFailed(
            "image", f"{what}: its manifest is of the old kind (schema 1) without digests that could be checked; push it again"
        )
    if "manifests" in document and ("layers" in document or "config" in document):
        # One reader would take it for a list and another for an image: CVE-2021-41190.
        raise StageFailed("image", f"{what}: its manifest claims to be a list and an image at once; refused")
    return document


def is_index(document: dict[str, Any]) -> bool:
    return "manifests" in document


def choose(index: dict[str, Any], wanted: Platform, what: str) -> str:
    """The digest of the entry that suits this machine best, the first of several; else of the only one that does not say for whom it is.

    Its config says so in any case, and is believed rather than the list.
    """
    best: tuple[int, str] | None = None
    there: list[str] = []
    unnamed: list[str] = []
    entries = index["manifests"]
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or not is_digest(entry.get("digest")) or entry.get("mediaType") not in (*INDEXES, *MANIFESTS):
            continue
        found = _platform(entry)
        if found is None:
            unnamed.append(entry["digest"])
            continue
        there.append(str(found))
        fit = wanted.fit(found)
        if fit is not None and (best is None or fit < best[0]):
            best = fit, entry["digest"]
    if best is None and len(unnamed) == 1:
        return unnamed[0]
    if best is None:
        have = printable(", ".join(sorted(set(there))) or "nothing that is an image", 200)
        raise StageFailed("image", f"{what}: there is none for {wanted}, only for {have}")
    return best[1]


def _platform(entry: dict[str, Any]) -> Platform | None:
    said = entry.get("platform")
    if not isinstance(said, dict):
        return None
    values = [value if isinstance(value := said.get(key, ""), str) else "unknown" for key in ("architecture", "variant", "os")]
    return Platform(*values)


def read(document: dict[str, Any], what: str) -> Manifest:
    """The image that a manifest describes; `StageFailed` when it describes none, or one beyond the caps."""
    config, layers = document.get("config"), document.get("layers")
    if not isinstance(config, dict) or not isinstance(layers, list) or config.get("mediaType") not in _CONFIGS:
        raise StageFailed("image", f"{what}: there is something of that name, but it is not an image")
    if len(layers) > MOST_LAYERS:
        raise StageFailed("image", f"{what}: {len(layers)} layers; at most {MOST_LAYERS} are taken")
    for layer in layers:
        kind = layer.get("mediaType") if isinstance(layer, dict) else None
        if not isinstance(kind, str) or not kind.startswith(_LAYERS):
            if isinstance(kind, str) and any(word in kind for word in _FOREIGN):
                raise StageFailed("image", f"{what}: one of its layers is kept somewhere else than the image; such are not fetched")
            raise StageFailed("image", f"{what}: a layer of unknown type {printable(str(kind), 80)!r}")
    manifest = Manifest(_descriptor(config, what), tuple(_descriptor(layer, what) for layer in layers))
    if len({blob.digest for blob in manifest.layers}) != len(set(manifest.layers)):
        raise StageFailed("image", f"{what}: its manifest gives one blob two sizes")
    if manifest.config.size > LARGEST_CONFIG:
        raise StageFailed("image", f"{what}: a config of {manifest.config.size} bytes; at most {LARGEST_CONFIG} are taken")
    if manifest.bytes > MOST_BYTES:
        raise StageFailed("image", f"{what}: {manifest.bytes} bytes of layers; at most {MOST_BYTES} are taken")
    return manifest


def _descriptor(said: dict[str, Any], what: str) -> Descriptor:
    digest, size = said.get("digest"), said.get("size")
    if not isinstance(digest, str) or not is_digest(digest) or type(size) is not int or size < 0:
        raise StageFailed("image", f"{what}: its manifest describes a blob without a digest and a size that could be checked")
    return Descriptor(digest, size)
