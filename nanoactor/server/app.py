"""The server put together: the engine, the desk, the monitor, and the routes to them."""

from __future__ import annotations

import logging
import resource
import socket
from typing import Any

from aiohttp import web

from nanoactor.actors.config import render_limits
from nanoactor.engine import AsyncLLM
from nanoactor.model_files import max_prompt_bytes
from nanoactor.server.completions import Completions
from nanoactor.server.config import ServerConfig
from nanoactor.server.desk import Desk
from nanoactor.server.exchange import Exchange, json_response
from nanoactor.server.http import Door, Routes
from nanoactor.server.metrics import Metrics
from nanoactor.server.monitor import Monitor
from nanoactor.server.observe import Observation
from nanoactor.server.openapi import document
from nanoactor.server.text_routes import TextRoutes

log = logging.getLogger("nanoactor.server")

_BACKLOG = 4096
_REPLY_SECONDS = 2.0
"""How long the last answers may take to leave."""


class Server:
    """An engine behind a socket. `start`, then `stop`."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        """`llm` is not started yet, and ends with the server."""
        self.config = config
        self.llm = llm
        self.metrics = Metrics()
        self.port = 0
        self._desk: Desk | None = None
        self._monitor = Monitor(llm, self.metrics, llm.config.stall_timeout)
        self._site: web.ServerRunner | None = None
        self._completions: Completions | None = None
        self._door: Door | None = None

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.config.served_model_name or self.llm.config.model

    async def start(self) -> None:
        """Start the engine, then listen. Raises what the engine raises, and `OSError` where the
        address cannot be had; nothing is left running then."""
        config = self.config
        listener = _listen(config.host, config.port)
        self.port = listener.getsockname()[1]
        try:
            await self.llm.start()
            files = self.llm.files
            if files.tokenizer_directory is not None:
                limits = render_limits(self.llm.config, files)
                self._desk = Desk(files.tokenizer_directory, 2 * max_prompt_bytes(files), limits)
                await self._desk.start()
            await self._monitor.start()
            await self._open(listener)
        except BaseException:
            listener.close()
            await self._close()
            raise

    async def _open(self, listener: socket.socket) -> None:
        config, llm = self.config, self.llm
        # Text may be escaped, token ids are written out: both take more than the prompt itself.
        largest = config.max_body_bytes or 2 * max_prompt_bytes(llm.files) + (1 << 20)
        door = Door(config, largest)
        name = self.name
        completions = Completions(llm, self._desk, door, config, name, self.metrics)
        texts = TextRoutes(llm, self._desk, door, completions, name, config.strict)
        looks = Observation(llm, self._monitor, self.metrics, door, self._desk)
        door.routes = _routes(completions, texts, looks, document(name, bool(config.api_keys)))
        door.on_outcome = self._count
        self._completions, self._door = completions, door
        raise_descriptor_limit()
        self._site = web.ServerRunner(door.server(), shutdown_timeout=_REPLY_SECONDS)
        await self._site.setup()
        await web.SockSite(self._site, listener, backlog=_BACKLOG).start()

    def _count(self, path: str, outcome: str) -> None:
        known = path if path in _COUNTED else "other"
        self.metrics.requests.labels(known, outcome).inc()

    async def drain(self) -> None:
        """Refuse new work; return when what runs has ended, or has been broken off because the
        time for that is over."""
        door, completions = self._door, self._completions
        if door is None or completions is None:
            return
        door.draining = True
        log.info("shutting down: %d requests under way", door.at_work)
        if not await door.idle(self.config.drain_timeout):
            log.warning("%d answers are broken off", completions.live)
            completions.break_off()
            await door.idle(_REPLY_SECONDS)

    async def stop(self) -> None:
        """Drain, then end everything."""
        try:
            await self.drain()
        finally:
            await self._close()

    async def _close(self) -> None:
        if self._site is not None:
            await self._site.cleanup()
        await self._monitor.stop()
        if self._desk is not None:
            await self._desk.close()
        await self.llm.close()


_COUNTED = {
    *("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"),
    *("/live", "/ready", "/health", "/metrics", "/trace", "/activity", "/openapi.json", "/"),
}


def _routes(
    completions: Completions,
    texts: TextRoutes,
    looks: Observation,
    openapi_document: dict[str, Any],
) -> Routes:
    async def openapi(exchange: Exchange) -> web.StreamResponse:
        return json_response(openapi_document, headers=exchange.headers)

    return {
        "/v1/chat/completions": {"POST": completions.chat},
        "/v1/completions": {"POST": completions.completions},
        "/v1/models": {"GET": texts.models},
        "/v1/models/": {"GET": texts.model},
        "/tokenize": {"POST": texts.tokenize},
        "/detokenize": {"POST": texts.detokenize},
        "/live": {"GET": looks.live},
        "/ready": {"GET": looks.ready},
        "/health": {"GET": looks.health},
        "/metrics": {"GET": looks.metrics},
        "/trace": {"GET": looks.trace},
        "/activity": {"GET": looks.activity},
        "/openapi.json": {"GET": openapi},
        "/favicon.ico": {"GET": looks.icon},
        "/": {"GET": looks.page},
    }


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket: before the model is loaded it is known whether the address can be had."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def raise_descriptor_limit() -> None:
    """As many descriptors as this process may have: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
