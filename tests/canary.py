"""Canaries: a random string in the places that a workload must never be able to read.

A canary is put in host files of several kinds and in the environment of the engine's own process; hostile cases then look
for it from inside. `planted` proves that the host itself can find it, otherwise its absence inside would mean nothing.
"""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Where a forgotten bind mount or a deny-list with a hole would show. The ordinary user reaches only some of them.
_PLACES = ("/root", "/etc", "/var/lib", "/opt", "/srv", "/home", "/run", "/var/tmp", "~", "/tmp")


class Canary:
    def __init__(self, text: str, files: list[Path]) -> None:
        self.text = text
        self.files = files

    @property
    def bytes(self) -> bytes:
        return self.text.encode()


@contextlib.contextmanager
def planted() -> Iterator[Canary]:
    """Plant a canary; every file is 0600 and goes away afterwards."""
    text = "untax-canary-" + secrets.token_hex(16)
    files: list[Path] = []
    # The name must not hold the secret: a listing may legitimately show names.
    name = f".untax-test-{os.getpid()}-{secrets.token_hex(4)}"
    os.environ["UNTAX_TEST_CANARY"] = text
    try:
        for place in {os.path.realpath(os.path.expanduser(p)) for p in _PLACES} | {tempfile.gettempdir()}:
            path = Path(place) / name
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(fd, "w") as out:
                    out.write(text + "\n")
                files.append(path)
        assert files and all(text in path.read_text() for path in files)
        yield Canary(text, files)
    finally:
        os.environ.pop("UNTAX_TEST_CANARY", None)
        for path in files:
            path.unlink(missing_ok=True)
