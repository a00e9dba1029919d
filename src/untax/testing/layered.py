"""A fake substrate whose sandboxes stand on real directories, so that stages and snapshots can be tried without a kernel's help."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from untax.core.errors import CreateError, SandboxLost
from untax.core.root import Root
from untax.core.spec import EnvSpec
from untax.testing.fake import FakeSandbox, FakeSubstrate
from untax.testing.files import LayeredFiles


class LayeredFake(FakeSubstrate):
    """As `FakeSubstrate`; uppers and frozen layers lie below `directory`. `frozen` are the layers that somebody still needs."""

    marks: Literal["trusted", "user"] = "user"

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(**options)
        self.directory = directory
        self.caches: list[Path | None] = []
        self.is_writing = False
        """As when something is open for writing in every sandbox: snapshots are then copies."""
        self._uses: Counter[str] = Counter()

    @property
    def frozen(self) -> set[str]:
        return set(self._uses)

    async def create_on(self, spec: EnvSpec, root: Root, *, cache: Path | None = None) -> LayeredFakeSandbox:
        await self.step("create")
        for layer in root.layers:
            if not Path(layer).is_dir():
                raise CreateError("", f"the layer {layer} is not there")
        self.specs.append(spec)
        self.caches.append(cache)
        sandbox = LayeredFakeSandbox(self, f"fake-{len(self.sandboxes)}", spec, root)
        self.sandboxes.append(sandbox)
        self.live.add(sandbox.id)
        self.hold(*root.layers)
        return sandbox

    # ---- who uses which frozen layer ----

    def add(self, layer: Path) -> None:
        self._uses[str(layer)] = 1

    def hold(self, *layers: str) -> None:
        for layer in layers:
            if layer in self._uses:
                self._uses[layer] += 1

    def let_go(self, *layers: str) -> None:
        for layer in layers:
            if layer in self._uses:
                self._uses[layer] -= 1
                if not self._uses[layer]:
                    del self._uses[layer]
                    shutil.rmtree(layer)


class LayeredFakeSandbox(FakeSandbox):
    def __init__(self, substrate: LayeredFake, sandbox_id: str, spec: EnvSpec, root: Root) -> None:
        super().__init__(substrate, sandbox_id, spec)
        self.root = root
        self._layered = substrate
        self._snapshots = 0
        self._is_gone = False
        self.upper = self._fresh()
        self.files = LayeredFiles(root.layers, self.upper)

    async def snapshot(self) -> FakeFrozen:
        await self._substrate.step("snapshot")
        if self._is_gone:
            raise SandboxLost(self.id, "it was destroyed")
        self._snapshots += 1
        tree = self._layered.directory / f"{self.id}-frozen-{self._snapshots}"
        how: Literal["swapped", "cloned"] = "cloned" if self._layered.is_writing else "swapped"
        self._layered.add(tree)
        frozen = FakeFrozen(self._layered, self.root.with_layers(str(tree)), tree, how)
        if how == "cloned":
            shutil.copytree(self.upper, tree, symlinks=True)
            return frozen
        self.upper.rename(tree)
        self.root = frozen.root
        self._layered.hold(str(tree))
        self.upper = self._fresh()
        self.files = LayeredFiles(self.root.layers, self.upper)
        return frozen

    async def is_pristine(self) -> bool:
        await self._substrate.step("is_pristine")
        return not any(self.upper.iterdir()) and not (self.cell is not None and self.cell.is_running)

    async def destroy(self) -> None:
        await super().destroy()
        if not self._is_gone:
            self._is_gone = True
            self._layered.let_go(*self.root.layers)
            shutil.rmtree(self.upper, ignore_errors=True)

    def _fresh(self) -> Path:
        upper = self._layered.directory / f"{self.id}-upper-{self._snapshots}"
        upper.mkdir(parents=True)
        return upper


class FakeFrozen:
    def __init__(self, substrate: LayeredFake, root: Root, tree: Path, how: Literal["swapped", "cloned"]) -> None:
        self.id = tree.name
        self.root = root
        self.tree = tree
        self.how: Literal["swapped", "cloned"] = how
        self._substrate = substrate
        self._is_discarded = False

    async def discard(self) -> None:
        if not self._is_discarded:
            self._is_discarded = True
            self._substrate.let_go(str(self.tree))
