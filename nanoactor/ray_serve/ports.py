"""Selection of a port for our HTTP server (ingress), other than that of Ray Serve's own HTTP proxy.

If both listened on the same port (`SO_REUSEPORT`), the proxy would receive some of the requests.
Ray's `serve run` always starts that proxy, on port 8000.
"""

from __future__ import annotations

import dataclasses
import logging

import aiohttp

from nanoactor.errors import InvalidConfig
from nanoactor.server.config import ServerConfig

log = logging.getLogger("nanoactor.ray")

_PROBE_SECONDS = 2.0
_MAX_PORTS = 16
_PROXY_HEALTH_PATH = "/-/healthz"
"""Path that Ray Serve's proxy serves and our servers do not."""
_LOOPBACK_OF_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing is bound here


async def avoid_proxy_port(config: ServerConfig) -> ServerConfig:
    """Return a copy of the configuration with the first port, starting at the configured one, that
    no Ray Serve proxy uses. Raises `InvalidConfig` if proxies use `_MAX_PORTS` consecutive
    ports."""
    for port in range(config.port, min(config.port + _MAX_PORTS, 1 << 16)):
        if port and await _is_proxy_port(config.host, port):
            continue
        if port != config.port:
            log.warning(
                "port %d is used by Ray Serve's own proxy, so the server listens on port %d. "
                "The proxy redirects clients to it, which costs each client a second request; "
                "`proxy_location: Disabled` in Ray Serve's configuration frees the port",
                config.port,
                port,
            )
        return dataclasses.replace(config, port=port)
    raise InvalidConfig(
        f"port {config.port} and the ports after it are used by Ray Serve's proxies; choose "
        "another port"
    )


async def _is_proxy_port(host: str, port: int) -> bool:
    """Return True if a Ray Serve proxy listens on the port. The port is probed several times,
    because an ingress may share it with the proxy."""
    address = _LOOPBACK_OF_WILDCARD.get(host, host)
    url = (
        f"http://[{address}]:{port}{_PROXY_HEALTH_PATH}"
        if ":" in address
        else f"http://{address}:{port}{_PROXY_HEALTH_PATH}"
    )
    timeout = aiohttp.ClientTimeout(total=_PROBE_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for _ in range(8):
            try:
                async with session.get(url, headers={"Connection": "close"}) as response:
                    if response.status == 200:
                        return True
            except (TimeoutError, aiohttp.ClientError, OSError):
                return False
    return False
