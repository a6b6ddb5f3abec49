"""Set of serving replicas, shared between the router's thread and the ingress's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class ReplicaGone(Exception):
    """Raised by a call to a replica that no longer serves."""


class Members:
    """Thread-safe set of the serving replicas. The router's thread updates it; event loops that
    watch it are notified."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: frozenset[str] = frozenset()
        self._watchers: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []

    @property
    def current(self) -> frozenset[str]:
        """Return the names of the serving replicas."""
        with self._lock:
            return self._current

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the running event loop whenever the members change."""
        with self._lock:
            self._watchers.append((asyncio.get_running_loop(), changed))

    def update(self, names: frozenset[str]) -> None:
        """Update the members and notify the watchers; may be called from any thread."""
        with self._lock:
            if names == self._current:
                return
            self._current = names
            self._watchers = [one for one in self._watchers if not one[0].is_closed()]
            watchers = list(self._watchers)
        for loop, changed in watchers:
            loop.call_soon_threadsafe(changed)


MEMBERS = Members()
"""Members of the engines' deployment; a process is an ingress for one such deployment only."""
