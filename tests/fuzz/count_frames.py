"""Feeds the host many frames, fast: the frame parser, a `Channel` and a `BlockingChannel`, each with calls of every kind open.

A conversation goes on over one channel until something spoils it, then over the next. Frames are counted when the parser has cut them off
or refused them. Nothing may come out of a channel but what it tells its callers, no answer may be one "that could not be read" (a parser's bug),
and what is held stays bounded. `python tests/fuzz/count_frames.py 10000000 [--only channel] [--seed 1]`
"""

import asyncio
import random

from tests.fuzz import counting, grammar, peer

from untax.channel import blocking, blocking_link, client, link, wire
from untax.channel.call import Call
from untax.channel.flow import Flow, WatchFlow
from untax.core.errors import ProtocolError, UntaxError

SPOILT = 0.02  # of all frames
FRAMES = 64  # in one input


class CountingParser(wire.FrameParser):
    __slots__ = ("count",)

    def __init__(self):
        super().__init__()
        self.count = 0

    def feed(self, received):
        try:
            for frame in super().feed(received):
                self.count += 1
                yield frame
        except ProtocolError:
            self.count += 1
            raise


class Talk:
    """One open id: its call, and how far its answer has got."""

    __slots__ = ("at", "call", "entry", "id", "life", "name", "rests")

    def __init__(self, request_id, name, life, call=None, entry=None):
        self.id, self.name, self.life, self.call, self.entry = request_id, name, life, call, entry
        self.at = 0
        self.rests = False  # until the next input: the host must have had its turn


class Conversation:
    """The cell's side of one channel. `driver` is the host's."""

    def __init__(self, choose, driver):
        self.choose = choose
        self.driver = driver
        self.talks = [self._begin(name) for name in grammar.CONVERSATIONS]
        self.next_egress = 0

    def _begin(self, name):
        make, lives = grammar.CONVERSATIONS[name]
        choose = self.choose
        call = make()
        request_id, entry = self.driver.send(call)
        return Talk(request_id, name, choose.choice(grammar.FAILURES if choose.random() < 0.1 else lives), call, entry)

    def input(self):
        choose, talks = self.choose, self.talks
        rand, frame = choose.random, wire.frame
        out = []
        for _ in range(FRAMES):
            talk = talks[int(rand() * len(talks))]
            if talk.rests or talk.at >= len(talk.life):
                continue
            kind, payload = talk.life[talk.at]
            if rand() < SPOILT:
                out.append(grammar.spoil_frame(choose, talk.id, kind, payload))
                continue
            talk.at += 1
            talk.rests = kind == wire.EGRESS
            out.append(frame(talk.id, kind, payload))
        return b"".join(out)

    def host_turn(self):
        """What callers do between inputs: take results and pieces, cancel, ask for more."""
        choose, opened = self.choose, self.driver.channel._open
        kept = []
        for talk in self.talks:
            call = talk.call
            talk.rests = False
            if isinstance(call, Flow):
                while call.take() is not None:
                    pass
                call.credit(talk.id)
            elif isinstance(call, WatchFlow):
                call.events.clear()
            if talk.id in opened and (call is None or not call.finished):
                talk.at = min(talk.at, len(talk.life) - 1)  # its end was lost inside a frame with a wrong length: say it again
                kept.append(talk)
                continue
            if call is not None and call.finished:
                try:
                    call.result("x")
                except UntaxError:
                    pass
            if talk.name is not None:
                kept.append(self._begin(talk.name))
        self.talks = kept
        roll = choose.random()
        if roll < 0.1:
            talk = choose.choice(kept)
            if talk.entry is not None:
                self.driver.channel._cancel(talk.id, talk.entry)
        elif roll < 0.2:
            self.next_egress += 1
            kept.append(Talk(wire.EGRESS_BIT | self.next_egress, None, grammar.EGRESS_LIFE))
        elif roll < 0.25:
            kept.extend(self._begin_batch())

    def _begin_batch(self):
        run = grammar.CONVERSATIONS["run"]
        calls = [run[0]() for _ in range(3)]
        whole = Call(wire.BATCH, b"", decode=wire.Reader.u32)
        ids, (request_id, entry) = self.driver.send_batch(calls, whole)
        parts = [Talk(part, None, self.choose.choice(run[1]), call) for part, call in zip(ids, calls, strict=True)]
        return [*parts, Talk(request_id, None, [(wire.DONE, wire.u32(3))], whole, entry)]


def cut(choose, data):
    roll = choose.random()
    if roll < 0.4 or len(data) < 2:
        return [data] if data else []
    if roll < 0.97:
        edges = sorted(int(choose.random() * len(data)) for _ in range(4))
    else:
        edges = range(0, len(data), choose.choice((1, 2, 3, 7, 11)))
    return [data[a:b] for a, b in zip([0, *edges], [*edges, len(data)], strict=True) if a < b]


def check_loss(channel):
    reason = channel.lost_reason
    if "could not be read" in reason or "spoke nonsense" not in reason:
        raise AssertionError(reason) from channel._cause


# ---- the parser alone ----


def parser_target(seed):
    choose = random.Random(seed)
    lives = [life for _, lives in grammar.CONVERSATIONS.values() for life in lives]

    def step():
        parser = CountingParser()
        valid = [wire.frame(choose.getrandbits(32), *frame) for _ in range(20) for frame in choose.choice(lives)]
        if choose.random() < 0.9:
            valid[choose.randrange(len(valid))] = grammar.spoil_frame(choose, 1, *choose.choice(choose.choice(lives)))
        try:
            for piece in cut(choose, b"".join(valid)):
                for _ in parser.feed(piece):
                    pass
                assert parser.buffered <= wire.FRAME_MAX_IN + 4
        except ProtocolError:
            pass
        return parser.count

    return step, lambda: None


# ---- a channel in an event loop ----


class AsyncDriver:
    def __init__(self):
        self.stream = peer.Stream()
        self.channel = client.Channel(self.stream, sandbox_id="x", egress=peer.Egress())
        self.parser = self.channel._parser = CountingParser()
        self.stream.receiver.data_received(peer.HELLO)

    def send(self, call):
        return self.channel._send(call)

    def send_batch(self, calls, whole):
        ids = [self.channel._take_id(link.Entry(call, float("inf"))) for call in calls]
        request_id, entry = self.channel._send(whole)
        entry.parts = ids
        return ids, (request_id, entry)

    def feed(self, piece):
        self.stream.receiver.data_received(piece)


def channel_target(seed):
    choose = random.Random(seed)
    loop = asyncio.new_event_loop()
    failures = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    talking = None

    async def turn():
        nonlocal talking
        if talking is None:
            talking = Conversation(choose, AsyncDriver())
        taken = _one_input(choose, talking)
        await asyncio.sleep(0)
        channel = talking.driver.channel
        if not channel.is_lost:
            talking.host_turn()
            assert len(channel._open) <= client._OPEN_MAX
        else:
            assert not channel._open
            check_loss(channel)
            await asyncio.sleep(0)  # for what served its streams
            assert not channel._egress_tasks
            talking = None
        assert not failures, failures
        return taken

    return lambda: loop.run_until_complete(turn()), loop.close


# ---- a blocking channel ----


class BlockingDriver:
    def __init__(self):
        self.sock = peer.Socket()
        self.channel = blocking.BlockingChannel(self.sock, sandbox_id="x")
        self.parser = self.channel._parser = CountingParser()
        self.feed(peer.HELLO)

    def send(self, call):
        return self.channel._begin(call)

    def send_batch(self, calls, whole):
        ids = [self.channel._take_id(blocking_link.Entry(call)) for call in calls]
        return ids, self.channel._begin(whole, parts=ids)

    def feed(self, piece):
        self.sock.coming = piece
        self.channel._read_once()


def blocking_target(seed):
    choose = random.Random(seed)
    talking = None

    def step():
        nonlocal talking
        if talking is None:
            talking = Conversation(choose, BlockingDriver())
        taken = _one_input(choose, talking)
        channel = talking.driver.channel
        if not channel.is_lost:
            talking.host_turn()
            assert len(channel._open) <= client._OPEN_MAX
        else:
            check_loss(channel)
            talking = None
        return taken

    return step, lambda: None


def _one_input(choose, talking):
    driver = talking.driver
    before = driver.parser.count
    for piece in cut(choose, talking.input()):
        driver.feed(piece)
        if driver.channel.is_lost:
            break
        assert driver.parser.buffered <= wire.FRAME_MAX_IN + 4
    if driver.parser.count == before and driver.parser.buffered:  # a long frame has swallowed the input: give it the rest
        driver.feed(choose.randbytes(driver.parser._need - driver.parser.buffered))
    return driver.parser.count - before


if __name__ == "__main__":
    counting.run({"parser": parser_target, "channel": channel_target, "blocking": blocking_target})
