"""The dependency stage: what set-up commands find, and what is kept of what they leave.

Commands run in order in one sandbox over the stages below, as root inside where the engine is root. They see the
variables below and none of a lease's: those bind late, and one layer serves leases that differ in them. A command that needs a
variable sets it itself. Package managers keep their caches in a directory that all builds over one image share and no
layer holds. Afterwards Python's files are compiled, so that no rollout does it again.
"""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import replace
from types import MappingProxyType

from untax.core.spec import EnvSpec, FrozenEnv
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

# For each interpreter: its own library, what is installed, and the work tree. Those whose compiled file is there and fits are
# left alone. Validity is by time and size, which copies keep; by hash, unchecked, an edited file would run as it was before.
_COMPILE = """
import compileall, os, py_compile, re, site, sys, sysconfig
paths = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | set(sys.path) | set(sys.argv[1:])
paths.add(site.getusersitepackages())
rest = re.compile(r"/(\\.git|node_modules)(/|$)")
how = {"quiet": 2, "rx": rest, "maxlevels": 40, "invalidation_mode": py_compile.PycInvalidationMode.TIMESTAMP}
done = []
for path in sorted(os.path.realpath(path) for path in paths if path and os.path.isdir(path)):
    if not any(path == other or path.startswith(other + "/") for other in done):
        done.append(path)
        try:
            compileall.compile_dir(path, workers=0, **how)
        except Exception:  # no semaphores for its workers
            compileall.compile_dir(path, workers=1, **how)
"""


def planned(spec: EnvSpec) -> EnvSpec:
    """The spec as a build carries it out: nothing in it that binds late, and the compiling after the last command."""
    place = spec.workdir or WORKDIR
    return replace(spec, setup=(*spec.setup, compile_step(place)), env=FrozenEnv(), user=None, network="none")


def compile_step(place: str) -> str:
    """A shell command that compiles what every Python here would import; it never fails, and does nothing where there is none."""
    where = shlex.quote(place)
    return (
        f"for python in python3 python {where}/.venv/bin/python {where}/venv/bin/python /opt/venv/bin/python; do "
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
