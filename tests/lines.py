"""TCP lines that are slow, stand still or are cut, between processes that know nothing of it."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class Line:
    """Carries every connection that is made to `address` to another address.

    delay: seconds that all bytes take, in either direction, in their order. still: while set, no byte arrives.
    """

    def __init__(self, target: str, loop: asyncio.AbstractEventLoop) -> None:
        self.delay = 0.0
        self.still = False
        self.address = ""
        self._host, port = target.rsplit(":", 1)
        self._port, self._loop = int(port), loop
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """End all connections at once, without a word."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._open |= ends
        ways = [asyncio.create_task(self._pass_on(*way)) for way in ((reader, far_writer), (far_reader, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.transport.abort()
        await asyncio.gather(*ways, return_exceptions=True)
        self._open -= ends

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arriving: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(10_000)

        async def write() -> None:
            while True:
                due, data = await arriving.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                while self.still:
                    await asyncio.sleep(0.01)
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        writing = asyncio.create_task(write())
        with contextlib.suppress(ConnectionError):
            data = b"begin"
            while data:
                data = await reader.read(1 << 16)
                await arriving.put((self._loop.time() + self.delay, data))
            await writing
        writing.cancel()


@contextlib.contextmanager
def lines() -> Iterator["Lines"]:
    """Run lines in a thread of their own while the context lasts."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield Lines(loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class Lines:
    """Opens lines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def to(self, target: str) -> Line:
        """Return a new line to an address, where nobody need listen yet."""
        line = Line(target, self._loop)
        asyncio.run_coroutine_threadsafe(line._listen(), self._loop).result()
        return line
