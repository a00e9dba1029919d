"""Where images come from: one file for each place, found by the word before the colon of an image's name.

A module here has `make(scheme, name)`, which looks at the name only: it opens nothing and asks nobody, and refuses a name that
cannot be one with `UsageError`. The slow ones are asked for in two steps, what an image is and what it holds, so that
a stage that exists already costs only the first.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from untax.core.errors import UsageError
from untax.core.root import ImageConfig, Root
from untax.core.stage import Identity
from untax.layers._held import alone
from untax.layers.sources._reference import shown_name

if TYPE_CHECKING:
    from untax.layers.store import LayerStore

T = TypeVar("T")

Progress = Callable[[str, int, int | None], None]
"""What is being done, the bytes done, and of how many, where that is known. Called in the event loop's thread."""

_MODULES = {
    "host": "host",
    "dir": "dir",
    "tar": "archive",
    "oci": "archive",
    "docker-archive": "archive",
    "docker": "engine",
    "podman": "engine",
    "registry": "registry",
    "debian": "debian",
}
FORMS = (
    "host",
    "dir:/path",
    "tar:/path.tar",
    "oci:/path[:tag]",
    "docker-archive:/path.tar[:name]",
    "docker:name[:tag]",
    "podman:name[:tag]",
    "registry:host/name[:tag]",
    "debian:release[+package,…]",
)


@dataclass(frozen=True, slots=True)
class Fetched:
    """An image in the store: its layers, bottom first, and what it says about itself."""

    adds: tuple[str, ...]
    config: ImageConfig
    notes: tuple[str, ...] = ()
    """What was left out of it and why, for people."""


@runtime_checkable
class Source(Protocol):
    """An image that has to be brought into the store before a sandbox can stand on it."""

    async def identify(self) -> Identity:
        """What the image is right now. Cheap beside `fetch`, and nothing is stored."""

    async def fetch(self, store: LayerStore, progress: Progress) -> Fetched:
        """Put its layers into the store. `StageFailed` when the image is not one or is refused, `StageUnavailable` when it cannot be had now.

        What `identify` said last is what is brought, or it fails.
        """


@runtime_checkable
class InPlace(Protocol):
    """An image that is used where it lies; nothing of it is stored."""

    async def identify(self) -> Identity: ...

    async def root(self) -> Root: ...


def find(image: str, *, cache: Path | None = None) -> Source | InPlace:
    """The source of an image by its name. `cache` is where the image `host` keeps what it prepares; `UsageError` for an unknown form."""
    scheme, _, name = image.partition(":")
    if scheme not in _MODULES or (scheme == "host") != (image == "host"):
        raise UsageError(f"image {shown_name(image)!r} is not known; the forms are: {', '.join(FORMS)}")
    module = importlib.import_module(f"untax.layers.sources.{_MODULES[scheme]}")
    found: Source | InPlace = module.make(cache) if scheme == "host" else module.make(scheme, name)
    return found


def image_identity(config_digest: str) -> Identity:
    """Of any image that has a config: the config names every layer by its contents, however the image was packed or carried."""
    return Identity(f"image:{config_digest}")


class Stop:
    """Tells work in a thread that nobody waits for it any more: it checks, and leaves by the exception."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        if self._event.is_set():
            raise Stopped


class Stopped(Exception):  # not an error of ours: it never leaves `in_thread`
    pass


async def in_thread(work: Callable[[Stop], T]) -> T:
    """Run blocking work. When the caller is cancelled the work is told to stop, and is waited for: its files are then nobody's."""
    stop = Stop()
    return await alone(lambda: work(stop), stop.set)


def progress_from_thread(progress: Progress) -> Progress:
    """The same, to be called from a thread; at most one call waits for the loop at a time, so a slow loop is not flooded."""
    loop = asyncio.get_running_loop()
    latest: list[Any] = []

    def tell() -> None:
        if latest:
            said = latest.pop()
            latest.clear()
            progress(*said)

    def note(what: str, done: int, total: int | None) -> None:
        is_told = bool(latest)
        latest.append((what, done, total))
        if not is_told:
            loop.call_soon_threadsafe(tell)

    return note
