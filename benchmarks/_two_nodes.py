"""Two nodes as two processes of a benchmark: how they are begun and asked, and the layers that travel between them."""

import contextlib
import os
import ssl
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from untax.cluster.transfer.serve import Server
from untax.layers import marks
from untax.layers.store import LayerStore

MIB = 1 << 20
_SMALL = 32 << 10  # bytes of each of the small files that are an eighth of the mixed layer


def server(store: LayerStore, said: Mapping[str, Any]) -> Server:
    """Of the node that has the layers, as its role says: `certificate`, `key`, `token` and `host`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(said["certificate"], said["key"])
    return Server("there", store, context, said["token"], host=said["host"])


def layers(root: Path, mib: int, only: int = 2) -> dict[str, str]:
    """Ids by what they are; `only` the first so many."""
    store = LayerStore(root, marks=marks.of_this_process())
    made = {}
    for what, small in (("one file", 0), ("an eighth in small files", mib * MIB // 8 // _SMALL))[:only]:
        with store.draft() as draft:
            with open(draft.tree / "large", "wb") as file:
                file.writelines(os.urandom(MIB) for _ in range((mib * MIB - small * _SMALL) // MIB))
            for number in range(small):
                directory = draft.tree / f"d{number // 100}"
                directory.mkdir(exist_ok=True)
                (directory / str(number)).write_bytes(os.urandom(_SMALL))
            made[f"{mib} MiB, {what}"] = draft.publish().id
    store.close()
    return made


@contextlib.contextmanager
def process(argv: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    """It ends with its input."""
    node = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield node
    finally:
        assert node.stdin is not None
        node.stdin.close()
        node.wait()


def line(node: "subprocess.Popen[str]") -> str:
    assert node.stdout is not None
    said = node.stdout.readline()
    if not said:
        raise SystemExit("one of the two nodes failed")
    return said


def ask(node: "subprocess.Popen[str]", what: str = "go") -> str:
    assert node.stdin is not None
    node.stdin.write(f"{what}\n")
    node.stdin.flush()
    return line(node)
