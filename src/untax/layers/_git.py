"""Git on the host, over repositories that somebody else wrote.

It runs with a configuration of ours and no other: not the machine's, not the user's, and of a repository's own only what git
itself takes for safe. No hooks, no filters, no submodules, no prompts, no background work, only the transports named;
what a server sends is checked object by object. Every run has a deadline and a process group that goes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from untax.core.errors import StageUnavailable

# Bytes of what git printed that are kept for people: its last words tell what went wrong.
_LOG_BYTES = 64 << 10
_ANSWER_BYTES = 16 << 20
_MOST_FILE_BYTES = 64 << 30
"""No file that git writes may be larger: a server may send without an end."""
_KILL_PATIENCE_S = 10.0

# What reaches git of the engine's own variables: how to get out of this network, and whom to trust there.
_PASSED = (
    *("PATH", "TMPDIR", "SSH_AUTH_SOCK", "SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "CURL_CA_BUNDLE"),
    *(name for proxy in ("http_proxy", "https_proxy", "all_proxy", "no_proxy") for name in (proxy, proxy.upper())),
)
# Slips of old tools that are in the history of many honest repositories and harm nobody who reads them. Everything else that
# git checks is refused, the names that have led out of a work tree (.git, .gitmodules and their disguises) first of all.
_HARMLESS = (
    *("badDate", "badDateOverflow", "badEmail", "badName", "badTimezone", "badFilemode", "missingAuthor", "missingCommitter"),
    *("missingEmail", "missingNameBeforeEmail", "missingSpaceBeforeDate", "missingSpaceBeforeEmail", "missingTaggerEntry"),
    *("multipleAuthors", "nulInCommit", "zeroPaddedDate", "zeroPaddedFilemode", "badTagName", "extraHeaderEntry"),
)
PROTOCOLS = ("http", "https", "ssh", "file")

_CONFIG: dict[str, str] = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.symlinks": "true",
    "core.logAllRefUpdates": "false",
    "core.pager": "cat",
    "core.askPass": "true",
    "credential.helper": "",
    "init.defaultBranch": "main",
    "safe.directory": "*",  # of other owners too: of their configuration nothing is run by what is run here
    "protocol.allow": "never",
    **{f"protocol.{name}.allow": "always" for name in PROTOCOLS},
    "protocol.version": "2",
    "transfer.fsckObjects": "true",
    **{f"{verb}.fsck.{slip}": "ignore" for verb in ("fetch", "receive") for slip in _HARMLESS},
    **{f"fsck.{slip}": "ignore" for slip in _HARMLESS},
    "transfer.bundleURI": "false",
    "fetch.unpackLimit": "1",  # always a pack: one file, however many objects
    "fetch.recurseSubmodules": "false",
    "fetch.writeCommitGraph": "false",
    "submodule.recurse": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "index.version": "2",
    "pack.threads": "1",  # the same history then gives the same pack
    "pack.writeReverseIndex": "false",
    "uploadpack.allowAnySHA1InWant": "true",
    "advice.detachedHead": "false",
    # A server that sends less than this for so long is given up.
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
}


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    stdout: bytes
    log: bytes


class Git:
    """Runs git. `home` is a directory of ours for its configuration; it is made when it is missing."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._is_ready = False

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        patience_s: float,
        config: Mapping[str, str] | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
        inherit: Sequence[int] = (),
    ) -> Ran:
        """Run it to its end and give what it answered, whatever its exit code. `TimeoutError` after `patience_s`.

        `config` goes by the environment, which other users cannot read, unlike a command line. What `on_stdout` raises ends the run. It is killed
        with everything it started when the caller is cancelled.
        """
        self._prepare()
        if shutil.which("git") is None:
            raise StageUnavailable("repo", "git is not installed on this machine; install the package git")
        try:
            # By a shell: not every event loop starts a process with a umask of its own.
            child = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-c",
                'umask 022; exec git "$@"',
                "git",
                *argv,
                cwd=cwd,
                env=self._environment(config or {}),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=tuple(inherit),
            )
        except FileNotFoundError as exc:
            raise StageUnavailable("repo", f"git cannot be started: {exc}") from exc
        answer, words = bytearray(), bytearray()

        def keep(data: bytes) -> None:
            answer.extend(data)
            if len(answer) > _ANSWER_BYTES:
                raise StageUnavailable("repo", f"git {argv[0]} answered more than {_ANSWER_BYTES >> 20} MiB")

        def hear(data: bytes) -> None:
            words.extend(data)
            del words[:-_LOG_BYTES]
            if on_stderr is not None:
                on_stderr(data)

        assert child.stdout is not None and child.stderr is not None
        try:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (_MOST_FILE_BYTES, _MOST_FILE_BYTES))
            async with asyncio.timeout(patience_s), asyncio.TaskGroup() as group:
                group.create_task(_drain(child.stdout, on_stdout or keep))
                group.create_task(_drain(child.stderr, hear))
            code = await child.wait()
        except BaseExceptionGroup as exc:  # of the task group; there is one reader that may fail
            raise exc.exceptions[0] from None
        finally:
            await _end(child)
        return Ran(code, bytes(answer), _readable(bytes(words)))

    def _prepare(self) -> None:
        if self._is_ready:
            return
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = "".join(f"[{_section(key)}]\n\t{key.rpartition('.')[2]} = {value}\n" for key, value in _CONFIG.items())
        draft = self._home / f"config.{os.getpid()}"
        draft.write_text(text)
        draft.rename(self._home / "config")
        self._is_ready = True

    def _environment(self, config: Mapping[str, str]) -> dict[str, str]:
        env = {name: os.environ[name] for name in _PASSED if name in os.environ}
        env |= {
            "HOME": str(self._home),
            "XDG_CONFIG_HOME": str(self._home),
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            # A file, and not GIT_CONFIG_COUNT, which git takes from the processes that it starts in other repositories.
            "GIT_CONFIG_GLOBAL": str(self._home / "config"),
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "true",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_ALLOW_PROTOCOL": ":".join(PROTOCOLS),
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
            "GIT_SSH_VARIANT": "ssh",
            "GIT_CONFIG_COUNT": str(len(config)),
        }
        for at, (key, value) in enumerate(config.items()):
            env |= {f"GIT_CONFIG_KEY_{at}": key, f"GIT_CONFIG_VALUE_{at}": value}
        return env


def _section(key: str) -> str:
    section, *rest = key.rpartition(".")[0].split(".", 1)
    return f'{section} "{rest[0]}"' if rest else section


async def _drain(stream: asyncio.StreamReader, take: Callable[[bytes], None]) -> None:
    while data := await stream.read(1 << 16):
        take(data)


async def _end(child: asyncio.subprocess.Process) -> None:
    """Kill it with its group when it still runs, and see it gone."""
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILL_PATIENCE_S):
            await asyncio.shield(child.wait())


def _readable(words: bytes) -> bytes:
    """Its words without the lines that a terminal would have overwritten."""
    return b"\n".join(line.rpartition(b"\r")[2] or line.rstrip(b"\r").rpartition(b"\r")[2] for line in words.split(b"\n"))
