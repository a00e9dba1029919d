"""What workloads work on, brought to this machine once and kept below the state directory: a repository and Python packages.

A repository comes from its public home when that answers, and otherwise from the source distribution of the same release: a small
repository, the same on every machine. Packages are pure Python wheels, unpacked. `downloads` is a directory that is looked
into first, for machines that reach neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from untax._remove import remove_tree
from untax.core.errors import StageFailed, StageUnavailable
from untax.rollout.workload import Source

FIXED = "refs/untax/fixed"
"""The release in which the bug is mended, where it was asked for."""
SERVED = "git"
"""Below the material's directory: what the git server serves."""
_ANSWER_S = 15.0  # for a public home to say that it is there
_CLONE_S = 300.0
_PIP_S = 300.0
_FACTS = "untax-source.json"
_DATE = "2000-01-01T00:00:00Z"  # of the one commit of a release, so that it has the same name everywhere
_MOST_BYTES = 1 << 30  # of an archive, unpacked

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Repository:
    """A bare repository on this machine whose only branch ends at `commit`."""

    path: str
    commit: str
    origin: str
    """`public` or `sdist`."""
    url: str
    ref: str

    @property
    def name(self) -> str:
        return Path(self.path).name


class Material:
    """The shelf. `say` is told about what takes long."""

    def __init__(self, directory: Path, *, downloads: Path | None = None, say: Say = lambda _: None) -> None:
        self.directory = directory
        self._downloads = downloads
        self._say = say

    @property
    def served(self) -> Path:
        return self.directory / SERVED

    def repository(self, source: Source) -> Repository:
        """The repository of a workload; `StageUnavailable` when neither its home nor its source distribution can be had."""
        place = self.served / f"{_stem(source)}-{_key(source.url, source.ref, source.sdist or '', source.fixed or '')}.git"
        if not (place / _FACTS).is_file():
            self._publish(place, lambda draft: self._fill(draft, place, source))
        return Repository(**json.loads((place / _FACTS).read_text(encoding="utf-8")))

    def wheels(self, packages: Sequence[str]) -> Path:
        """A directory with the wheels of exactly these packages."""
        place = self.directory / "wheels" / _key(*sorted(packages))
        if not place.is_dir():
            self._publish(place, lambda draft: self._bring_wheels(packages, draft))
        return place

    def packages(self, packages: Sequence[str]) -> Path:
        """A directory with these packages unpacked and compiled, to be named in PYTHONPATH."""
        place = self.directory / "packages" / _key(*sorted(packages), sys.implementation.cache_tag or "")
        if not place.is_dir():
            wheels = self.wheels(packages)
            self._publish(place, lambda draft: _unpack_wheels(wheels, draft))
        return place

    # ---- inside ----

    def _publish(self, place: Path, fill: Callable[[Path], None]) -> None:
        """Whole or not at all; of two who make the same at once, the first wins."""
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=place.parent))
        try:
            fill(draft)
            try:
                draft.rename(place)
            except OSError:
                if not place.is_dir():
                    raise
        except OSError as exc:
            raise StageUnavailable("repo", f"{place}: {exc.strerror or exc}") from exc
        finally:
            if draft.is_dir():
                remove_tree(draft)

    def _fill(self, draft: Path, place: Path, source: Source) -> None:
        commit = self._clone(source, draft)
        origin = "public"
        if commit is None:
            if source.sdist is None:
                raise StageUnavailable(
                    "repo", f"{source.url} does not answer, and the workload names no source distribution (sdist) for that"
                )
            origin = "sdist"
            commit = _commit_releases([self._sdist(one) for one in (source.sdist, source.fixed) if one is not None], draft)
        facts = Repository(str(place), commit, origin, source.url, source.ref)
        (draft / _FACTS).write_text(json.dumps(asdict(facts)), encoding="utf-8")

    def _clone(self, source: Source, draft: Path) -> str | None:
        """The commit of the ref, with its history up to there and nothing else; None when the home does not answer."""
        if _git("ls-remote", "--", source.url, "HEAD", timeout_s=_ANSWER_S) is None:
            return None
        self._say(f"fetching {source.url} at {source.ref}")
        _must(draft, "init", "-q", "--bare", "-b", "main", ".")
        if _git("fetch", "-q", "--no-tags", "--", source.url, source.ref, cwd=draft, timeout_s=_CLONE_S) is None:
            if source.sdist is None:
                raise StageFailed(
                    "repo", f"{source.url} has no {source.ref!r}, or did not give it; a branch, a tag or a whole commit hash is wanted"
                )
            remove_tree(draft)
            draft.mkdir()
            return None
        commit = _must(draft, "rev-parse", "FETCH_HEAD^{commit}")
        _must(draft, "update-ref", "refs/heads/main", commit)
        (draft / "FETCH_HEAD").unlink(missing_ok=True)
        _must(draft, "update-server-info")
        return commit

    def _sdist(self, package: str) -> Path:
        name, _, version = package.partition("==")
        file = f"{name}-{version}.tar.gz"
        kept = self.directory / "sources" / file
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".draft-", dir=kept.parent) as draft:
                if not self._take(file, Path(draft)):
                    self._say(f"downloading the source distribution of {package}")
                    self._pip(["--no-binary", name, package], Path(draft), f"{file}")
                (Path(draft) / file).rename(kept)
        return kept

    def _bring_wheels(self, packages: Sequence[str], draft: Path) -> None:
        wanted = [package for package in packages if not self._take_wheel(package, draft)]
        if wanted:
            self._say(f"downloading {len(wanted)} Python packages")
            self._pip(["--only-binary", ":all:", *wanted], draft, "their wheels")
        for wheel in draft.glob("*.whl"):
            if not wheel.name.endswith("-none-any.whl"):
                raise StageFailed("deps", f"{wheel.name} is not pure Python, and would not be the same software on every substrate")

    def _take_wheel(self, package: str, draft: Path) -> bool:
        name, _, version = package.partition("==")
        return self._take(f"{name.replace('-', '_')}-{version}-*none-any.whl", draft)

    def _take(self, pattern: str, draft: Path) -> bool:
        """Whether the directory that was given has it."""
        found = sorted(self._downloads.glob(pattern)) if self._downloads is not None else []
        for file in found[:1]:
            shutil.copyfile(file, draft / file.name)
        return bool(found)

    def _pip(self, arguments: Sequence[str], draft: Path, what: str) -> None:
        argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "-d", str(draft), *arguments]
        try:
            ran = subprocess.run(argv, capture_output=True, timeout=_PIP_S, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise _unreachable(what, str(exc).encode()) from exc
        if ran.returncode != 0:
            raise _unreachable(what, ran.stderr)


def _unreachable(what: str, log: bytes) -> StageUnavailable:
    return StageUnavailable(
        "deps", f"pip could not bring {what}; on a machine without an index put them into a directory and name it with --downloads", log
    )


def _commit_releases(archives: Sequence[Path], bare: Path) -> str:
    """A commit for each source distribution; the branch ends at the first. What is newer lies on a ref that no clone sees."""
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=bare.parent) as scratch:
        work = Path(scratch) / "work"
        work.mkdir()
        _must(work, "init", "-q", "-b", "main", ".")
        for number, archive in enumerate(archives):
            _lay_out(archive, work)
            _must(work, "add", "-A", "-f")
            release = archive.name.removesuffix(".tar.gz")
            _must(work, "commit", "-q", "-m", f"{release}, from its source distribution")
            _must(work, "update-ref", f"refs/releases/{number}", "HEAD")
        remove_tree(bare)
        _must(work, "clone", "-q", "--mirror", "--no-local", ".", str(bare))
    _must(bare, "remote", "remove", "origin")
    _must(bare, "update-ref", "refs/heads/main", "refs/releases/0")
    _must(bare, "update-ref", "-d", "refs/releases/0")
    if len(archives) > 1:
        _must(bare, "update-ref", FIXED, "refs/releases/1")
        _must(bare, "update-ref", "-d", "refs/releases/1")
    _must(bare, "config", "transfer.hideRefs", "refs/untax")
    _must(bare, "update-server-info")
    return _must(bare, "rev-parse", "refs/heads/main")


def _lay_out(archive: Path, work: Path) -> None:
    """The files of a release in place of those that are there."""
    for old in work.iterdir():
        if old.name != ".git":
            remove_tree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=work.parent) as scratch:
        tree = Path(scratch)
        _unpack_sdist(archive, tree)
        tops = list(tree.iterdir())
        if len(tops) != 1 or not tops[0].is_dir() or (tops[0] / ".git").exists():
            raise StageFailed("repo", f"{archive.name} is not a source distribution: it has {len(tops)} names at its top")
        for new in tops[0].iterdir():
            new.rename(work / new.name)


def _unpack_sdist(archive: Path, into: Path) -> None:
    try:
        with tarfile.open(archive, "r:gz") as tar:
            members = tar.getmembers()
            if sum(member.size for member in members) > _MOST_BYTES:
                raise StageFailed("repo", f"{archive.name} unpacks to more than {_MOST_BYTES >> 20} MiB")
            for member in members:
                _unpack_member(tar, member, into, archive.name)
    except (tarfile.TarError, EOFError) as exc:
        archive.unlink(missing_ok=True)
        raise StageFailed("repo", f"{archive.name} cannot be read: {exc}; it was removed, try again") from exc


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path, archive: str) -> None:
    """Files and directories, below `into`, and nothing else. (Python 3.11's `extractall` has no filter before 3.11.4.)"""
    parts = Path(member.name).parts
    if not parts or ".." in parts or Path(member.name).is_absolute() or not (member.isfile() or member.isdir()):
        raise StageFailed("repo", f"{archive}: {member.name!r} is not a file or directory of a source distribution")
    place = into.joinpath(*parts)
    if member.isdir():
        place.mkdir(parents=True, exist_ok=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None
    with place.open("xb") as file:
        shutil.copyfileobj(content, file)
    place.chmod(0o755 if member.mode & 0o100 else 0o644)


def _unpack_wheels(wheels: Path, into: Path) -> None:
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)  # noqa: S202  (zipfile lets no name lead out)
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", str(into)], capture_output=True, timeout=_PIP_S
    )  # a file that cannot be stays as it is


_GIT_CONFIG = ("core.hooksPath=/dev/null", "core.autocrlf=false", "gc.auto=0", "transfer.fsckObjects=true", "safe.directory=*")


def _git(*argv: str, timeout_s: float, cwd: Path | None = None) -> str | None:
    """What git printed, or None when it failed or took too long."""
    options = [word for setting in _GIT_CONFIG for word in ("-c", setting)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith("GIT_SSL")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "untax", f"GIT_{who}_EMAIL": "untax@localhost", f"GIT_{who}_DATE": _DATE}
    try:
        ran = subprocess.run(
            ["git", *options, *argv],
            cwd=cwd,
            env=env,
            capture_output=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except FileNotFoundError as exc:
        raise StageUnavailable("repo", "git is not installed here; apt install git") from exc
    except subprocess.TimeoutExpired:
        return None
    return ran.stdout.decode(errors="replace").strip() if ran.returncode == 0 else None


def _must(cwd: Path, *argv: str) -> str:
    said = _git(*argv, cwd=cwd, timeout_s=_CLONE_S)
    if said is None:
        raise StageFailed("repo", f"git {' '.join(argv[:3])} failed in {cwd}")
    return said


def _stem(source: Source) -> str:
    name = source.url.rstrip("/").rpartition("/")[2].removesuffix(".git")
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip(".-") or "repository"


def _key(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]
