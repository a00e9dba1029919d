"""The contract between a rollout and whatever it runs on.

Adapters do the work and never time it: the caller opens a span around each call, so every substrate is measured at the
same boundary by the same clock. What only some substrates can do is a small protocol of its own, asked for with
`isinstance`; there are no methods that raise `NotImplementedError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from untax.core.result import CommandResult
from untax.core.root import Root
from untax.core.spec import EnvSpec, Limits
from untax.core.stream import ByteStream


class Bare(Protocol):
    """What every live environment is to whoever frees it, with a channel or without."""

    id: str

    async def wait_ready(self) -> None:
        """Return once it can be used; raise `ReadinessTimeout` or `SandboxLost` otherwise."""

    async def destroy(self) -> None:
        """Free everything that making it took. Safe to call twice, and before `wait_ready`."""


class Sandbox(Bare, Protocol):
    """One live environment, held by one caller at a time. It is ready once a channel would open."""

    async def open_channel(self) -> ByteStream:
        """Start the cell inside and give the stream it listens on; all actions go over it.

        A stream over which the cell was greeted and configured already has `resumed`, where that was left (`channel.handover.Resumed`).
        """


class Substrate(Protocol):
    name: str
    isolation: str
    """How strong its boundary is: one of `untax.core.spec.ISOLATION_LEVELS`."""

    def unavailable_reason(self) -> str | None:
        """Say why this machine cannot use the substrate and what to do about it, or None when it can."""

    async def create(self, spec: EnvSpec) -> Sandbox:
        """Ask for a sandbox and return as soon as it has an identity, ready or not.

        `spec.user` is the identity of everything that names no other user; `spec.limits` bind from the start. What
        this substrate cannot make at all (an unknown image, a user it does not have) is a `UsageError`; a create that
        failed is a `CreateError` or `BackendError`, and has given back what it took.
        """


# ---- what only some can do ----


@runtime_checkable
class Service(Protocol):
    """A substrate with something of its own that runs between sandboxes: a helper process, a connection."""

    async def start(self) -> None:
        """Begin, and remove what an earlier holder of the same state left behind when it was killed."""

    async def aclose(self) -> None:
        """End it and everything it made. Safe to call twice, and without `start`."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What commands in a sandbox find there unless they are told otherwise."""

    workdir: str
    home: str
    user: str
    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    shell: str = "/bin/bash"
    proxy_port: int = 3128
    """Where the cell's proxy listens on the sandbox's loopback, when it has a network."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What the image sets, where only the sandbox itself can say so."""


@runtime_checkable
class Describing(Protocol):
    """A sandbox that knows its facts. One that does not gets those of an ordinary image."""

    def facts(self) -> Facts: ...


@dataclass(frozen=True, slots=True)
class Unenforced:
    """Something that was asked for and that this host cannot hold a sandbox to."""

    name: str
    """A field of `Limits`, `network`, or `isolation`."""
    reason: str
    remedy: str


def said_together(limits: Iterable[Unenforced]) -> list[tuple[str, str, str]]:
    """Names, reason and remedy: once for all that share the last two."""
    names: dict[tuple[str, str], list[str]] = {}
    for limit in limits:
        names.setdefault((limit.reason, limit.remedy), []).append(limit.name)
    return [(", ".join(those), reason, remedy) for (reason, remedy), those in names.items()]


@runtime_checkable
class Enforcing(Protocol):
    """A sandbox that says which of its limits are not enforced. One without this ability enforces them all.

    A substrate, once started, may say it of all its sandboxes as far as it knows before it has made one.
    """

    @property
    def unenforced(self) -> Sequence[Unenforced]: ...


@runtime_checkable
class Rebindable(Protocol):
    """A sandbox whose limits can be changed while it lives, from outside only."""

    async def bind_limits(self, limits: Limits) -> Sequence[Unenforced]:
        """Hold it to `limits` from now on; what it is not held to is returned, with the reason, and stays as it was.

        Meant for a sandbox in which nothing runs yet: actions under way may end with an error. Raise `SandboxLost` when it is gone.
        """


@runtime_checkable
class UserBinding(Protocol):
    """A sandbox whose own user can be changed while it lives."""

    async def bind_user(self, user: str | None) -> None:
        """Everything that names no other user is `user`'s from now on, or the sandbox's first user's; `facts` says so.

        `UsageError` when there is no such user inside. Meant for a sandbox in which nothing runs yet.
        """


@runtime_checkable
class BindingLate(Protocol):
    """A substrate all of whose sandboxes take their limits (`Rebindable`), their user (`UserBinding`) or both late.

    What is not named here is fixed when a sandbox is created, and one that was made ahead serves only leases with the same.
    `limits` are memory, processes and CPU; `disk` goes with them where that can be changed too. A substrate that holds nobody to any
    limit names both: all are the same to it.
    """

    @property
    def binds_late(self) -> frozenset[Literal["limits", "disk", "user"]]: ...


@runtime_checkable
class Explaining(Protocol):
    """A sandbox that may know why it never came up."""

    async def loss_reason(self) -> str | None:
        """The step that failed and its remedy, or None; asked once the channel has ended before the cell greeted."""


@runtime_checkable
class UserSwitching(Protocol):
    """A sandbox in which commands may run as users other than the one it was created for."""

    async def provide_worker(self, user: str) -> None:
        """Give the cell hands that act as `user`; `UsageError` when there is no such user inside.

        Called when the cell answers that it has none; the action is then asked for once more.
        """


@runtime_checkable
class Freezable(Protocol):
    """A sandbox whose processes can be stopped all at once and go on later as if nothing had been."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


@runtime_checkable
class Retiring(Protocol):
    """A sandbox that can be told that its end is near."""

    def retire(self) -> None:
        """Nothing in it has to get any further: what runs shall take no time from its successor. `destroy` follows."""


@runtime_checkable
class Layered(Protocol):
    """A substrate whose sandboxes stand on directories that somebody else prepared."""

    @property
    def marks(self) -> Literal["trusted", "user"]:
        """In which extended attributes its layers keep what was deleted or replaced; known once started."""

    async def create_on(self, spec: EnvSpec, root: Root, *, cache: Path | None = None) -> LayeredSandbox:
        """As `create`, over `root` whatever `spec.image` says. `cache` is a directory that is seen, writable, at /var/cache/untax."""


class Export(Protocol):
    """Writes a chain to a file, or to whoever reads a pipe, as an image with a name and labels. Blocking: call it in a thread."""

    def __call__(
        self, root: Root, target: Path, name: str, labels: Mapping[str, str], /, to: Literal["oci", "squashfs", "tar"] | None = None
    ) -> object:
        """`to`: another form than what the substrate `takes`; `tar` is the merged tree alone, written in one go."""


@runtime_checkable
class Importing(Protocol):
    """A substrate that cannot stand on directories of this machine: it takes each chain in once, as an image of its own."""

    builder: str
    """The substrate in whose sandboxes missing stages are built: what is taken in is then the same everywhere."""
    takes: Literal["oci", "squashfs", "erofs"]
    """As what a chain is written for it."""

    @property
    def image_sockets(self) -> Mapping[str, str]:
        """Where images of these schemes are to be asked for; known once started."""

    async def own_root(self, image: str) -> Root | None:
        """A root for an image that it has itself, by the name that a spec has for it; None for any other."""

    async def take_in(self, key: str, root: Root, export: Export) -> Root:
        """A root that stands for the chain `root`, known by `key`: found again, or taken in as `export` writes it, once for all who ask."""

    async def discard(self, root: Root) -> None:
        """Give up what was taken in, unless a sandbox stands on it. Safe to call twice."""

    async def create_on(self, spec: EnvSpec, root: Root, *, cache: Path | None = None) -> Sandbox:
        """As `create`, over a root that one of the others gave, whatever `spec.image` says."""


@runtime_checkable
class Evicting(Protocol):
    """An importing substrate that removes what it took in when it takes in too much."""

    def has_taken(self, root: Root) -> bool:
        """Whether what `take_in` gave still stands for its chain; otherwise it is taken in again."""


class LayeredSandbox(Sandbox, Protocol):
    """A sandbox over layers: what was written in it lies apart from them."""

    root: Root
    """What it stands on now; more than it was created on once a snapshot was taken."""

    @property
    def upper(self) -> Path:
        """Where the host can read what was written since. The workload may change it at any time: follow no link in it."""

    async def snapshot(self) -> Frozen:
        """Freeze what was written into a layer while the sandbox lives on. Nothing changes in it afterwards."""

    async def is_pristine(self) -> bool:
        """Whether nothing was written, nothing runs and nothing was mounted since it was created, as far as can be proven."""


@runtime_checkable
class Reviving(Protocol):
    """A substrate whose sandboxes are `Remembering`, and whose `create_on` a root with `memory` goes on with what was put down."""

    revives: bool

    def parts(self, root: Root) -> Sequence[Path]:
        """The directories that hold what was put down, for who keeps it beyond the engine: first what several have in common. Nothing in them changes."""

    async def take_up(self, root: Root, stored: Sequence[Path]) -> Remembered:
        """What was put down by another engine, its parts where they were copied to; they stay there as long as it is not discarded.

        `root` says the rest. `StageUnavailable` when memory that was left there cannot go on here.
        """


@runtime_checkable
class Remembering(Protocol):
    """A sandbox whose processes can be put down with their memory, for others to go on with."""

    async def remember(self) -> Remembered:
        """Put down everything as it is now, files included, while the sandbox lives on. Its channel is silent meanwhile (`Channel.silence`)."""


class Remembered(Protocol):
    """Files and processes of a sandbox at one moment."""

    root: Root
    """What copies are created on: its `memory` is set."""

    async def discard(self) -> None:
        """Let go of it; those who went on from it are not touched. Safe to call twice."""


class Frozen(Protocol):
    """What a sandbox had written up to one moment, as a layer."""

    id: str
    root: Root
    """What a fork is created on: the chain with this layer on top."""
    tree: Path
    """Where the host can read the layer."""
    how: Literal["swapped", "cloned"]
    """`swapped`: the sandbox goes on above it, nothing was copied. `cloned`: something was open for writing, so it was copied while frozen."""

    async def discard(self) -> None:
        """Let go of it; it stays until the last sandbox that stands on it is gone. Safe to call twice."""


@runtime_checkable
class Diagnosing(Protocol):
    """A substrate that can say more about this machine than whether it can be used."""

    def evidence(self) -> Sequence[str]:
        """What was looked at and found, one line each; shown by `untax doctor`."""


@runtime_checkable
class Reluctant(Protocol):
    """A substrate that may be too slow on this machine to be tried by the way."""

    @property
    def is_slow_to_try(self) -> bool:
        """Whether one sandbox takes seconds; its evidence then says how to try one on purpose."""


@runtime_checkable
class Fastidious(Protocol):
    """A substrate that has only images of some kinds, and can say so by a name alone."""

    def image_trouble(self, image: str) -> str | None:
        """Why a sandbox of it can never stand on the image of that name, with the remedy; None when it may."""


@runtime_checkable
class Doubtful(Protocol):
    """A substrate whose boundary does not hold on every machine that it runs on."""

    def boundary_trouble(self) -> str | None:
        """Why its sandboxes have no boundary here, with the remedy; None when they have. Blocks, for seconds unless it is started."""


@dataclass(frozen=True, slots=True)
class Typical:
    """What a substrate costs where nothing was measured: of the right order, and no more."""

    start_s: float
    """Until a command can run, cold, its image in place."""
    action_s: float
    """Added to every action over the held channel."""


@runtime_checkable
class Priced(Protocol):
    """A substrate that says what it typically costs, for a choice between several. One that does not is judged by its isolation."""

    @property
    def typical(self) -> Typical: ...


@runtime_checkable
class Seeing(Protocol):
    """A substrate whose commands may see the files of the machine that untax runs on, by the same paths.

    No isolation does not mean that: commands on another machine have none and see other files.
    """

    sees_host_files: bool


@runtime_checkable
class Incumbent(Protocol):
    """A sandbox that can also run a command the way its users do today, one exec at a time."""

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """Run `argv` without a shell. `timeout` is a command that takes too long on a backend that answers; one that does not answer is a
        `BackendError`, soon after the deadline. Raise `SandboxLost` only when the sandbox itself is gone.
        """


@runtime_checkable
class IncumbentMaking(Protocol):
    """A substrate whose users without a channel get their sandboxes another way than by `create`, and pay another price for it."""

    async def create_incumbent(self, spec: EnvSpec) -> Bare:
        """As `create`, of an `Incumbent` and `Furnishing` one; `spec.network` is the sandbox's from the start."""


@runtime_checkable
class Furnishing(Protocol):
    """A sandbox that needs no channel for what is to lie in it before the first command."""

    async def furnish(self, trees: Mapping[str, Path]) -> None:
        """Put these trees where their names say."""


# ---- for the meter ----


@runtime_checkable
class Tidying(Protocol):
    """A substrate that removes the files of destroyed sandboxes in the background."""

    async def wait_tidy(self) -> None:
        """Return once none is under way."""


@runtime_checkable
class Orchestrated(Protocol):
    """A sandbox that a control plane placed, and whose own events say how long that took."""

    @property
    def control_plane_ns(self) -> int:
        """Of `create` and `wait_ready`: admission, scheduling, whatever is neither the image's transfer nor the start itself."""


@runtime_checkable
class Detailing(Protocol):
    """A sandbox that has something to say about itself in the record of a trial: a runtime, an accelerator, a node."""

    @property
    def detail(self) -> Mapping[str, Any]: ...


@runtime_checkable
class ImageForgetting(Protocol):
    """A substrate that can drop an image, so that the next `create` finds it absent."""

    async def forget_image(self, spec: EnvSpec) -> None: ...
