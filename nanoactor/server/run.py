"""The main coroutine of `nanoactor serve`, from startup until a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Callable

from nanoactor.api.engine import AsyncLLM
from nanoactor.errors import InvalidConfig
from nanoactor.server.app import Server
from nanoactor.server.config import ServerConfig
from nanoactor.server.listening import url_of

log = logging.getLogger("nanoactor.server")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DUPLICATE_SECONDS = 0.5
"""Time within which a second signal is a duplicate of the first, in seconds. The command `timeout`
sends two at once: to the process and to its process group."""
_DEAD_SECONDS = 5.0
"""Time for which `/health` reports a dead engine before the server exits, in seconds."""


async def serve(llm: AsyncLLM, config: ServerConfig) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, and then wait until running requests have finished. A
    second signal ends the process immediately. Raises `EngineDead` if the engine has died."""
    server = Server(llm, config)
    shutdown = ShutdownEvent()
    loop = asyncio.get_running_loop()
    # nohup ignores SIGHUP. Keep ignoring it.
    handles_sighup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    handled_signals = [
        number for number in SIGNALS if handles_sighup or number is not signal.SIGHUP
    ]
    for number in handled_signals:
        loop.add_signal_handler(number, shutdown.on_signal, number)
    log.info("starting %s", llm.config.model)
    starting = asyncio.ensure_future(_start(server))
    stopping = asyncio.ensure_future(shutdown.wait())
    dying = asyncio.ensure_future(llm.death())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        await starting
        # Existing objects stay alive. The garbage collector need not scan them again.
        gc.collect()
        gc.freeze()
        await asyncio.wait((dying, stopping), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            await asyncio.wait((stopping,), timeout=_DEAD_SECONDS)
        await server.stop()
        if llm.dead is not None:
            raise llm.dead
    finally:
        stopping.cancel()
        dying.cancel()
        for number in handled_signals:
            loop.remove_signal_handler(number)
        gc.unfreeze()


async def _start(server: Server) -> None:
    config, begin = server.config, time.monotonic()
    try:
        await server.start()
    except OSError as error:
        address = config.uds or f"{config.host} port {config.port}"
        raise InvalidConfig(f"cannot listen on {address}: {error.strerror or error}") from error
    llm, facts = server.llm, server.llm.facts
    log.info(
        "%s (%s) on %s, context %d, KV cache of %d tokens, loaded in %.1f s",
        server.names[0],
        facts["dtype"],
        facts["device"],
        llm.files.max_model_len,
        facts["num_blocks"] * facts["block_size"],
        time.monotonic() - begin,
    )
    log.info("listening on %s", url_of(config, server.port))
    if not config.on_loopback and not config.api_keys:
        log.warning(
            "%s can be reached from other machines, but no API key is set; use --api-key to set "
            "one",
            config.host,
        )


class ShutdownEvent(asyncio.Event):
    """Event that is set when the server should shut down."""

    def __init__(self, before_end: Callable[[], object] = lambda: None) -> None:
        """Create the event. `before_end` is called before a second signal ends this process
        immediately."""
        super().__init__()
        self._since, self._before_end = 0.0, before_end

    def on_signal(self, number: signal.Signals) -> None:
        """Set the event. If a shutdown is already in progress, restore the signal's default action
        and send the signal again, which ends this process and its child processes."""
        now = time.monotonic()
        if self._since and now - self._since > _DUPLICATE_SECONDS:
            self._before_end()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._since = self._since or now
        self.set()
