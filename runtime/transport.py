"""The interface between transports and the outboxes and mailboxes that use them.

A transport carries records from one writer to one or more readers; each reader receives every
record once, in order. The parts are created in the supervisor's process as *ends*: plain
descriptions of inherited file descriptors, which any process can open as a `Sender` or a
`Receiver`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nanoactor.runtime.codec import Encoded
from nanoactor.runtime.lease import Lease

Deliver = Callable[[Any, Lease | None, int], bool]
"""Called with each message in order, the lease under which it is read (None if it needs none), and
its send time in ns of the host's monotonic clock.

Returns True if the callee keeps the lease; otherwise the receiver releases it at once.
"""

Fatal = Callable[[BaseException], None]
"""Called with the error if reading or handling a message failed and the node cannot continue."""


@dataclasses.dataclass(slots=True)
class EdgeStatistics:
    """Counters of one end of an edge since the end was opened."""

    messages: int = 0
    bytes: int = 0
    waits: int = 0
    """Writer: number of sends that found no room. Reader: number of wake-ups."""
    spins: int = 0
    """Reader: number of wake-ups avoided because a record arrived during the bounded spin."""
    waiting_ns: int = 0
    """Reader: time in ns between send and delivery, summed over all messages."""


class Sender(Protocol):
    """The writing end of an edge."""

    statistics: EdgeStatistics
    sent_ns: int
    """Send time of the latest record, in ns of the host's monotonic clock."""
    inline: int
    """Largest size in bytes of arrays that are sent inside the msgpack part; 0 in debug mode, where
    every array is read in place, so that escapes from a lease are caught."""

    @property
    def max_record(self) -> int:
        """Size in bytes of the largest record that can ever be sent."""

    def try_send(self, encoded: Encoded) -> bool:
        """Write and publish one record; return False if there is no room for it now.

        Raises `RecordTooLarge` if there can never be room for it.
        """

    def has_unread(self) -> bool:
        """Return True if some reader has not read all records that were sent."""

    def when_writable(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call `callback` once, on the loop, when there may be room again."""

    def close(self) -> None:
        """Release memory and descriptors."""


class Receiver(Protocol):
    """The reading end of an edge."""

    statistics: EdgeStatistics

    @property
    def backlog(self) -> int:
        """Number of records that have arrived and will be delivered before the loop does anything
        else."""

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the backlog is empty. Must be called only while there is a
        backlog."""

    def start(self, loop: asyncio.AbstractEventLoop, deliver: Deliver, fatal: Fatal) -> None:
        """Deliver every record on the loop from now on."""

    def close(self) -> None:
        """Stop delivering; release memory and descriptors."""


class SenderEnd(Protocol):
    """A writing end before it is opened; picklable."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that the opening process must inherit."""

    def remapped(self, mapping: Mapping[int, int]) -> SenderEnd:
        """Return a copy for another process, in which descriptor n has the number `mapping[n]`."""

    def open(self) -> Sender:
        """Open the end in this process, which takes over the descriptors."""


class ReceiverEnd(Protocol):
    """A reading end before it is opened; picklable."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that the opening process must inherit."""

    def remapped(self, mapping: Mapping[int, int]) -> ReceiverEnd:
        """Return a copy for another process, in which descriptor n has the number `mapping[n]`."""

    def open(self) -> Receiver:
        """Open the end in this process, which takes over the descriptors."""
