"""Client connections: the limit on their number, and responses to malformed HTTP requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from nanoactor.server.config import ServerConfig
from nanoactor.server.context import context_of, json_response
from nanoactor.server.errors import RETRY_AFTER, APIError, unavailable

_MAX_QUOTED_CHARACTERS = 200
"""Maximum number of characters quoted from an error message of the HTTP parser."""
_LINGER_SECONDS = 2.0
"""Seconds for which the rest of a rejected body is still read, so that the client can read the
response."""

LogRequest = Callable[[web.BaseRequest, int, float], None]
"""Callback that receives a request, the status of its response and the duration in seconds."""


def connection_factory(
    server: web.Server, config: ServerConfig, log_request: LogRequest
) -> Callable[[], asyncio.BaseProtocol]:
    """Return a protocol factory for connections to `server`. Connections beyond `max_connections`
    are refused. `log_request` is called for malformed requests."""
    options: dict[str, Any] = {
        "loop": asyncio.get_running_loop(),
        "keepalive_timeout": config.idle_timeout,
        "lingering_time": _LINGER_SECONDS,
        "access_log": None,
        "auto_decompress": False,
        "logger": logging.getLogger("nanoactor.http"),
    }

    def accept() -> asyncio.BaseProtocol:
        if len(server.connections) >= config.max_connections:
            return _Refusal()
        return Connection(server, log_request, **options)

    return accept


class Connection(web.RequestHandler):
    """A client connection. Malformed requests get a response in the API's format, without a
    traceback in the log."""

    def __init__(self, server: web.Server, log_request: LogRequest, **options: Any) -> None:
        super().__init__(server, **options)
        self._log_request = log_request
        self.stalled = False
        """True if the connection was closed because the client did not read the sent data in
        time."""

    def connection_lost(self, exc: BaseException | None) -> None:
        """Handle the end of the connection, and record whether the client stopped reading."""
        self.stalled = isinstance(exc, TimeoutError)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Create the response to a malformed HTTP request or an uncaught error."""
        context = context_of(request)
        if request.writer.output_size:
            raise ConnectionError("the answer has already begun, so it can only be cut off")
        if status >= 500 and isinstance(exc, Exception):
            problem = context.to_api_error(exc)
        else:
            problem = malformed(exc, status)
            request._version = HttpVersion11  # aiohttp assumes 1.0 if parsing fails
            context.note += f" {problem.message!r:.200}"
        response = json_response(
            context.error_body(problem), status=problem.status, headers=context.headers
        )
        response.force_close()
        self._log_request(request, problem.status, 0.0)
        return response


def malformed(error: BaseException | None, status: int = 400) -> APIError:
    """Convert an error of the HTTP parser to the error that the client receives."""
    message = error.message if isinstance(error, HttpProcessingError) else str(error or "")
    first_line = message.strip().partition("\n")[0].rstrip(":")
    if isinstance(error, LineTooLong):
        line, limit = error.args[0], error.args[1]
        is_target = bytes(line).lstrip().startswith((b"/", b"http"))
        what, code = ("the request's target", 414) if is_target else ("a header", 431)
        return APIError(code, f"{what} is longer than {limit} bytes")
    if "Too many headers" in first_line:
        return APIError(431, "the request has too many headers: at most 128 are accepted")
    if "overflow" in first_line and "Content-Length" in first_line:
        return APIError(413, "the body is too long: its Content-Length does not fit into 64 bits")
    quoted = "".join(c if c.isprintable() else "?" for c in first_line)[:_MAX_QUOTED_CHARACTERS]
    return APIError(status, "the request is not valid HTTP" + (f": {quoted}" if quoted else ""))


class _Refusal(asyncio.Protocol):
    """Protocol of a connection that is refused because too many others are open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send a response with status 503 and close the connection."""
        transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        body = msgspec.json.encode(unavailable("too many connections").body)
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {RETRY_AFTER}\r\n"
            "Connection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.close()
