"""What every request passes, whatever it asks for: connection, key, body, request id, errors, log.

Routing is a look-up: the paths are few and fixed.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from nanoactor.errors import NanoactorError
from nanoactor.server.config import ServerConfig
from nanoactor.server.connections import Connection, Connections
from nanoactor.server.errors import APIError, from_engine, unavailable
from nanoactor.server.exchange import Exchange, json_response
from nanoactor.server.keys import Keys

log = logging.getLogger("nanoactor.server")
access_log = logging.getLogger("nanoactor.access")

OPEN_PATHS = ("/live", "/ready", "/favicon.ico")
"""What probes may see without a key, and what browsers ask for by themselves."""
_QUIET = (*OPEN_PATHS, "/health", "/metrics", "/activity")
"""What is asked for again and again, by machines."""
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|\d+\.\d+\.\d+\.\d+|localhost|[\w.-]+\.localhost)(:\d+)?")
_LINGER = 2.0
"""Seconds for which the rest of a refused body is read, so that its sender can read the answer."""
_MANY_BODIES = 64
"""How many bodies of the largest size may be on their way at once."""
_SMALL_BODY = 1 << 16
_GONE = 499
"""As nginx writes it: the client has gone away."""
_OUTCOMES = {429: "overloaded", _GONE: "client_gone", 503: "unavailable"}


Handler = Callable[[Exchange], Awaitable[web.StreamResponse]]
Routes = Mapping[str, Mapping[str, Handler]]
"""By path and method."""


class Door:
    """Takes requests from connections to their handlers, and makes errors of theirs answers."""

    def __init__(self, config: ServerConfig, max_body_bytes: int) -> None:
        self._config = config
        self._keys = Keys(config.api_keys)
        self._max_body = max_body_bytes
        self._body_room = _MANY_BODIES * max_body_bytes
        self.routes: Routes = {}
        self.draining = False
        """Whether new work is refused."""
        self._at_work = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.on_outcome: Callable[[str, str], None] = lambda path, outcome: None
        """Hears the path and the outcome of every request."""

    async def idle(self, seconds: float) -> bool:
        """Wait until no work is under way; False where that takes longer."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def at_work(self) -> int:
        """How many requests that are work are under way, from their heads on."""
        return self._at_work

    # -- connections ----------------------------------------------------------------------

    def server(self) -> web.Server:
        """What makes a protocol of each connection."""
        return Connections(
            self._config,
            self.note,
            self.handle,
            handler_cancellation=True,  # a client that goes away ends its handler
            request_factory=self._make_request,
            keepalive_timeout=self._config.idle_timeout,
            lingering_time=_LINGER,
            access_log=None,
            auto_decompress=False,
            logger=logging.getLogger("nanoactor.http"),
        )

    def _make_request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=self._max_body
        )

    # -- requests -------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        exchange, begin = Exchange(request), time.monotonic()
        status = _GONE
        is_work = request.method == "POST"
        self._enter(is_work)
        try:
            response = await self._answer(exchange)
            status = response.status
            return response
        finally:
            self._leave(is_work)
            self.note(exchange, status, time.monotonic() - begin)

    def _enter(self, is_work: bool) -> None:
        self._at_work += is_work
        if is_work:
            self._idle.clear()

    def _leave(self, is_work: bool) -> None:
        self._at_work -= is_work
        if not self._at_work:
            self._idle.set()

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        """What the handler returns, or the error that it raises as an answer."""
        self._add_cors(exchange)
        try:
            return await self._route(exchange)(exchange)
        except APIError as error:
            problem = error
        except NanoactorError as error:
            problem = from_engine(error)
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("request %s failed", exchange.id)
            problem = from_engine(error)
        if exchange.begun:
            raise ConnectionResetError("the answer had begun") from problem
        return self.refusal(exchange, problem)

    def refusal(self, exchange: Exchange, error: APIError) -> web.Response:
        """An error as an answer; one that leaves a body unread ends the connection."""
        if error.code or error.param:
            exchange.note += f" {(error.code or error.param)!r:.100}"
        response = json_response(error.body, error.status, {**exchange.headers, **error.headers})
        if not exchange.request.content.is_eof():
            response.force_close()
        return response

    def _route(self, exchange: Exchange) -> Handler:
        """The handler of a path and method; raises `APIError` for whoever may not see one."""
        request = exchange.request
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return self._preflight
        self._check_host(request)
        path = exchange.path
        if path not in OPEN_PATHS:
            self._check_key(request)
        methods = self.routes.get(path)
        if methods is None and path.startswith("/v1/models/"):
            methods = self.routes["/v1/models/"]
        if methods is None:
            near = difflib.get_close_matches(path[:100], [p for p in self.routes if p != "/"], 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise APIError(404, f"there is no {path[:200]!r} here; {hint}See /openapi.json")
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            allowed = ", ".join(methods)
            raise APIError(405, f"{path} takes {allowed}, not {method}", headers={"Allow": allowed})
        return methods[method]

    def _check_key(self, request: web.BaseRequest) -> None:
        headers = request.headers
        if not self._keys.admits(headers.get("Authorization"), headers.get("x-api-key")):
            browser = "text/html" in request.headers.get("Accept", "")
            challenge = 'Basic realm="nanoactor", charset="UTF-8"' if browser else "Bearer"
            raise APIError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY', or as "
                "'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": challenge},
            )

    def _check_host(self, request: web.BaseRequest) -> None:
        """A page elsewhere may point a name of its own at 127.0.0.1 and have a browser call us;
        where only this machine can call, the name must be one that nobody else can own."""
        config, host = self._config, request.headers.get("Host", "").lower()
        if not config.on_loopback or config.api_keys or not host or _HOST.fullmatch(host):
            return
        allowed = {name.lower() for name in config.allowed_hosts}
        if host.rpartition(":")[0] in allowed or host in allowed:
            return
        raise APIError(400, f"host {host[:100]!r} is not allowed here; see --allowed-host")

    def _add_cors(self, exchange: Exchange) -> None:
        origin, allowed = exchange.request.headers.get("Origin"), self._config.cors_origins
        if allowed:
            exchange.headers["Vary"] = "Origin"
        if origin and (origin in allowed or "*" in allowed):
            exchange.headers["Access-Control-Allow-Origin"] = origin if "*" not in allowed else "*"
            exchange.headers["Access-Control-Expose-Headers"] = "x-request-id, Retry-After"

    async def _preflight(self, exchange: Exchange) -> web.StreamResponse:
        headers = dict(exchange.headers)
        if "Access-Control-Allow-Origin" in headers:
            headers["Access-Control-Allow-Methods"] = "GET, POST"
            # Clients add headers of their own; an origin that may call may send what it likes.
            wanted = exchange.request.headers.get("Access-Control-Request-Headers", "")
            headers["Access-Control-Allow-Headers"] = wanted
            headers["Access-Control-Max-Age"] = "600"
        return web.Response(status=204, headers=headers)

    def note(self, exchange: Exchange, status: int, seconds: float) -> None:
        """Count a request and write it down."""
        request = exchange.request
        outcome = _OUTCOMES.get(status) or ("ok" if status < 400 else f"{status // 100}xx")
        self.on_outcome(exchange.path, "broken_off" if exchange.broken_off else outcome)
        if self._config.access_log:
            quiet = status < 400 and exchange.path in _QUIET
            stalled = isinstance(request.protocol, Connection) and request.protocol.stalled
            access_log.log(
                logging.DEBUG if quiet else logging.INFO,
                "%s %s %s %d %.1f ms %s%s%s",
                request.remote or "-",
                request.method[:20],
                request.rel_url.raw_path[:200],
                status,
                1000 * seconds,
                exchange.id,
                exchange.note,
                " reads nothing" if stalled else "",
            )

    # -- bodies ---------------------------------------------------------------------------

    async def body(self, exchange: Exchange) -> bytes:
        """The whole body of a request that must be JSON; `APIError` where it is not, is too long,
        or takes too long."""
        request = exchange.request
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise APIError(
                415, f"the body must be JSON: Content-Type application/json, not {kind[:100]!r}"
            )
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise APIError(415, "compressed bodies are not accepted: leave Content-Encoding out")
        declared = request.content_length
        if declared is not None and declared > self._max_body:
            raise self._too_large()
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        seconds = self._config.body_timeout
        try:
            async with asyncio.timeout(seconds):
                body = await self._read(request)
        except TimeoutError:
            raise APIError(408, f"the body did not arrive within {seconds:g} s") from None
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise APIError(400, f"the body is broken: {error}") from None
        if self.draining:
            raise unavailable("the server is shutting down")
        return body

    async def _read(self, request: web.BaseRequest) -> bytes:
        """All of it. What has come of large bodies is bounded together; small ones always pass."""
        body = bytearray()
        held = 0
        try:
            while part := await request.content.readany():
                body += part
                if len(body) > self._max_body:
                    raise self._too_large()
                if len(body) > _SMALL_BODY:
                    self._body_room -= len(body) - held
                    held = len(body)
                    if self._body_room < 0:
                        raise unavailable("too many large bodies are on their way")
            return bytes(body)
        finally:
            self._body_room += held

    def _too_large(self) -> APIError:
        return APIError(413, f"the body is longer than {self._max_body} bytes")
