"""Parallel wake-ups: an actor wakes all other nodes when it detects that work is on its way to
them.

A message that passes through five sleeping processes wakes one after another, which takes 0.05 to
0.2 ms each. If the first process wakes all the others, they wake at once and poll for messages for
a moment before they sleep again, so each hop finds its receiver awake. Between polls they may
rehearse upcoming work (`Actor.rehearse`), so that its code is in the caches.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

_PAUSE = 6
"""Minimum time between two wake-ups by one node, as a multiple of the time that woken nodes stay
awake."""
_OVER = object()


@dataclasses.dataclass(frozen=True, slots=True)
class AlarmPlan:
    """Alarm configuration of one node; picklable. The descriptors are the node's own copies."""

    bell: int
    """Eventfd that other nodes write to and this node reads."""
    others: tuple[int, ...]
    seconds: float

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that the node's process must inherit."""
        return (self.bell, *self.others)

    def moved(self, places: Mapping[int, int]) -> AlarmPlan:
        """Return this plan with its descriptors mapped by `places` to their numbers in another
        process."""
        others = tuple(places[other] for other in self.others)
        return dataclasses.replace(self, bell=places[self.bell], others=others)


def create_alarms(nodes: Sequence[str], seconds: float) -> dict[str, AlarmPlan]:
    """Return an alarm plan for each of these nodes, which wake one another."""
    bells: dict[str, int] = {}
    plans: dict[str, AlarmPlan] = {}
    with contextlib.ExitStack() as stack:
        for name in nodes:
            bells[name] = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            stack.callback(os.close, bells[name])
        with contextlib.ExitStack() as copies:
            for name in nodes:
                found = []
                for other in (name, *(other for other in nodes if other != name)):
                    found.append(os.dup(bells[other]))
                    copies.callback(os.close, found[-1])
                plans[name] = AlarmPlan(found[0], tuple(found[1:]), seconds)
            copies.pop_all()
    return plans


class Alarm:
    """Wakes other nodes, and keeps this node's loop awake for a moment after another node has woken
    it."""

    def __init__(
        self,
        plan: AlarmPlan,
        loop: asyncio.AbstractEventLoop,
        may_stay: Callable[[], bool],
        rehearse: Callable[[], Iterator[object]] = lambda: iter(()),
    ) -> None:
        """`may_stay` returns True if the loop may poll again instead of sleeping. `rehearse` runs
        between polls, one part at a time."""
        self._plan = plan
        self._loop = loop
        self._may_stay = may_stay
        self._rehearse = rehearse
        self._parts: Iterator[object] | None = None
        self._until = self._not_before = 0.0
        self._ticks = False
        self._closed = False
        self.roused = self.looks = 0
        """Number of times that the node was woken, and number of times that it has polled while
        awake."""
        loop.add_reader(plan.bell, self._hear)

    def rouse(self) -> None:
        """Wake the other nodes, unless this node did so a moment ago. May be called from any
        thread.

        Without this limit, loops would never sleep under load, when work is always on its way.
        """
        now = time.monotonic()
        if self._closed or now < self._not_before:  # closed: the numbers may be reused
            return
        self._not_before = now + _PAUSE * self._plan.seconds
        for bell in self._plan.others:
            # The counter is full only after 2**64 - 2 writes without a read.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(bell, 1)

    def rest(self) -> None:
        """Allow the loop to sleep again: the expected message has arrived."""
        self._until = 0.0

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._plan.bell)
        self.roused += 1
        self._until = time.monotonic() + self._plan.seconds
        if self._parts is None:
            self._parts = self._rehearse()
        if not self._ticks:
            self._ticks = True
            self._loop.call_soon(self._tick)  # messages that have arrived go first

    def _tick(self) -> None:
        """Make the loop poll its descriptors without blocking."""
        self._ticks = not self._closed and time.monotonic() < self._until and self._may_stay()
        if self._ticks:
            self.looks += 1
            self._loop.call_soon(self._tick)
            if self._parts is not None and next(self._parts, _OVER) is _OVER:
                self._parts = None

    def close(self) -> None:
        """Close the descriptors; the loop may no longer run."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._plan.bell)
        for descriptor in self._plan.descriptors:
            os.close(descriptor)
