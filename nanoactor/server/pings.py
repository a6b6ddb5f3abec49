"""Pings: events that keep a stream's connection open while there is nothing else to send."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

PING_SECONDS = 10.0
"""Seconds of silence after which a ping is sent. Proxies close connections that are silent for 30
to 60 s."""
Write = Callable[[bytes], Awaitable[None]]


class Pinged:
    """Writer of one stream's events; it sends a ping whenever the stream has been silent for
    `PING_SECONDS`."""

    def __init__(self, write: Write, ping: bytes) -> None:
        self._write, self._ping = write, ping
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()

    async def write(self, events: bytes) -> None:
        """Write events; raise `ConnectionError` if the client has disconnected."""
        self._last = self._loop.time()
        await self._write(events)

    async def ping(self) -> None:
        """Write a ping after each silence until canceled, or until the client has disconnected."""
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(self._last + PING_SECONDS - self._loop.time())
                if self._loop.time() - self._last >= PING_SECONDS:
                    await self.write(self._ping)


@contextlib.asynccontextmanager
async def pinged(write: Write, ping: bytes) -> AsyncIterator[Write]:
    """Yield a `write` function that also keeps the connection open with pings, or the original
    `write` if the API has no ping."""
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
