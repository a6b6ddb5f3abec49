"""An ingress's end of a link: receives reports, sends orders, and detects a dead replica."""

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

WORD_SECONDS = 3.0
"""Seconds after which an ingress that has no orders sends a heartbeat."""
_TICK = 0.5
_CLOSE_SECONDS = 2.0
_SUDDEN_SECONDS = 3.0
_FAREWELL_SECONDS = 60.0


class Connector(Protocol):
    """Access to replicas: through Ray, or a substitute in tests."""

    @property
    def members(self) -> frozenset[str]:
        """Return the names of the replicas that are serving now."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the ingress's event loop whenever `members` has changed."""

    def open(self, replica: str, link: str) -> AsyncGenerator[bytes, None]:
        """Open a link and yield the replica's reports. Raises an error if the replica dies or is
        gone."""

    async def push(self, replica: str, orders: bytes) -> bool:
        """Send orders to a replica; return False if it does not know the link. Raises the errors of
        `open`."""


class Owner(Protocol):
    """Receiver of a link's events: the fleet."""

    def up(self, link: LinkEnd) -> None:
        """Handle a replica that has identified itself."""

    def reported(self, link: LinkEnd, report: wire.Report) -> None:
        """Handle a report from the replica."""

    def lost(self, link: LinkEnd, cause: str) -> None:
        """Handle the loss of a replica that has died, hangs or has closed the link. No more reports
        follow."""


class LinkEnd:
    """An ingress's end of one link, from its opening to its end."""

    def __init__(
        self, replica: str, connector: Connector, owner: Owner, silence: float, ingress: str
    ) -> None:
        """A replica that sends no report for `silence` seconds is considered hung."""
        self.replica, self.name = replica, f"{ingress}/{secrets.token_hex(4)}"
        self.hello: wire.Hello | None = None
        self.is_over = False
        self.left_at: float | None = None
        """Time at which the replica left the members, or None. After that, it gets no new streams:
        it is shutting down, or is dead."""
        self.heard = time.monotonic()
        self.ordered = 0
        """Number of orders queued so far."""
        self._connector, self._owner, self._silence = connector, owner, silence
        self._orders: list[wire.Order] = []
        self._read = self._told_read = 0
        self._wanted = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._run())]

    @property
    def is_leaving(self) -> bool:
        """Return True if the replica accepts no new streams."""
        return self.left_at is not None

    @property
    def has_drained(self) -> bool:
        """Return True if the replica left the members a while ago, so that its end was planned. A
        replica that dies leaves the members just before or just after its death is detected
        here."""
        return self.left_at is not None and time.monotonic() - self.left_at > _SUDDEN_SECONDS

    def order(self, order: wire.Order) -> None:
        """Queue an order for the replica. Orders queued in one iteration of the event loop are sent
        together."""
        self._orders.append(order)
        self.ordered += 1
        self._wanted.set()

    async def _run(self) -> None:
        self._tasks += [asyncio.ensure_future(self._push()), asyncio.ensure_future(self._watch())]
        try:
            async with contextlib.aclosing(
                self._connector.open(self.replica, self.name)
            ) as reports:
                async for data in reports:
                    self._take(wire.decode_report(data))
            self._lose("it has closed the link")
        except msgspec.DecodeError as error:
            self._lose(f"its report cannot be read: {error}")
        except Exception as error:  # whatever the connector raises
            self._lose(f"{type(error).__name__}: {error}"[:300])

    def _take(self, report: wire.Report) -> None:
        if self.is_over:  # the replica hung and has recovered: its streams run elsewhere
            return
        self.heard = time.monotonic()
        self._read = report.number
        if self._read - self._told_read >= WINDOW // 2:
            self._wanted.set()
        if report.hello is not None:
            self.hello = report.hello
            self._owner.up(self)
        self._owner.reported(self, report)

    async def _push(self) -> None:
        """Send batches of orders one at a time, so that they arrive in order."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WORD_SECONDS):
                    await self._wanted.wait()
            if self.hello is None:  # until its hello, the replica may not know the link
                await asyncio.sleep(_TICK / 10)
                continue
            self._wanted.clear()
            orders, self._orders = self._orders, []
            self._told_read = self._read
            try:
                batch = wire.encode(wire.Orders(self.name, self._read, orders))
                is_known = await self._connector.push(self.replica, batch)
            except Exception as error:
                self._lose(f"{type(error).__name__}: {error}"[:300])
                return
            if not is_known:
                self._lose("it has closed the link")
                return

    async def _watch(self) -> None:
        """Detect a hung replica. A late tick counts as two ticks at most, so that time in which
        this process itself did not run is ignored."""
        silent, heard = 0.0, self.heard
        while silent < self._silence:
            before = time.monotonic()
            await asyncio.sleep(_TICK)
            silent += min(time.monotonic() - before, 2 * _TICK)
            if heard != self.heard:
                silent, heard = 0.0, self.heard
        self._lose(f"it has sent nothing for {self._silence:g} s")

    def give_up(self, cause: str) -> None:
        """Treat the replica as lost: its process is alive, but its engine is dead."""
        self._lose(cause)

    def _lose(self, cause: str) -> None:
        if not self.is_over:
            self.is_over = True
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            if self.hello is not None:  # if it hangs and recovers, it must end its streams
                self._tasks.append(asyncio.ensure_future(self._say_close(_FAREWELL_SECONDS)))
            self._owner.lost(self, cause)

    async def _say_close(self, seconds: float) -> None:
        batch = wire.encode(wire.Orders(self.name, self._read, [*self._orders, wire.Close()]))
        with contextlib.suppress(Exception):  # the replica may be gone
            async with asyncio.timeout(seconds):
                await self._connector.push(self.replica, batch)

    async def close(self) -> None:
        """End the link; the replica aborts the streams that still run on it."""
        if self.hello is not None and not self.is_over:
            self.is_over = True
            await self._say_close(_CLOSE_SECONDS)
        self.is_over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
