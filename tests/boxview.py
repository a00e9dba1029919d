"""What a sandbox sees of its own processes.

A process in the middle of its exec has an empty command line, and one that was killed keeps its own until it next runs: to look
once is a race with either. So a test waits for what it expects, for so long at most, and looks once only where it must hold at once.
"""

import random


def odd_seconds() -> str:
    """How long to sleep in a test that looks for the sleeper: also where all share one /proc, nobody else's is found."""
    return str(random.randrange(10**6, 10**7))


def _seen(text: str) -> str:
    """A shell condition: a process has `text` in its command line. The bracket keeps the shell that asks from finding itself."""
    return f"grep -qsz -- '{text[:1]}[{text[1]}]{text[2:]}' /proc/[0-9]*/cmdline"


async def is_running(box, text: str) -> bool:
    return (await box.shell(_seen(text))).exit_code == 0


async def wait_running(box, text: str, within_s: float = 10.0) -> bool:
    return await _wait(box, _seen(text), within_s)


async def wait_gone(box, text: str, within_s: float) -> bool:
    return await _wait(box, f"! {_seen(text)}", within_s)


async def _wait(box, condition: str, within_s: float) -> bool:
    """/proc announces nothing, so this polls, inside and in one action."""
    steps = round(within_s / 0.01)
    asked = f"i=0; until {condition}; do [ $i -lt {steps} ] || exit 1; i=$((i+1)); sleep 0.01; done"
    return (await box.shell(asked, timeout_s=10 * within_s)).exit_code == 0
