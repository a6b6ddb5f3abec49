"""Isolated runs of requests that may kill replicas (suspects): one after the other, each runs alone
on a reserved replica.

Such a run is called a *trial*.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from nanoactor.fleet import wire
from nanoactor.fleet.dispatch import NO_REPLICA_TIMEOUT, can_run
from nanoactor.fleet.replica import Replica
from nanoactor.fleet.requests import FleetRequest, Part
from nanoactor.fleet.trials import Trials

log = logging.getLogger("nanoactor.fleet")


class Begin(Protocol):
    """Function that starts a part on a replica."""

    def __call__(self, part: Part, replica: Replica, *, is_alone: bool = False) -> None:
        """Send a part (a request or one of its sequences) to a replica, which starts it. `is_alone`
        is True if the part must run there alone."""


class TrialRuns:
    """Runner of trials: reserves a replica for each request that may kill replicas, and runs the
    request there alone. `Trials` decides which requests are tried."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        usable_replicas: Callable[[], Iterable[Replica]],
        begin: Begin,
    ) -> None:
        """Start without suspects. `replicas` are the connected replicas, and `usable_replicas`
        returns those that accept new requests. `begin` starts a part on a replica."""
        self._replicas, self._usable_replicas = replicas, usable_replicas
        self._begin_part = begin
        self._trials = Trials()
        self._requests: dict[int, FleetRequest] = {}
        """Requests that may kill replicas (suspects), by uid."""
        self._waiting: dict[Part, None] = {}
        """Parts of suspects (requests that may kill replicas) that wait to run alone."""
        self._replica: Replica | None = None
        """Replica that is reserved for a trial, or that was asked for a reservation; None if there
        is none."""
        self._suspect: int | None = None
        """Uid of the suspect (a request that may kill replicas) for which the replica is reserved;
        None if there is none."""

    @property
    def waiting(self) -> int:
        """Number of parts (requests or single sequences) that wait to run alone."""
        return len(self._waiting)

    def reserves(self, replica: Replica) -> bool:
        """Return True if this ingress has reserved the replica to run a suspected request alone, or
        has asked to reserve it."""
        return replica is self._replica

    def queue_if_suspect(self, part: Part) -> bool:
        """Queue a part to run alone if its request is suspected of killing replicas. Return True if
        it was queued. A request that is already on trial is queued again, because its trial was
        interrupted."""
        uid = part.request.uid
        if uid == self._trials.on_trial:  # its replica declined it or is leaving
            self._trials.cancel_trial()
            self._release()
        if uid not in self._trials.suspects:
            return False
        self._requests[uid] = part.request
        self._waiting[part] = None
        part.waiting_since = time.monotonic()
        return True

    def note_death(self, replica: Replica) -> FleetRequest | None:
        """Record the death of a replica. Return the request that caused it, or None if the cause is
        not known."""
        requests = {part.request.uid: part.request for part in replica.parts.values()}
        tokens_sent = {uid: request.tokens_sent for uid, request in requests.items()}
        num_suspects = len(self._trials.suspects)
        is_alone = replica is self._replica
        culprit = self._trials.note_death(tokens_sent, time.monotonic(), is_alone=is_alone)
        if (new := len(self._trials.suspects) - num_suspects) > 0:
            log.warning(
                "%d requests may have caused the deaths of replicas, so each of them will run "
                "alone",
                new,
            )
        self.note_departure(replica)
        return requests.get(culprit) if culprit is not None else None

    def note_departure(self, replica: Replica) -> None:
        """Handle the end of a replica: cancel the trial for which it was reserved, if any."""
        if replica is self._replica:
            self._replica = self._suspect = None
            self._trials.cancel_trial()

    def note_resumed(self, request: FleetRequest) -> None:
        """Record that a request has resumed after the death of a replica."""
        self._trials.note_resumed(request.uid, time.monotonic())

    def forget(self, request: FleetRequest) -> None:
        """Forget a request that has finished."""
        self._trials.forget(request.uid)
        self._requests.pop(request.uid, None)
        for part in [part for part in self._waiting if part.request is request]:
            del self._waiting[part]
        if request.uid == self._suspect:
            self._release()

    def _release(self) -> None:
        if self._replica is not None and not self._replica.link.is_closed:
            self._replica.link.send(wire.Reserve(is_wanted=False))
        self._replica = self._suspect = None

    def advance(self) -> None:
        """Ask a replica for a reservation for the next suspect (a request that may kill replicas),
        unless there already is one. Of the replicas that can run the suspect, choose the one with
        the fewest streams."""
        replica = self._replica
        if replica is not None:
            if replica.link.is_leaving and self._trials.on_trial is None:
                self._release()
            return
        if self._trials.next_suspect is None:
            return
        usable = list(self._usable_replicas())
        for suspect in self._trials.suspects:
            parts = [part for part in self._waiting if part.request.uid == suspect]
            free = [one for one in usable if all(can_run(part, one.state) for part in parts)]
            if parts and free:
                self._suspect = suspect
                self._replica = min(free, key=lambda one: one.state.streams)
                self._replica.link.send(wire.Reserve(is_wanted=True))
                return

    def on_report(self, replica: Replica, is_vacant: bool) -> None:
        """Process a replica's report. If the replica is reserved and idle (`is_vacant`), start the
        trial, that is, run a suspected request alone. If that request has run long enough, end the
        trial."""
        if replica is not self._replica or self._suspect is None:
            return
        now, on_trial = time.monotonic(), self._trials.on_trial
        if on_trial is None:
            if is_vacant and not replica.parts:
                self._begin(self._suspect, replica, now)
        elif self._trials.is_cleared(self._requests[on_trial].tokens_sent, now):
            request = self._requests.pop(on_trial)
            log.info("request %s ran alone, and its replica did not die", request.entry.request_id)
            self._trials.forget(on_trial)
            self._release()

    def _begin(self, suspect: int, replica: Replica, now: float) -> None:
        request = self._requests[suspect]
        self._trials.begin(suspect, request.tokens_sent, now)
        for part in [part for part in self._waiting if part.request is request]:
            del self._waiting[part]
            self._begin_part(part, replica, is_alone=True)

    def tick(self, now: float) -> None:
        """Request a pending reservation again, because another ingress may have held the replica
        until now. Release a replica that is no longer needed. Restart the timeouts of waiting parts
        (requests or single sequences) that a connected replica could run."""
        replica = self._replica
        if replica is not None and self._trials.on_trial is None:
            if self._suspect in self._trials.suspects:
                replica.link.send(wire.Reserve(is_wanted=True))
            else:
                self._release()
        states = [one.state for one in self._replicas.values()]
        for part in self._waiting:
            if any(can_run(part, state) for state in states):
                part.waiting_since = now

    def expired(self, now: float) -> list[Part]:
        """Return the waiting parts (requests or single sequences) for which no compatible replica
        has been connected for longer than `NO_REPLICA_TIMEOUT`. `now` is `time.monotonic()`."""
        return [part for part in self._waiting if now - part.waiting_since > NO_REPLICA_TIMEOUT]
