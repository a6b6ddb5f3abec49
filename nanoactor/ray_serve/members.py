"""The set of serving replicas, shared between the thread of Ray's router and the ingress's event
loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class ReplicaGone(Exception):
    """The replica that was called no longer serves."""


class Members:
    """Thread-safe set of the names of the serving replicas. The router's thread updates it, and
    registered callbacks run on their event loops after each change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: frozenset[str] = frozenset()
        self._watchers: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []

    @property
    def current(self) -> frozenset[str]:
        """Names of the replicas that are serving now."""
        with self._lock:
            return self._current

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the current event loop after each change of the set."""
        with self._lock:
            self._watchers.append((asyncio.get_running_loop(), changed))

    def update(self, names: frozenset[str]) -> None:
        """Replace the set and notify all watchers. May be called from any thread."""
        with self._lock:
            if names == self._current:
                return
            self._current = names
            self._watchers = [one for one in self._watchers if not one[0].is_closed()]
            watchers = list(self._watchers)
        for loop, changed in watchers:
            loop.call_soon_threadsafe(changed)


MEMBERS = Members()
"""Serving replicas of the engines' deployment. One set suffices, because a process is the ingress
(HTTP server) of only one deployment."""
