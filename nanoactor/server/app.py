"""The HTTP server: creates all services and routes, and starts and stops them."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from nanoactor.api.engine import AsyncLLM
from nanoactor.errors import InvalidConfig, InvalidRequest
from nanoactor.model_files.files import max_prompt_bytes
from nanoactor.options.config import EngineConfig
from nanoactor.server.anthropic.routes import MessagesRoutes
from nanoactor.server.compat_routes import CompatRoutes
from nanoactor.server.completions import Completions
from nanoactor.server.config import ServerConfig
from nanoactor.server.connections import connection_factory
from nanoactor.server.context import json_response
from nanoactor.server.http import HttpFrontend, Routes
from nanoactor.server.listening import bind_socket, make_tls_context, remove_unix_socket
from nanoactor.server.live_answers import LiveAnswers
from nanoactor.server.media import MediaLimits, MediaLoader
from nanoactor.server.metrics import Metrics
from nanoactor.server.monitor import Monitor
from nanoactor.server.observe import ObservationRoutes
from nanoactor.server.openapi import document
from nanoactor.server.pooling.routes import PoolingRoutes
from nanoactor.server.requests import Decoder
from nanoactor.server.responses.routes import ResponsesRoutes
from nanoactor.server.serving import Engine, MonitorProtocol
from nanoactor.server.text_routes import TextRoutes
from nanoactor.server.text_service import TextService
from nanoactor.server.translating import Options
from nanoactor.setup.actors import render_options

log = logging.getLogger("nanoactor.server")

_LISTEN_BACKLOG = 4096
_MIN_DIVISIBLE_QUEUE = 16
"""Minimum capacity of the waiting queue at which one client is limited to half of it."""
_IMAGES_BYTES = 64 << 20
"""Additional bytes allowed in a request's body if the model accepts images."""
_RESPONSE_ID = "{id:(?!input_tokens|compact)[^/]+}"
"""Path pattern of a response id, which excludes the names of the API's other routes."""
_FINAL_SEND_SECONDS = 2.0
"""Maximum number of seconds for sending the last responses at shutdown."""


_MAX_HANDSHAKE_SECONDS = 10.0
"""Maximum number of seconds for the TLS handshake of a new connection."""


class Server:
    """HTTP server for one engine or a fleet of engines. Call `start`, and later `stop`."""

    def __init__(
        self,
        llm: Engine,
        config: ServerConfig,
        *,
        text_service: TextService | None = None,
        monitor: MonitorProtocol | None = None,
        reuse_port: bool = False,
    ) -> None:
        """Create the server without starting it.

        `llm` must not have been started, because the server starts and closes it. For a fleet
        (several engines), pass its `monitor` and `text_service`; the fleet starts and closes the
        latter. For one engine, the server creates both. `reuse_port` allows another server to
        listen on the same port, for instance one that replaces this one.
        """
        self._reuse_port = reuse_port
        self.config = config
        self.llm = llm
        self.names = config.model_names or (llm.config.model,)
        """Names of the model that clients may use. Responses contain the first one."""
        self.port = 0
        self.metrics = Metrics(self.names[0], vllm_names=config.vllm_metrics)
        self._tracer = llm if isinstance(llm, AsyncLLM) else None
        if self._tracer is not None:
            monitor = Monitor(self._tracer, self.metrics, llm.config.stall_timeout)
        assert monitor is not None
        self._monitor = monitor
        self.metrics.engine_metrics = monitor.collect
        max_text_bytes = 2 * max_prompt_bytes(llm.files)
        self._text_service = text_service
        if text_service is None and llm.files.tokenizer_directory is not None:
            render_limits = render_options(llm.config, llm.files)
            reserved = llm.files.placeholders
            self._text_service = TextService(
                llm.files.tokenizer_directory, max_text_bytes, render_limits, reserved
            )
        # JSON escapes and decimal token ids need more bytes than the text of the prompt.
        accepts_images = llm.files.images is not None
        max_body_bytes = (
            config.max_body_bytes or max_text_bytes + (1 << 20) + accepts_images * _IMAGES_BYTES
        )
        decoder = Decoder(config.strict, accepts_images, self._template_members)
        is_traced = llm.config.otlp_traces_endpoint is not None
        self._http = HttpFrontend(
            config, self.names, max_body_bytes, self.metrics, decoder, is_traced=is_traced
        )
        self._media = MediaLoader(MediaLimits(config.allowed_media_domains))
        self._answers = LiveAnswers(
            llm,
            self._http,
            self.metrics,
            max_answers=config.max_answers_per_client or _max_answers_per_client(llm.config),
            cap_max_tokens=not config.strict,
        )
        self._completions = Completions(
            llm,
            self._text_service,
            self._http,
            self._media,
            self._answers,
            separate_reasoning=config.separate_reasoning,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        app = self._http.application(self._routes())
        app.cleanup_ctx.append(_lifetime(llm.start, llm.close))
        app.cleanup_ctx.append(_lifetime(_nothing, self._media.close))
        if self._text_service is not None and text_service is None:
            app.cleanup_ctx.append(_lifetime(self._text_service.start, self._text_service.close))
        app.cleanup_ctx.append(_lifetime(self._monitor.start, self._monitor.stop))
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a disconnect cancels the request's handler
            shutdown_timeout=_FINAL_SEND_SECONDS,
        )
        self._listening_server: asyncio.Server | None = None

    def _template_members(self) -> Sequence[str]:
        return () if self._text_service is None else self._text_service.template.members

    def _translation_options(self) -> Options:
        accepts_images = self.llm.files.images is not None
        renders_result_images = (
            self._text_service is not None and self._text_service.template.renders_result_images
        )
        return Options(accepts_images, renders_result_images, self.config.drop_volatile_lines)

    def _routes(self) -> Routes:
        text_routes = TextRoutes(self.llm, self._text_service, self._http, self._media, self.names)
        apis = self._completions, text_routes, self._http, self._translation_options
        messages, responses = MessagesRoutes(*apis), ResponsesRoutes(*apis)
        observation = ObservationRoutes(
            self._tracer, self._monitor, self.metrics, self._http, self._text_service
        )
        openapi_document = document(self.names, bool(self.config.api_keys), self.config.root_path)

        async def openapi(request: web.Request) -> web.StreamResponse:
            return json_response(openapi_document)

        pooling = PoolingRoutes(
            self.llm,
            self._http,
            self.metrics,
            self.names[0],
            max_answers=self.config.max_answers_per_client
            or _max_answers_per_client(self.llm.config),
        )
        compat = CompatRoutes(self.llm, self._completions, self._answers, self._http, self.names)
        routes: dict[str, Any] = {
            "/v1/chat/completions": ("POST", self._completions.chat),
            "/v1/completions": ("POST", self._completions.completions),
            "/v1/responses": ("POST", responses.create),
            "/v1/responses/input_tokens": ("POST", responses.input_tokens),
            "/v1/responses/compact": ("POST", responses.compact),
            f"/v1/responses/{_RESPONSE_ID}": ("GET", responses.stored),
            f"/v1/responses/{_RESPONSE_ID}/cancel": ("POST", responses.stored),
            "/v1/messages": ("POST", messages.create),
            "/v1/messages/count_tokens": ("POST", messages.count_tokens),
            "/v1/models": ("GET", text_routes.models),
            "/v1/models/{model:.+?}": ("GET", text_routes.model),
            "/tokenize": ("POST", text_routes.tokenize),
            "/detokenize": ("POST", text_routes.detokenize),
            "/live": ("GET", observation.live),
            "/ready": ("GET", observation.ready),
            "/health": ("GET", observation.health),
            "/metrics": ("GET", observation.metrics),
            "/trace": ("GET", observation.trace),
            "/activity": ("GET", observation.activity),
            "/openapi.json": ("GET", openapi),
            "/favicon.ico": ("GET", observation.icon),
            "/": ("GET", observation.page),
            **pooling.routes(),
            **compat.routes(openapi_document, observation.health),
        }
        if self.config.enable_tokenizer_info_endpoint:
            routes |= compat.tokenizer_routes()
        if self.config.enable_control_endpoints:
            routes |= compat.control_routes()
        return routes

    async def start(self) -> None:
        """Start the engine, and then accept connections. Raises the engine's errors, and `OSError`
        if the address is not available. After an error, everything is stopped again."""
        tls_context = make_tls_context(self.config)
        listener = bind_socket(self.config, self._reuse_port)
        self.port = 0 if self.config.uds is not None else listener.getsockname()[1]
        try:
            await self._runner.setup()
            self._check_template_defaults()
            assert self._runner.server is not None
            raise_descriptor_limit()
            accept = connection_factory(self._runner.server, self.config, self._http.log_request)
            loop = asyncio.get_running_loop()
            options: dict[str, Any] = {
                "sock": listener,
                "backlog": _LISTEN_BACKLOG,
                "ssl": tls_context,
            }
            if tls_context is not None:
                options["ssl_handshake_timeout"] = min(
                    self.config.idle_timeout, _MAX_HANDSHAKE_SECONDS
                )
            if self.config.uds is not None:
                self._listening_server = await loop.create_unix_server(accept, **options)
            else:
                self._listening_server = await loop.create_server(accept, **options)
        except BaseException:
            listener.close()
            remove_unix_socket(self.config)
            await self._runner.cleanup()
            raise

    def _check_template_defaults(self) -> None:
        defaults = self._http.template_defaults
        try:
            if self._text_service is not None:
                self._text_service.template.check(defaults)
        except InvalidRequest as error:
            text = str(error).removeprefix("chat_template_kwargs: ")
            raise InvalidConfig(f"default_chat_template_kwargs: {text}") from None

    async def drain(self) -> None:
        """Refuse new requests, and wait until all running requests have finished. Requests that
        take longer than `drain_timeout` seconds are aborted."""
        self._http.is_draining = True
        if self._reuse_port and self._listening_server is not None:
            self._listening_server.close()  # new connections go to the other servers on this port
        log.info("shutting down while %d requests are in progress", self._http.active_posts)
        if not await self._http.wait_idle(self.config.drain_timeout):
            log.warning(
                "cutting off %d answers that did not finish within the drain timeout",
                self._answers.num_live,
            )
            self._answers.abort_all()
            await self._http.wait_idle(_FINAL_SEND_SECONDS)

    async def stop(self) -> None:
        """Drain all requests, and then stop the server and the engine."""
        try:
            await self.drain()
        finally:
            if self._listening_server is not None:
                self._listening_server.close()
                remove_unix_socket(self.config)
            await self._runner.cleanup()


async def _nothing() -> None:
    """Do nothing. Serves as the `start` of a component that has none."""


def _max_answers_per_client(config: EngineConfig) -> int:
    """Return the maximum number of answers in progress per client: `max_num_seqs` plus half of the
    waiting queue, so that other clients have room. If the queue is too short to be divided, one
    client may fill it."""
    queue = config.max_waiting_requests
    return config.max_num_seqs + (queue // 2 if queue >= _MIN_DIVISIBLE_QUEUE else queue + 1)


def _lifetime(
    start: Callable[[], Awaitable[object]], stop: Callable[[], Awaitable[None]]
) -> Callable[[web.Application], AsyncIterator[None]]:
    """Return an aiohttp cleanup context that starts a component and later stops it."""

    async def lifetime(app: web.Application) -> AsyncIterator[None]:
        await start()
        yield
        await stop()

    return lifetime


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open file descriptors to the hard limit, because each connection
    needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
