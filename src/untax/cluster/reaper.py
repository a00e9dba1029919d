"""What an agent that was killed left on its node, removed by somebody who outlives it.

A shell waits for the end of a pipe that only the agent holds open: it costs next to nothing, and the kernel tells it, however the agent ended. Unless the agent said that it
is done, an engine is then started on its state directory and ended again, which sweeps (untax.substrates._host). The store of layers stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from untax.cluster.interpreter import command
from untax.core.errors import UntaxError
from untax.engine import Engine
from untax.server.sole import only_server

# In a process of its own that is nobody's child: Ray kills the children of its workers. Signals of a terminal or of a manager are not for it.
# The pipe is its input, put aside at once: what runs in the background has none, and Debian's shell knows no descriptor of two digits.
_WAIT = 'exec 3<&0; (trap "" HUP INT TERM; cd /; read -r word <&3 || exec "$0" "$@" 3<&-) >/dev/null 2>&1 &'
# What was killed with the agent may still be ending, and its groups cannot be removed before that; nothing tells when.
_AGAIN_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Reaper:
    """Waits from here on, until `done` or until this process is no more."""

    def __init__(self, substrate: str, state_dir: Path, place: Path) -> None:
        reading, self._writing = os.pipe()
        said = {"substrate": substrate, "state_dir": str(state_dir), "place": str(place)}
        try:
            subprocess.run(
                ["/bin/sh", "-c", _WAIT, *command("untax.cluster.reaper", said)],
                stdin=reading,
                start_new_session=True,
                check=True,
            )
        except BaseException:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)

    def done(self) -> None:
        """Nothing is left to be removed."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._writing, b"done\n")
        os.close(self._writing)


async def swept(substrate: str, state_dir: Path, place: Path) -> None:
    """Nothing where another agent is there already: it has swept itself."""
    if not state_dir.is_dir():
        return
    with contextlib.suppress(UntaxError), only_server(str(state_dir), substrate):
        shutil.rmtree(place, ignore_errors=True)
        for again_s in _AGAIN_S:
            async with Engine(substrate, state_dir=state_dir):
                pass
            if not any((state_dir / substrate).glob("*engine-*")):
                break
            await asyncio.sleep(again_s)


def main(said: Mapping[str, str]) -> None:
    asyncio.run(swept(said["substrate"], Path(said["state_dir"]), Path(said["place"])))
