"""Pings: events that keep a stream's connection open while there is no output to send."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

PING_SECONDS = 10.0
"""Seconds without output after which a ping is sent. Proxies close connections after 30 to 60 s
without data."""
Write = Callable[[bytes], Awaitable[None]]


class Pinged:
    """Writer for the events of one stream. After `PING_SECONDS` without an event, it sends a
    ping."""

    def __init__(self, write: Write, ping: bytes) -> None:
        self._write, self._ping = write, ping
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()

    async def write(self, events: bytes) -> None:
        """Write events to the client. Raises `ConnectionError` if the client has disconnected."""
        self._last = self._loop.time()
        await self._write(events)

    async def ping(self) -> None:
        """Write a ping after every `PING_SECONDS` without an event. Returns when the client has
        disconnected; otherwise runs until canceled."""
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(self._last + PING_SECONDS - self._loop.time())
                if self._loop.time() - self._last >= PING_SECONDS:
                    await self.write(self._ping)


@contextlib.asynccontextmanager
async def pinged(write: Write, ping: bytes) -> AsyncIterator[Write]:
    """Yield a `write` function, and send pings while it is not called. If `ping` is empty because
    the API has no pings, yield `write` itself."""
    if not ping:
        yield write
        return
    stream = Pinged(write, ping)
    task = asyncio.create_task(stream.ping())
    try:
        yield stream.write
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
