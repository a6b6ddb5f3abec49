"""Connections of one ingress (an HTTP server in front of the replicas) to all replicas.

A *link* is the connection between an ingress and a replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from nanoactor.fleet import wire
from nanoactor.fleet.link_end import Connector, LinkEnd
from nanoactor.fleet.prefix_map import PrefixMap
from nanoactor.fleet.replica import Replica

log = logging.getLogger("nanoactor.fleet")

_MAX_RETRY_WAIT = 10.0


class Receiver(Protocol):
    """Receiver of the events of connected replicas. In production, this is the `Fleet`."""

    def on_report(self, replica: Replica, report: wire.Report) -> None:
        """Handle a report of a replica."""

    def on_lost(self, replica: Replica | None, *, is_planned: bool) -> None:
        """Handle the loss of a replica. `replica` is None if it had not sent its first report.
        `is_planned` is True if the replica was shut down on purpose."""


class Links:
    """The links of one ingress. It opens a link to each replica that is serving, retries after a
    loss, and closes the link to a replica that is shutting down once no stream runs there. The
    `Fleet` uses it, and receives the events of the replicas from it."""

    def __init__(
        self,
        connector: Connector,
        ingress: str,
        silence: float,
        prefixes: PrefixMap,
        receiver: Receiver,
    ) -> None:
        """Create the links without connecting. `connector` provides access to the replicas, and
        `ingress` is the name under which they know this ingress. A replica that sends nothing for
        `silence` seconds is considered hung. `prefixes` is the map from which a lost replica is
        removed."""
        self._connector, self._ingress, self._silence = connector, ingress, silence
        self._prefixes, self._receiver = prefixes, receiver
        self.replicas: dict[str, Replica] = {}
        """Connected replicas, by name."""
        self._links: dict[str, LinkEnd] = {}
        self._retries: dict[str, tuple[float, float]] = {}
        """For each lost replica: time of the next attempt to connect (`time.monotonic()`), and the
        delay before that attempt, in seconds."""
        self.first_connected = asyncio.Event()
        self.facts: dict[str, Any] = {}
        """Properties of the replica that connected last."""
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        """Connect to all replicas, and later to new ones, in the background."""
        self._connector.watch(self.update_members)
        self.update_members()

    async def close(self) -> None:
        """Close all links."""
        self._closed = True
        await asyncio.gather(*(link.close() for link in self._links.values()))
        await asyncio.gather(*self._closing, return_exceptions=True)

    def update_members(self) -> None:
        """Connect to new members, the replicas that the connector reports as serving. Close the
        connection to a replica that is no longer a member once no stream runs there."""
        members = self._connector.members
        now = time.monotonic()
        for replica in members - self._links.keys():
            if self._retries.get(replica, (0.0, 0.0))[0] <= now and not self._closed:
                self._links[replica] = LinkEnd(
                    replica, self._connector, self, self._silence, self._ingress
                )
        for replica in self._retries.keys() - members:
            del self._retries[replica]
        for replica, link in list(self._links.items()):
            if replica not in members and not link.is_leaving:
                link.left_at = now
                log.info("replica %s is leaving; it finishes its running streams", replica)
                self.close_if_idle(link)

    def close_if_idle(self, link: LinkEnd) -> None:
        """Close the link to a replica that is shutting down, unless streams of this ingress still
        run there. Does nothing if the replica is serving."""
        if not link.is_leaving:
            return
        replica = self.replicas.get(link.replica)
        if replica is not None and replica.link is link and replica.parts:
            return
        self._remove(link)
        task = asyncio.ensure_future(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _remove(self, link: LinkEnd) -> Replica | None:
        if self._links.get(link.replica) is link:
            del self._links[link.replica]
        replica = self.replicas.get(link.replica)
        if replica is None or replica.link is not link:
            return None
        del self.replicas[link.replica]
        self._prefixes.forget(link.replica)
        return replica

    # -- events of a link -------------------------------------------------------------------

    def on_up(self, link: LinkEnd) -> None:
        """Add a replica that has sent its first report."""
        assert link.hello is not None
        self.replicas[link.replica] = Replica(link, link.hello)
        self._retries.pop(link.replica, None)
        log.info("replica %s is serving", link.replica)
        self.facts = link.hello.facts
        self.first_connected.set()

    def on_report(self, link: LinkEnd, report: wire.Report) -> None:
        """Pass a report on to the receiver, unless its link has been replaced or removed."""
        replica = self.replicas.get(link.replica)
        if replica is not None and replica.link is link:
            self._receiver.on_report(replica, report)

    def on_lost(self, link: LinkEnd, cause: str) -> None:
        """Remove a replica that died, hung or closed the link, and connect to it again later.
        `cause` is for the log."""
        replica = self._remove(link)
        wait = min(_MAX_RETRY_WAIT, 2 * self._retries.get(link.replica, (0.0, 0.5))[1])
        self._retries[link.replica] = time.monotonic() + wait, wait
        if self._closed:
            return
        is_planned = link.has_drained
        log.log(
            logging.INFO if is_planned else logging.ERROR,
            "replica %s is lost: %s%s",
            link.replica,
            cause,
            f"; {len(replica.parts)} streams continue on other replicas" if replica else "",
        )
        self._receiver.on_lost(replica, is_planned=is_planned)

    # -- statistics -------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Maximum number of requests that may wait on the connected replicas, summed over the
        replicas."""
        return sum(r.state.hello.max_waiting_requests for r in self.replicas.values())

    @property
    def unconnected(self) -> frozenset[str]:
        """Names of the serving replicas to which this ingress is not connected."""
        return self._connector.members - self.replicas.keys()

    @property
    def block_size(self) -> int:
        """Number of tokens in a KV block; 0 while no replica is connected."""
        return next((r.state.block_size for r in self.replicas.values()), 0)
