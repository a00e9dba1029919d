"""What a cell says in answer to each kind of call, valid from the first frame to the last, and ways to spoil it.

A *life* is the list of (kind, payload) that answers one call. Most frames of a fuzz run are valid, so that a channel gets deep into
its conversation before something spoils it.
"""

import struct

from untax.channel import actions, flow, wire

_COMMAND = struct.Struct("<BiQQQQIIBQQ")
_NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, 256, 4095, 4097, 65535, 65536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
_KINDS = (wire.HELLO, wire.CREDIT, wire.DONE, wire.STARTED, wire.OUT, wire.ITEMS, wire.ERROR, wire.EGRESS, 0, 0x10, 0x55, 0xFF)


def command_done(how=0, code=0, out=b"", err=b"", oom=0):
    return _COMMAND.pack(how, code, 1000, 10, 10, 100, oom, 0, 0, 0, 0) + wire.blob(out) + wire.blob(err)


def error(code, number=0, message=b"no\n\x1b[1m"):
    return struct.pack("<Hi", code, number) + wire.blob(message)


def entry(name=b"f", kind=b"f", target=b""):
    return wire.blob(name) + kind + struct.pack("<IIIQq", 0o100644, 1, 1, 5, 10) + wire.blob(target)


def match(kind=0):
    return wire.blob(b"d/f") + struct.pack("<IIB", 3, 4, kind) + wire.blob(b"text \xff")


def event(kind=1, to=b""):
    return wire.u8(kind) + wire.blob(b"d/f\xff") + wire.blob(to)


FAILURES = [[(wire.ERROR, error(code, number))] for code in range(1, 13) for number in (0, 2, 13)]
_PROCESS = [
    [(wire.STARTED, wire.u32(7)), (wire.OUT, b"\1one"), (wire.OUT, b"\2two"), (wire.CREDIT, wire.u8(0) + wire.u32(0)), (wire.DONE, command_done(out=b"x"))],
    [(wire.STARTED, wire.u32(8)), *[(wire.OUT, b"\1" + bytes(300))] * 20, (wire.DONE, command_done(1, 9))],
    [(wire.STARTED, wire.u32(8)), *[(wire.OUT, b"\1a"), (wire.OUT, b"\2b")] * 20, (wire.OUT, b"\1"), (wire.OUT, b"\2"), (wire.DONE, command_done(2))],
]  # fmt: skip
_FILE = struct.pack("<QIq", 3, 0o644, 5)
_BODY = bytes(actions.INLINE_MAX + 1)

# For each kind of call: how to make one, and what may be answered.
CONVERSATIONS = {
    "run": (
        lambda: actions.run(["x"], cap=1000),
        [
            [(wire.DONE, command_done(out=b"hello", err=b"!"))],
            [(wire.OUT, b"\1" + bytes(100)), (wire.OUT, b"\2y"), (wire.DONE, command_done(0, 3, b"rest"))],
            [(wire.DONE, command_done(1, 11, oom=1))],
            [(wire.DONE, command_done(3))],
        ],
    ),
    "session_run": (
        lambda: actions.session_run(1, "x", cap=1000),
        [[(wire.OUT, b"\1abc"), (wire.DONE, command_done(out=b"x") + b"\1")], [(wire.DONE, command_done(2) + b"\0")]],
    ),
    "session_open": (actions.session_open, [[(wire.DONE, wire.u32(1) + wire.u32(9))]]),
    "read": (
        lambda: actions.read("x", limit=1000),
        [[(wire.OUT, b"\1abc"), (wire.OUT, b"\1def"), (wire.DONE, _FILE + wire.blob(b"ghi"))], [(wire.DONE, _FILE + wire.blob(b""))]],
    ),
    "write": (lambda: actions.write("x", b"1"), [[(wire.DONE, wire.u64(1))]]),
    "write_body": (
        lambda: actions.write("x", _BODY),
        [[(wire.CREDIT, wire.u8(0) + wire.u32(0)), (wire.DONE, wire.u64(1))]],
    ),
    "list": (
        lambda: actions.list_dir("x", most=10),
        [[(wire.ITEMS, wire.u32(2) + entry() + entry(b"l", b"l", b"t")), (wire.DONE, b"\0" + wire.u32(1) + entry(b"d", b"d"))]],
    ),
    "stat": (lambda: actions.stat("x"), [[(wire.DONE, entry())], [(wire.DONE, entry(b"\xff", b"?"))]]),
    "search": (
        lambda: actions.search("x", most=10),
        [[(wire.ITEMS, wire.u32(2) + match() + match(3)), (wire.DONE, struct.pack("<QQBI", 5, 1, 1, 1) + match(1))]],
    ),
    "remove": (lambda: actions.remove("x"), [[(wire.DONE, wire.u64(1))]]),
    "edit": (lambda: actions.edit("x", "a", "b"), [[(wire.DONE, wire.u32(1))]]),
    "patch": (lambda: actions.apply_patch("x"), [[(wire.DONE, wire.blobs([b"a", b"b/\xff"]))]]),
    "processes": (
        actions.processes,
        [[(wire.DONE, wire.u32(2) + (struct.pack("<IBBQ", 7, 1, 0, 10**9) + wire.blobs([b"a", b"b"])) * 2)], [(wire.DONE, wire.u32(0))]],
    ),
    "ping": (actions.ping, [[(wire.DONE, b"")]]),
    "upload": (
        lambda: actions.upload("x", iter(()), max_bytes=1, max_entries=1),
        [[(wire.CREDIT, wire.u8(0) + wire.u32(0)), (wire.DONE, wire.u64(1) + wire.u64(2))]],
    ),
    "start": (lambda: flow.start(["x"]), _PROCESS),
    "pty": (lambda: flow.pty(["x"]), _PROCESS[:2]),
    "connect": (
        lambda: flow.connect(1),
        [[(wire.STARTED, wire.u32(0)), *[(wire.OUT, b"\1" + bytes(50))] * 10, (wire.OUT, b"\1"), (wire.DONE, b"")]],
    ),
    "download": (lambda: flow.download("x", max_bytes=10), [[*[(wire.OUT, b"\1" + bytes(512))] * 5, (wire.DONE, wire.u64(1) + wire.u64(9))]]),
    "watch": (
        lambda: flow.watch("x"),
        [[(wire.STARTED, wire.u32(0)), *[(wire.ITEMS, wire.u32(2) + event() + event(4, b"to"))] * 10, (wire.DONE, b"")]],
    ),
}  # fmt: skip
EGRESS_LIFE = [(wire.EGRESS, wire.blob(b"example.org") + wire.u16(443)), (wire.OUT, b"\1abc"), (wire.OUT, b"\1"), (wire.DONE, b"")]


def spoil_payload(choose, payload):
    """A payload that is a little wrong; the header around it stays right."""
    spoiled = bytearray(payload)
    match choose.randrange(6):
        case 0:
            del spoiled[choose.randrange(len(spoiled) + 1) :]
        case 1:
            spoiled += choose.randbytes(choose.randrange(1, 20))
        case 2:
            for _ in range(choose.randrange(1, 4)):
                if spoiled:
                    spoiled[choose.randrange(len(spoiled))] = choose.randrange(256)
        case 3:
            at = choose.randrange(len(spoiled) + 1)
            spoiled[at : at + 4] = struct.pack("<I", choose.choice(_NUMBERS))
        case 4:
            at = choose.randrange(len(spoiled) + 1)
            spoiled[at:at] = spoiled[:at] if choose.random() < 0.5 else choose.randbytes(choose.randrange(8))
        case _:
            spoiled = bytearray(choose.randbytes(choose.randrange(100)))
    return bytes(spoiled)


def spoil_frame(choose, request_id, kind, payload):
    """A frame with something wrong anywhere: its payload mostly, or its kind, id, header, or all of it."""
    roll = choose.random()
    if roll < 0.7:
        return wire.frame(request_id, kind, spoil_payload(choose, payload))
    if roll < 0.8:
        return wire.frame(request_id, choose.choice(_KINDS), payload)
    if roll < 0.9:
        other = choose.choice((0, request_id + 1, request_id | wire.EGRESS_BIT, choose.getrandbits(32)))
        return wire.frame(other & 0xFFFFFFFF, kind, payload)
    if roll < 0.97:
        raw = bytearray(wire.frame(request_id, kind, payload))
        raw[choose.randrange(12)] = choose.randrange(256)
        return bytes(raw)
    return choose.randbytes(choose.randrange(1, 200))
