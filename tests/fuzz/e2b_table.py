"""E2B's routes as operations of an OpenAPI document, for `tests.fuzz.requests`: the control plane, and envd under Connect's JSON.

`x-envd` marks what goes to a sandbox by header, `x-stream` what comes and goes in envelopes; `x-endless` ends only with its reader.
"""

from typing import Any

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_TRUTH: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "number"}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
_TEMPLATE: Schema = {"type": "string", "enum": ["base", "base", "base", "x", "fuzz", "base:default"]}
_TIMEOUT: Schema = {"type": "integer", "minimum": 0, "maximum": 300}


def _object(*needed: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(needed)}


_VARIABLES = _object(A=_TEXT, image=_TEXT)
_NETWORK = _object(allowOut=_TEXTS, denyOut=_TEXTS, allowPublicTraffic=_TRUTH, maskRequestHost=_TEXT)
_CREATE = _object(
    "templateID", templateID=_TEMPLATE, timeout=_TIMEOUT, metadata=_VARIABLES, envVars=_VARIABLES, autoPause=_TRUTH, secure=_TRUTH,
    autoResume=_object(enabled=_TRUTH), network=_NETWORK, allow_internet_access=_TRUTH,
)  # fmt: skip
_STEPS: Schema = {
    "type": "array",
    "items": _object(
        "type", "args", type={"type": "string", "enum": ["RUN", "ENV", "COPY", "USER", "WORKDIR"]}, args=_TEXTS, filesHash=_TEXT
    ),
}
_BUILD = _object(
    fromImage={"type": "string", "enum": ["host", "x"]}, fromTemplate=_TEMPLATE, steps=_STEPS, startCmd=_TEXT, readyCmd={"enum": ["true"]}
)
_NAMED = _object("name", name={"type": "string", "enum": ["fuzz", "fuzz:a", "x y"]}, tags=_TEXTS, cpuCount=_WHOLE, memoryMB=_WHOLE)
_PAGE = {"limit": _WHOLE, "nextToken": _TEXT}

_CONTROL: tuple[tuple[str, str, Schema | None, dict[str, Schema]], ...] = (
    ("POST", "/sandboxes", _CREATE, {}),
    ("GET", "/sandboxes", None, {"metadata": _TEXT}),
    ("GET", "/v2/sandboxes", None, {"metadata": _TEXT, "state": _TEXT, "template": _TEXT, "startedAfter": _TEXT, "order": _TEXT, **_PAGE}),
    ("GET", "/sandboxes/metrics", None, {"sandbox_ids": _TEXT}),
    ("GET", "/sandboxes/{sandbox}", None, {}),
    ("DELETE", "/sandboxes/{sandbox}", None, {}),
    ("POST", "/sandboxes/{sandbox}/pause", _object(memory=_TRUTH), {}),
    ("POST", "/sandboxes/{sandbox}/resume", _object(timeout=_TIMEOUT, autoPause=_TRUTH), {}),
    ("POST", "/sandboxes/{sandbox}/connect", _object(timeout=_TIMEOUT), {}),
    ("POST", "/sandboxes/{sandbox}/timeout", _object("timeout", timeout=_TIMEOUT), {}),
    ("POST", "/sandboxes/{sandbox}/refreshes", _object(duration=_TIMEOUT), {}),
    ("PUT", "/sandboxes/{sandbox}/network", _NETWORK, {}),
    ("POST", "/sandboxes/{sandbox}/fork", _object(count={"type": "integer", "minimum": 0, "maximum": 3}, timeout=_TIMEOUT), {}),
    ("POST", "/sandboxes/{sandbox}/snapshots", _object(name=_TEXT), {}),
    ("GET", "/sandboxes/{sandbox}/metrics", None, {"start": _WHOLE, "end": _WHOLE}),
    ("GET", "/v2/sandboxes/{sandbox}/logs", None, {"start": _WHOLE, "limit": _WHOLE}),
    ("GET", "/snapshots", None, {"sandboxID": _TEXT, "name": _TEXT, **_PAGE}),
    ("POST", "/v3/templates", _NAMED, {}),
    ("GET", "/templates", None, {}),
    ("GET", "/templates/aliases/{template}", None, {}),
    ("POST", "/templates/tags", _object("target", "tags", target=_TEMPLATE, tags=_TEXTS), {}),
    ("DELETE", "/templates/tags", _object("name", "tags", name=_TEMPLATE, tags=_TEXTS), {}),
    ("GET", "/templates/{template}", None, {}),
    ("DELETE", "/templates/{template}", None, {}),
    ("GET", "/templates/{template}/tags", None, {}),
    ("GET", "/templates/{template}/files/{hash}", None, {}),
    ("POST", "/v2/templates/{template}/builds/{build}", _BUILD, {}),
    ("GET", "/templates/{template}/builds/{build}/status", None, {"logsOffset": _WHOLE}),
)
_PROCESS = _object(pid={"x-known": "pid"}, tag={"type": "string", "enum": ["held", "x"]})
_COMMAND = _object("cmd", cmd={"type": "string", "enum": ["true", "echo", "/bin/cat", "nothing"]}, args=_TEXTS, envs=_VARIABLES, cwd=_TEXT)
_PTY = _object(size=_object(rows=_WHOLE, cols=_WHOLE))
_INPUT = _object(stdin={"type": "string", "enum": ["eA==", "eA=="]}, pty={"type": "string", "enum": ["eA=="]})
_AT = _object("path", path=_TEXT)
_WATCH = _object("path", path={"type": "string", "enum": [".", "/tmp", "x"]}, recursive=_TRUTH, includeEntry=_TRUTH)
_WATCHER = _object(watcherId={"x-known": "watcher"})

_CALLS: tuple[tuple[str, Schema], ...] = (
    ("process.Process/List", _object()),
    ("process.Process/SendInput", _object("process", "input", process=_PROCESS, input=_INPUT)),
    ("process.Process/SendSignal", _object("process", "signal", process=_PROCESS, signal={"enum": ["SIGNAL_SIGTERM", "SIGNAL_SIGKILL"]})),
    ("process.Process/CloseStdin", _object("process", process=_PROCESS)),
    ("process.Process/Update", _object("process", process=_PROCESS, pty=_PTY)),
    ("filesystem.Filesystem/Stat", _AT),
    ("filesystem.Filesystem/MakeDir", _AT),
    ("filesystem.Filesystem/Move", _object("source", "destination", source=_TEXT, destination=_TEXT)),
    (
        "filesystem.Filesystem/ListDir",
        _object("path", path={"type": "string", "enum": [".", "d", "x"]}, depth={"type": "integer", "maximum": 3}),
    ),
    ("filesystem.Filesystem/Remove", _object("path", path={"type": "string", "enum": ["f", "d/e", "x"]})),
    ("filesystem.Filesystem/CreateWatcher", _WATCH),
    ("filesystem.Filesystem/GetWatcherEvents", _WATCHER),
    ("filesystem.Filesystem/RemoveWatcher", _WATCHER),
)
_STREAMS: tuple[tuple[str, Schema, bool], ...] = (
    ("process.Process/Start", _object("process", process=_COMMAND, pty=_PTY, tag=_TEXT, stdin=_TRUTH), False),
    ("process.Process/Connect", _object("process", process=_PROCESS), False),
    ("process.Process/StreamInput", _object("start", start=_object("process", process=_PROCESS), data=_object(input=_INPUT)), False),
    ("filesystem.Filesystem/WatchDir", _WATCH, True),
)


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    """Methods, paths and operations, as `paths` of a document has them."""
    found = [(method, path, _operation(path, body, query)) for method, path, body, query in _CONTROL]
    found += [("POST", f"/{name}", {**_operation(name, body, {}), "x-envd": True}) for name, body in _CALLS]
    found += [
        ("POST", f"/{name}", {**_operation(name, body, {}), "x-envd": True, "x-stream": True, "x-endless": is_endless})
        for name, body, is_endless in _STREAMS
    ]
    where = {"path": _TEXT, "username": {"type": "string", "enum": ["user", "root", "x"]}}
    raw = {"requestBody": {"content": {"application/octet-stream": {}}}}
    found += [("GET", "/files", {**_operation("/files", None, where), "x-envd": True})]
    found += [("POST", "/files", {**_operation("/files", None, where), **raw, "x-envd": True})]
    return found + [("GET", path, {**_operation(path, None, {}), "x-envd": True}) for path in ("/health", "/metrics", "/envs")]


def _operation(path: str, body: Schema | None, query: dict[str, Schema]) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    parameters += [{"name": name, "in": "query", "required": False, "schema": one} for name, one in query.items()]
    found: dict[str, Any] = {"operationId": path, "parameters": parameters}
    return found if body is None else found | {"requestBody": {"content": {"application/json": {"schema": body}}}}
