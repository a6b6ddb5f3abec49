"""Connections: how many there may be, and which are hung up on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import msgspec
from aiohttp import web

from nanoactor.server.config import ServerConfig
from nanoactor.server.context import context_of, json_response
from nanoactor.server.errors import RETRY_AFTER, APIError, unavailable

log = logging.getLogger("nanoactor.server")

_LINGER = 2.0
"""Seconds for which the rest of a refused body is read, so that its sender can read the answer."""

Note = Callable[[web.BaseRequest, int, float], None]
"""Takes a request, the status of its answer, and the seconds that it took."""


def acceptor(
    server: web.Server, config: ServerConfig, note: Note
) -> Callable[[], asyncio.BaseProtocol]:
    """Return what makes a protocol of each new connection to `server`; connections beyond the limit
    are refused. `note` hears of requests that get no further than here."""
    options: dict[str, Any] = {
        "loop": asyncio.get_running_loop(),
        "keepalive_timeout": config.idle_timeout,
        "lingering_time": _LINGER,
        "access_log": None,
        "auto_decompress": False,
        "logger": logging.getLogger("nanoactor.http"),
    }

    def accept() -> asyncio.BaseProtocol:
        if len(server.connections) >= config.max_connections:
            return _Refusal()
        return Connection(server, note, config.send_timeout, **options)

    return accept


class Connection(web.RequestHandler):
    """A connection whose broken requests get an answer in our shape, and no traceback in the log;
    and which ends where nobody reads what it has to say."""

    def __init__(self, server: web.Server, note: Note, patience: float, **options: Any) -> None:
        """`patience`: seconds for which what was sent may lie unread."""
        super().__init__(server, **options)
        self._note = note
        self._patience = patience
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
        if (transport := self.transport) is not None:
            left = transport.get_write_buffer_size()
            later = asyncio.get_running_loop().call_later
            self._watch = later(self._patience, self._look, transport, left)

    def _look(self, transport: asyncio.Transport, before: int) -> None:
        if transport.get_write_buffer_size() >= before:
            self.stalled = True
            transport.abort()
        else:
            self._look_again()

    def _look_no_more(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nothing is left to watch."""
        self._look_no_more()
        super().connection_lost(exc)

    def force_close(self) -> None:
        """Hang up; what is not read in time then is lost."""
        transport = self.transport
        super().force_close()
        if transport is not None and transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(self._patience, transport.abort)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP request, or an error that nobody else has caught."""
        context = context_of(request)
        if request.writer.output_size:
            raise ConnectionError("the answer has begun; it can only be broken off")
        if status >= 500:
            log.error("request %s failed", context.id, exc_info=exc)
        text = "the request is not valid HTTP" if status < 500 else "internal error"
        response = json_response(
            APIError(status, text).body, status=status, headers=context.headers
        )
        response.force_close()
        self._note(request, status, 0.0)
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
