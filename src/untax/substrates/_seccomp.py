"""The cell's system-call table as the profile that container engines take: one table, two ways to apply it.

Engines name calls and compare whole arguments of 64 bits, of which the kernel may look at the lower half only. So nothing here says "unequal" or
"greater": what is allowed is said bit by bit, and what is not said is refused. Calls whose names the engine's library does not know yet do
not exist inside, as with any number above the table.
"""

from __future__ import annotations

import errno
import functools
import subprocess
from collections.abc import Iterable
from typing import Any

from untax.core.errors import SubstrateUnavailable
from untax.substrates._host import cell_path

_LOW = 0xFFFFFFFF
_NAMESPACES = 0x7E020000  # CLONE_NEW* but for time
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_NETLINK = 16
# Said once more by name: engines before Docker 23 know no other default than EPERM, and glibc starts no thread when it gets that here.
_ABSENT = ["clone3"]
_PERSONALITIES = (0, 0x0008, 0x20000, 0xFFFFFFFF)  # Linux, its 32-bit form, an old version number, and the question


@functools.cache
def profile() -> dict[str, Any]:
    """For this machine's processor. `SubstrateUnavailable` where the cell cannot be asked."""
    try:
        table = subprocess.run([cell_path(), "seccomp-table", "--names"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as exc:
        raise SubstrateUnavailable("", f"the cell cannot be asked for its table of system calls: {exc}") from exc
    return profile_of(tuple(line.split() for line in table.splitlines()))


def profile_of(verdicts: Iterable[Iterable[str]]) -> dict[str, Any]:
    """The same from pairs of a call's name and its verdict."""
    names: dict[str, list[str]] = {}
    for name, verdict in verdicts:
        names.setdefault(verdict, []).append(name)
    rules = [_rule(names.get("allow", []), []), _refusal(names.get("eperm", []), errno.EPERM), _refusal(_ABSENT, errno.ENOSYS)]
    for verdict, conditions in _CONDITIONS.items():
        for name in names.get(verdict, []):
            rules += [_rule([name], condition) for condition in conditions]
    return {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": errno.ENOSYS, "syscalls": [rule for rule in rules if rule["names"]]}


def _rule(names: list[str], condition: list[dict[str, Any]]) -> dict[str, Any]:
    """Allowed where all of `condition` holds."""
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": condition}


def _refusal(names: list[str], error: int) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": error, "args": []}


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _equal(index: int, value: int) -> dict[str, Any]:
    return _masked(index, _LOW, value)


def _ioctls() -> list[list[dict[str, Any]]]:
    """All but two that differ in their last four bits: one that differs from both elsewhere, or has other last bits."""
    upper = _TIOCSTI & ~0xF
    elsewhere = [[_masked(1, 1 << bit, ~upper & 1 << bit)] for bit in range(4, 32)]
    return elsewhere + [[_equal(1, upper | last)] for last in range(16) if upper | last not in (_TIOCSTI, _TIOCLINUX)]


_CONDITIONS: dict[str, list[list[dict[str, Any]]]] = {
    "clone": [[_masked(0, _NAMESPACES, 0)]],
    "socket": [*([_equal(0, family)] for family in (1, 2, 10)), [_equal(0, _AF_NETLINK), _equal(2, 0)]],
    "ioctl": _ioctls(),
    "personality": [[_equal(0, value)] for value in _PERSONALITIES],
    # Asking about anybody, and changing one's own: the new limit's address is nil, or the process is the caller itself.
    "prlimit": [[_equal(0, 0)], [{"index": 2, "value": 0, "valueTwo": 0, "op": "SCMP_CMP_EQ"}]],
}
