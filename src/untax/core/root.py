"""What a sandbox's file system stands on: directories that lie on each other, and what their image says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from untax.core.spec import FrozenEnv


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says about how it wants to be used. Data, never instructions: nothing here is run by itself."""

    env: Mapping[str, str] = field(default_factory=FrozenEnv)
    workdir: str | None = None
    user: str | None = None
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=FrozenEnv)


@dataclass(frozen=True, slots=True)
class View:
    """A directory of the host that is seen at a place inside, below the layers: what is written there goes to the sandbox's own."""

    source: str
    at: str


@dataclass(frozen=True, slots=True)
class Root:
    """A chain of layers as directories, bottom first, over views of the host where there are any.

    `is_furnished` says that the sandbox's own directories (its home, its working directory) are in a layer already, with the
    owners and modes they were given there; otherwise whoever creates a sandbox makes them.
    """

    layers: tuple[str, ...]
    views: tuple[View, ...] = ()
    config: ImageConfig = ImageConfig()
    path: str | None = None
    """The search path for programs, where the image has one of its own and does not say so in its variables."""
    is_furnished: bool = False
    memory: str | None = None
    """Where processes were put down with their memory: a sandbox on this root goes on with them."""

    def with_layers(self, *directories: str) -> Root:
        """The same with further layers on top."""
        return replace(self, layers=(*self.layers, *directories), is_furnished=True)
