"""CommandResult: how a command ended, as data.

The six outcomes here belong to the workload. The three that belong to the infrastructure are exceptions
(`SpawnFailed`, `SandboxLost`, `BackendError`) and can never be read as a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from untax.core.errors import CommandFailed

Outcome = Literal["exited", "signaled", "timeout", "oom", "disk_full", "limit"]

TIMEOUT_EXIT_CODE = 124  # as coreutils' `timeout`
SIGNAL_EXIT_BASE = 128  # as a shell: 128 + the signal's number
_LIMIT_SIGNALS = {25: "fsize", 24: "cpu"}  # SIGXFSZ, SIGXCPU as Linux numbers them: the client may run elsewhere
_SIGKILL = 9


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command printed, how it ended and what it used.

    `exit_code` is the status of a command that exited, 128 + n for one that signal n ended (137 for `oom`), and 124 for
    one cut off at its deadline.

    `stdout` and `stderr` are raw. Each holds at most the cap that was asked for; when a command printed more,
    the bytes from the beginning and from the end are joined without a marker, `truncated` is true and
    `dropped_stdout`, `dropped_stderr` count what lay between.
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    outcome: Outcome = "exited"
    limit_kind: str | None = None  # "fsize", "cpu" or "pids": the limit that was met, also when the command got over it
    elapsed_s: float = 0.0  # inside, from start to exit
    round_trip_s: float = 0.0  # outside, from sending the request to having the answer
    user_s: float = 0.0
    system_s: float = 0.0
    peak_memory_kib: int = 0
    oom_kills: int = 0  # processes the kernel killed for memory while this ran, the command itself or not
    dropped_stdout: int = 0
    dropped_stderr: int = 0

    @property
    def timed_out(self) -> bool:
        return self.outcome == "timeout"

    @property
    def truncated(self) -> bool:
        return self.dropped_stdout > 0 or self.dropped_stderr > 0

    @property
    def text(self) -> str:
        """`stdout` as UTF-8, with U+FFFD for what is not."""
        return self.stdout.decode("utf-8", "replace")

    def check(self) -> CommandResult:
        """Return this result when it exited with 0, raise `CommandFailed` otherwise."""
        if self.outcome != "exited" or self.exit_code != 0:
            raise CommandFailed(self)
        return self

    def summary(self) -> str:
        """One line for people: how it ended and the last thing it said on stderr."""
        how = f"exit code {self.exit_code}" if self.outcome == "exited" else f"{self.outcome} ({self.exit_code})"
        if self.limit_kind is not None:
            how = f"{self.limit_kind} limit ({self.exit_code})"
        said = self.stderr.rstrip().rsplit(b"\n", 1)[-1][-200:]
        return f"{how}: {ascii(said.decode('utf-8', 'replace'))[1:-1]}" if said else how


def derive_outcome(
    *, signaled: bool, timed_out: bool, code: int, oom_kills: int, pids_refused: int, disk_full: bool
) -> tuple[int, Outcome, str | None]:
    """The exit code, outcome and kind of limit that the cell's facts about one command amount to.

    A success is a success, whatever limits were met on the way; they are noted in the kind. A failure is blamed on a
    limit only when the kernel's counters say that it was met while the command ran. A shell whose last child the
    kernel killed for memory exits with 137, which is `oom` as well.
    """
    kind = "pids" if pids_refused else None
    if timed_out:
        return TIMEOUT_EXIT_CODE, "timeout", kind
    exit_code = SIGNAL_EXIT_BASE + code if signaled else code
    if exit_code == SIGNAL_EXIT_BASE + _SIGKILL and oom_kills:
        return exit_code, "oom", kind
    if signaled and code in _LIMIT_SIGNALS:
        return exit_code, "limit", _LIMIT_SIGNALS[code]
    if exit_code != 0 and disk_full and not signaled:
        return exit_code, "disk_full", kind
    if exit_code != 0 and pids_refused:
        return exit_code, "limit", kind
    return exit_code, "signaled" if signaled else "exited", kind
