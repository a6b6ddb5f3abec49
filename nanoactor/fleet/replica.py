"""A connected replica, as an ingress sees it."""

from __future__ import annotations

import time

from nanoactor.fleet import wire
from nanoactor.fleet.link_end import LinkEnd
from nanoactor.fleet.requests import Part
from nanoactor.fleet.routing import ReplicaState


class Replica:
    """A replica to which this ingress is connected, with its latest state and the requests that run
    on it."""

    def __init__(self, link: LinkEnd, hello: wire.Hello) -> None:
        self.link = link
        self.state = ReplicaState(link.replica, hello)
        self.parts: dict[int, Part] = {}
        """Running parts (requests or single sequences of them), by stream number."""
        self.figures: dict[str, float] = {}
        self.last_report = time.monotonic()

    def note_report(self, report: wire.Report) -> None:
        """Record a report, and the load in it."""
        self.last_report = time.monotonic()
        if report.load is not None:
            self.state.update_load(report.load, report.orders_processed)
            self.figures = report.load.figures or self.figures

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self.link.replica
