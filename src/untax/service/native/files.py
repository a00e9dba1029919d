"""Files inside a lease: bytes in, bytes out."""

from __future__ import annotations

from typing import Any

from untax.service.native.endpoint import Asked, Operation
from untax.service.native.fields import Field
from untax.service.native.idempotency import Answered
from untax.service.native.values import entry_data, text_of


async def read(asked: Asked) -> Answered:
    query = asked.query
    data = await asked.holding.box.read(query["path"], offset=query["offset"], limit=query["limit"])
    return Answered(200, data, "application/octet-stream")


async def write(asked: Asked) -> dict[str, Any]:
    query = asked.query
    written = await asked.holding.box.write(
        query["path"], asked.raw, mode=query["mode"], append=query["append"], exclusive=query["exclusive"], parents=query["parents"]
    )
    return {"bytes": written}


async def remove(asked: Asked) -> dict[str, Any]:
    return {"removed": await asked.holding.box.remove(asked.query["path"], recursive=asked.query["recursive"])}


async def entries(asked: Asked) -> dict[str, Any]:
    return {"entries": [entry_data(one) for one in await asked.holding.box.list(asked.query["path"])]}


async def stat(asked: Asked) -> dict[str, Any]:
    return entry_data(await asked.holding.box.stat(asked.query["path"], follow=asked.query["follow"]))


async def mkdir(asked: Asked) -> Answered:
    body = asked.body
    await asked.holding.box.mkdir(body["path"], mode=body["mode"], parents=body["parents"])
    return Answered(204)


async def move(asked: Asked) -> Answered:
    body = asked.body
    await asked.holding.box.move(body["source"], body["target"], overwrite=body["overwrite"])
    return Answered(204)


async def search(asked: Asked) -> dict[str, Any]:
    body = asked.body
    found = await asked.holding.box.search(
        body["pattern"],
        body["root"],
        how=body["how"],
        ignore_case=body["ignore_case"],
        whole_words=body["whole_words"],
        globs=body["globs"] or (),
        most=body["most"],
        timeout_s=body["timeout_s"],
    )
    matches = [
        {"path": text_of(one.path), "line": one.line, "column": one.column, "kind": one.kind, "text": text_of(one.text)}
        for one in found.matches
    ]
    return {"matches": matches, "files": found.files, "skipped": found.skipped, "more": found.more}


async def edit(asked: Asked) -> dict[str, Any]:
    body = asked.body
    return {"replaced": await asked.holding.box.edit(body["path"], body["old"], body["new"], count=body["count"])}


async def patch(asked: Asked) -> dict[str, Any]:
    body = asked.body
    changed = await asked.holding.box.apply_patch(body["diff"], body["directory"], strip=body["strip"], dry_run=body["dry_run"])
    return {"changed": [text_of(one) for one in changed]}


_PATH = Field("text", "relative to the working directory, or absolute", is_needed=True, least=1, most=4096)
_MODE_MAX = 0o7777
_ONE = "/leases/{lease}"
_READ = {
    "path": _PATH,
    "offset": Field("whole", "where to begin", default=0, least=0, most=2**62),
    "limit": Field("whole", "how many bytes; without it all, up to 64 MiB", least=0, most=64 << 20),
}
_WRITE = {
    "path": _PATH,
    "mode": Field("whole", "permission bits, as a decimal number", least=0, most=_MODE_MAX),
    "append": Field("truth", "to what is there", default=False),
    "exclusive": Field("truth", "refuse when it is there", default=False),
    "parents": Field("truth", "make missing directories", default=True),
}
_SEARCH = {
    "pattern": Field("text", "what to look for", is_needed=True, least=1, most=64 << 10),
    "root": Field("text", "below which directory", default=".", least=1, most=4096),
    "how": Field("text", "as what", default="text", choices=("text", "regex", "symbol")),
    "ignore_case": Field("truth", "", default=False),
    "whole_words": Field("truth", "", default=False),
    "globs": Field("texts", "only in files with such names"),
    "most": Field("whole", "matches", default=1000, least=1, most=100_000),
    "timeout_s": Field("number", "seconds", default=300.0, most=86_400.0),
}
_EDIT = {
    "path": _PATH,
    "old": Field("text", "must be there exactly `count` times", is_needed=True, least=1),
    "new": Field("text", "takes its place", is_needed=True),
    "count": Field("whole", "0: once or more", default=1, least=0, most=1_000_000),
}
_PATCH = {
    "diff": Field("text", "a unified diff", is_needed=True, least=1),
    "directory": Field("text", "where", default=".", least=1, most=4096),
    "strip": Field("whole", "leading parts of its paths that are left out", default=1, least=0, most=100),
    "dry_run": Field("truth", "only say what would change", default=False),
}
_MKDIR = {
    "path": _PATH,
    "mode": Field("whole", "permission bits", default=0o755, least=0, most=_MODE_MAX),
    "parents": Field("truth", "", default=True),
}
_MOVE = {"source": _PATH, "target": _PATH, "overwrite": Field("truth", "", default=True)}
_FOLLOW = {"path": _PATH, "follow": Field("truth", "links", default=True)}
_REMOVE = {"path": _PATH, "recursive": Field("truth", "a tree", default=False)}
_BAD = (403, 409, 413, 507)

OPERATIONS = (
    Operation("GET", f"{_ONE}/files", "read_file", "The bytes of a file", read, query=_READ, gives_bytes=True, errors=_BAD),
    Operation(
        "PUT", f"{_ONE}/files", "write_file", "Write a whole file, or append to one", write, query=_WRITE, takes_bytes=True, errors=_BAD
    ),
    Operation("DELETE", f"{_ONE}/files", "remove_file", "Remove a file, an empty directory or a tree", remove, query=_REMOVE, errors=_BAD),
    Operation("GET", f"{_ONE}/entries", "list_entries", "What is in a directory", entries, query={"path": _PATH}, errors=_BAD),
    Operation("GET", f"{_ONE}/stat", "stat_file", "One file", stat, query=_FOLLOW, errors=_BAD),
    Operation("POST", f"{_ONE}/mkdir", "make_directory", "Make a directory", mkdir, body=_MKDIR, status=204, errors=_BAD),
    Operation("POST", f"{_ONE}/move", "move_file", "Move or rename", move, body=_MOVE, status=204, errors=_BAD),
    Operation("POST", f"{_ONE}/search", "search", "Look for a text, an expression or a Python symbol", search, body=_SEARCH, errors=_BAD),
    Operation("POST", f"{_ONE}/edit", "edit_file", "Replace an exact text", edit, body=_EDIT, errors=_BAD),
    Operation("POST", f"{_ONE}/patch", "apply_patch", "Apply a unified diff, all of it or nothing", patch, body=_PATCH, errors=_BAD),
)
