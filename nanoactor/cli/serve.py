"""The command `nanoactor serve`: an HTTP server with one engine, or with several on Ray."""

from __future__ import annotations

import logging
import os
from collections.abc import Coroutine
from typing import Any

from nanoactor.api.engine import AsyncLLM
from nanoactor.cli.options import given_values
from nanoactor.compat.flags import NOTES
from nanoactor.options.config import EngineConfig
from nanoactor.ray_serve.options import FleetConfig
from nanoactor.server.config import ServerConfig

log = logging.getLogger("nanoactor.server")
KEY_VARIABLE, VLLM_KEY_VARIABLE = "NANOACTOR_API_KEY", "VLLM_API_KEY"


async def run_server(args: Any) -> None:
    """Run the `serve` command: serve until a signal ends the server."""
    from nanoactor.server.run import serve

    # Remove the keys from the environment, because child processes do not need them.
    keys = [os.environ.pop(name, None) for name in (KEY_VARIABLE, VLLM_KEY_VARIABLE)]
    key = next(filter(None, keys), None)
    options = ({"api_keys": (key,)} if key else {}) | given_values(args, ServerConfig)
    config, server = (
        EngineConfig(args.model, **given_values(args, EngineConfig)),
        ServerConfig(**options),
    )
    level = (server.log_level or "info").upper()
    for name in ("nanoactor.server", "nanoactor.access"):
        logging.getLogger(name).setLevel(level)
    for note in getattr(args, NOTES):
        log.info("%s", note)
    fleet = FleetConfig(**given_values(args, FleetConfig))
    if fleet.replicas:
        from nanoactor.ray_serve.launch import serve_replicas

        await serve_replicas(config, server, fleet)
    else:
        await serve(AsyncLLM(config), server)


def run_on_uvloop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine like `asyncio.run`, but on uvloop, because a server benefits from a faster
    event loop."""
    import uvloop

    uvloop.run(main)
