"""`registry:`, images from any server that speaks the OCI distribution protocol.

An image is what its config says, and the config names every layer by its contents: so a registry, and whatever lies between,
can withhold an image but not change it. Layers come a few at a time, each is unpacked as soon as it is there, and what has
arrived when the way is cut is gone on with.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from untax.core.errors import StageFailed
from untax.core.stage import Identity
from untax.layers import spares
from untax.layers.sources import Fetched, Progress, Stopped, _blobs, _chain, _manifest, image_identity, progress_from_thread
from untax.layers.sources._blobs import Descriptor
from untax.layers.sources._chain import Chain
from untax.layers.sources._http import Halt, Patience, Reply, Web, in_thread, persist
from untax.layers.sources._image import PackedLayer
from untax.layers.sources._login import Login, read_credentials
from untax.layers.sources._manifest import Manifest
from untax.layers.sources._reference import Platform, Reference, is_digest, is_loopback, parse_remote, this_platform
from untax.layers.sources.config import read_config

if TYPE_CHECKING:
    from untax.layers.store import LayerStore

_AT_ONCE = 4  # more connections to one registry gain little and are what rate limits count
_DEEPEST_INDEX = 3
_MOST_REMEMBERED = 1024
_PROBE_S = 3.0


def make(scheme: str, name: str) -> RegistryImage:
    del scheme  # there is one
    return RegistryImage(parse_remote(name))


class RegistryImage:
    """One image in one registry. What `identify` found is what `fetch` brings, even when its tag moves in between."""

    def __init__(self, reference: Reference, *, patience: Patience | None = None, platform: Platform | None = None) -> None:
        self._reference = reference
        self._patience = patience or Patience()
        self._platform = platform or this_platform()
        self._found: Manifest | None = None

    async def identify(self) -> Identity:
        self._found = None if self._reference.digest is None else _remembered.get((self._reference.digest, self._platform))
        if self._found is None:
            halt = Halt()
            self._found = await in_thread(halt, lambda: self._look(halt))
        return image_identity(self._found.config.digest)

    def _look(self, halt: Halt) -> Manifest:
        pull = _Pull(self._reference, self._patience, halt)
        if self._reference in _last_seen:
            # To ask what a tag stands for is cheap everywhere, and registries that count what is read do not count it.
            known = _remembered.get((pull.current_digest(), self._platform))
            if known is not None:
                return known
        digest, found = pull.manifest(self._platform)
        if len(_remembered) >= _MOST_REMEMBERED:
            _remembered.clear()
            _last_seen.clear()
        _remembered[digest, self._platform] = found
        _last_seen.add(self._reference)
        return found

    async def fetch(self, store: LayerStore, progress: Progress) -> Fetched:
        if self._found is None:
            await self.identify()
        manifest, halt, note = self._found, Halt(), progress_from_thread(progress)
        assert manifest is not None
        return await in_thread(halt, lambda: _Pull(self._reference, self._patience, halt).image(manifest, self._platform, store, note))


_remembered: dict[tuple[str, Platform], Manifest] = {}
"""What a digest stands for never changes: an image is asked about once in a process, and then only which one its tag is."""
_last_seen: set[Reference] = set()


class _Pull:
    """The conversation with one registry about one image. Blocking, in one thread and those it starts."""

    def __init__(self, reference: Reference, patience: Patience, halt: Halt) -> None:
        scheme = reference.scheme or ("http" if is_loopback(reference.host) and not _speaks_tls(reference) else "https")
        self._reference = replace(reference, scheme=scheme)
        self._patience, self.halt = patience, halt
        web = Web(reference.host, is_plain=scheme == "http", patience=patience, halt=halt)
        self._login = Login(web, self._reference, read_credentials(reference))
        self._what = str(reference)

    def manifest(self, platform: Platform) -> tuple[str, Manifest]:
        """The image for this platform, through lists of images for several; and the digest of what the name itself stands for."""
        wanted, top = self._reference.wanted, ""
        for _ in range(_DEEPEST_INDEX):
            body = self._document(wanted)
            top = top or self._reference.digest or f"sha256:{hashlib.sha256(body).hexdigest()}"
            document = _manifest.parse(body, self._what)
            if not _manifest.is_index(document):
                return top, _manifest.read(document, self._what)
            wanted = _manifest.choose(document, platform, self._what)
        raise StageFailed("image", f"{self._what}: lists of lists, more than {_DEEPEST_INDEX} deep")

    def current_digest(self) -> str:
        """Which digest the tag has now; empty when the registry does not say."""

        def attempt() -> str:
            with self._open("manifests", self._reference.wanted, {"Accept": _manifest.ACCEPT}, method="HEAD") as reply:
                return reply.headers.get("Docker-Content-Digest", "") if reply.status == 200 else ""

        return persist(self._what, self._patience, self.halt, attempt)

    def image(self, manifest: Manifest, platform: Platform, store: LayerStore, note: Progress) -> Fetched:
        """Its layers in the store. Blobs come several at a time; they are unpacked in order, each over those below it."""
        said = read_config(self._config(manifest.config), self._what, digest=manifest.config.digest, platform=platform)
        if len(said.diff_ids) != len(manifest.layers):
            raise StageFailed("image", f"{self._what}: {len(manifest.layers)} layers, and a config that speaks of {len(said.diff_ids)}")
        spares.remove_old(store.root)
        _chain.sweep(store.downloads)
        chain = Chain(store, self._what, said)
        wanted = Counter(manifest.layers[at] for at in chain.missing)
        tally = _Tally(f"pull {self._what}", sum(blob.size for blob in wanted), note)
        with _Downloads(self, store.downloads, wanted, tally) as downloads:
            layers = [PackedLayer(functools.partial(downloads.open, blob), blob.size) for blob in manifest.layers]
            return chain.put(layers, check=self.halt.check, progress=tally.after)

    def blob(self, directory: Path, blob: Descriptor, came: Callable[[int], None]) -> BinaryIO:
        def ask(start: int) -> Reply:
            return self._open("blobs", blob.digest, {"Range": f"bytes={start}-"} if start else {})

        return _blobs.download(directory, blob, ask, patience=self._patience, halt=self.halt, came=came)

    def _config(self, blob: Descriptor) -> bytes:
        def attempt() -> bytes:
            with self._open("blobs", blob.digest, {}) as reply:
                _blobs.require_ok(reply, self._what)
                return reply.read(blob.size)

        return persist(self._what, self._patience, self.halt, attempt)

    def _document(self, wanted: str) -> bytes:
        def attempt() -> bytes:
            with self._open("manifests", wanted, {"Accept": _manifest.ACCEPT}) as reply:
                if reply.status == 404:
                    raise StageFailed("image", f"the registry has no {self._what}")
                _blobs.require_ok(reply, self._what)
                body = reply.read(_manifest.LARGEST_MANIFEST)
                said = reply.headers.get("Docker-Content-Digest", "")
            digest = wanted if is_digest(wanted) else said
            if is_digest(digest):
                _manifest.require_digest(body, digest, self._what)
            return body

        return persist(self._what, self._patience, self.halt, attempt)

    def _open(self, kind: str, name: str, headers: dict[str, str], *, method: str = "GET") -> Reply:
        return self._login.open(method, f"{self._login.base}/v2/{self._reference.name}/{kind}/{name}", headers)


class _Downloads:
    """The blobs of one image on their way, a few at a time. One that fails ends the others; the first failure is the one told."""

    def __init__(self, pull: _Pull, directory: Path, wanted: Counter[Descriptor], tally: _Tally) -> None:
        self._pull, self._directory, self._uses, self._tally = pull, directory, wanted, tally
        self._pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="untax-blob")
        self._running = {blob: self._pool.submit(self._fetch, blob) for blob in wanted}

    def _fetch(self, blob: Descriptor) -> BinaryIO:
        try:
            return self._pull.blob(self._directory, blob, self._tally.add)
        except BaseException:
            self._pull.halt.set()
            raise

    def open(self, blob: Descriptor) -> BinaryIO:
        """The file of a blob once it is there. With the last use its name is removed."""
        file = self._running[blob].result()
        again = open(f"/proc/self/fd/{file.fileno()}", "rb", buffering=0)  # noqa: SIM115 - for the caller, with a place of its own
        self._uses[blob] -= 1
        if not self._uses[blob]:
            _blobs.discard(self._directory, blob)
            file.close()
        return again

    def __enter__(self) -> _Downloads:
        return self

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> None:
        if exc is not None:
            self._pull.halt.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        first: BaseException | None = None
        for blob, running in self._running.items():
            failed = None if running.cancelled() else running.exception()
            if not running.cancelled() and failed is None:
                running.result().close()
            elif failed is not None and not isinstance(failed, Stopped):
                first = first or failed
            # What was refused is not wanted again, and what fills a disk keeps it full.
            if isinstance(exc, StageFailed) or (exc is not None and _blobs.is_full(exc.__cause__)):
                _blobs.discard(self._directory, blob)
        if isinstance(exc, Stopped) and first is not None:
            raise first


class _Tally:
    """Adds up what several threads bring, and tells of it."""

    def __init__(self, what: str, total: int, note: Progress) -> None:
        self._what, self._total, self._note = what, total, note
        self._done = 0
        self._lock = threading.Lock()
        note(what, 0, total)

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._note(self._what, self._done, self._total)

    def after(self, what: str, done: int, total: int | None) -> None:
        """Tell of what else is done, once everything is there: two things at once would be one bar that jumps."""
        with self._lock:
            if self._done >= self._total:
                self._note(what, done, total)


def _speaks_tls(reference: Reference) -> bool:
    """Whether the registry on this machine wants TLS: nothing is sent but a greeting. One that does not answer does not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only to see whether it answers; the connections that are used verify
    try:
        with socket.create_connection((reference.host.strip("[]"), reference.port or 443), _PROBE_S) as plain:
            plain.settimeout(_PROBE_S)
            with context.wrap_socket(plain):
                return True
    except OSError:
        return False
