"""Every exception we raise.

```text
UntaxError                   retryable = False unless a subclass says otherwise
├── UsageError               the caller's mistake: bad spec, bad option, wrong order of calls (also a ValueError)
│   └── RecordError          a file of records that cannot be read as one, or not be written any further
├── SubstrateError           the substrate's failure; carries the sandbox id
│   ├── SubstrateUnavailable not usable on this machine, or no quota
│   ├── CreateError          no sandbox came of it                        retryable
│   ├── ReadinessTimeout     created, never became ready                  retryable
│   ├── SpawnFailed          the sandbox stands, the command never started
│   ├── SandboxLost          died under its holder                        retryable
│   ├── BackendError         the engine, cluster or provider failed       retryable
│   └── DestroyError         may have leaked something; names what
├── PoolError
│   ├── PoolTimeout          no lease within the deadline                 retryable
│   ├── LeaseRefused         not here and now: ask another node           retryable
│   └── PoolClosed
├── StageError               what a spec needs could not be put in place; carries the stage
│   ├── StageFailed          its recipe failed: a set-up command, a missing commit, a refused archive; carries the log
│   └── StageUnavailable     its source did not answer, or the store is full or damaged     retryable
├── ProtocolError            the other end of an action channel spoke nonsense
├── CommandFailed            raised by CommandResult.check(); carries the result
└── ActionError              the sandbox stands and answered no; the workload's business, never the infrastructure's
    ├── FileError            a file action failed inside; also an OSError, with errno and filename
    │   ├── NotFound         also a FileNotFoundError
    │   ├── Exists           also a FileExistsError
    │   ├── PermissionDenied also a PermissionError
    │   ├── IsDirectory      also an IsADirectoryError
    │   ├── NotDirectory     also a NotADirectoryError
    │   ├── DiskFull         no space or quota left in the sandbox
    │   └── TooLarge         more than the caller allowed
    ├── EditConflict         the text to edit is not there, or not as often; the patch does not apply
    ├── ActionTimeout        an action other than a command passed its deadline; also a TimeoutError
    ├── Gone                 no such session, process or user inside
    │   └── NoWorker         nobody inside acts for that user yet; nothing was started
    └── NotRun               left out of a batch that stopped at an earlier failure, or cancelled before it began
```
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from untax.core.result import CommandResult


class UntaxError(Exception):
    """The root: `retryable` says whether the same request may succeed on a fresh sandbox."""

    retryable = False


class UsageError(UntaxError, ValueError):
    """The caller's mistake; the message names the remedy. Nothing was started."""


class RecordError(UsageError):
    """A file of records that cannot be read as one, or not be written any further. Nothing of it was changed or lost."""


class SubstrateError(UntaxError):
    """The substrate failed. `sandbox_id` is empty when there was no sandbox yet."""

    def __init__(self, sandbox_id: str, message: str) -> None:
        super().__init__(sandbox_id, message)
        self.sandbox_id = sandbox_id
        self.message = message

    def __str__(self) -> str:
        return f"{self.sandbox_id}: {self.message}" if self.sandbox_id else self.message


class SubstrateUnavailable(SubstrateError):
    pass


class CreateError(SubstrateError):
    retryable = True


class ReadinessTimeout(SubstrateError):
    retryable = True


class SpawnFailed(SubstrateError):
    pass


class SandboxLost(SubstrateError):
    retryable = True


class BackendError(SubstrateError):
    retryable = True


class DestroyError(SubstrateError):
    pass


class PoolError(UntaxError):
    pass


class PoolTimeout(PoolError):
    retryable = True


class LeaseRefused(PoolError):
    """A node that was asked to say so at once has no place for this lease; nothing was started, and another node may have one.

    `reason` is a word for programs: `"draining"`, `"full"` (a lease would have to end first), `"busy"` (the tenant's allowance is used up,
    or what was being made for it was too long in coming) or `"disk"` (there is no room for a stage).
    """

    retryable = True

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return self.message


class PoolClosed(PoolError):
    pass


class StageError(UntaxError):
    """What a spec needs could not be put in place. `stage` is the rung of the ladder, `log` what was printed meanwhile."""

    def __init__(self, stage: str, message: str, log: bytes = b"") -> None:
        super().__init__(stage, message, log)
        self.stage = stage
        self.message = message
        self.log = log

    def __str__(self) -> str:
        tail = self.log[-2000:].decode(errors="replace").rstrip()
        return f"{self.stage}: {self.message}" + (f"\n{tail}" if tail else "")


class StageFailed(StageError):
    """The recipe itself failed: the same recipe will fail again."""

    @property
    def found_no_room(self) -> bool:
        """Whether a set-up command found no room: it may have filled the machine's disk, and not its own share. Then it may do better elsewhere."""
        return "disk_full" in self.message


class StageUnavailable(StageError):
    """The source did not answer, or the store is full or damaged."""

    retryable = True


class ProtocolError(UntaxError):
    pass


class CommandFailed(UntaxError):
    """A command that was checked did not exit with 0; `result` says how it ended."""

    def __init__(self, result: CommandResult) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return self.result.summary()


class ActionError(UntaxError):
    pass


class FileError(ActionError, OSError):
    """A file action failed inside the sandbox. `errno`, `strerror` and `filename` are as for any `OSError`."""


class NotFound(FileError, FileNotFoundError):
    pass


class Exists(FileError, FileExistsError):
    pass


class PermissionDenied(FileError, PermissionError):
    pass


class IsDirectory(FileError, IsADirectoryError):
    pass


class NotDirectory(FileError, NotADirectoryError):
    pass


class DiskFull(FileError):
    pass


class TooLarge(FileError):
    pass


class EditConflict(ActionError):
    pass


class ActionTimeout(ActionError, TimeoutError):
    pass


class Gone(ActionError):
    pass


class NoWorker(Gone):
    pass


class NotRun(ActionError):
    pass


_BY_ERRNO: dict[int, type[FileError]] = {
    errno.ENOENT: NotFound,
    errno.EEXIST: Exists,
    errno.ENOTEMPTY: Exists,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EROFS: PermissionDenied,
    errno.EISDIR: IsDirectory,
    errno.ENOTDIR: NotDirectory,
    errno.ENOSPC: DiskFull,
    errno.EDQUOT: DiskFull,
    errno.EFBIG: TooLarge,
}


def file_error(number: int, message: str, path: str | None) -> FileError:
    """The exception for an error number that a file action met inside the sandbox."""
    kind = _BY_ERRNO.get(number, FileError)
    reason = os.strerror(number) if number > 0 else "failed"
    step = message.removesuffix(reason).rstrip(": ")  # cells say the reason too
    return kind(number, f"{reason} ({step})" if step else reason, path)
