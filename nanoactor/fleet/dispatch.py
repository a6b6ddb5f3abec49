"""Queue of parts that wait for a replica. Moved streams that can run immediately start first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from nanoactor.fleet.pages import Part
from nanoactor.fleet.routing import Place, Router

PATIENCE = 120.0
"""Seconds that a request may wait while no replica could run it, even if it were idle."""


class Dispatch:
    """The queue of an ingress, and the choice of replicas for it."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._moved: dict[Part, None] = {}
        self._new: dict[Part, None] = {}

    def add(self, part: Part) -> None:
        """Queue a part until a replica can run it."""
        queue = self._moved if part.is_moved else self._new
        queue[part] = None
        part.waits_since = time.monotonic()

    def remove(self, part: Part) -> None:
        """Remove a part from the queue."""
        self._moved.pop(part, None)
        self._new.pop(part, None)

    @property
    def waiting(self) -> int:
        """Return the number of queued parts."""
        return len(self._moved) + len(self._new)

    def note_serving(self, places: Sequence[Place], now: float) -> None:
        """Restart the timeout of parts that a serving replica could run, even if it has no room
        now."""
        for part in (*self._moved, *self._new):
            if any(fits(part, place) for place in places):
                part.waits_since = now

    def place(self, places: Iterable[Place], begin: Callable[[Part, Place], None]) -> None:
        """Start all parts that can start. A moved stream starts only where it can run at once, so
        that free slots bound the load after a death. New requests do not start on a replica that a
        moved stream is waiting for."""
        usable = list(places)
        blocked: set[str] = set()
        for part in sorted(self._moved, key=_by_priority):
            fitting = [place for place in usable if fits(part, place)]
            free = [place for place in fitting if place.has_room(part.tokens)]
            if free:
                self._begin(part, free, begin)
            else:
                blocked.update(place.replica for place in fitting)
        left = [place for place in usable if place.replica not in blocked]
        for part in sorted(self._new, key=_by_priority):
            open_ = [
                place
                for place in left
                if not place.is_full and place.replica not in part.refused_by
            ]
            if open_:
                self._begin(part, open_, begin)
            elif usable and all(place.replica in part.refused_by for place in usable):
                part.refused_by.clear()  # all others have left: it may be sent to these again

    def _begin(self, part: Part, places: list[Place], begin: Callable[[Part, Place], None]) -> None:
        self.remove(part)
        chosen = self.router.choose(places, part.page.hashes, part.tokens, time.monotonic())
        assert chosen is not None
        begin(part, chosen)

    def take_hopeless(self, now: float) -> list[Part]:
        """Remove and return the parts that have waited too long for a replica that could run
        them."""
        found = [part for part in (*self._moved, *self._new) if now - part.waits_since > PATIENCE]
        for part in found:
            self.remove(part)
        return found


def _by_priority(part: Part) -> tuple[int, int]:
    return part.page.priority, part.page.uid


def fits(part: Part, place: Place) -> bool:
    """Return True if a replica can run a part: if the part has a fingerprint, the replica's must be
    the same."""
    return not part.fingerprint or part.fingerprint == place.hello.fingerprint
