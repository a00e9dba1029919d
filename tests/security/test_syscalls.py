"""The system-call filter, from both sides: the recorded verdict of every number, and what the kernel answers inside."""

import json
import platform
import subprocess
from pathlib import Path

import pytest

from untax.substrates._host import cell_path

_RECORDED = Path(__file__).parent.parent / "data" / f"seccomp-{platform.machine()}.txt"
_ERRNO = {"eperm": 1, "enosys": 38}
# uretprobe and uprobe: since Linux 6.14 the kernel passes them by every filter and ends a caller that is not being probed.
_UNFILTERED = {335, 336}

# In the sandbox: each number called with arguments that no call accepts, and the errno that came back.
_PROBE = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for number in json.loads(sys.argv[1]):
    ctypes.set_errno(0)
    returned = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    found[number] = ctypes.get_errno() if returned == -1 else 0
print(json.dumps(found))
"""


def _verdicts(text: str) -> dict[int, str]:
    rows = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return {int(number): verdict for number, verdict in rows}


def _recorded() -> dict[int, str]:
    if not _RECORDED.exists():
        pytest.skip(f"no verdicts are recorded for {platform.machine()}")
    return _verdicts(_RECORDED.read_text())


def test_every_number_up_to_600_has_its_recorded_verdict():
    """A change of the table is a change of this record, seen in review."""
    printed = subprocess.run([cell_path(), "seccomp-table"], capture_output=True, text=True, check=True).stdout

    assert _verdicts(printed) == _recorded()
    assert sorted(_recorded()) == list(range(600))


async def test_e17_the_kernel_answers_refused_numbers_as_recorded(box):
    """Every refused call fails with its own error, none succeeds, and the sandbox goes on."""
    refused = {number: _ERRNO[verdict] for number, verdict in _recorded().items() if verdict in _ERRNO and number not in _UNFILTERED}
    refused |= dict.fromkeys((600, 601, 1000, 0x40000000), 38)

    result = await box.run(["python3", "-c", _PROBE, json.dumps(list(refused))])

    assert result.exit_code == 0, result.stderr
    assert {int(number): error for number, error in json.loads(result.stdout).items()} == refused
    assert (await box.run(["true"])).exit_code == 0
