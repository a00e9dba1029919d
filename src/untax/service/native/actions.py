"""Commands and sessions inside a lease."""

from __future__ import annotations

import secrets
from typing import Any

from untax.channel.session import Session
from untax.service.errors import Refused, not_found
from untax.service.native.endpoint import Asked, Operation
from untax.service.native.fields import Field, bad
from untax.service.native.idempotency import Answered
from untax.service.native.values import result_data, text_of

TIMEOUT_MAX_S = 86_400.0
_SESSIONS_MAX = 64  # of one lease
_CAP_MAX = 16 << 20


async def run(asked: Asked) -> dict[str, Any]:
    body, box = asked.body, asked.holding.box
    options = {name: body[name] for name in ("cwd", "env", "stdin", "user", "timeout_s", "merge", "cap")}
    if body["stdin_text"] is not None:
        if options["stdin"] is not None:
            raise bad("give either stdin or stdin_text")
        options["stdin"] = body["stdin_text"].encode()
    if (body["argv"] is None) == (body["shell"] is None):
        raise bad("give either argv, a list, or shell, a text")
    if body["argv"] is not None:
        return result_data(await box.run(body["argv"], **options))
    return result_data(await box.shell(body["shell"], **options))


async def processes(asked: Asked) -> dict[str, Any]:
    found = await asked.holding.box.processes()
    return {
        "processes": [
            {"pid": one.pid, "running": one.running, "pty": one.pty, "age_s": one.age_s, "argv": [text_of(word) for word in one.argv]}
            for one in found
        ]
    }


async def open_session(asked: Asked) -> dict[str, Any]:
    holding, body = asked.holding, asked.body
    sessions: dict[str, Session] = holding.extra.setdefault("sessions", {})
    for name in [name for name, one in sessions.items() if not one.is_alive]:
        del sessions[name]
    if len(sessions) >= _SESSIONS_MAX:
        raise Refused(429, "TooMany", f"{_SESSIONS_MAX} sessions are open in this lease: close some of them", retry_after_s=1.0)
    session = await holding.box.session(cwd=body["cwd"], env=body["env"], user=body["user"]).open()
    name = f"ses-{secrets.token_hex(8)}"
    sessions[name] = session
    return {"session": name, "pid": session.pid}


def _session(asked: Asked) -> Session:
    found: Session | None = asked.holding.extra.get("sessions", {}).get(asked.path["session"])
    if found is None:
        raise not_found("session")
    return found


async def run_in_session(asked: Asked) -> dict[str, Any]:
    session = _session(asked)
    result = await session.run(asked.body["text"], timeout_s=asked.body["timeout_s"], cap=asked.body["cap"])
    return {**result_data(result), "is_alive": session.is_alive}


async def close_session(asked: Asked) -> Answered:
    session = _session(asked)
    del asked.holding.extra["sessions"][asked.path["session"]]
    await session.close()
    return Answered(204)


_WHERE = {
    "cwd": Field("text", "where it runs", is_nullable=True, most=4096),
    "env": Field("variables", "over the lease's", is_nullable=True),
    "user": Field("text", "as whom", is_nullable=True, most=256),
}
_TIMEOUT = Field("number", "seconds; null: as long as the lease lasts", is_nullable=True, default=300.0, most=TIMEOUT_MAX_S)
_CAP = Field("whole", "bytes of each stream that are returned", default=1 << 20, least=0, most=_CAP_MAX)
_RUN = {
    "argv": Field("texts", "the program and its arguments", is_nullable=True),
    "shell": Field("text", "or a text for bash", is_nullable=True),
    **_WHERE,
    "stdin": Field("base64", "standard input", is_nullable=True),
    "stdin_text": Field("text", "the same as text", is_nullable=True),
    "timeout_s": _TIMEOUT,
    "merge": Field("truth", "stderr into stdout", default=False),
    "cap": _CAP,
}
_IN_SESSION = {"text": Field("text", "what one would type", is_needed=True), "timeout_s": _TIMEOUT, "cap": _CAP}
_ONE = "/leases/{lease}"

OPERATIONS = (
    Operation(
        "POST",
        f"{_ONE}/run",
        "run",
        "Run a command and wait for it; its exit code is a result, never an error",
        run,
        body=_RUN,
        errors=(422,),
    ),
    Operation("GET", f"{_ONE}/processes", "list_processes", "What was started and not yet forgotten", processes),
    Operation(
        "POST",
        f"{_ONE}/sessions",
        "open_session",
        "A bash whose directory and variables last",
        open_session,
        body=_WHERE,
        status=201,
        errors=(422,),
    ),
    Operation("POST", f"{_ONE}/sessions/{{session}}/run", "run_in_session", "Run what one would type", run_in_session, body=_IN_SESSION),
    Operation("DELETE", f"{_ONE}/sessions/{{session}}", "close_session", "End the shell and what runs in it", close_session, status=204),
)
