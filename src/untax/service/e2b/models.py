"""Ours in E2B's words: entries of a file system, accounts, times, ends of processes. Pure."""

from __future__ import annotations

import posixpath
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from untax.channel.replies import Entry, Event
from untax.core.result import CommandResult

ENVD_VERSION = "0.6.4"
"""Of which all that the SDK asks for is here: up to recursive watches with entries, default users, closing of input, uploads as octets, metadata."""
_DIRECTORY_BYTES = 4096
_WHOLE = re.compile(r"-?[0-9]{1,15}")
METADATA_PREFIX = "user.e2b."
_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY"}
_EVENTS = {"created": "CREATE", "modified": "WRITE", "deleted": "REMOVE", "moved": "RENAME", "attributes": "CHMOD"}
_SIGNALS = {
    1: "hangup",
    2: "interrupt",
    3: "quit",
    6: "aborted",
    9: "killed",
    11: "segmentation fault",
    13: "broken pipe",
    15: "terminated",
}


def moment(seconds: float) -> str:
    """RFC 3339, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


# ---- accounts ----


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    uid: int
    gid: int
    home: str


@dataclass(frozen=True, slots=True)
class Accounts:
    """Who there is, as the files in /etc say. What they say is the workload's word, and only names and numbers of its own sandbox."""

    users: Mapping[str, Account] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    groups: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, passwd: bytes, group: bytes) -> Accounts:
        users: dict[str, Account] = {}
        names: dict[int, str] = {}
        for fields in _lines(passwd, 7):
            account = Account(fields[0], int(fields[2]), whole(fields[3]) or 0, fields[5] or "/")
            users.setdefault(account.name, account)
            names.setdefault(account.uid, account.name)
        groups: dict[int, str] = {}
        for fields in _lines(group, 3):
            groups.setdefault(int(fields[2]), fields[0])
        return cls(users, names, groups)

    def owner(self, uid: int) -> str:
        return self.names.get(uid, str(uid))

    def group(self, gid: int) -> str:
        return self.groups.get(gid, str(gid))


def _lines(raw: bytes, least: int) -> list[list[str]]:
    lines = [line.split(":") for line in raw.decode("utf-8", "replace").splitlines()]
    return [
        fields for fields in lines if len(fields) >= least and fields[0] and not fields[2].startswith("-") and whole(fields[2]) is not None
    ]


def whole(text: str) -> int | None:
    """A number as people write it, of at most 15 digits; None for anything else that Python would take for digits."""
    return int(text) if _WHOLE.fullmatch(text) else None


def resolved(path: str, home: str, workdir: str | None = None) -> str:
    """A path as programs of that user would mean it: `~` and relative ones are below the home, or the working directory."""
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    whole = posixpath.normpath(posixpath.join(workdir or home, path)) if path else workdir or home
    return "/" + whole.lstrip("/")


# ---- files ----


def permissions(entry: Entry) -> str:
    """As Go prints a mode: the type's letter, then the bits."""
    letter = {"directory": "d", "link": "L", "fifo": "p", "socket": "S", "character": "Dc", "block": "D"}.get(entry.type, "-")
    return letter + stat.filemode(stat.S_IFREG | (entry.mode & 0o777))[1:]


def entry_info(
    entry: Entry,
    path: str,
    accounts: Accounts,
    *,
    kind: str | None = None,
    target: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """`kind` and `target` are what a link leads to."""
    info: dict[str, Any] = {
        "name": posixpath.basename(path) or "/",
        "type": _TYPES.get(kind or entry.type, "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        # An empty directory has a block of its own where envd runs (ext4), and clients take 0 for a fault.
        "size": str(entry.size or (_DIRECTORY_BYTES if entry.is_dir else 0)),
        "mode": entry.mode & 0o777,
        "permissions": permissions(entry),
        "owner": accounts.owner(entry.uid),
        "group": accounts.group(entry.gid),
        "modifiedTime": moment(entry.mtime_ns / 1e9),
    }
    if target is not None:
        info["symlinkTarget"] = target
    if metadata:
        info["metadata"] = dict(metadata)
    return info


def events_of(event: Event) -> list[tuple[str, str]]:
    """Names and types, as their watcher would have told it: what was moved goes in one place and appears in another."""
    if event.type == "overflow":
        return []
    told = [(event.path, f"EVENT_TYPE_{_EVENTS[event.type]}")]
    if event.type == "moved" and event.to is not None:
        told.append((event.to, "EVENT_TYPE_CREATE"))
    return told


# ---- processes ----


def end_event(result: CommandResult) -> dict[str, Any]:
    """How a process ended, in the words of Go's `os.ProcessState`."""
    if result.outcome in ("exited", "disk_full") or (result.outcome in ("oom", "limit") and result.exit_code < 128):
        status = f"exit status {result.exit_code}"
        end: dict[str, Any] = {"exitCode": result.exit_code, "exited": True, "status": status}
    else:
        number = result.exit_code - 128
        status = f"signal: {_SIGNALS.get(number, str(number))}"
        end = {"exitCode": -1, "exited": False, "status": status}
    if end["exitCode"]:
        reason = {"oom": " (out of memory)", "disk_full": " (disk full)", "limit": f" ({result.limit_kind} limit)"}.get(result.outcome, "")
        end["error"] = status + reason
    return end
