"""Suspects run alone: a replica is reserved for each, one after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Protocol

from nanoactor.fleet import wire
from nanoactor.fleet.pages import Page, Part
from nanoactor.fleet.replica import Replica
from nanoactor.fleet.trials import Trials

log = logging.getLogger("nanoactor.fleet")


class Runs(Protocol):
    """The fleet, as far as trials need it."""

    def usable(self) -> Iterator[Replica]:
        """Go through the replicas that take what is new."""

    def begin(self, part: Part, replica: Replica, *, is_alone: bool = False) -> None:
        """Have a part run on a replica."""


class TrialRuns:
    """Carries out what `Trials` decides."""

    def __init__(self, fleet: Runs) -> None:
        self._fleet = fleet
        self._trials = Trials()
        self._pages: dict[int, Page] = {}
        """Suspects, by number."""
        self._kept: dict[Part, None] = {}
        """Their parts, which wait."""
        self._replica: Replica | None = None
        """Reserved, or about to be."""

    @property
    def waiting(self) -> int:
        """Return how many parts wait for a trial."""
        return len(self._kept)

    def is_on(self, replica: Replica) -> bool:
        """Tell whether a replica is reserved by this ingress."""
        return replica is self._replica

    def keeps(self, part: Part) -> bool:
        """Keep the part of a suspect until its trial; tell whether it is one."""
        if part.page.uid not in self._trials.suspects:
            return False
        self._pages[part.page.uid] = part.page
        self._kept[part] = None
        return True

    def note_death(self, replica: Replica) -> Page | None:
        """A replica has died; return the request that has killed it, where that is known."""
        pages = {part.page.uid: part.page for part in replica.parts.values()}
        told = {uid: page.told for uid, page in pages.items()}
        before = len(self._trials.suspects)
        culprit = self._trials.note_death(told, time.monotonic())
        if (new := len(self._trials.suspects) - before) > 0:
            log.warning("%d requests may be what kills replicas: each is to run alone", new)
        if replica is self._replica:
            self._replica = None
            if culprit is None:
                self._trials.put_back()
        return pages.get(culprit) if culprit is not None else None

    def note_going_on(self, page: Page) -> None:
        """A request runs again."""
        self._trials.note_going_on(page.uid, time.monotonic())

    def forget(self, page: Page) -> None:
        """A request is over."""
        was_tried = self._trials.on_trial == page.uid
        was_next = self._trials.next == page.uid
        self._trials.forget(page.uid)
        self._pages.pop(page.uid, None)
        for part in [part for part in self._kept if part.page is page]:
            del self._kept[part]
        if was_tried or (was_next and not self._trials.suspects):
            self._release()

    def _release(self) -> None:
        if self._replica is not None:
            self._replica.link.order(wire.Reserve(wanted=False))
            self._replica = None

    def advance(self) -> None:
        """Reserve a replica for the next suspect: the one with the fewest streams."""
        if self._replica is not None and self._replica.link.has_drained:
            self._replica = None
            self._trials.put_back()
        if self._trials.next is None or self._replica is not None:
            return
        free = list(self._fleet.usable())
        if free:
            self._replica = min(free, key=lambda replica: replica.place.streams)
            self._replica.link.order(wire.Reserve(wanted=True))

    def reported(self, replica: Replica, is_alone: bool) -> None:
        """A replica has reported: perhaps it is free for the trial, or the trial is over."""
        if replica is not self._replica:
            return
        now, tried = time.monotonic(), self._trials.on_trial
        if tried is None:
            if is_alone and not replica.parts and (suspect := self._trials.next) is not None:
                self._begin(suspect, replica, now)
        elif self._trials.is_cleared(self._pages[tried].told, now):
            page = self._pages.pop(tried)
            log.info("request %s has killed nothing", page.entry.request_id)
            self._trials.forget(tried)
            self._release()

    def _begin(self, suspect: int, replica: Replica, now: float) -> None:
        page = self._pages[suspect]
        self._trials.begin(suspect, page.told, now)
        for part in [part for part in self._kept if part.page is page]:
            del self._kept[part]
            self._fleet.begin(part, replica, is_alone=True)

    def tick(self) -> None:
        """Ask again for a replica that another ingress had reserved."""
        replica = self._replica
        if replica is not None and self._trials.on_trial is None:
            replica.link.order(wire.Reserve(wanted=True))
