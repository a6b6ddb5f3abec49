"""Server-sent events to one client, who may be slow or go away."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from nanoactor.server.errors import APIError
from nanoactor.server.exchange import Exchange

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """A value as one event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream:
    """The answer to one request, as events."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._response = web.StreamResponse(headers=exchange.headers)
        self._response.content_type = "text/event-stream"
        self._response.charset = "utf-8"
        self._response.headers["Cache-Control"] = "no-cache"
        # Some proxies keep answers back until they are whole, unless they are told not to.
        self._response.headers["X-Accel-Buffering"] = "no"

    async def begin(self) -> None:
        """Send the head: from now on errors can only be events."""
        await self._response.prepare(self._exchange.request)

    async def send(self, data: bytes) -> None:
        """Send events; waits while the client has 64 KiB unread, and what comes meanwhile merges
        where it is made. Raises `ConnectionError` where nobody listens any more."""
        await self._response.write(data)

    async def end(self, error: APIError | None = None) -> web.StreamResponse:
        """Finish; an error takes the place of the mark by which clients know that all has come."""
        self._exchange.broken_off = error is not None
        await self.send(DONE if error is None else event(error.body))
        await self._response.write_eof()
        return self._response
