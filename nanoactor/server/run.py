"""`nanoactor serve`: a server from start to signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal

from nanoactor.engine import AsyncLLM
from nanoactor.errors import InvalidConfig
from nanoactor.server.app import Server
from nanoactor.server.config import ServerConfig

log = logging.getLogger("nanoactor.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(llm: AsyncLLM, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end; a second one ends at once."""
    server = Server(llm, config)
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, _on_signal, number, asked)
    starting = asyncio.ensure_future(_start(server))
    stopping = asyncio.ensure_future(asked.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        await starting
        # What is there now stays: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        await asked.wait()
        await server.stop()
    finally:
        stopping.cancel()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        gc.unfreeze()


async def _start(server: Server) -> None:
    config = server.config
    try:
        await server.start()
    except OSError as error:
        raise InvalidConfig(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}"
        ) from error
    host = f"[{config.host}]" if ":" in config.host else config.host
    log.info("listening on http://%s:%d", host, server.port)
    if not config.on_loopback and not config.api_keys:
        log.warning("others can reach %s, and no API key is set (--api-key)", config.host)


def _on_signal(number: signal.Signals, asked: asyncio.Event) -> None:
    if asked.is_set():  # the second: the kernel ends us, and our processes end with us
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    asked.set()
