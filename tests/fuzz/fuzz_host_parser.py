"""Feeds a cell's bytes to the host: the frame parser, and a channel with a pending call of every kind.

Run by `make fuzz` (atheris), or without it: `python tests/fuzz/fuzz_host_parser.py --random 100000`. The first byte of an input says
how the rest is cut; what follows are frames by a small grammar or raw bytes. Only `ProtocolError` may come out of the
parser, nothing out of the channel, and what they hold stays bounded.
"""

import asyncio
import contextlib
import random
import sys

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["untax"]) if atheris else contextlib.nullcontext():
    from tests.fuzz import grammar, peer

    from untax.channel import client, wire
    from untax.core.errors import ProtocolError, UntaxError

KINDS = (0x01, 0x06, 0x80, 0x81, 0x82, 0x83, 0x8F, 0x90, 0x55)


def frames(data):
    """Turns bytes into frames that are mostly well formed: kind, id, size, payload."""
    out = bytearray()
    at = 0
    while at + 3 <= len(data):
        kind, request, size = data[at], data[at + 1], data[at + 2]
        at += 3
        name = request & 0x1F | (wire.EGRESS_BIT if request & 0x80 else 0)
        out += wire.frame(name, KINDS[kind % len(KINDS)] if kind < 0xF0 else kind, data[at : at + size])
        at += size
    return bytes(out)


def feed_parser(pieces):
    parser = wire.FrameParser()
    try:
        for piece in pieces:
            for _ in parser.feed(piece):
                pass
            assert parser.buffered <= wire.FRAME_MAX_IN + 4
    except ProtocolError:
        pass


def feed_channel(loop, pieces):
    async def attempt():
        stream = peer.Stream()
        channel = client.Channel(stream, sandbox_id="x", egress=peer.Egress())
        stream.receiver.data_received(peer.HELLO)
        open_calls = [make() for make, _ in grammar.CONVERSATIONS.values()]
        for call in open_calls:
            channel._send(call)
        for piece in pieces:
            if channel.is_lost:
                break
            stream.receiver.data_received(piece)
        for call in open_calls:
            if call.finished:
                try:
                    call.result("x")
                except UntaxError:
                    pass
        assert len(channel._open) <= len(open_calls) + client._EGRESS_MAX
        channel.close()
        if channel._egress_tasks:
            await asyncio.sleep(0)

    loop.run_until_complete(attempt())


def cut(data, how):
    if how % 4 == 0:
        return [data]
    step = (1, 3, 7, 64)[how // 4 % 4] if how % 4 == 1 else 1 + how
    return [data[at : at + step] for at in range(0, len(data), step)]


def one_input(loop, data):
    if not data:
        return
    body = data[1:]
    feed_parser(cut(body, data[0]))
    feed_channel(loop, cut(frames(body) if data[0] & 0x80 else body, data[0] & 0x7F))


def main():
    loop = asyncio.new_event_loop()
    if "--random" in sys.argv:
        choose = random.Random(0)
        for _ in range(int(sys.argv[sys.argv.index("--random") + 1])):
            one_input(loop, choose.randbytes(choose.randrange(200)))
    elif atheris is None:
        sys.exit("atheris is not installed: pip install atheris, or use --random N")
    else:
        atheris.Setup(sys.argv, lambda data: one_input(loop, data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
