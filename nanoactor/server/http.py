"""Processing that all HTTP requests share: access checks, bodies, headers, errors and the access
log."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import itertools
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from msgspec import Struct

from nanoactor.server.anthropic.request import MessagesRequest
from nanoactor.server.config import ServerConfig
from nanoactor.server.context import answer_as_http1, context_of, json_response, origin_of
from nanoactor.server.errors import APIError, check_model, unavailable
from nanoactor.server.keys import Keys
from nanoactor.server.metrics import Metrics
from nanoactor.server.requests import ChatRequest, CompletionRequest, Decoder
from nanoactor.server.responses.request import ResponsesRequest
from nanoactor.telemetry.origin import ORIGIN

access_log = logging.getLogger("nanoactor.access")

OPEN_PATHS = ("/live", "/ready", "/favicon.ico")
"""Paths that require no API key, because probes or browsers request them without one."""
_POLLED_PATHS = (*OPEN_PATHS, "/health", "/metrics", "/activity")
"""Paths that programs poll. Successful requests for them are logged at debug level."""
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|\d+\.\d+\.\d+\.\d+|localhost|[\w.-]+\.localhost)(:\d+)?")
_MIN_SIMILARITY = 0.85
"""Minimum similarity, from 0 to 1, at which an existing path is suggested for an unknown one."""
_NOT_SERVED = {
    "/embed": "embeddings are served at /v1/embeddings",
    "/pooling": "embeddings are served at /v1/embeddings, and scores at /score",
    "/classify": "classification is not supported, but pairs of texts can be scored at /score",
    "/audio": "audio is not supported; text is generated at /v1/chat/completions",
    "/images": "image generation is not supported; text is generated at /v1/chat/completions",
    "/realtime": "the Realtime API is not supported; answers can be streamed at /v1/responses",
    "/moderations": "moderation is not supported",
    "/files": "files are not stored; send their content with the request",
    "/batches": "batches are not supported; send the requests at the same time, and they run "
    "together",
    "/conversations": "conversations are not stored; send the whole conversation with each request",
    "/assistants": "assistants are not supported; conversations are supported at /v1/responses",
    "/api/": "Ollama's API is not supported; OpenAI's API is, at /v1/chat/completions",
    "/generate": "text is generated at /v1/completions and /v1/chat/completions",
}
"""Hints for clients that request a feature of another server. A key is a part of the requested
path."""
_MAX_LARGE_BODIES = 64
"""Number of bodies of the maximum size that may be received at the same time."""
_SMALL_BODY = 1 << 16
_CLIENT_GONE_STATUS = 499
"""Status that is logged if the client has disconnected, as in nginx."""
_OUTCOMES = {429: "overloaded", _CLIENT_GONE_STATUS: "client_gone", 503: "unavailable"}

_BODY = web.RequestKey("body", bytes)
Routes = Mapping[str, tuple[str, Handler]]
"""For each path: comma-separated HTTP methods, and the handler."""
B = TypeVar("B", bound=Struct)
_GENERATION_REQUESTS = (CompletionRequest, ChatRequest, MessagesRequest, ResponsesRequest)


class HttpFrontend:
    """Passes requests to their handlers, and converts exceptions to error responses."""

    def __init__(
        self,
        config: ServerConfig,
        names: Sequence[str],
        max_body_bytes: int,
        metrics: Metrics,
        decoder: Decoder,
        *,
        is_traced: bool = False,
    ) -> None:
        """Store the options. `names` are the names that clients may use for the model, `metrics`
        counts the requests, and `decoder` decodes their bodies. `is_traced` is True if the engine
        exports OpenTelemetry traces of requests."""
        self._config = config
        self._names = names
        self._is_traced = is_traced
        self._max_body = max_body_bytes
        self._metrics = metrics
        self._keys = Keys(config.api_keys)
        self.template_defaults = dict(config.default_chat_template_kwargs or {})
        """Chat template variables for requests that do not set them."""
        self.decoder = decoder
        self._body_budget = _MAX_LARGE_BODIES * max_body_bytes
        self._paths: list[str] = []
        self._prefixes = dict.fromkeys(("", config.root_path))
        """Path prefixes of all routes. A proxy may remove its own prefix from a path, or keep
        it."""
        quiet = (config.disable_access_log_for_endpoints or "").split(",")
        self._unlogged = {path.strip() for path in quiet}
        self.is_draining = False
        """True if new requests are refused because the server is shutting down."""
        self.active_posts = 0
        """Number of POST requests in progress, counted from the arrival of their headers."""
        self._idle = asyncio.Event()
        self._idle.set()

    def application(self, routes: Routes) -> web.Application:
        """Create the aiohttp application that serves these routes."""
        self._paths = [path for path in routes if "{" not in path]
        app = web.Application(middlewares=[self._log_outcome, self._answer_errors, self._admit])
        app.on_response_prepare.append(self._add_headers)
        for path, (method, handler) in routes.items():
            # Clients may omit /v1 or append slashes.
            pattern = path.replace("/v1/", "/{version:(v1/)?}") + "{slashes:/*}"
            for path_pattern, prefix in itertools.product((path, pattern), self._prefixes):
                for name in method.split(", "):
                    add = app.router.add_get if name == "GET" else app.router.add_post
                    add(prefix + path_pattern, handler, expect_handler=_expect_later)
        return app

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until no POST request is in progress. Return False after `seconds` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return not self.active_posts

    # -- middlewares, the outermost first -------------------------------------------------

    @web.middleware
    async def _log_outcome(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Run the request, count it, and write it to the access log."""
        context_of(request).strip_root(self._config.root_path)
        if self._is_traced:
            ORIGIN.set(origin_of(request, self._names[0]))
        begin, status = time.monotonic(), _CLIENT_GONE_STATUS
        post_count = int(request.method == "POST")
        self._change_active_posts(post_count)
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            self._change_active_posts(-post_count)
            self.log_request(request, status, time.monotonic() - begin)

    def _change_active_posts(self, change: int) -> None:
        self.active_posts += change
        if self.active_posts:
            self._idle.clear()
        else:
            self._idle.set()

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Convert exceptions to error responses. Close the connection if the request's body was not
        read completely."""
        context = context_of(request)
        try:
            return await handler(request)
        except ConnectionError:
            raise
        except Exception as error:
            problem = context.to_api_error(error)
        if request.writer.output_size:
            raise ConnectionResetError("the answer has already begun") from problem
        if problem.code or problem.param:
            context.note += f" {(problem.code or problem.param)!r:.100}"
        answer_as_http1(request)
        body = context.error_body(problem)
        response = json_response(body, status=problem.status, headers=problem.headers)
        if not request.content.is_eof():
            response.force_close()
        return response

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer CORS preflight requests. Raise `APIError` for unauthorized callers and unknown
        paths. Pass all other requests on to `handler`."""
        if request.version not in (HttpVersion10, HttpVersion11):
            raise APIError(505, "this server supports only HTTP/1.1 and HTTP/1.0")
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return self._preflight(request)
        self._check_host(request)
        path = context_of(request).path
        if path not in OPEN_PATHS:
            self._check_key(request)
        match request.match_info.http_exception:
            case web.HTTPMethodNotAllowed() as error:
                allowed = ", ".join(sorted(error.allowed_methods - {"HEAD"}))
                text = f"{path} accepts {allowed}, not {error.method}"
                raise APIError(405, text, headers={"Allow": allowed})
            case web.HTTPException():
                hint = self._hint(path)
                raise APIError(
                    404,
                    f"the path {path[:200]!r} does not exist{hint}; see /openapi.json for "
                    "all paths",
                )
        return await handler(request)

    def _hint(self, path: str) -> str:
        """Return a hint for an unknown path, in parentheses after a space. Empty if there is
        none."""
        for part, text in _NOT_SERVED.items():
            if part in path:
                return f" ({text})"
        matches = difflib.get_close_matches(path[:100], self._paths, 1, _MIN_SIMILARITY)
        return f" (did you mean {matches[0]}?)" if matches else ""

    def _check_key(self, request: web.Request) -> None:
        headers = request.headers
        if not self._keys.is_authorized(headers.get("Authorization"), headers.get("x-api-key")):
            browser = "text/html" in request.headers.get("Accept", "")
            challenge = 'Basic realm="nanoactor", charset="UTF-8"' if browser else "Bearer"
            raise APIError(
                401,
                "the API key is missing or wrong; send it in the header 'Authorization: Bearer "
                "KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": challenge},
            )

    def client_of(self, request: web.Request) -> str:
        """Return an identifier of the client: a digest of its API key, or its address."""
        credentials = request.headers.get("Authorization"), request.headers.get("x-api-key")
        return self._keys.client(*credentials, request.remote or "")

    def _check_host(self, request: web.Request) -> None:
        """Raise `APIError` if a request to a loopback interface has a foreign `Host` header.
        Nothing is checked if an API key is required.

        A remote site can point its own name at 127.0.0.1 and make a browser call this server (DNS
        rebinding). The host must therefore be a local name or address, or one of `allowed_hosts`.
        """
        config, host = self._config, request.headers.get("Host", "").lower()
        if not config.on_loopback or config.api_keys or not host or _HOST.fullmatch(host):
            return
        if config.uds is not None:  # browsers do not connect to Unix sockets
            return
        allowed = {name.lower() for name in config.allowed_hosts}
        if host.rpartition(":")[0] not in allowed and host not in allowed:
            raise APIError(
                400,
                f"the host {host[:100]!r} is not allowed; start the server with "
                "--allowed-host to allow it",
            )

    # -- headers --------------------------------------------------------------------------

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that every response has, and CORS headers for allowed origins."""
        response.headers.update(context_of(request).headers)
        if self._config.cors_origins:
            response.headers["Vary"] = "Origin"
        if origin := self._allowed_origin(request):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "x-request-id, Retry-After"

    def _allowed_origin(self, request: web.Request) -> str:
        origin, allowed = request.headers.get("Origin", ""), self._config.cors_origins
        if origin and "*" in allowed:
            return "*"
        return origin if origin in allowed else ""

    def _preflight(self, request: web.Request) -> web.StreamResponse:
        response = web.Response(status=204)
        if self._allowed_origin(request):
            response.headers["Access-Control-Allow-Methods"] = "GET, POST"
            # Clients may define their own headers. An allowed origin may send any.
            requested_headers = request.headers.get("Access-Control-Request-Headers", "")
            response.headers["Access-Control-Allow-Headers"] = requested_headers
            response.headers["Access-Control-Max-Age"] = "600"
        return response

    # -- access log -----------------------------------------------------------------------

    def log_request(self, request: web.BaseRequest, status: int, seconds: float) -> None:
        """Count a request, and write it to the access log. `seconds` is its duration."""
        context = context_of(request)
        outcome = _OUTCOMES.get(status) or ("ok" if status < 400 else f"{status // 100}xx")
        path = context.path if context.path in self._paths else "other"
        self._metrics.requests.labels(path, "broken_off" if context.broken_off else outcome).inc()
        if self._config.access_log and context.path not in self._unlogged:
            is_polled = status < 400 and context.path in _POLLED_PATHS
            access_log.log(
                logging.DEBUG if is_polled else logging.INFO,
                "%s %s %s %d %.1f ms %s%s%s",
                request.remote or "-",
                request.method[:20],
                request.rel_url.raw_path[:200],
                status,
                1000 * seconds,
                context.id,
                context.note,
                " reads nothing" if getattr(request.protocol, "stalled", False) else "",
            )

    # -- bodies ---------------------------------------------------------------------------

    async def read(self, request: web.Request, kind: type[B]) -> B:
        """Read a request's body and decode it as `kind`. Raises `APIError` if it is invalid."""
        body = self.decoder.decode(kind, await self.body(request))
        context = context_of(request)
        context.fields = frozenset(kind.__struct_fields__)
        if user := getattr(body, "user", None):
            context.note = f" user={user[:100]!r}"
        if model := getattr(body, "model", None):
            check_model(model, self._names)
        if isinstance(body, _GENERATION_REQUESTS):
            body.model = self._names[0]
        return body

    async def body(self, request: web.Request) -> bytes:
        """Return the complete body of a request, cached after the first call. Raises `APIError` if
        the content type is not JSON, or if the body is too long or arrives too slowly."""
        cached: bytes | None = request.get(_BODY)
        if cached is not None:
            return cached
        request[_BODY] = body = await self._receive_body(request)
        return body

    async def _receive_body(self, request: web.Request) -> bytes:
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise APIError(
                415, f"the Content-Type of the body must be application/json, not {kind[:100]!r}"
            )
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise APIError(
                415, "compressed bodies are not accepted; send the request without Content-Encoding"
            )
        if (request.content_length or 0) > self._max_body:
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
            raise APIError(400, f"the body cannot be read: {error}") from None
        if self.is_draining:
            raise unavailable("the server is shutting down")
        return body

    async def _read(self, request: web.Request) -> bytes:
        """Read the complete body. All large bodies that are being received share a memory budget;
        small bodies are not counted."""
        body = bytearray()
        counted = 0
        try:
            while part := await request.content.readany():
                body += part
                if len(body) > self._max_body:
                    raise self._too_large()
                if len(body) > _SMALL_BODY:
                    self._body_budget -= len(body) - counted
                    counted = len(body)
                    if self._body_budget < 0:
                        raise unavailable(
                            "the server is receiving too many large bodies; try again later"
                        )
            return bytes(body)
        finally:
            self._body_budget += counted

    def _too_large(self) -> APIError:
        return APIError(413, f"the body is longer than {self._max_body} bytes")


async def _expect_later(request: web.Request) -> None:
    """Do nothing. `_receive_body` responds to `Expect: 100-continue` once it has accepted the
    headers."""
