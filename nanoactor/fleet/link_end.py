"""The ingress's end of a link, the connection between an HTTP server (ingress) and a replica. It
sends orders, receives reports, and detects that the replica has died or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from nanoactor.fleet import wire
from nanoactor.fleet.hub import WINDOW

log = logging.getLogger("nanoactor.fleet")

HEARTBEAT_SECONDS = 3.0
"""Time without orders after which the ingress sends a heartbeat, in seconds."""
_TICK = 0.5
_CLOSE_TIMEOUT = 2.0
_DEPARTURE_SECONDS = 3.0
"""Minimum time, in seconds, between a replica's removal from the serving replicas and its end for
this end to count as planned."""
_HUNG_CLOSE_TIMEOUT = 60.0
"""Time, in seconds, for which a lost replica is still asked to close the link, in case it only hung
and recovers."""


class Connector(Protocol):
    """Access to the replicas: through Ray, or through a substitute in tests."""

    @property
    def members(self) -> frozenset[str]:
        """Names of the replicas that are serving now."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the ingress's event loop after each change of `members`."""

    def open(self, replica: str, link: str) -> AsyncGenerator[bytes, None]:
        """Open a link to a replica, and yield its encoded reports. Raises an error if the replica
        dies or no longer exists."""

    async def push(self, replica: str, orders: bytes) -> bool:
        """Send encoded orders to a replica. Return False if the replica does not know the link.
        Raises the same errors as `open`."""


class Owner(Protocol):
    """Receiver of the events of a link (the connection to a replica). In production, this is
    `Links`."""

    def on_up(self, link: LinkEnd) -> None:
        """Handle the first report of a replica."""

    def on_report(self, link: LinkEnd, report: wire.Report) -> None:
        """Handle a report of the replica."""

    def on_lost(self, link: LinkEnd, cause: str) -> None:
        """Handle the loss of a replica that died, hung or closed the link. No more reports follow.
        `cause` is for the log."""


class LinkEnd:
    """An ingress's end of its connection to one replica. It sends orders to the replica, and passes
    the replica's reports to its owner, `Links`."""

    def __init__(
        self, replica: str, connector: Connector, owner: Owner, silence: float, ingress: str
    ) -> None:
        """Open the link. `owner` receives its events. A replica that sends no report for `silence`
        seconds is considered hung. `ingress` is the prefix of the link's name."""
        self.replica, self.name = replica, f"{ingress}/{secrets.token_hex(4)}"
        self.hello: wire.Hello | None = None
        self.is_closed = False
        self.left_at: float | None = None
        """Time (`time.monotonic()`) at which the replica was removed from the serving replicas;
        None while it is serving. A removed replica is shutting down or dead, and gets no new
        streams."""
        self.last_heard = time.monotonic()
        self.orders_queued = 0
        """Number of orders queued since the link was opened."""
        self._connector, self._owner, self._silence = connector, owner, silence
        self._orders: list[wire.Order] = []
        self._last_read = self._last_acked = 0
        self._send_due = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._run())]

    @property
    def is_leaving(self) -> bool:
        """True if the replica is no longer among the serving replicas, so that it gets no new
        streams."""
        return self.left_at is not None

    @property
    def has_drained(self) -> bool:
        """True if the replica was removed from the serving replicas more than `_DEPARTURE_SECONDS`
        ago, so that its end is planned. A dying replica is removed at about the time at which its
        death is detected here."""
        return self.left_at is not None and time.monotonic() - self.left_at > _DEPARTURE_SECONDS

    def send(self, order: wire.Order) -> None:
        """Queue an order for the replica. Orders of the same iteration of the event loop are sent
        as one batch."""
        self._orders.append(order)
        self.orders_queued += 1
        self._send_due.set()

    async def _run(self) -> None:
        self._tasks += [asyncio.ensure_future(self._push()), asyncio.ensure_future(self._watch())]
        try:
            async with contextlib.aclosing(
                self._connector.open(self.replica, self.name)
            ) as reports:
                async for data in reports:
                    self._handle_report(wire.decode_report(data))
            self._mark_lost("it has closed the link")
        except msgspec.DecodeError as error:
            self._mark_lost(f"its report cannot be read: {error}")
        except Exception as error:  # the connector may raise any exception
            self._mark_lost(f"{type(error).__name__}: {error}"[:300])

    def _handle_report(self, report: wire.Report) -> None:
        if self.is_closed:  # the replica hung and has recovered: its streams run elsewhere
            return
        self.last_heard = time.monotonic()
        self._last_read = report.number
        if self._last_read - self._last_acked >= WINDOW // 2:
            self._send_due.set()
        if report.hello is not None:
            self.hello = report.hello
            self._owner.on_up(self)
        self._owner.on_report(self, report)

    async def _push(self) -> None:
        """Send queued orders in batches, one batch at a time so that they stay in order. If there
        are none, send an empty batch every `HEARTBEAT_SECONDS`."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._send_due.wait()
            if self.hello is None:  # before that, the replica may not know the link
                await asyncio.sleep(_TICK / 10)
                continue
            self._send_due.clear()
            orders, self._orders = self._orders, []
            self._last_acked = self._last_read
            try:
                batch = wire.encode(wire.Orders(self.name, self._last_read, orders))
                is_known = await self._connector.push(self.replica, batch)
            except Exception as error:
                self._mark_lost(f"{type(error).__name__}: {error}"[:300])
                return
            if not is_known:
                self._mark_lost("it has closed the link")
                return

    async def _watch(self) -> None:
        """Detect a hung replica. A late timer counts as two check intervals at most, so that pauses
        of this process are not mistaken for silence."""
        silence, last_heard = 0.0, self.last_heard
        while silence < self._silence:
            before = time.monotonic()
            await asyncio.sleep(_TICK)
            silence += min(time.monotonic() - before, 2 * _TICK)
            if last_heard != self.last_heard:
                silence, last_heard = 0.0, self.last_heard
        self._mark_lost(f"it has sent nothing for {self._silence:g} s")

    def mark_lost(self, cause: str) -> None:
        """Mark the replica as lost although its process is alive, because its engine has died.
        `cause` is for the log."""
        self._mark_lost(cause)

    def _mark_lost(self, cause: str) -> None:
        if not self.is_closed:
            self.is_closed = True
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            if self.hello is not None:  # if it hangs and recovers, it must end its streams
                self._tasks.append(asyncio.ensure_future(self._send_close(_HUNG_CLOSE_TIMEOUT)))
            self._owner.on_lost(self, cause)

    async def _send_close(self, seconds: float) -> None:
        batch = wire.encode(wire.Orders(self.name, self._last_read, [*self._orders, wire.Close()]))
        with contextlib.suppress(Exception):  # the replica may be gone
            async with asyncio.timeout(seconds):
                await self._connector.push(self.replica, batch)

    async def close(self) -> None:
        """End the link. The replica aborts the streams that still run on it."""
        if self.hello is not None and not self.is_closed:
            self.is_closed = True
            await self._send_close(_CLOSE_TIMEOUT)
        self.is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
