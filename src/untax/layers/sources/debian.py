"""`debian:`, a small Debian made on the spot from the mirror that this machine's apt uses: `debian:bookworm[+package,package]`.

An image by recipe is its recipe: the same text means the same image, though a mirror that has moved on gives newer packages
to whoever builds it later. Whatever else could differ between two builds from one state of a mirror is removed: dates of
files, logs, caches, the machine's id.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.core.root import ImageConfig
from untax.core.stage import Identity
from untax.layers.sources import Fetched, Progress, _apt, progress_from_thread
from untax.layers.sources._http import Halt, in_thread
from untax.layers.sources._reference import Platform, this_platform
from untax.layers.unpack import unpack

if TYPE_CHECKING:
    from untax.layers.store import LayerStore

_SUITE = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
# Debian's policy, less a dash or plus at the end of names that apt would take for an order to remove or install.
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]*[a-z0-9](?:\+\+)?|[a-z0-9]\+\+")
_LONGEST_NAME = 128
_MOST_PACKAGES = 1000
_BUILD_S = 3600.0  # a minimal system takes 15 s from a near mirror; a few hundred packages from a far one, half an hour
_END_S = 30.0  # for the builder to remove what it had made, when it is told to stop
_LOG_BYTES = 64 << 10
_VERSION = 1  # part of the recipe: raised when the same text is built to something else than before
# What apt and wget say when it was the network.
_NETWORK = re.compile(
    rb"Temporary failure resolving|Could not resolve|Could not connect|Connection (?:failed|timed out|refused)|Unable to connect|"
    rb"\b(?:429|50[0234]) +[A-Z][a-z]|Hash Sum mismatch|Mirror sync in progress"
)

# Runs outside the new system, whose directory is $1. Files get no later date than the mirror's own newest one.
_TIDY = """
newest=$(cat var/lib/apt/lists/*Release 2>/dev/null | sed -n 's/^Date: //p' | while read -r text; do date --utc --date="$text" +%s; done | sort -n | tail -n 1)
newest=${newest:-0}
rm -rf var/lib/apt/lists/* var/cache/apt/* var/cache/debconf/*-old var/cache/ldconfig/aux-cache var/lib/dpkg/*-old
rm -f etc/apt/apt.conf.d/99mmdebstrap etc/hostname etc/resolv.conf var/lib/dbus/machine-id var/lib/systemd/random-seed
find var/log -type f -name '*.*' -delete
find var/log -type f -exec truncate --size=0 {} +
: >etc/machine-id
mkdir -p var/lib/apt/lists/partial var/cache/apt/archives/partial
if [ "$newest" -gt 0 ]; then
    sed -i -E "s/^([^:]*:[^:]*:)[0-9]+:/\\1$((newest / 86400)):/" etc/shadow
    find . -xdev \\( -path ./dev -o -path ./proc -o -path ./sys \\) -prune -o ! -type d -newermt "@$newest" -exec touch --no-dereference --date="@$newest" {} +
fi
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    suite: str
    packages: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.suite + (f"+{','.join(self.packages)}" if self.packages else "")


def make(scheme: str, name: str) -> DebianImage:
    del scheme  # there is one
    return DebianImage(parse(name))


def parse(text: str) -> Recipe:
    """`suite[+package,package…]`, the packages in any order and any number of times; anything else is a `UsageError`."""
    suite, plus, rest = text.partition("+")
    packages = rest.split(",") if plus else []
    if not _SUITE.fullmatch(suite) or len(suite) > _LONGEST_NAME:
        raise UsageError(
            f"debian image {text[:80]!r}: a release is a word in lower case, as in debian:bookworm or debian:bookworm+git,python3"
        )
    for package in packages:
        if not _PACKAGE.fullmatch(package) or len(package) > _LONGEST_NAME:
            raise UsageError(f"debian image {text[:80]!r}: {package[:80]!r} is not the name of a package")
    if len(packages) > _MOST_PACKAGES:
        raise UsageError(f"debian image: {len(packages)} packages; at most {_MOST_PACKAGES} are taken")
    return Recipe(suite, tuple(sorted(set(packages))))


class DebianImage:
    def __init__(self, recipe: Recipe, *, platform: Platform | None = None) -> None:
        self._recipe = recipe
        self._platform = platform or this_platform()

    async def identify(self) -> Identity:
        return Identity(f"debian:{_VERSION} minbase {self._platform} {self._recipe}")

    async def fetch(self, store: LayerStore, progress: Progress) -> Fetched:
        halt, note = Halt(), progress_from_thread(progress)
        return await in_thread(halt, lambda: self._build(store, note, halt))

    def _build(self, store: LayerStore, note: Progress, halt: Halt) -> Fetched:
        what = f"debian:{self._recipe}"
        builder = choose_builder()
        sources = _apt.for_suite(_apt.read_sources(), self._recipe.suite)
        if not sources:
            raise StageFailed(
                "image", f"{what}: this machine's apt gets nothing from a Debian mirror; add one below /etc/apt/sources.list.d"
            )
        note(f"install {what}", 0, None)

        def on_read(read: int) -> None:
            halt.check()
            note(f"unpack {what}", read, None)

        with store.draft() as draft:
            with builder(self._recipe, sources, halt) as archive:
                unpacked = unpack(archive, draft.tree, marks=store.marks, has_whiteouts=False, on_read=on_read)
            for name in ("dev", "proc", "sys"):  # what is mounted there is the sandbox's own, and not packed
                (draft.tree / name).mkdir(mode=0o755, exist_ok=True)
            layer = draft.publish()
        config = ImageConfig(env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
        return Fetched((layer.id,), config, tuple(f"left out: {one}" for one in unpacked.notes))


Builder = Callable[[Recipe, Sequence[_apt.Source], Halt], contextlib.AbstractContextManager[BinaryIO]]
"""Gives a tar of the new system to read. Whether it could be built is known when it has been read: leaving it may raise."""


def choose_builder(have: Callable[[str], bool] | None = None) -> Builder:
    """What this machine can build with; `StageUnavailable` with the remedy when there is nothing."""
    have = have or (lambda name: shutil.which(name, path=_path()) is not None)
    is_root = os.geteuid() == 0
    if have("mmdebstrap") and (is_root or have("newuidmap")):
        return mmdebstrap
    if have("debootstrap") and is_root:
        return debootstrap
    if have("mmdebstrap"):
        raise StageUnavailable("image", "an ordinary user needs newuidmap to build a Debian: apt install uidmap")
    raise StageUnavailable("image", "there is nothing here to build a Debian with: apt install mmdebstrap")


@contextlib.contextmanager
def mmdebstrap(recipe: Recipe, sources: Sequence[_apt.Source], halt: Halt) -> Iterator[BinaryIO]:
    """As root in a mount namespace of its own; for an ordinary user in a user namespace with the ids that /etc/subuid lends them."""
    argv = [
        "mmdebstrap",
        f"--mode={'root' if os.geteuid() == 0 else 'unshare'}",
        "--variant=minbase",
        "--format=tar",
        "--skip=cleanup/apt,cleanup/reproducible,output/dev",  # done below, before files get their dates; a sandbox has its own /dev
        f"--customize-hook={_tidying(sources)}",
        *(f"--aptopt={option}" for option in _apt.passed_on()),
        *([f"--include={','.join(recipe.packages)}"] if recipe.packages else []),
        recipe.suite,
        "-",
        *(source.line() for source in sources),
    ]
    with _Program(argv, halt) as program:
        yield program.output


@contextlib.contextmanager
def debootstrap(recipe: Recipe, sources: Sequence[_apt.Source], halt: Halt) -> Iterator[BinaryIO]:
    """As root only. It installs from the release alone; updates and security fixes are a matter of `apt upgrade` in a set-up step."""
    main = next(source for source in sources if source.suite == recipe.suite)
    keys = [f"--keyring={value}" for name, value in main.options if name == "signed-by"]
    extra = [f"--include={','.join(recipe.packages)}"] if recipe.packages else []
    with tempfile.TemporaryDirectory(prefix="untax-debian-") as directory:
        os.chmod(directory, 0o755)  # noqa: S103 - it becomes the new system's /
        with _Program(["debootstrap", "--variant=minbase", *keys, *extra, recipe.suite, directory, main.uri], halt) as program:
            program.wait()
        with _Program(["sh", "-c", _tidying(sources), "sh", directory], halt) as program:
            program.wait()
        pack = "tar --create --one-file-system --numeric-owner --sort=name --xattrs --exclude=./dev/* --exclude=./proc/* --exclude=./sys/*"
        with _Program([*pack.split(), f"--directory={directory}", "."], halt) as program:
            yield program.output


def _tidying(sources: Sequence[_apt.Source]) -> str:
    """What apt in the image reads is said without passwords, and without keys that only this machine has."""
    lines = " ".join(shlex.quote(source.public().line()) for source in sources)
    return f"""set -eu; cd "$1"; printf '%s\\n' {lines} >etc/apt/sources.list{_TIDY}"""


class _Program:
    """A program whose output is read as it comes, and which is ended with all it started when nobody waits for it."""

    def __init__(self, argv: Sequence[str], halt: Halt) -> None:
        self._argv, self._halt = argv, halt
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed on the way out
        self._is_late = threading.Event()
        self._watchdog = threading.Timer(_BUILD_S, self._late)

    def __enter__(self) -> _Program:
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=_environment(),
                cwd="/",
                start_new_session=True,  # so that what it starts can be ended with it
            )
        except OSError as exc:
            self._log.close()
            raise StageUnavailable("image", f"{self._argv[0]} cannot be run: {exc.strerror}") from exc
        self._watchdog.daemon = True
        self._watchdog.start()
        try:
            self._halt.hold(self._terminate)
        except BaseException:
            self._finish()
            raise
        return self

    @property
    def output(self) -> BinaryIO:
        assert self._process.stdout is not None
        return self._process.stdout  # type: ignore[return-value]

    def wait(self) -> None:
        """Read to the end what is of no interest."""
        while data := self.output.read(65536):
            self._log.write(data)

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> None:
        """What stopped it, if it was stopped; else its own failure, which a reader took for a damaged archive; else the reader's."""
        try:
            if exc is None or (isinstance(exc, StageFailed) and not self.output.read(1)):
                self._process.wait()
        finally:
            code = self._process.poll()
            self._finish()
            log = self._read_log()
        if exc is not None and not isinstance(exc, Exception):
            return
        self._halt.check()
        if self._is_late.is_set():
            raise StageUnavailable("image", f"{self._argv[0]} took more than {_BUILD_S:.0f} s", log)
        if code:
            kind = StageUnavailable if is_network_failure(log) else StageFailed
            raise kind("image", f"{self._argv[0]} failed with exit status {code}", log)

    def _finish(self) -> None:
        """Nothing of it runs afterwards."""
        self._watchdog.cancel()
        self._halt.drop(self._terminate)
        self._terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self.output.close()

    def _read_log(self) -> bytes:
        with self._log as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
            return log.read()

    def _late(self) -> None:
        self._is_late.set()
        self._terminate()

    def _terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        # Of a group whose leader has been waited for the number may be another's by now.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def is_network_failure(log: bytes) -> bool:
    """Whether a builder's words say that it may work another time."""
    return _NETWORK.search(log) is not None


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _environment() -> dict[str, str]:
    """What a builder needs to know, and no more: package scripts run with it."""
    wanted = ("TMPDIR", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    return {"PATH": _path(), "LANG": "C.UTF-8", "HOME": "/nonexistent", **{name: os.environ[name] for name in wanted if name in os.environ}}
