"""The ends of a channel that a fuzz target drives: what the host reads is given by hand, what it writes goes nowhere."""

from untax.channel import wire

HELLO = wire.hello("fuzz")


class Stream:
    """Takes everything and remembers nothing."""

    write_buffer_size = 0

    def start(self, receiver):
        self.receiver = receiver

    def write(self, data):
        pass

    async def drain(self):
        pass

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def close(self):
        self.receiver.connection_lost(None)


class Socket:
    """What the channel reads is put into `coming`."""

    def __init__(self):
        self.coming = b""

    def setblocking(self, flag):
        pass

    def fileno(self):
        return -1

    def send(self, data, flags=0):
        return len(data)

    def recv(self, size, flags=0):
        return self.coming

    def setsockopt(self, *option):
        pass

    def shutdown(self, how):
        pass

    def close(self):
        pass


class Egress:
    """Denies every fourth connection and reads the others to their end."""

    async def serve(self, host, port, link):
        if link._id % 4 == 0:
            link.deny(403, "no")
            return
        link.accept()
        while await link.receive() is not None:
            pass
