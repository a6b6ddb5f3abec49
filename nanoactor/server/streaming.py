"""Server-sent events to one client, who may be slow or go away."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from nanoactor.server.context import context_of
from nanoactor.server.errors import APIError

DONE = b"data: [DONE]\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Some proxies keep answers back until they are whole, unless they are told not to.
    "X-Accel-Buffering": "no",
}


def event(value: Any) -> bytes:
    """A value as one event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream:
    """The answer to one request, as events."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)

    async def begin(self) -> None:
        """Send the head: from now on errors can only be events."""
        await self._response.prepare(self._request)

    async def send(self, data: bytes) -> None:
        """Send events; waits while the client has 64 KiB unread, and what comes meanwhile merges
        where it is made. Raises `ConnectionError` where nobody listens any more."""
        await self._response.write(data)

    async def end(self, error: APIError | None = None) -> web.StreamResponse:
        """Finish; an error takes the place of the mark by which clients know that all has come."""
        context_of(self._request).broken_off = error is not None
        await self.send(DONE if error is None else event(error.body))
        await self._response.write_eof()
        return self._response
