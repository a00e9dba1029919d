"""The images that tests run on: one small directory of ordinary programs, made once and kept in the temporary directory.

The `process` and `ssh` substrates have no root of their own and therefore take the host's programs; all others get the directory,
a provider as what its template stands for.
Checks that run on both may use only the programs named here.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from untax import substrates
from untax.core.substrate import Importing

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
# Besides, where hostile cases are run. Those that a machine lacks are left out.
TOOLS = [
    "chattr", "chrt", "cmp", "curl", "dmesg", "fallocate", "getent", "git", "ionice", "ipcmk", "ipcs", "kill", "mknod", "mount", "nice",
    "nsenter", "prlimit", "ps", "su", "umount", "unshare", "xargs",
]  # fmt: skip
KUBERNETES_IMAGE = "untax.local/small:1"  # the same directory, which tests/kubehost.py loads into the nodes
_TOOLS_LAYOUT = 2
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
    if substrate == "kubernetes":
        return KUBERNETES_IMAGE
    return "host" if substrate in ("process", "ssh", "hosted:daytona", "hosted:e2b", "hosted:modal") else f"dir:{small_directory()}"


def tools_image(substrate: str) -> str:
    """With Python, pip, git and curl: the host's own software where it is used in place, some of it where it would be copied as a whole."""
    return f"dir:{tools_directory()}" if isinstance(substrates.load(substrate), Importing) else "host"


def small_directory() -> Path:
    """A root file system of a few programs and their libraries, readable by everyone."""
    return _made_once(f"untax-test-image-{os.geteuid()}-{_LAYOUT}", build)


def small_archive(directory: Path) -> Path:
    """That one as an image that is the same on every machine, so that what stands on it travels."""
    image = directory / "small.tar"
    subprocess.run(["tar", "-C", small_directory(), "-cf", image, "."], check=True)
    return image


def tools_directory() -> Path:
    """The small one with the running Python, git, curl and what hostile cases use."""
    return _made_once(f"untax-test-tools-{os.geteuid()}-{_TOOLS_LAYOUT}", build_tools)


def _made_once(name: str, build: Callable[[Path], None]) -> Path:
    ready = Path(tempfile.gettempdir()) / name
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


def image_with_sshd(root: Path) -> Path:
    """The same programs and an sshd, in a directory that is made."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if sshd is None:
        raise RuntimeError("no sshd here; apt install openssh-server")
    root.mkdir()
    build(root)
    shutil.copy2(sshd, root / "usr/bin/sshd")
    for library in _libraries_of(sshd):
        target = root / "usr/lib" / Path(library).name
        if not target.exists():
            shutil.copy2(os.path.realpath(library), target)
    return root


def build(root: Path, extra: tuple[str, ...] = ()) -> None:
    for name in ("usr/bin", "usr/lib", "etc", "root", "home/user", "home/other", "tmp", "var/tmp", "proc", "dev", "run", "workspace"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        target = {"bin": "usr/bin", "sbin": "usr/bin"}.get(name, "usr/lib")
        (root / name).symlink_to(target)
    (root / "etc/passwd").write_text(_PASSWD)
    (root / "etc/group").write_text(_GROUP)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    libraries: set[str] = set()
    for name in (*PROGRAMS, *extra):
        found = shutil.which(name, path="/usr/bin:/bin")
        if found is None:
            raise RuntimeError(f"the test image needs the program {name}")
        shutil.copy2(os.path.realpath(found), root / "usr/bin" / name)
        (root / "usr/bin" / name).chmod(0o755)
        libraries |= _libraries_of(found)
    _copy_libraries(root, libraries)


def _copy_libraries(root: Path, libraries: set[str]) -> None:
    for library in libraries:
        copied = root / "usr/lib" / Path(library).name
        shutil.copy2(os.path.realpath(library), copied)
        copied.chmod(0o755)
    # The loader looks in the distribution's own directories; one link serves them all.
    for library in libraries:
        where = root / Path(library).parent.relative_to("/")
        if not where.exists():
            where.parent.mkdir(parents=True, exist_ok=True)
            where.symlink_to(os.path.relpath(root / "usr/lib", os.path.realpath(where.parent)))


def build_tools(root: Path) -> None:
    build(root)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library = Path(sysconfig.get_paths()["stdlib"])
    where = root / "usr/local/lib" / version
    unwanted = (
        "__pycache__",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "tkinter",
        "site-packages",
        "dist-packages",
        "config-*",
        "*.a",
    )
    shutil.copytree(library, where, ignore=shutil.ignore_patterns(*unwanted), symlinks=True)
    # pip as a package of its own: from the wheel that every Python carries, wherever its distribution put that.
    wheel = next(iter([*library.glob("ensurepip/_bundled/pip-*.whl"), *Path("/usr/share/python-wheels").glob("pip-*.whl")]), None)
    if wheel is not None:
        shutil.unpack_archive(wheel, where / "site-packages", "zip")
    (root / "usr/local/bin").mkdir(parents=True)
    python = root / "usr/local/bin/python3"
    shutil.copy2(os.path.realpath(sys.executable), python)
    (python.parent / "python").symlink_to("python3")
    programs = [str(found) for name in TOOLS if (found := shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin"))]
    remote = Path("/usr/lib/git-core/git-remote-https")
    if remote.exists():
        programs.append(str(remote))
    for program in programs:
        target = root / ("usr/lib/git-core" if "git-core" in program else "usr/bin") / Path(program).name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(os.path.realpath(program), target)
    extensions = [str(one) for one in (where / "lib-dynload").glob("*.so")]
    libraries = set().union(*(_libraries_of(one) for one in [os.path.realpath(sys.executable), *programs, *extensions]))
    # Opened by name when a thread is ended, which no list of needed libraries says.
    libraries |= {str(beside) for one in list(libraries) if (beside := Path(one).with_name("libgcc_s.so.1")).exists()}
    for one in libraries:
        target = root / "usr/lib" / Path(one).name
        if not target.exists():
            shutil.copy2(os.path.realpath(one), target)
    for one in libraries:
        place = root / Path(one).parent.relative_to("/")
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(os.path.relpath(root / "usr/lib", os.path.realpath(place.parent)))


def _libraries_of(program: str) -> set[str]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+\.so\S*)", listed))
