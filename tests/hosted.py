"""`untax serve` over HTTP in a process of its own, and a plain client for it."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from tests import serving

TIMEOUT_S = 30


class Hosted(serving.Serving):
    """A service that said it listens."""

    def __init__(self, process: asyncio.subprocess.Process, said: dict[str, object]) -> None:
        super().__init__(process, str(said["url"]))
        self.said = said
        self.key_file = Path(str(said["key_file"]))
        text = self.key_file.read_text()
        self.token = text.strip() if "=" not in text else ""

    def client(self, token: str | None = None) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {token or self.token}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=TIMEOUT_S, trust_env=False)


async def started(state: Path, *options: str, substrate: str = "namespace", port: int = 0, stderr: int | None = None) -> Hosted:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "untax.cli", "serve", "--json", "--port", str(port), "--state-dir", str(state), "--substrate", substrate,
        "--limits", "warn", "--drain", "0", *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env=serving.environment(),
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = json.loads(await asyncio.wait_for(process.stdout.readline(), 30) or b"{}")
    if "url" not in said:
        await process.wait()
        raise AssertionError(said)
    return Hosted(process, said)


@contextlib.asynccontextmanager
async def hosted(directory: Path, *options: str, substrate: str = "namespace") -> AsyncIterator[Hosted]:
    """A service below `directory`; whatever happened to it, the process is gone at the end."""
    served = await started(directory / "state", *options, substrate=substrate)
    try:
        yield served
    finally:
        if served.process.returncode is None:
            served.send(signal.SIGCONT)
        await serving.ended(served)
