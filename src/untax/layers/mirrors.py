"""Copies of repositories on this machine, one for each, that all stages and engines share.

A mirror is asked first, and the server only for a commit that it lacks: by its hash where the server allows that, else by all
branches and tags. A mirror is never seen in a sandbox; what is built from it has only what one commit reaches.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import os
import posixpath
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import unquote, urlsplit

from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.core.spec import Repo
from untax.layers._git import Git, Ran
from untax.layers._held import file_lock, held
from untax.layers.sources import Progress
from untax.layers.spares import using

log = logging.getLogger("untax.layers")

_FETCH_PATIENCE_S = 3600.0
_LOCAL_PATIENCE_S = 1800.0
_ATTEMPTS = 4
_BACK_OFF_S = 0.5  # before the second attempt; doubled for each further one, and up to as much again by chance

# ---- where a repository is ----


@dataclass(frozen=True, slots=True)
class Origin:
    """A repository's place as git is told it: without a password, which goes another way."""

    kind: Literal["http", "ssh", "path", "bundle"]
    url: str
    authorization: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Of its mirror."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:40]

    def config(self) -> dict[str, str]:
        found = {"remote.origin.url": self.url}
        if self.authorization is not None:
            where = urlsplit(self.url)
            found[f"http.{where.scheme}://{where.netloc}/.extraHeader"] = f"Authorization: {self.authorization}"
            # Git takes the header along to wherever it is sent: git 2.39 gave it to another host with the request after the redirect.
            found["http.followRedirects"] = "false"
        return found


_SCP = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*@[A-Za-z0-9_.][A-Za-z0-9_.-]*:[^:]+")
_FORMS = "https://…, http://…, ssh://…, user@host:path, file:///…, the path of a repository or of a bundle file"


def origin_of(url: str) -> Origin:
    """Read a repository's URL or path; `UsageError` for what is none of the forms."""
    if any(ord(c) < 0x20 or ord(c) == 0x7F for c in url):
        raise UsageError(f"Repo.url {_shown(url)!r} has control characters in it")
    if url.startswith("file://"):
        if urlsplit(url).netloc not in ("", "localhost"):
            raise UsageError(f"Repo.url {_shown(url)!r} names a file on another machine; the forms are: {_FORMS}")
        url = unquote(urlsplit(url).path)
    elif "://" not in url and os.path.exists(url):
        url = os.path.abspath(url)  # named from where this process works: the commit says what it is, wherever it lies
    if url.startswith("/"):
        path = posixpath.normpath(url)
        return Origin("bundle" if os.path.isfile(path) else "path", path)
    if _SCP.fullmatch(url) and "://" not in url:
        return Origin("ssh", url)
    try:
        where = urlsplit(url)
        host, user, password = where.hostname, where.username, where.password
    except ValueError as exc:
        raise UsageError(f"Repo.url: {exc}") from exc
    if where.scheme not in ("http", "https", "ssh") or not host or host.startswith("-") or " " in url:
        raise UsageError(f"Repo.url {_shown(url)!r} is not known; the forms are: {_FORMS}")
    if where.scheme == "ssh":
        if password is not None:
            raise UsageError("Repo.url: ssh takes no password from a URL; use a key, or an agent")
        return Origin("ssh", url)
    if user is None:
        return Origin("http", url)
    token = base64.b64encode(f"{unquote(user)}:{unquote(password or '')}".encode()).decode()
    return Origin("http", where._replace(netloc=where.netloc.rpartition("@")[2]).geturl(), f"Basic {token}")


def _shown(url: str) -> str:
    """Without whatever may be a password in it."""
    return re.sub(r"^([A-Za-z0-9+.-]+://)?[^/]*@", r"\1…@", url)


def without_password(repo: Repo) -> Repo:
    """The same repository, fit to be remembered and shown."""
    origin = origin_of(repo.url)
    return repo if origin.authorization is None else replace(repo, url=origin.url)


def check_commit(commit: str) -> str:
    """A commit is named by its hash, whole or abbreviated: a branch or tag would mean another commit tomorrow."""
    if not re.fullmatch(r"[0-9a-fA-F]{4,40}|[0-9a-fA-F]{64}", commit):
        raise UsageError(
            f"Repo.commit {commit!r} is not a commit hash; give the hash (4 to 40 hexadecimal digits, or 64), not a branch or tag, "
            "which may name another commit tomorrow: git rev-parse <name>^{commit} tells it"
        )
    return commit.lower()


# ---- mirrors ----

_MISSING = re.compile(
    rb"not our ref|unadvertised object|couldn't find remote ref|no such remote ref|does not support.*want|bad object", re.IGNORECASE
)
_TRANSIENT = re.compile(
    rb"could not resolve|failed to connect|couldn't connect|connection (refused|reset|timed out|closed)|returned error: (429|5\d\d)|early eof"
    rb"|unexpected disconnect|hung up unexpectedly|rpc failed|too slow|timed out|temporary failure|gnutls|ssl_error_syscall|empty reply",
    re.IGNORECASE,
)

_REDIRECTED = re.compile(rb"returned error: 30[12378]|redirect", re.IGNORECASE)
_FULL = re.compile(rb"no space left|disk quota exceeded", re.IGNORECASE)


class Mirrors:
    """Copies of repositories on this machine, below one directory; for several engines at once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.git = Git(root / ".git-home")

    async def provide(self, repo: Repo, progress: Progress) -> tuple[Path, str]:
        """A mirror that has the commit with as much history as is asked for, and the commit's whole name.

        The server is asked only when no mirror has it. `StageFailed` when the repository has no such commit or
        refuses us, `StageUnavailable` when it did not answer.
        """
        commit, origin = check_commit(repo.commit), origin_of(repo.url)
        is_whole = len(commit) in (40, 64)
        full = self._root / origin.name
        found = await self._resolve(full, commit)
        if found is not None:
            return full, found
        if repo.depth is not None and is_whole and origin.kind != "bundle":
            # A mirror for each: fetching one commit with little history would cut the history of others in the same mirror short.
            shallow = self._root / f"{origin.name}-{commit}-{repo.depth}"
            if await self._resolve(shallow, commit) or await self._fetch(shallow, origin, commit, repo.depth, progress):
                return shallow, commit
        found = await self._fetch(full, origin, commit, None, progress)
        if found is None:
            raise StageFailed(
                "repo", f"{without_password(repo).url} has no commit {repo.commit} on any branch or tag, nor gives it by its hash"
            )
        return full, found

    async def forget(self, mirror: Path) -> None:
        """Remove a mirror that turned out to be damaged."""
        async with held(file_lock(self._root / f"{mirror.name}.lock")):
            await asyncio.to_thread(shutil.rmtree, mirror, ignore_errors=True)

    async def _resolve(self, mirror: Path, commit: str) -> str | None:
        """The whole name of a commit that the mirror has for certain; `UsageError` when there are several it may be."""
        if not (mirror / "HEAD").exists():
            return None
        if len(commit) not in (40, 64):
            # No ref of a mirror can be meant: all lie below refs/all and refs/untax.
            named = await self._ask(mirror, "rev-parse", "--verify", f"{commit}^{{commit}}")
            if b"ambiguous" in named.log:
                raise UsageError(f"Repo.commit {commit!r} may be several; give more digits\n{named.log.decode(errors='replace')}")
            if named.code != 0:
                return None
            commit = named.stdout.decode().strip()
        # Reachable from a ref, and not merely there: a pack that was cut off has commits whose history is missing.
        found = await self._ask(mirror, "for-each-ref", "--count=1", "--format=%(objectname)", f"--contains={commit}")
        return commit if found.code == 0 and found.stdout.strip() else None

    async def _fetch(self, mirror: Path, origin: Origin, commit: str, depth: int | None, progress: Progress) -> str | None:
        """Bring a commit into a mirror; None when the repository does not have it, or gives it in no way that we know."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with held(using(mirror)), held(file_lock(self._root / f"{mirror.name}.lock")) as lock:
            found = await self._resolve(mirror, commit)  # another engine may have been faster
            if found is not None:
                return found
            await self._make(mirror, sha256=len(commit) == 64)
            if len(commit) in (40, 64) and origin.kind != "bundle":
                ask = [*(("--depth", str(depth)) if depth else ()), "origin", f"+{commit}:refs/untax/{commit}"]
                ran = await self._transfer(mirror, origin, ask, lock, progress)
                if ran.code == 0 and await self._resolve(mirror, commit):
                    return commit
                log.debug("%s does not give %s by its hash: %s", origin.url, commit, ran.log.decode(errors="replace"))
            if depth is not None:
                return None
            names = ["*"] if origin.kind == "bundle" else ["heads/*", "tags/*"]
            ran = await self._transfer(mirror, origin, ["--prune", "origin", *(f"+refs/{n}:refs/all/{n}" for n in names)], lock, progress)
            if ran.code != 0:
                elsewhere = "; it sends us elsewhere, where the password may not go: name that address instead"
                is_sent = origin.authorization is not None and _REDIRECTED.search(ran.log)
                raise StageFailed("repo", f"cannot fetch from {origin.url}{elsewhere if is_sent else ''}", ran.log)
            found = await self._resolve(mirror, commit)
            if found is None and b"shallow roots" in ran.log:
                raise StageFailed("repo", f"{origin.url} has only a part of its history itself; ask for as much by depth=…", ran.log)
            if found is not None:
                await self._ask(mirror, "update-ref", f"refs/untax/{found}", found)  # stays when its branch moves on
            return found

    async def _make(self, mirror: Path, *, sha256: bool) -> None:
        """An empty mirror, or the one that is there without what a killed fetch left in the way. Its lock is held."""
        if (mirror / "HEAD").exists():
            await asyncio.to_thread(_sweep_mirror, mirror)
            return
        shutil.rmtree(mirror, ignore_errors=True)
        made = await self.git.run(
            ["init", "-q", "--bare", "--template=", f"--object-format={'sha256' if sha256 else 'sha1'}", str(mirror)],
            cwd=self._root,
            patience_s=_LOCAL_PATIENCE_S,
        )
        if made.code != 0:
            raise StageUnavailable("repo", f"no mirror could be made in {self._root}", made.log)

    async def _transfer(self, mirror: Path, origin: Origin, ask: Sequence[str], lock: int, progress: Progress) -> Ran:
        """One fetch, tried again when the server or the way to it failed. Gives the refusal when it was refused."""
        options = ["--no-tags", "--no-write-fetch-head", "--no-recurse-submodules", "--progress", "--force"]
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                # Git holds the lock as well: should this engine be killed, nobody else comes in before git has ended too.
                ran = await self.git.run(
                    ["fetch", *options, *ask],
                    cwd=mirror,
                    config=origin.config(),
                    patience_s=_FETCH_PATIENCE_S,
                    on_stderr=_Received(f"fetch {origin.url}", progress),
                    inherit=[lock],
                )
            except TimeoutError:
                raise StageUnavailable("repo", f"{origin.url} did not finish within {_FETCH_PATIENCE_S:g} s") from None
            if _FULL.search(ran.log):
                raise StageUnavailable("repo", f"no room in {self._root}; free some, or keep state_dir elsewhere", ran.log)
            if ran.code == 0 or _MISSING.search(ran.log) or not _TRANSIENT.search(ran.log):
                return ran
            if attempt < _ATTEMPTS:
                await asyncio.sleep(_BACK_OFF_S * 2 ** (attempt - 1) * (1 + random.random()))
        raise StageUnavailable("repo", f"{origin.url} did not answer in {_ATTEMPTS} attempts", ran.log)

    async def _ask(self, mirror: Path, *argv: str) -> Ran:
        return await self.git.run(argv, cwd=mirror, patience_s=_LOCAL_PATIENCE_S)


def _sweep_mirror(mirror: Path) -> None:
    """What a git that was killed leaves: locks that nobody holds, and packs that were never finished."""
    for directory, _, names in os.walk(mirror):
        for name in names:
            if name.endswith(".lock") or name.startswith("tmp_"):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(directory, name))


class _Received:
    """Reads git's own progress out of what it prints."""

    _AMOUNT: ClassVar = re.compile(rb"Receiving objects:.*?, ([0-9.]+) (bytes|KiB|MiB|GiB)")
    _UNITS: ClassVar = {b"bytes": 1, b"KiB": 1 << 10, b"MiB": 1 << 20, b"GiB": 1 << 30}

    def __init__(self, what: str, progress: Progress) -> None:
        self._what = what
        self._progress = progress

    def __call__(self, printed: bytes) -> None:
        amounts = self._AMOUNT.findall(printed)
        if amounts:
            number, unit = amounts[-1]
            with contextlib.suppress(ValueError):
                self._progress(self._what, int(float(number) * self._UNITS[unit]), None)
