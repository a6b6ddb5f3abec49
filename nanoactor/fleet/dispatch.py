"""Queue of an ingress, an HTTP server in front of the replicas: requests that wait for a replica.
Interrupted streams go first.

A `Part` is a whole request, or one of its sequences. A *moved* part has lost its replica and
resumes on another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from nanoactor.fleet.requests import Part
from nanoactor.fleet.routing import ReplicaState, Router

NO_REPLICA_TIMEOUT = 120.0
"""Maximum time, in seconds, that a part (a request or one of its sequences) may wait while no
connected replica is compatible with it. Waiting for a busy replica does not count."""


class Dispatch:
    """Queue of requests that wait for a replica. It also selects the replica on which each of them
    starts."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._moved: dict[Part, None] = {}
        self._new: dict[Part, None] = {}

    def add(self, part: Part) -> None:
        """Queue a part (a request or one of its sequences) until a replica has room for it."""
        queue = self._moved if part.is_moved else self._new
        queue[part] = None
        part.waiting_since = time.monotonic()

    def remove(self, part: Part) -> None:
        """Remove a part from the queue. Does nothing if the part is not queued."""
        self._moved.pop(part, None)
        self._new.pop(part, None)

    @property
    def waiting(self) -> int:
        """Number of queued parts (requests or single sequences)."""
        return len(self._moved) + len(self._new)

    def refresh_timeouts(self, states: Sequence[ReplicaState], now: float) -> None:
        """Restart the timeout of every queued part that is compatible with one of these replicas,
        even if the replica is busy. `now` is `time.monotonic()`."""
        for part in (*self._moved, *self._new):
            if any(can_run(part, state) for state in states):
                part.waiting_since = now

    def assign(
        self, states: Iterable[ReplicaState], begin: Callable[[Part, ReplicaState], None]
    ) -> None:
        """Start all queued parts (requests or single sequences) for which a replica has room, by
        calling `begin` with each part and its replica.

        A moved part, which resumes after the loss of its replica, starts only where it can run
        immediately. This limits the load on the remaining replicas. New parts do not start on a
        replica for which a moved part is waiting.
        """
        usable = list(states)
        blocked: set[str] = set()
        for part in sorted(self._moved, key=_by_priority):
            capable = [state for state in usable if can_run(part, state)]
            free = [state for state in capable if state.has_room(part.tokens)]
            if free:
                self._begin(part, free, begin)
            else:
                blocked.update(state.name for state in capable)
        unblocked = [state for state in usable if state.name not in blocked]
        for part in sorted(self._new, key=_by_priority):
            accepting = [
                state
                for state in unblocked
                if not state.is_full and state.name not in part.refused_by
            ]
            if accepting:
                self._begin(part, accepting, begin)
            elif usable and all(state.name in part.refused_by for state in usable):
                part.refused_by.clear()  # the other replicas are gone, so ask these again

    def _begin(
        self, part: Part, states: list[ReplicaState], begin: Callable[[Part, ReplicaState], None]
    ) -> None:
        self.remove(part)
        chosen = self.router.choose(states, part.request.block_keys, part.tokens, time.monotonic())
        assert chosen is not None
        begin(part, chosen)

    def pop_expired(self, now: float) -> list[Part]:
        """Remove and return all parts for which no compatible replica has been connected for longer
        than `NO_REPLICA_TIMEOUT`. `now` is `time.monotonic()`."""
        expired = [
            part
            for part in (*self._moved, *self._new)
            if now - part.waiting_since > NO_REPLICA_TIMEOUT
        ]
        for part in expired:
            self.remove(part)
        return expired


def _by_priority(part: Part) -> tuple[int, int]:
    return part.request.priority, part.request.uid


def can_run(part: Part, state: ReplicaState) -> bool:
    """Return True if a replica may run a part: the part has no fingerprint yet, or the replica has
    the same one. A fingerprint is a digest of the model, the version and the options."""
    return not part.fingerprint or part.fingerprint == state.hello.fingerprint
