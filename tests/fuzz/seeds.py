"""Writes seeds for the native fuzz targets: inputs that hold many valid requests, with answers of a worker between them.

A mutator alone takes hours to come upon one whole SPAWN. `python tests/fuzz/seeds.py agent DIRECTORY`, or `actions`, `ferry`, `texts`.
"""

import random
import struct
import sys
from pathlib import Path

from untax.channel import actions, flow, wire

SEEDS = 200
_FROM_HOST, _FROM_WORKER, _EXIT = 2, 6, 7  # steps of fuzz_agent.c
_EXECED, _KILLED, _PROBED = 0x71, 0x73, 0x75


def requests():
    """One valid request of every kind or more, as (kind, payload)."""
    calls = [
        actions.run(["true"]),
        actions.run(["cat"], stdin=b"in", env={"A": "1", "B": None}, cwd="d", user="root", merge=True, cap=100),
        actions.shell("echo $A", timeout_s=1),
        actions.signal(1, 15, group=True),
        actions.resize(1, 24, 80),
        actions.processes(),
        actions.session_open(cwd=".", env={"A": "1"}),
        actions.session_run(1, "cd /; pwd", cap=1000),
        actions.session_close(1),
        actions.read("f", offset=1, limit=100),
        actions.write("f", b"data", append=True),
        actions.write("n/m", b"data", exclusive=True),
        actions.list_dir(".", most=5),
        actions.stat("f", follow=False),
        actions.mkdir("n/d"),
        actions.remove("n", recursive=True),
        actions.move("f", "d/f2"),
        actions.upload("up", iter(()), max_bytes=1000, max_entries=10),
        actions.search("o", ".", most=5),
        actions.search("t[wh]o*", ".", how="regex", ignore_case=True, globs=["*.py", "!d/**"]),
        actions.search("A.*", ".", how="symbol"),
        actions.edit("f", "two", "2"),
        actions.apply_patch("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"),
        actions.configure(workdir="/", env={"PATH": "/bin"}, proxy_port=0),
        actions.ping(),
        flow.start(["cat"]),
        flow.start_shell("cat", stdin=False, merge=True),
        flow.pty(["sh"]),
        flow.attach(1),
        flow.connect(80),
        flow.download(".", max_bytes=1000),
        flow.watch("."),
    ]
    inner = b"".join(wire.frame(100 + n, call.kind, call.payload) for n, call in enumerate((calls[0], calls[11], calls[24])))
    return [(call.kind, call.payload) for call in calls] + [
        (wire.BATCH, wire.u8(1) + wire.u32(3) + inner),
        (wire.CANCEL, b""),
        (wire.CREDIT, wire.u8(1) + wire.u32(1000)),
        (wire.DATA, wire.u8(0) + b"data"),
        (wire.DATA, wire.u8(1)),
        (wire.EGRESS_OK, b""),
        (wire.EGRESS_DENY, wire.u16(403) + wire.blob(b"no")),
    ]


def answers(choose):
    """What a worker may say to a call, as (kind, payload)."""
    pid = choose.randrange(1, 9)
    return choose.choice((
        (_EXECED, struct.pack("<IiBQB", pid, 0, 0, 1, 0)),
        (_EXECED, struct.pack("<IiBQB", pid, 0, 0, 1, 0)),
        (_EXECED, struct.pack("<IiBQB", 0, choose.choice((2, 13, 7)), choose.randrange(4), 1, 0)),
        (_KILLED, wire.u32(1)),
        (_PROBED, wire.u8(1)),
        (wire.DONE, b""),
        (wire.DONE, struct.pack("<QIqI", 3, 0o644, 0, 3) + b"abc"),
        (wire.OUT, b"\1abc"),
        (wire.ITEMS, wire.u32(0)),
        (wire.STARTED, wire.u32(0)),
        (wire.ERROR, struct.pack("<Hi", 2, 2) + wire.blob(b"no")),
        (wire.CREDIT, wire.u8(0) + wire.u32(4)),
    ))  # fmt: skip


def agent_seed(choose, known):
    """Steps as fuzz_agent.c reads them: what, size, and for a frame kind, id (or which call), flags."""
    out = bytearray()
    request_id = 0
    while len(out) < 3500:
        roll = choose.random()
        if roll < 0.55:
            kind, payload = choose.choice(known)
            opens = kind >= wire.SPAWN or kind in (wire.CONFIGURE, wire.BATCH, wire.PING)
            if opens and kind not in (wire.EGRESS_OK, wire.EGRESS_DENY):
                request_id = request_id % 90 + 1
            step = bytes((kind, request_id, 0)) + payload
            what = _FROM_HOST
        elif roll < 0.9:
            kind, payload = answers(choose)
            step, what = bytes((kind, choose.randrange(16))) + payload, _FROM_WORKER
        else:
            step, what = bytes((choose.randrange(1, 9), choose.randrange(3))), _EXIT
        if len(step) < 256:
            out += bytes((what, len(step))) + step
    return bytes(out)


def actions_seed(choose, known):
    """Frames as fuzz_actions.c takes them behind a first byte of 0."""
    # Closing a watch takes the kernel milliseconds: few seeds have one.
    watches = choose.random() < 0.02
    file_kinds = [one for one in known if wire.READ <= one[0] <= wire.WATCH and (one[0] != wire.WATCH or watches)]
    out = bytearray(b"\0")
    while len(out) < 3500:
        kind, payload = choose.choice(file_kinds)
        out += wire.frame(choose.randrange(1, 200), kind, payload)
    return bytes(out)


_PARTS = (
    *(b"a", b"ab", b"the", b".", b"x*", b"y+?", b"(a|b)", b"[a-z]", b"[^0-9_]", rb"\d+", rb"\w", rb"\bend\b", b"^", b"$"),
    *(b"z{2,5}", b"(?:q)", b"(?i)k", "ü".encode(), rb"\x41", rb"\."),
)
_LINES = (
    *(b"class A:", b"    def f(self, x=(1, 2)): pass", b"async def g():", b"    return '''doc", b"''' + f'{x!r:>{w}}'", b"@decorated("),
    *(
        b")",
        b"\\",
        b"# def no()",
        b"\tdef tab(): pass",
        rb"if x: y = rb'\'",
        b"def h[T](x: T): return lambda: 0",
        "class Größe: ...".encode(),
    ),
)


def texts_seed(choose, _known):
    """As fuzz_texts.c takes them: a source behind a first byte of 1, or lines of one byte of flags and an expression behind 0."""
    if choose.random() < 0.4:
        return b"\1" + b"\n".join(choose.choices(_LINES, k=40))
    return b"\0" + b"\n".join(bytes((choose.randrange(8),)) + b"".join(choose.choices(_PARTS, k=choose.randrange(1, 8))) for _ in range(60))


def ferry_seed(choose, _known):
    """Steps as fuzz_ferry.c reads them: what, size; messages of a client begin with a kind and the number of a lane."""
    out = bytearray()
    while len(out) < 3500:
        lane = choose.randrange(4)
        what, body = choose.choice((
            (0, struct.pack("<BI", 0, 2) + b"".join(struct.pack("<IQ", one, choose.choice((0, 0, 5, 200))) for one in range(choose.randrange(5)))),
            (1, struct.pack("<BI", 1, lane) + b"to the sandbox" * choose.randrange(15)),
            (1, struct.pack("<BI", 1, lane) + b"x"),
            (2, struct.pack("<BIQ", 2, lane, choose.choice((0, 5, 200, 400)))),
            (3, struct.pack("<BI", 3, lane)),
            (4, bytes((lane,)) + b"from it" * choose.randrange(30)),
            (4, bytes((lane,)) + bytes(199)),
            (5, bytes((lane,))),
            (6, b""),
            (7, struct.pack("<II", 1 + choose.randrange(3), 3)),
        ))  # fmt: skip
        out += bytes((what, len(body))) + body
    return bytes(out)


def main():
    target, directory = sys.argv[1], Path(sys.argv[2])
    make = {"agent": agent_seed, "actions": actions_seed, "ferry": ferry_seed, "texts": texts_seed}[target]
    choose = random.Random(0)
    directory.mkdir(parents=True, exist_ok=True)
    for n in range(SEEDS):
        (directory / f"seed-{n:03}").write_bytes(make(choose, requests()))


if __name__ == "__main__":
    main()
