"""The serving replicas, passed from the router's thread to the ingress's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class ReplicaGone(Exception):
    """The replica that a call names no longer serves."""


class Members:
    """The serving replicas, passed from the router's thread to the loops that watch them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: frozenset[str] = frozenset()
        self._watchers: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []

    @property
    def now(self) -> frozenset[str]:
        """Return the names of the serving replicas."""
        with self._lock:
            return self._now

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the running event loop whenever the members change."""
        with self._lock:
            self._watchers.append((asyncio.get_running_loop(), changed))

    def tell(self, names: frozenset[str]) -> None:
        """Update the members and notify the watchers; may be called from any thread."""
        with self._lock:
            if names == self._now:
                return
            self._now = names
            self._watchers = [one for one in self._watchers if not one[0].is_closed()]
            watchers = list(self._watchers)
        for loop, changed in watchers:
            loop.call_soon_threadsafe(changed)


MEMBERS = Members()
"""Members of the engines' deployment; a process is an ingress for one such deployment only."""
