"""The image `host`: this machine's own software, shown by an allow-list.

A sandbox sees views of the directories that hold programs, a few files of /etc copied into a skeleton, and nothing else: no
home directory, no /var, no /run, no secret. What is not on the lists below does not exist inside.

A skeleton is prepared once and shared by all engines of one state directory. Whoever uses one holds a lock on it for the life
of the process, so that those which no longer fit can be told from those in use, and removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from untax._remove import remove_tree
from untax.core.errors import StageUnavailable, UsageError
from untax.core.root import Root, View
from untax.core.stage import Identity
from untax.layers.sources import in_thread

_PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_EMPTY = ("etc", "home", "mnt", "opt", "root", "run", "srv", "var", "var/cache", "var/lib", "var/log")
# What programs read of /etc to work at all: the loader, locales, time, names, certificates, alternatives, interpreters.
_ETC = (
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "inputrc",
    "java-17-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.conf",
    "localtime",
    "lsb-release",
    "magic",
    "magic.mime",
    "mime.types",
    "networks",
    "os-release",
    "perl",
    "profile",
    "protocols",
    "redhat-release",
    "rpc",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
_WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
}
_VERSION = "3"  # raised when what is put into a skeleton changes
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# What package managers rewrite whenever the software in the views changes: stages over an older state are then built anew.
_PACKAGE_DATABASES = ("/var/lib/dpkg/status", "/var/lib/rpm/rpmdb.sqlite", "/var/lib/rpm/Packages", "/lib/apk/db/installed")

_MOST_VIEWS = 30  # what the launcher takes, with one to spare
# Below the prefix of an interpreter a mount may be anything, a secret too; only these places hold software.
_OF_AN_INTERPRETER = ("bin", "include", "lib", "lib64", "share")
_NO_FILES = (
    *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs", "fusectl"),
    *("hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs"),
)
_REMOTE = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs", "fuse", "ncpfs", "coda", "gpfs", "orangefs")
_ANSWER_S = 1.0  # a server that takes longer to answer would have every sandbox wait for it


def make(cache: Path | None) -> HostImage:
    return HostImage(cache)


class HostImage:
    """The source `host`. `cache` is where skeletons are kept; it may be left out by whoever only wants to know what the image is."""

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache

    async def identify(self) -> Identity:
        return await in_thread(lambda _: host_identity())

    async def root(self) -> Root:
        if self._cache is None:
            raise UsageError("the image 'host' needs a directory to prepare its skeleton in: find('host', cache=…)")
        cache = self._cache
        return await in_thread(lambda _: host_root(cache))


def host_identity() -> Identity:
    """What this machine is now: good nowhere else, and only until its software changes."""
    facts = [*_facts_now().lines, *_file_facts(_PACKAGE_DATABASES), *_file_facts(_site_directories())]
    return Identity(f"host:{machine_id()}:{_key(facts)}", is_portable=False)


def host_root(cache: Path) -> Root:
    """The image, its skeleton built below `cache` unless one that fits is there. Blocks; `StageUnavailable` when it cannot be built."""
    facts = _facts_now()
    skeleton = cache / f"host-{_key(facts.lines)}"
    with _guard:
        if (str(skeleton) not in _held) or not skeleton.is_dir():
            try:
                _provide(skeleton, facts)
            except OSError as exc:
                raise StageUnavailable("image", f"the image 'host' cannot be prepared in {cache}: {exc.strerror}: {exc.filename}") from exc
    views = tuple(View(place, place) for place in facts.views)
    return Root(layers=(str(skeleton),), views=views, path=facts.path)


def machine_id() -> str:
    """Which machine this is. Not its id as such, which is nobody else's business."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError, ValueError):
            if text := Path(path).read_text().strip():
                return _key(["machine", text])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _key(["boot", os.uname().nodename, boot])


# ---- what there is to be shown ----


@dataclass(frozen=True, slots=True)
class _Facts:
    views: tuple[str, ...]
    """Outermost first."""
    path: str
    lines: tuple[str, ...]
    """What a skeleton depends on."""


_log = logging.getLogger("untax.layers")
_guard = threading.Lock()
_held: dict[str, int] = {}  # skeletons that this process uses, and the locks that say so
_users: Counter[str] = Counter()  # by the directory that skeletons lie in
_latest: tuple[_Quick, _Facts] | None = None


class _Quick(NamedTuple):
    """What is cheap to find out, and changes with nearly everything else."""

    mounts: str
    interpreter: tuple[str, str]
    others: tuple[str, ...]


def _facts_now() -> _Facts:
    """Found out again when something at the top of it has changed: a whole look takes milliseconds, and every lease asks."""
    global _latest
    others = (*_links(), *_file_facts(f"/etc/{name}" for name in _ETC))
    quick = _Quick(_mount_table(), (sys.prefix, sys.base_prefix), others)
    before, facts = _latest or (None, None)
    if before is None or facts is None or before != quick:
        # Hosts mount and unmount all day, seldom below a view.
        views, path = _views_and_path(quick.mounts)
        is_only_mounts = before is not None and before[1:] == quick[1:] and facts is not None and facts.views == views
        if facts is None or not is_only_mounts:
            facts = _Facts(views, path, (_VERSION, *views, path, *_links(), *_etc_facts()))
        _latest = quick, facts
    return facts


def _views_and_path(mount_table: str) -> tuple[tuple[str, ...], str]:
    programs = [f"/{name}" for name in _PROGRAMS if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")]
    prefixes = _interpreter_prefixes()
    mounts = submounts(mount_table, [*programs, *(f"{prefix}/{name}" for prefix in prefixes for name in _OF_AN_INTERPRETER)])
    answering = [place for place, kind in mounts if _is_directory(place, is_remote=kind.startswith(_REMOTE))]
    places = [*programs, *prefixes, *sorted(answering)]
    views = tuple(places[:_MOST_VIEWS])
    if missing := [*(place for place, _ in mounts if place not in answering), *places[_MOST_VIEWS:]]:
        # A file that is mounted over another is such a one too: overlay takes directories only.
        _log.warning("not in the image 'host', because no directory, no answer in time, or too many mounts: %s", ", ".join(missing))
    return views, ":".join([*(f"{prefix}/bin" for prefix in prefixes if os.path.isdir(f"{prefix}/bin")), _SYSTEM_PATH])


def submounts(table: str, places: Sequence[str]) -> list[tuple[str, str]]:
    """Mount points below `places`, with their types, out of /proc/self/mountinfo: overlay does not see what is mounted below a layer.

    Left out are mounts without files of their own, and those that only come to be when somebody looks.
    """
    found: dict[str, str] = {}
    for line in table.splitlines():
        fields = line.split(" ")
        if len(fields) < 9 or "-" not in fields[6:]:
            continue
        place, kind = _unescaped(fields[4]), fields[fields.index("-", 6) + 1]
        found.pop(place, None)
        if kind not in _NO_FILES and any(place.startswith(f"{above}/") for above in places):
            found[place] = kind  # of two at one place the later hides the earlier
    return list(found.items())


def _unescaped(text: str) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8) & 0xFF]), os.fsencode(text)))


def _is_directory(place: str, *, is_remote: bool) -> bool:
    """Whether a mount is there and answers. A server that is gone would hold us as long as the kernel is patient with it."""
    if not is_remote:
        return os.path.isdir(place)
    answer: list[bool] = []
    asking = threading.Thread(target=lambda: answer.append(os.path.isdir(place)), daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    return answer == [True]


def _mount_table() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""


_ITS_OWN = ("/tmp", "/dev", "/proc")


def _interpreter_prefixes() -> list[str]:
    """Where the running interpreter and its packages are, unless a view of /usr holds them already.

    A prefix that is a home directory, or holds one, would show more than an interpreter: it is left out. So is one where a sandbox
    has something of its own, a /tmp for instance, which would cover it.
    """
    found: list[Path] = []
    home = Path.home().resolve()
    for prefix in (Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()):
        is_wide = prefix == home or prefix in home.parents
        is_covered = any(prefix.is_relative_to(own) for own in _ITS_OWN)
        if is_covered:
            _log.warning(
                "%s is not in the image 'host': a sandbox has a %s of its own; use an interpreter that lies elsewhere",
                prefix,
                prefix.parents[-2],
            )
        if prefix.is_relative_to("/usr") or is_wide or is_covered or any(prefix.is_relative_to(other) for other in found):
            continue
        found = [other for other in found if not other.is_relative_to(prefix)] + [prefix]
    return [str(prefix) for prefix in found]


def _site_directories() -> list[str]:
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _links() -> list[str]:
    return [f"{name} -> {os.readlink(f'/{name}')}" for name in _PROGRAMS if os.path.islink(f"/{name}")]


def _file_facts(paths: Iterable[str]) -> list[str]:
    facts = []
    for path in paths:
        with contextlib.suppress(OSError):
            facts.append(_fact(path, os.lstat(path)))
    return facts


def _etc_facts() -> list[str]:
    """Everything that is copied, down to each file: an edit in place changes no directory."""
    facts = []
    for name in _ETC:
        facts += _file_facts([f"/etc/{name}"])
        for directory, _, files in os.walk(f"/etc/{name}"):
            facts += _file_facts([directory, *sorted(f"{directory}/{file}" for file in files)])
    return facts


def _fact(path: str, found: os.stat_result) -> str:
    return f"{path} {found.st_mode:o} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _key(lines: Iterable[str]) -> str:
    return hashlib.sha256(b"\0".join(os.fsencode(line) for line in lines)).hexdigest()[:16]


# ---- skeletons ----


def use(cache: Path) -> None:
    """Say that somebody in this process works with the skeletons below `cache`, until `let_go`."""
    with _guard:
        _users[str(cache)] += 1


def let_go(cache: Path) -> None:
    """The last in this process to do so lets go of the locks too: they would keep a file system from being unmounted."""
    with _guard:
        _users[str(cache)] -= 1
        if _users[str(cache)] <= 0:
            del _users[str(cache)]
            for skeleton in [one for one in _held if Path(one).parent == cache]:
                os.close(_held.pop(skeleton))


def _provide(skeleton: Path, facts: _Facts) -> None:
    """Have it there and locked, and remove those that nobody holds any more. Behind a gate: whoever removes must see every lock."""
    cache = skeleton.parent
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _gate(cache):
        if str(skeleton) not in _held:
            fd = os.open(cache / f"{skeleton.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_SH)
            _held[str(skeleton)] = fd
        if not skeleton.is_dir():
            _build(skeleton, facts)
        _sweep(cache)


def _sweep(cache: Path) -> None:
    names = {name.removesuffix(".lock") for name in os.listdir(cache) if name.startswith("host-")}
    for name in sorted(names):
        lock = cache / f"{name}.lock"
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(cache / name)
            lock.unlink()
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(fd)
    for name in os.listdir(cache):
        if name.startswith(".host-"):  # half of one, by somebody who died: the gate is ours
            remove_tree(cache / name)


@contextlib.contextmanager
def _gate(cache: Path) -> Iterator[None]:
    fd = os.open(cache / ".gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _build(skeleton: Path, facts: _Facts) -> None:
    partial = skeleton.with_name(f".{skeleton.name}")
    remove_tree(partial)
    try:
        _fill(partial, facts)
        partial.rename(skeleton)
    finally:
        remove_tree(partial)


def _fill(root: Path, facts: _Facts) -> None:
    for name in (*_EMPTY, "var/tmp"):
        (root / name).mkdir(parents=True)
    for name in _PROGRAMS:
        if os.path.islink(f"/{name}"):
            (root / name).symlink_to(os.readlink(f"/{name}"))
    for place in facts.views:
        if not any(place.startswith(f"{other}/") for other in facts.views):  # one inside another lies there, not here
            (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in _ETC:
        target = root / "etc" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(Path("/etc", name), target)
    for name, text in _WRITTEN.items():
        (root / "etc" / name).write_text(text)
        (root / "etc" / name).chmod(0o644)
    for directory, _, _ in os.walk(root):  # whatever the engine's own umask
        Path(directory).chmod(0o755)
    (root / "var/tmp").chmod(0o1777)


def _copy(source: Path, target: Path) -> None:
    """What cannot be read is left out; links are kept as links. A full disk is an error: half a skeleton would be kept for good."""
    try:
        mode = os.lstat(source).st_mode
        if stat.S_ISLNK(mode):
            target.symlink_to(os.readlink(source))
        elif stat.S_ISDIR(mode):
            names = sorted(os.listdir(source))
            target.mkdir()
            for name in names:
                _copy(source / name, target / name)
        elif stat.S_ISREG(mode):
            shutil.copy2(source, target)
    except (FileNotFoundError, PermissionError):
        pass  # ours to write, so it is the source that is gone or closed to us
