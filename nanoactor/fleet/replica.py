"""A replica that serves, as an ingress sees it."""

from __future__ import annotations

import time

from nanoactor.fleet import wire
from nanoactor.fleet.link_end import LinkEnd
from nanoactor.fleet.pages import Part
from nanoactor.fleet.routing import Place


class Replica:
    """A link that is up, and what runs on it."""

    def __init__(self, link: LinkEnd, hello: wire.Hello) -> None:
        self.link = link
        self.place = Place(link.replica, hello)
        self.parts: dict[int, Part] = {}
        """By the number of their stream."""
        self.figures: dict[str, float] = {}
        self.reported = time.monotonic()

    @property
    def name(self) -> str:
        """Return the replica's name."""
        return self.link.replica
