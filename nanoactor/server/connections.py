"""Connections: how many there may be, and which are hung up on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from nanoactor.server.config import ServerConfig
from nanoactor.server.errors import RETRY_AFTER, APIError, unavailable
from nanoactor.server.exchange import Exchange, json_response

log = logging.getLogger("nanoactor.server")

Note = Callable[[Exchange, int, float], None]
"""Takes a request, the status of its answer, and the seconds that it took."""


class Connections(web.Server):
    """Counts connections, and refuses those beyond the limit."""

    def __init__(self, config: ServerConfig, note: Note, handler: Any, **options: Any) -> None:
        """`note` hears of what gets no further than here."""
        super().__init__(handler, **options)
        self.config = config
        self.note = note
        self._options = options
        for ours in ("handler_cancellation", "request_factory"):
            self._options.pop(ours)

    def __call__(self) -> Any:
        """A protocol for a new connection."""
        if len(self._connections) >= self.config.max_connections:
            return _Refusal()
        return Connection(self, loop=self._loop, **self._options)


class Connection(RequestHandler):
    """A connection whose broken requests get an answer in our shape, and no traceback in the log;
    and which ends where nobody reads what it has to say."""

    def __init__(self, server: Connections, **options: Any) -> None:
        super().__init__(server, **options)
        self._note = server.note
        self._patience = server.config.send_timeout
        self._watch: asyncio.TimerHandle | None = None
        self.stalled = False

    def pause_writing(self) -> None:
        """What was written waits: see whether it gets less."""
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        """It was read."""
        self._look_no_more()
        super().resume_writing()

    def _look_again(self) -> None:
        transport = self.transport
        if transport is not None:
            left = transport.get_write_buffer_size()
            self._watch = self._loop.call_later(self._patience, self._look, transport, left)

    def _look(self, transport: asyncio.Transport, before: int) -> None:
        if transport.get_write_buffer_size() >= before:
            self.stalled = True
            transport.abort()
        else:
            self._look_again()

    def _look_no_more(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nothing is left to watch."""
        self._look_no_more()
        super().connection_lost(exc)

    def force_close(self) -> None:
        """Hang up; what is not read in time then is lost."""
        transport = self.transport
        super().force_close()
        if transport is not None and transport.get_write_buffer_size():
            self._loop.call_later(self._patience, transport.abort)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP request, or an error that nobody else has caught."""
        exchange = Exchange(request)
        if exchange.begun:
            raise ConnectionError("the answer has begun; it can only be broken off")
        if status >= 500:
            log.error("request %s failed", exchange.id, exc_info=exc)
        text = "the request is not valid HTTP" if status < 500 else "internal error"
        response = json_response(APIError(status, text).body, status, exchange.headers)
        response.force_close()
        self._note(exchange, status, 0.0)
        return response


class _Refusal(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say so, and hang up."""
        transport = cast("asyncio.Transport", transport)  # uvloop's is none by name
        body = msgspec.json.encode(unavailable("too many connections").body)
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {RETRY_AFTER}\r\n"
            "Connection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.close()
