"""Access of an ingress (an HTTP server) to the replicas, through calls on a Ray Serve handle."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from nanoactor.ray_serve.members import MEMBERS, ReplicaGone

log = logging.getLogger("nanoactor.ray")


class RayConnector:
    """Implementation of `nanoactor.fleet.link_end.Connector` that calls the deployment of the
    engines."""

    def __init__(self, engines: Any) -> None:
        options = _transport(engines)
        self._link_calls = engines.options(method_name="link", stream=True, **options)
        self._push_calls = engines.options(method_name="push", **options)

    @property
    def members(self) -> frozenset[str]:
        """Names of the replicas that are serving now."""
        return MEMBERS.current

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the current event loop after each change of `members`."""
        MEMBERS.watch(changed)

    async def open(self, replica: str, link: str) -> AsyncGenerator[bytes, None]:
        """Open a link (a connection) to a replica, and yield its encoded reports. Raises
        `ReplicaGone` if the replica no longer serves."""
        _check_not_empty(replica)
        reports = self._link_calls.remote(replica, link)
        try:
            async for report in reports:
                yield report
        finally:
            reports.cancel()

    async def push(self, replica: str, orders: bytes) -> bool:
        """Send encoded orders to a replica. Return False if the replica does not know the link.
        Raises `ReplicaGone` if the replica no longer serves."""
        _check_not_empty(replica)
        is_known: bool = await self._push_calls.remote(replica, orders)
        return is_known


def _transport(engines: Any) -> dict[str, Any]:
    """Return handle options that make Ray Serve call replicas directly, without Ray actor calls.
    Return no options if this release of Ray Serve does not support them; they are not public yet.

    With direct calls, a report costs the ingress and the replica 0.9 ms of CPU time instead of 1.7
    ms, and a call ends as soon as its caller does.
    """
    if "_by_reference" in inspect.signature(engines.options).parameters:
        return {"_by_reference": False}
    log.warning(
        "this release of Ray Serve does not support direct calls, so reports take twice "
        "the CPU time"
    )
    return {}


def _check_not_empty(replica: str) -> None:
    # Without replicas, Ray's router would hold calls back until there is one.
    if not MEMBERS.current:
        raise ReplicaGone(f"replica {replica} is no longer serving")
