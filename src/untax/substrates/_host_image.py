"""The image `host`: this machine's own software, shown by an allow-list.

A sandbox sees read-only views of the directories that hold programs, a few files of /etc copied into a skeleton, and
nothing else: no home directory, no /var, no /run, no secret. What is not on the lists below does not exist inside.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

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
_VERSION = b"2"


@dataclass(frozen=True, slots=True)
class HostImage:
    skeleton: str
    views: tuple[tuple[str, str], ...]
    """Host directory and its place inside, outermost first."""
    path: str


def host_image(cache: Path) -> HostImage:
    """The image, its skeleton built below `cache` unless one that still fits is there."""
    programs = [Path("/", name) for name in _PROGRAMS]
    prefixes = _interpreter_prefixes()
    views = tuple((str(place), str(place)) for place in (*(p for p in programs if p.is_dir() and not p.is_symlink()), *prefixes))
    key = hashlib.sha256(b"\0".join((_VERSION, *(os.fsencode(at) for at, _ in views), *_etc_facts()))).hexdigest()[:16]
    skeleton = cache / f"host-{key}"
    if not skeleton.is_dir():
        _build(skeleton, programs, views)
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    path = ":".join([*(f"{prefix}/bin" for prefix in prefixes if (prefix / "bin").is_dir()), system])
    return HostImage(str(skeleton), views, path)


def _interpreter_prefixes() -> list[Path]:
    """Where the running interpreter and its packages are, unless a view of /usr holds them already.

    A prefix that is a home directory, or holds one, would show more than an interpreter: it is left out.
    """
    found: list[Path] = []
    home = Path.home().resolve()
    for prefix in (Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()):
        is_wide = prefix == home or prefix in home.parents
        if prefix.is_relative_to("/usr") or is_wide or any(prefix.is_relative_to(other) for other in found):
            continue
        found = [other for other in found if not other.is_relative_to(prefix)] + [prefix]
    return found


def _etc_facts() -> list[bytes]:
    facts = []
    for name in _ETC:
        try:
            st = os.lstat(f"/etc/{name}")
        except OSError:
            continue
        facts.append(f"{name} {st.st_mtime_ns} {st.st_size}".encode())
    return facts


def _build(skeleton: Path, programs: list[Path], views: tuple[tuple[str, str], ...]) -> None:
    partial = skeleton.with_name(f".{skeleton.name}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _fill(partial, programs, views)
        partial.rename(skeleton)
    except OSError:
        if not skeleton.is_dir():  # another engine may have been first; its skeleton is as good
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(root: Path, programs: list[Path], views: tuple[tuple[str, str], ...]) -> None:
    for name in (*_EMPTY, "var/tmp"):
        (root / name).mkdir(parents=True)
    for place in programs:
        if place.is_symlink():
            (root / place.name).symlink_to(os.readlink(place))
    for _, inside in views:
        (root / inside.lstrip("/")).mkdir(parents=True, exist_ok=True)
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
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.is_dir():
            names = sorted(os.listdir(source))
            target.mkdir()
            for name in names:
                _copy(source / name, target / name)
        elif source.is_file():
            shutil.copy2(source, target)
    except (FileNotFoundError, PermissionError):
        pass  # ours to write, so it is the source that is gone or closed to us
