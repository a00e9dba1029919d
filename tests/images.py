"""The images that tests run on: one small directory of ordinary programs, made once and kept in the temporary directory.

The `process` and `ssh` substrates have no root of their own and therefore take the host's programs; all others get the directory.
Checks that run on both may use only the programs named here.
"""

import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

PROGRAMS = [
    "bash",
    "cat",
    "chmod",
    "cp",
    "cut",
    "date",
    "dd",
    "echo",
    "env",
    "expr",
    "false",
    "find",
    "grep",
    "head",
    "id",
    "ln",
    "ls",
    "mkdir",
    "mkfifo",
    "mv",
    "nohup",
    "od",
    "perl",
    "printf",
    "pwd",
    "readlink",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "setsid",
    "sh",
    "sha256sum",
    "sleep",
    "sort",
    "stat",
    "stty",
    "tail",
    "tee",
    "test",
    "timeout",
    "touch",
    "tr",
    "true",
    "truncate",
    "tty",
    "uname",
    "wc",
    "yes",
]
_LAYOUT = 4  # part of the cached directory's name: raise it when what is built changes

_PASSWD = """\
root:x:0:0:root:/root:/bin/bash
user:x:1000:1000:user:/home/user:/bin/bash
other:x:1001:1001:other:/home/other:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/bin/sh
"""
_GROUP = "root:x:0:\nuser:x:1000:\nother:x:1001:\nnogroup:x:65534:\n"


def small_image(substrate: str) -> str:
    """The image for conformance checks: the same few megabytes on every substrate that has a root of its own."""
    return "host" if substrate in ("process", "ssh") else f"dir:{small_directory()}"


def small_directory() -> Path:
    """A root file system of a few programs and their libraries, readable by everyone."""
    ready = Path(tempfile.gettempdir()) / f"untax-test-image-{os.geteuid()}-{_LAYOUT}"
    if ready.exists():
        # Someone else's directory under our name would run as our image.
        if ready.lstat().st_uid != os.geteuid() or not stat.S_ISDIR(ready.lstat().st_mode):
            raise RuntimeError(f"{ready} is not ours")
        return ready
    making = Path(tempfile.mkdtemp(prefix="untax-test-image-making-"))
    try:
        making.chmod(0o755)
        build(making)
        making.rename(ready)
    except OSError:
        shutil.rmtree(making, ignore_errors=True)
        if not ready.exists():  # another test process may have been first
            raise
    return ready


def build(root: Path) -> None:
    for name in ("usr/bin", "usr/lib", "etc", "root", "home/user", "home/other", "tmp", "var/tmp", "proc", "dev", "run", "workspace"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        target = {"bin": "usr/bin", "sbin": "usr/bin"}.get(name, "usr/lib")
        (root / name).symlink_to(target)
    (root / "etc/passwd").write_text(_PASSWD)
    (root / "etc/group").write_text(_GROUP)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    libraries: set[str] = set()
    for name in PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin")
        if found is None:
            raise RuntimeError(f"the test image needs the program {name}")
        shutil.copy2(os.path.realpath(found), root / "usr/bin" / name)
        (root / "usr/bin" / name).chmod(0o755)
        libraries |= _libraries_of(found)
    for library in libraries:
        target = root / "usr/lib" / Path(library).name
        shutil.copy2(os.path.realpath(library), target)
        target.chmod(0o755)
    # The loader looks in the distribution's own directories; one link serves them all.
    for library in libraries:
        where = root / Path(library).parent.relative_to("/")
        if not where.exists():
            where.parent.mkdir(parents=True, exist_ok=True)
            where.symlink_to(os.path.relpath(root / "usr/lib", os.path.realpath(where.parent)))


def _libraries_of(program: str) -> set[str]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+\.so\S*)", listed))
