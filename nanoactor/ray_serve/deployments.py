"""The two Ray Serve deployments: the engines, and the ingresses (HTTP servers) in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, TextIO

from nanoactor.api.engine import AsyncLLM
from nanoactor.fleet.client import FleetLLM
from nanoactor.fleet.fingerprint import fingerprint
from nanoactor.fleet.hub import Hub
from nanoactor.fleet.monitor import FleetMonitor
from nanoactor.options.config import EngineConfig
from nanoactor.ray_serve.api import serve
from nanoactor.ray_serve.connector import RayConnector
from nanoactor.ray_serve.loopback import bind_to_loopback
from nanoactor.ray_serve.options import FleetConfig
from nanoactor.ray_serve.ports import avoid_proxy_port
from nanoactor.ray_serve.starting import restricted_to_half_of_cores
from nanoactor.server.app import Server
from nanoactor.server.config import ServerConfig
from nanoactor.server.listening import url_of

bind_to_loopback()  # runs when Ray imports this module, before Ray Serve opens the port

log = logging.getLogger("nanoactor.ray")

LOG_VARIABLE = "NANOACTOR_RAY_LOG"
"""Environment variable that contains a path. If that file exists on their machine, the deployments
also write their log to it."""


class Engine:
    """A replica: one engine, and the `Hub` that serves it to the ingresses (HTTP servers)."""

    async def __init__(self, config: EngineConfig, fleet: FleetConfig) -> None:  # type: ignore[misc]
        _configure_logging(logging.WARNING)
        # The ingress makes the spans of a request, whichever replicas run it.
        config = dataclasses.replace(config, otlp_traces_endpoint=None)
        with _without_omp_num_threads(), restricted_to_half_of_cores():
            self._llm = await asyncio.to_thread(_create_engine, config)
            digest = asyncio.ensure_future(asyncio.to_thread(fingerprint, self._llm.files, config))
            await self._llm.start()
        facts = self._llm.facts
        replica_fingerprint = f"{await digest}-{facts['dtype']}-{facts['block_size']}"
        self._hub = Hub(self._llm, replica_fingerprint, fleet.report_interval)
        self._hub.start()
        self._fleet = fleet

    async def link(self, replica: str, link: str) -> AsyncGenerator[bytes, None]:
        """Serve a link (a connection) to an ingress, and yield encoded reports. `link` is its name.
        Only the router uses `replica`."""
        async with contextlib.aclosing(self._hub.link(link)) as reports:
            async for report in reports:
                yield report

    async def push(self, replica: str, orders: bytes) -> bool:
        """Process encoded orders of an ingress. Return False if the link has ended. Only the router
        uses `replica`."""
        return self._hub.handle_orders(orders)

    def check_health(self) -> None:
        """Raise an error if the engine has died, so that Ray replaces the replica."""
        if self._llm.dead is not None:
            raise self._llm.dead

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of replicas that this replica's load would need, as the metric
        `demand`."""
        load = self._hub.load(0)
        return {"demand": self._fleet.demand(load, self._llm.config.max_num_seqs)}

    async def __del__(self) -> None:
        """Close the engine. Ray Serve awaits this method after the last link has ended."""
        if hasattr(self, "_hub"):
            await self._hub.stop()
            await self._llm.close()


def _create_engine(config: EngineConfig) -> AsyncLLM:
    """Create an engine. If several replicas start on a node, one of them downloads the model while
    the others wait."""
    lock_directory = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoactor" / "locks"
    )
    lock_directory.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(f"{config.model} {config.revision}".encode()).hexdigest()[:32]
    with (lock_directory / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return AsyncLLM(config)


@contextlib.contextmanager
def _without_omp_num_threads() -> Iterator[None]:
    """Unset `OMP_NUM_THREADS` in this context. Ray sets the variable for the replica's process, but
    the engine's processes, which start in this context, choose their number of threads
    themselves."""
    saved = os.environ.pop("OMP_NUM_THREADS", None)
    try:
        yield
    finally:
        if saved is not None:
            os.environ["OMP_NUM_THREADS"] = saved


class Ingress:
    """An HTTP server that forwards requests to the replicas of a fleet."""

    async def __init__(  # type: ignore[misc]
        self, engines: Any, config: EngineConfig, server: ServerConfig, fleet: FleetConfig
    ) -> None:
        _configure_logging(logging.INFO)
        name = serve.get_replica_context().replica_id.unique_id
        connector = RayConnector(engines)
        self._llm = FleetLLM(config, connector, ingress=name, silence=fleet.silence_timeout)
        monitor = FleetMonitor(self._llm)
        server = await avoid_proxy_port(server)
        self._server = Server(
            self._llm, server, text_service=self._llm.text_service, monitor=monitor, reuse_port=True
        )
        await self._server.start()
        log.info("%s: listening on %s", name, url_of(server, self._server.port))
        if not server.on_loopback and not server.api_keys:
            log.warning(
                "%s can be reached from other machines, but no API key is set; use --api-key to "
                "set one",
                server.host,
            )

    async def __call__(self, request: Any) -> Any:
        """Redirect a request that arrived through Ray Serve's own proxy to the port of this
        server."""
        from starlette.responses import RedirectResponse

        return RedirectResponse(str(request.url.replace(port=self._server.port)), 307)

    async def port(self) -> int:
        """Return the port on which this ingress listens."""
        return self._server.port

    async def __del__(self) -> None:
        """Stop the server after its running requests have finished. Ray Serve awaits this
        method."""
        if hasattr(self, "_server"):
            await self._server.stop()


@functools.cache
def _configure_logging(level: int) -> None:
    """Write the log to stderr, which Ray redirects to a file per process. Records of at least
    `level` also go to the file that `LOG_VARIABLE` names, if it exists on this machine."""
    for name in ("server", "access", "ray", "fleet", "engine"):
        logging.getLogger(f"nanoactor.{name}").setLevel(logging.INFO)
    logger = logging.getLogger("nanoactor")
    logger.propagate = False
    _add_handler(logger, sys.stderr, logging.INFO)
    if path := os.environ.get(LOG_VARIABLE):
        with contextlib.suppress(OSError):  # the file is on another machine
            _add_handler(logger, open(path, "a", buffering=1), level)  # noqa: SIM115 - it stays


def _add_handler(logger: logging.Logger, stream: TextIO, level: int) -> None:
    handler = logging.StreamHandler(stream)
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
