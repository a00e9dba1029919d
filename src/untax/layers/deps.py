"""The dependency stage: what set-up commands find, and what is kept of what they leave.

Commands run in order in one sandbox over the stages below, as root inside where the engine is root. They see the
variables below and none of a lease's: those bind late, and one layer serves leases that differ in them. A command that needs a
variable sets it itself. Package managers keep their caches in a directory that builds of one repository over one
image share and no layer holds. Afterwards Python's files are compiled, so that no rollout does it again.
"""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import replace
from types import MappingProxyType

from untax.core.spec import EnvSpec, FrozenEnv, Network
from untax.core.stage import WORKDIR
from untax.layers.copy import Owner, Skip
from untax.layers.marks import Marks
from untax.layers.repo import HOME, USER_ID

CACHE = "/var/cache/untax"
"""Where a build sees its cache directory."""

# Only what an installed tree can do without: the module caches of Go, Cargo or Maven *are* the installation, offline.
ENV = MappingProxyType(
    {
        "PIP_CACHE_DIR": f"{CACHE}/pip",
        "UV_CACHE_DIR": f"{CACHE}/uv",
        "UV_LINK_MODE": "copy",  # the cache is another file system, and not to be linked from
        "POETRY_CACHE_DIR": f"{CACHE}/poetry",
        "npm_config_cache": f"{CACHE}/npm",
        "YARN_CACHE_FOLDER": f"{CACHE}/yarn",
        "CCACHE_DIR": f"{CACHE}/ccache",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        # The system whose packages this would break is a layer of one spec.
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        # The work tree is the user's, the commands are root's.
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
)

WHEELS = "/var/tmp/wheels"
"""Where a build sees the directory of packages that its engine was given; no part of the layer."""


def wheels_env(network: Network) -> dict[str, str]:
    """With which Python's installers find them there, and without a network nowhere else: asking an index would only take time."""
    env = {"PIP_FIND_LINKS": WHEELS, "UV_FIND_LINKS": WHEELS}
    return {**env, "PIP_NO_INDEX": "1", "UV_NO_INDEX": "1"} if network == "none" else env


# For each interpreter: its own library, what is installed, and the work tree; only what has no compiled file that fits, because
# compileall hands every file to another process before it looks (10,000 files that needed nothing took 37 s so). What fits is
# decided by time and size, which copies keep; by a hash that is not checked, an edited file would run as it was before.
_COMPILE = """
import compileall, importlib.util, os, py_compile, site, struct, sys, sysconfig
from concurrent.futures import ProcessPoolExecutor

def lacks(path):
    try:
        was = os.stat(path)
        with open(importlib.util.cache_from_source(path), "rb") as file:
            head = file.read(16)
    except OSError:
        return True
    fits = struct.pack("<4sIII", importlib.util.MAGIC_NUMBER, 0, int(was.st_mtime) & 0xFFFFFFFF, was.st_size & 0xFFFFFFFF)
    return head[:4] != fits[:4] or (head[4:8] == fits[4:8] and head != fits)

def compiled(path):
    compileall.compile_file(path, quiet=2, force=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)

tops = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | set(sys.path) | set(sys.argv[1:])
tops.add(site.getusersitepackages())
found = set()
for top in {os.path.realpath(top) for top in tops if top and os.path.isdir(top)}:
    for directory, names, files in os.walk(top):
        names[:] = [name for name in names if name not in (".git", "node_modules", "__pycache__")]
        found.update(os.path.join(directory, name) for name in files if name.endswith(".py"))
wanted = sorted(path for path in found if lacks(path))
try:
    with ProcessPoolExecutor() as pool:
        list(pool.map(compiled, wanted, chunksize=32))
except Exception:  # no semaphores for its workers, or one of them was killed
    list(map(compiled, wanted))
"""


def planned(spec: EnvSpec) -> EnvSpec:
    """The spec as a build carries it out: nothing in it that binds late, and the compiling after the last command."""
    place = spec.workdir or WORKDIR
    return replace(spec, setup=(*spec.setup, compile_step(place)), env=FrozenEnv(), user=None, network="none")


_LOG_BYTES = 4096  # kept in the record of a stage, of which a store has thousands


def own_log(log: bytes, place: str) -> bytes:
    """The end of what a spec's own commands printed, without the compiling, which is ours and prints nothing."""
    return log.partition(b"$ " + compile_step(place).encode())[0][-_LOG_BYTES:]


def compile_step(place: str) -> str:
    """A shell command that compiles what every Python here would import; it never fails, and does nothing where there is none."""
    where = shlex.quote(place)
    return (
        f'for python in "$(command -v python3 || command -v python)" {where}/.venv/bin/python {where}/venv/bin/python /opt/venv/bin/python; do '
        f'command -v "$python" >/dev/null 2>&1 && (umask 022; unset PYTHONDONTWRITEBYTECODE; "$python" -I -c {shlex.quote(_COMPILE)} {where}) '
        ">/dev/null 2>&1; done; true"
    )


# ---- what a layer keeps ----

_LEFT_OUT = (
    b"var/cache/untax",  # where the cache was seen
    b"tmp",
    b"var/tmp",
    b"root/.cache/pip",
    b"root/.cache/uv",
    b"home/user/.cache/pip",
    b"home/user/.cache/uv",
    b"root/.npm/_cacache",
    b"home/user/.npm/_cacache",
)
_KEPT_EMPTY = frozenset({b"tmp", b"var/tmp"})
_ARCHIVES = b"var/cache/apt/archives/"


def left_out() -> Skip:
    """What of a build's tree is no part of the layer: caches, and what was meant to be gone anyway."""

    def skip(path: bytes, was: os.stat_result) -> bool:
        if path in _KEPT_EMPTY:
            return False
        if path.startswith(_ARCHIVES):
            return path.endswith(b".deb") and stat.S_ISREG(was.st_mode)
        return any(path == one or path.startswith(one + b"/") for one in _LEFT_OUT)

    return skip


def owners(place: str, marks: Marks) -> Owner | None:
    """Root's files in the work tree and in the user's home become the user's, who is to work there."""
    if marks != "trusted":
        return None
    own = tuple(os.fsencode(one.strip("/")) for one in (place, HOME))

    def owner(path: bytes, was: os.stat_result) -> tuple[int, int]:
        is_users = was.st_uid == 0 and any(path == one or path.startswith(one + b"/") for one in own)
        return (USER_ID, USER_ID) if is_users else (was.st_uid, was.st_gid)

    return owner
