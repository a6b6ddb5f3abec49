"""Parallel wake-ups: an actor wakes all other nodes when it sees that a message will reach them
soon.

Without an alarm, a message that passes through five sleeping processes wakes them one after
another, at 0.05 to 0.2 ms each. If the first process wakes all others, they wake at the same time
and poll for messages briefly before they sleep again. Each hop then finds its receiver awake.
Between polls, a process may rehearse upcoming work (`Actor.rehearse`), so that its code is in the
CPU caches.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

_MIN_INTERVAL_FACTOR = 6
"""Minimum time between two wake-ups by one node, as a multiple of the time that woken nodes stay
awake."""
_EXHAUSTED = object()


@dataclasses.dataclass(frozen=True, slots=True)
class AlarmPlan:
    """Alarm configuration of one node (process); picklable. The file descriptors are duplicates
    that only this node uses."""

    bell: int
    """Eventfd that other nodes write to in order to wake this node."""
    other_bells: tuple[int, ...]
    awake_seconds: float
    """Time that a woken node stays awake, in seconds."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that the node's process must inherit."""
        return (self.bell, *self.other_bells)

    def remapped(self, mapping: Mapping[int, int]) -> AlarmPlan:
        """Return a copy for another process, in which descriptor n has the number `mapping[n]`."""
        other_bells = tuple(mapping[other] for other in self.other_bells)
        return dataclasses.replace(self, bell=mapping[self.bell], other_bells=other_bells)


def create_alarms(nodes: Sequence[str], seconds: float) -> dict[str, AlarmPlan]:
    """Return an alarm plan for each of these nodes (processes), by name. Each node can wake all
    others, and a woken node stays awake for `seconds`."""
    bells: dict[str, int] = {}
    plans: dict[str, AlarmPlan] = {}
    with contextlib.ExitStack() as stack:
        for name in nodes:
            bells[name] = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            stack.callback(os.close, bells[name])
        with contextlib.ExitStack() as copies:
            for name in nodes:
                descriptors = []
                for other in (name, *(other for other in nodes if other != name)):
                    descriptors.append(os.dup(bells[other]))
                    copies.callback(os.close, descriptors[-1])
                plans[name] = AlarmPlan(descriptors[0], tuple(descriptors[1:]), seconds)
            copies.pop_all()
    return plans


class Alarm:
    """Alarm of one node (process). It wakes other nodes and, when another node has woken this one,
    keeps this node's loop polling for a moment."""

    def __init__(
        self,
        plan: AlarmPlan,
        loop: asyncio.AbstractEventLoop,
        may_stay: Callable[[], bool],
        rehearse: Callable[[], Iterator[object]] = lambda: iter(()),
    ) -> None:
        """`may_stay` returns True if the loop may poll again instead of sleeping. `rehearse`
        returns an iterator, which is advanced by one step between polls."""
        self._plan = plan
        self._loop = loop
        self._may_stay = may_stay
        self._rehearse = rehearse
        self._rehearsal: Iterator[object] | None = None
        self._awake_until = self._next_wake_at = 0.0
        self._is_ticking = False
        self._closed = False
        self.wakeups = self.polls = 0
        """Number of times that the node was woken, and number of polls while it was awake."""
        loop.add_reader(plan.bell, self._on_bell)

    def wake_others(self) -> None:
        """Wake the other nodes (processes), unless this node did so a moment ago. May be called
        from any thread.

        Under load, a message is always on its way, so without this limit the loops would never
        sleep.
        """
        now = time.monotonic()
        if self._closed or now < self._next_wake_at:  # closed: the numbers may be reused
            return
        self._next_wake_at = now + _MIN_INTERVAL_FACTOR * self._plan.awake_seconds
        for bell in self._plan.other_bells:
            # The counter is full only after 2**64 - 2 writes without a read.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(bell, 1)

    def allow_sleep(self) -> None:
        """Allow the loop to sleep again: the expected message has arrived."""
        self._awake_until = 0.0

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._plan.bell)
        self.wakeups += 1
        self._awake_until = time.monotonic() + self._plan.awake_seconds
        if self._rehearsal is None:
            self._rehearsal = self._rehearse()
        if not self._is_ticking:
            self._is_ticking = True
            self._loop.call_soon(self._tick)  # messages that have arrived go first

    def _tick(self) -> None:
        """Keep the loop polling its descriptors without blocking, and run one step of the
        rehearsal."""
        self._is_ticking = (
            not self._closed and time.monotonic() < self._awake_until and self._may_stay()
        )
        if self._is_ticking:
            self.polls += 1
            self._loop.call_soon(self._tick)
            if self._rehearsal is not None and next(self._rehearsal, _EXHAUSTED) is _EXHAUSTED:
                self._rehearsal = None

    def close(self) -> None:
        """Close the descriptors. Afterwards the alarm does nothing."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._plan.bell)
        for descriptor in self._plan.descriptors:
            os.close(descriptor)
