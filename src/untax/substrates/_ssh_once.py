"""One fresh `ssh` for one command, as people do it today: connect, agree on keys, log in, run, leave."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence

from untax.core.result import TIMEOUT_EXIT_CODE, CommandResult
from untax.substrates import _ssh_client as client
from untax.substrates._incumbent import by_deadline
from untax.substrates._ssh_client import Address


async def run_once(
    sandbox_id: str,
    address: Address,
    connect_s: float,
    workdir: str,
    argv: Sequence[str],
    *,
    timeout_s: float,
    ask: Callable[[], Awaitable[object]],
) -> CommandResult:
    """Run `argv` in `workdir` there. `ask` is of `by_deadline`; when it is ssh that failed, what `client.failure` makes of its words is raised."""
    mark = f"untax-{secrets.token_hex(8)}\n"
    began = time.perf_counter()
    done = await by_deadline(client.run(address, connect_s, _line(workdir, argv, mark)), timeout_s, sandbox_id, ask)
    trip_s = time.perf_counter() - began
    if done is None:
        return CommandResult(TIMEOUT_EXIT_CODE, outcome="timeout", round_trip_s=trip_s)
    code, out, err = done
    before, vouched, after = err.rpartition(mark.encode())
    if code < 0 or (code == client.FAILED and not vouched):
        raise client.failure(sandbox_id, address, err[-1000:].decode(errors="replace").strip())
    return CommandResult(code, out, before + after, round_trip_s=trip_s)


def _line(workdir: str, argv: Sequence[str], mark: str) -> str:
    """For the shell there, whosever it is, to give to a plain one.

    255 is what ssh ends with when it fails, and also when a signal ended what it ran. The shell around the command makes 128 + n of a signal, and
    vouches by the mark for a 255 that is the command's own. What it would say itself of a command that was killed goes nowhere.
    """
    script = (
        f"cd {shlex.quote(workdir)} || exit; exec 3>&2 2>/dev/null; (exec {client.quoted(argv)} 2>&3 3>&-); code=$?; "
        f"[ $code != {client.FAILED} ] || echo {mark.strip()} >&3; exit $code"
    )
    return f"exec sh -c {shlex.quote(script)}"
