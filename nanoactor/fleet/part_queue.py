"""Queue of an ingress: all parts (requests or single sequences of them) that wait for a replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nanoactor.fleet.dispatch import Dispatch
from nanoactor.fleet.replica import Replica
from nanoactor.fleet.requests import Part
from nanoactor.fleet.routing import ReplicaState, Router
from nanoactor.fleet.trial_runs import Begin, TrialRuns


class PartQueue:
    """The parts that wait for a replica. Most of them wait in `dispatch`, for a replica that they
    share with other streams. Parts of requests that may kill replicas wait in `trials`, for a
    replica on which they run alone. The `Fleet` adds the parts, and starts those that the queue
    assigns to a replica."""

    def __init__(self, router: Router, replicas: Mapping[str, Replica], begin: Begin) -> None:
        """Create an empty queue. `replicas` are the connected replicas, kept up to date by the
        caller. `begin` starts a part on a replica."""
        self._replicas, self._begin = replicas, begin
        self.dispatch = Dispatch(router)
        self.trials = TrialRuns(replicas, self.usable_replicas, begin)
        self._is_closed = False

    def close(self) -> None:
        """Start no more parts."""
        self._is_closed = True

    @property
    def waiting(self) -> int:
        """Number of queued parts."""
        return self.dispatch.waiting + self.trials.waiting

    def add(self, part: Part) -> None:
        """Queue a part (a request or one of its sequences) until a replica has room for it. If its
        request is suspected of killing replicas, queue it to run alone instead."""
        if not self.trials.queue_if_suspect(part):
            self.dispatch.add(part)

    def add_refused(self, part: Part, replica: Replica) -> bool:
        """Queue a part again that `replica` has refused to run. Return False, without queueing it,
        if no other usable replica is left that may accept it."""
        if not part.is_moved:  # a moved part was accepted before, so it waits for room
            part.refused_by.add(replica.name)
            if all(other.name in part.refused_by for other in self.usable_replicas()):
                return False
        self.add(part)
        return True

    def advance(self) -> None:
        """Start all queued parts for which a replica has room, and reserve a replica for the next
        request that must run alone."""
        if self._is_closed:
            return
        if self.dispatch.waiting:
            usable = [replica.state for replica in self.usable_replicas()]
            self.dispatch.assign(usable, self._begin_shared)
        # With a single replica, start queued parts before the next request that must run alone.
        if len(self._replicas) > 1 or not self.dispatch.waiting:
            self.trials.advance()

    def usable_replicas(self) -> Iterator[Replica]:
        """Yield the replicas that accept new requests: those that are neither shutting down nor
        reserved to run a single request alone."""
        for replica in self._replicas.values():
            is_reserved = replica.state.load.is_reserved or self.trials.reserves(replica)
            if not (replica.link.is_leaving or is_reserved):
                yield replica

    def _begin_shared(self, part: Part, state: ReplicaState) -> None:
        self._begin(part, self._replicas[state.name])

    def tick(self, now: float) -> None:
        """Do the periodic work: renew pending reservations, and restart the timeouts of parts that
        are compatible with a connected replica. `now` is `time.monotonic()`."""
        self.trials.tick(now)
        self.dispatch.refresh_timeouts([r.state for r in self._replicas.values()], now)

    def pop_expired(self, now: float) -> list[Part]:
        """Return the parts for which no compatible replica has been connected for longer than
        `NO_REPLICA_TIMEOUT`. The caller must end their requests; until then, those that wait in
        `trials` stay there. `now` is `time.monotonic()`."""
        return [*self.dispatch.pop_expired(now), *self.trials.expired(now)]
