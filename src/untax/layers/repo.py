"""The repository stage: a work tree at one commit, with the history up to it and nothing newer.

Commits come over a mirror on this machine (mirrors.py). The tree's own `.git` is made by fetching one commit from the mirror into an empty
repository, so it holds what is reachable from that commit and has never held anything else: no remote, tag, note, reflog,
stash, alternate, hook or dangling object. `HEAD` is on a branch `main`, whatever the branch was called where it came from.

The same commit gives the same bytes: every file has the time of the commit, and the index says so. Git inside compares size and
time only (`core.checkStat=minimal`, `core.trustctime=false` in the repository's config), so `git status` reads no
contents, whichever inode or owner a file has there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import posixpath
import shutil
import stat
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.core.spec import Repo
from untax.core.stage import WORKDIR
from untax.layers._descent import Descent, walk
from untax.layers._git import Git, Ran
from untax.layers._held import held
from untax.layers.marks import OPAQUE_VALUE, Marks, opaque
from untax.layers.mirrors import Mirrors, without_password
from untax.layers.sources import Progress
from untax.layers.spares import using

log = logging.getLogger("untax.layers")

HOME = "/home/user"
USER_ID = 1000
"""Who works in a sandbox unless told otherwise, and owns the work tree."""
BRANCH = "main"
_OPEN_MODE = 0o755

_LOCAL_PATIENCE_S = 1800.0
_MOST_FILES = 2_000_000
_MOST_BYTES = 64 << 30
"""More than any repository that is worked in, and less than the trees of a few kilobytes that unfold to billions of files."""
_MOUNTED = ("/proc", "/sys", "/dev", "/tmp", "/var/cache/untax")
"""Where a sandbox has something of its own, so that no layer is seen."""
# Before 1980 there are tools that cannot store the date (zip); later than now, ones that do not believe it (make).
_EARLIEST_S = 315_532_800 + 86_400


Standing = Callable[[str], os.stat_result | None]
"""What the image has at a path, not following a link at its end; None for nothing."""


def check_place(place: str) -> str:
    """Where a repository may lie inside: an absolute path, and nowhere that a sandbox covers by something of its own."""
    if not place.startswith("/") or ".." in place.split("/"):
        raise UsageError(f"workdir {place!r}: a repository needs an absolute path without '..'")
    clean = "/" + posixpath.normpath(place).lstrip("/")
    if clean == "/":
        raise UsageError("workdir '/': a repository cannot lie at the root; name a directory")
    for mounted in _MOUNTED:
        if clean == mounted or clean.startswith(mounted + "/"):
            raise UsageError(f"workdir {place!r}: {mounted} is every sandbox's own; name another place for the repository")
    return clean


def _nothing(_: str) -> None:
    return None


async def fill(
    mirrors: Mirrors, repo: Repo, tree: Path, *, at: str, marks: Marks, standing: Standing = _nothing, progress: Progress = lambda *_: None
) -> str:
    """Fill the empty directory `tree` with a layer that has the repository at `at`; gives the commit's whole name.

    The layer also has the directories that are a sandbox's own. Directories on the way there are as the image has them, or 0755 of root's.
    """
    place = check_place(at)
    for attempt in (1, 2):
        mirror, commit = await mirrors.provide(repo, progress)
        work = await asyncio.to_thread(_furnish, tree, place, marks, standing)
        try:
            async with held(using(mirror)):
                when = await _build(mirrors.git, mirror, commit, repo.depth, work)
            break
        except _Damaged as exc:
            if attempt == 2:
                raise StageUnavailable("repo", f"the mirror {mirror} is damaged: {exc}; remove it", exc.log) from exc
            log.warning("the mirror of %s is damaged and is made anew: %s", without_password(repo).url, exc)
            await mirrors.forget(mirror)
            await asyncio.to_thread(_empty, tree)
    await asyncio.to_thread(_settle, tree, place, when, marks, standing)
    return commit


class _Damaged(Exception):
    def __init__(self, message: str, log: bytes) -> None:
        super().__init__(message)
        self.log = log


def _own_directories(place: str) -> list[str]:
    """What is a sandbox's own besides the repository, where the repository itself does not hold it."""
    return [own for own in (HOME, WORKDIR) if own != place and not own.startswith(place + "/")]


def _furnish(tree: Path, place: str, marks: Marks, standing: Standing) -> Path:
    """Make the directories of the layer; done before anything of the repository is there that could be a link."""
    os.chmod(tree, _OPEN_MODE)
    for wanted in (*_own_directories(place), place):
        parts = wanted.strip("/").split("/")
        on_the_way = ["/" + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        blocked = next((one for one in on_the_way if not _may_stand(standing(one))), None)
        if blocked is not None:
            if wanted == place:
                raise UsageError(f"workdir {place!r}: {blocked} is a link or a file in the image; name the directory itself")
            continue  # an image that has its homes elsewhere keeps them there
        for one in on_the_way:
            with contextlib.suppress(FileExistsError):
                os.mkdir(tree / one[1:])
                os.chmod(tree / one[1:], _OPEN_MODE)
    work = tree / place[1:]
    try:
        # What the image has in the same place is not part of the work tree, least of all another .git.
        os.setxattr(work, opaque(marks), OPAQUE_VALUE)
    except OSError as exc:
        raise StageUnavailable(
            "repo", f"the store's file system takes no {opaque(marks)} attributes: {exc.strerror}; keep state_dir elsewhere"
        ) from exc
    return work


def _may_stand(below: os.stat_result | None) -> bool:
    return below is None or stat.S_ISDIR(below.st_mode)


# Every object was checked when it came into the mirror.
_TRUSTED = {"transfer.fsckObjects": "false"}


async def _build(git: Git, mirror: Path, commit: str, depth: int | None, work: Path) -> int:
    """A repository in `work` that has this commit and what is behind it; gives the time that its files are to have."""

    async def run(*argv: str, on_stdout: Callable[[bytes], None] | None = None) -> Ran:
        try:
            ran = await git.run(argv, cwd=work, config=_TRUSTED, patience_s=_LOCAL_PATIENCE_S, on_stdout=on_stdout)
        except TimeoutError:
            raise StageFailed("repo", f"git {argv[0]} took more than {_LOCAL_PATIENCE_S:g} s") from None
        if ran.code != 0:
            if b"No space left" in ran.log or b"Disk quota" in ran.log:
                raise StageUnavailable("repo", "the store's disk is full; free space, or lower its budget", ran.log)
            raise _Damaged(f"git {argv[0]} failed", ran.log)
        return ran

    await run(
        "init", "-q", "--template=", f"--initial-branch={BRANCH}", f"--object-format={'sha256' if len(commit) == 64 else 'sha1'}", "."
    )
    shallow = ["--depth", str(depth)] if depth is not None else []
    await run(
        "fetch", "-q", "--no-tags", "--no-write-fetch-head", "--update-head-ok", *shallow, str(mirror), f"{commit}:refs/heads/{BRANCH}"
    )
    size = _Size()
    await run("ls-tree", "-r", "-l", "-z", "--full-tree", commit, on_stdout=size)
    await run("read-tree", "--reset", "-u", commit)
    when = int((await run("show", "-s", "--format=%ct", commit)).stdout)
    _strip(work / ".git", sha256=len(commit) == 64)
    await _prove(run, commit)
    (work / ".git" / "packed-refs").unlink(missing_ok=True)
    return min(max(when, _EARLIEST_S), int(time.time()))


class _Size:
    """Counts what a checkout would write, and refuses what is no honest tree, before it is written."""

    def __init__(self) -> None:
        self._rest = b""
        self._files = self._bytes = 0

    def __call__(self, listed: bytes) -> None:
        *entries, self._rest = (self._rest + listed).split(b"\0")
        self._files += len(entries)
        for entry in entries:
            size = entry.partition(b"\t")[0].split()[-1]
            self._bytes += int(size) if size.isdigit() else 0
        if self._files > _MOST_FILES or self._bytes > _MOST_BYTES:
            raise StageFailed("repo", f"the work tree has more than {_MOST_FILES:,} files or {_MOST_BYTES >> 30} GiB")


def _strip(directory: Path, *, sha256: bool) -> None:
    """Leave of a `.git` what a repository needs, and write its config anew: nothing in it says where it came from."""
    kept = {"HEAD", "index", "objects", "refs", "shallow"}
    for entry in directory.iterdir():
        if entry.name not in kept:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    config = "[core]\n\trepositoryformatversion = %d\n\tfilemode = true\n\tbare = false\n\tlogallrefupdates = true\n"
    config += "\tcheckStat = minimal\n\ttrustctime = false\n" + ("[extensions]\n\tobjectformat = sha256\n" if sha256 else "")
    (directory / "config").write_text(config % sha256)
    (directory / "info").mkdir()
    # The dependency stage compiles Python ahead of time; that is no change to the repository.
    (directory / "info" / "exclude").write_text("__pycache__/\n")


async def _prove(run: Callable[..., Awaitable[Ran]], commit: str) -> None:
    """Every object that is there is reachable from the commit, which is all that there is of refs. Nothing newer can be."""
    counts = [0, 0]

    def count(at: int) -> Callable[[bytes], None]:
        def add(data: bytes) -> None:
            counts[at] += data.count(b"\n")

        return add

    refs = await run("for-each-ref", "--format=%(refname) %(objectname)")
    await run("rev-list", "--objects", "--no-object-names", commit, on_stdout=count(0))
    await run("cat-file", "--batch-all-objects", "--batch-check=%(objectname)", on_stdout=count(1))
    if refs.stdout.decode().split() != [f"refs/heads/{BRANCH}", commit] or counts[0] != counts[1]:
        raise _Damaged(f"{counts[1]} objects came where the commit has {counts[0]}", refs.stdout)


def _settle(tree: Path, place: str, when: int, marks: Marks, standing: Standing) -> None:
    """Give every entry its owner and its time, and the index the same."""
    work = tree / place[1:]
    index = work / ".git" / "index"
    index.write_bytes(_with_times(index.read_bytes(), when))
    owner = (USER_ID, USER_ID) if marks == "trusted" else (os.geteuid(), os.getegid())
    root = (0, 0) if marks == "trusted" else owner
    own = (*_own_directories(place), place)
    stamp = (when * 10**9, when * 10**9)
    with Descent(tree) as descent:
        for visit in walk(descent):
            if visit is None:
                continue
            name, _, fd = visit
            inside = b"/" + b"/".join((*descent.names, name))
            is_users = any(inside == os.fsencode(one) or inside.startswith(os.fsencode(one) + b"/") for one in own)
            below = None if is_users else standing(os.fsdecode(inside))
            who = owner if is_users else root
            if below is not None:
                os.chmod(name, below.st_mode & 0o7777, dir_fd=fd)
                who = (below.st_uid, below.st_gid) if marks == "trusted" else root
            os.chown(name, *who, dir_fd=fd, follow_symlinks=False)
            os.utime(name, ns=stamp, dir_fd=fd, follow_symlinks=False)
    # Later than every file in it: git doubts the entries that are as young as the index itself, and reads their files.
    os.utime(index, ns=((when + 2) * 10**9, (when + 2) * 10**9))


def _with_times(index: bytes, when: int) -> bytes:
    """An index (version 2) whose entries all say `when`, and nothing about inodes and owners of the machine it was made on."""
    signature, version, entries = struct.unpack_from(">4sII", index)
    if signature != b"DIRC" or version != 2:
        raise StageFailed("repo", f"git wrote an index of version {version}, which is not understood here")
    made = bytearray(index)
    # The checksum of a repository with SHA-256 is longer; it is over everything before it, so it tells which one is used.
    is_sha1 = hashlib.sha1(index[:-20], usedforsecurity=False).digest() == index[-20:]
    oid = 20 if is_sha1 else 32
    at = 12
    for _ in range(entries):
        struct.pack_into(">IIIIII", made, at, when, 0, when, 0, 0, 0)  # ctime, mtime, device, inode
        struct.pack_into(">II", made, at + 28, 0, 0)  # user, group
        end = made.index(b"\0", at + 42 + oid)
        at += ((end - at) // 8 + 1) * 8  # padded with one to eight NULs
    body = bytes(made[:-oid])
    return body + (hashlib.sha1(body, usedforsecurity=False) if is_sha1 else hashlib.sha256(body)).digest()


def _empty(tree: Path) -> None:
    for entry in tree.iterdir():
        shutil.rmtree(entry)
