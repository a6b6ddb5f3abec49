"""Trials of suspected requests: one after the other, each runs alone on a reserved replica."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Protocol

from nanoactor.fleet import wire
from nanoactor.fleet.dispatch import PATIENCE, fits
from nanoactor.fleet.pages import Page, Part
from nanoactor.fleet.replica import Replica
from nanoactor.fleet.trials import Trials

log = logging.getLogger("nanoactor.fleet")


class Runs(Protocol):
    """The part of the fleet that trials use."""

    replicas: dict[str, Replica]

    def usable(self) -> Iterator[Replica]:
        """Iterate over the replicas that accept new requests."""

    def begin(self, part: Part, replica: Replica, *, is_alone: bool = False) -> None:
        """Start a part on a replica."""


class TrialRuns:
    """Carries out the decisions of `Trials`."""

    def __init__(self, fleet: Runs) -> None:
        self._fleet = fleet
        self._trials = Trials()
        self._pages: dict[int, Page] = {}
        """Pages of suspects, by uid."""
        self._kept: dict[Part, None] = {}
        """Waiting parts of suspects."""
        self._replica: Replica | None = None
        """The replica that is reserved for a trial, or that was asked to be."""
        self._suspect: int | None = None
        """Uid of the suspect for which the replica is reserved."""

    @property
    def waiting(self) -> int:
        """Return the number of parts that wait for a trial."""
        return len(self._kept)

    def is_on(self, replica: Replica) -> bool:
        """Return True if `replica` is the one that this ingress reserves for a trial."""
        return replica is self._replica

    def keeps(self, part: Part) -> bool:
        """Keep a part until its trial and return True if its request is a suspect."""
        uid = part.page.uid
        if uid == self._trials.on_trial:  # the trial's replica has declined it, or is leaving
            self._trials.put_back()
            self._release()
        if uid not in self._trials.suspects:
            return False
        self._pages[uid] = part.page
        self._kept[part] = None
        part.waits_since = time.monotonic()
        return True

    def note_death(self, replica: Replica) -> Page | None:
        """Record the death of a replica; return the request that caused it, if known."""
        pages = {part.page.uid: part.page for part in replica.parts.values()}
        told = {uid: page.told for uid, page in pages.items()}
        before = len(self._trials.suspects)
        is_alone = replica is self._replica
        culprit = self._trials.note_death(told, time.monotonic(), is_alone=is_alone)
        if (new := len(self._trials.suspects) - before) > 0:
            log.warning("%d requests may have killed replicas: each will run alone", new)
        self.note_gone(replica)
        return pages.get(culprit) if culprit is not None else None

    def note_gone(self, replica: Replica) -> None:
        """Handle the end of a replica: if it was reserved for a trial, cancel the trial."""
        if replica is self._replica:
            self._replica = self._suspect = None
            self._trials.put_back()

    def note_going_on(self, page: Page) -> None:
        """Record that a request has resumed."""
        self._trials.note_going_on(page.uid, time.monotonic())

    def forget(self, page: Page) -> None:
        """Forget a finished request."""
        self._trials.forget(page.uid)
        self._pages.pop(page.uid, None)
        for part in [part for part in self._kept if part.page is page]:
            del self._kept[part]
        if page.uid == self._suspect:
            self._release()

    def _release(self) -> None:
        if self._replica is not None and not self._replica.link.is_over:
            self._replica.link.order(wire.Reserve(wanted=False))
        self._replica = self._suspect = None

    def advance(self) -> None:
        """If no replica is reserved, reserve the one with the fewest streams for the next suspect
        that a replica can run."""
        replica = self._replica
        if replica is not None:
            if replica.link.is_leaving and self._trials.on_trial is None:
                self._release()
            return
        if self._trials.next is None:
            return
        usable = list(self._fleet.usable())
        for suspect in self._trials.suspects:
            parts = [part for part in self._kept if part.page.uid == suspect]
            free = [one for one in usable if all(fits(part, one.place) for part in parts)]
            if parts and free:
                self._suspect = suspect
                self._replica = min(free, key=lambda one: one.place.streams)
                self._replica.link.order(wire.Reserve(wanted=True))
                return

    def reported(self, replica: Replica, is_alone: bool) -> None:
        """Handle a replica's report: start the trial once the replica is idle, or end the trial
        once its request is cleared."""
        if replica is not self._replica or self._suspect is None:
            return
        now, tried = time.monotonic(), self._trials.on_trial
        if tried is None:
            if is_alone and not replica.parts:
                self._begin(self._suspect, replica, now)
        elif self._trials.is_cleared(self._pages[tried].told, now):
            page = self._pages.pop(tried)
            log.info("request %s has not killed its replica", page.entry.request_id)
            self._trials.forget(tried)
            self._release()

    def _begin(self, suspect: int, replica: Replica, now: float) -> None:
        page = self._pages[suspect]
        self._trials.begin(suspect, page.told, now)
        for part in [part for part in self._kept if part.page is page]:
            del self._kept[part]
            self._fleet.begin(part, replica, is_alone=True)

    def tick(self, now: float) -> None:
        """Repeat the reservation, as another ingress may have held the replica; release the replica
        if it is no longer needed."""
        replica = self._replica
        if replica is not None and self._trials.on_trial is None:
            if self._suspect in self._trials.suspects:
                replica.link.order(wire.Reserve(wanted=True))
            else:
                self._release()
        places = [one.place for one in self._fleet.replicas.values()]
        for part in self._kept:
            if any(fits(part, place) for place in places):
                part.waits_since = now

    def take_hopeless(self, now: float) -> list[Part]:
        """Return the suspects' parts that have waited too long for a replica that could run
        them."""
        return [part for part in self._kept if now - part.waits_since > PATIENCE]
