"""The interface between transports and the outboxes and mailboxes that use them.

A transport carries records from one writer to one or more readers. Each reader receives every
record once, in order. The supervisor's process creates *ends*: picklable descriptions of inherited
file descriptors, which another process opens as a `Sender` or a `Receiver`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nanoactor.runtime.codec import Encoded
from nanoactor.runtime.lease import Lease

Deliver = Callable[[Any, Lease | None, int], bool]
"""Function that handles one message. Its arguments are the message, a lease (permission to read the
message's arrays in place; None if the message owns its memory), and the send time in ns of the
monotonic clock.

It returns True if the handler keeps the lease. If it returns False, the receiver releases the lease
at once.
"""

Fatal = Callable[[BaseException], None]
"""Function that is called with an exception after which the node cannot continue."""


@dataclasses.dataclass(slots=True)
class EdgeStatistics:
    """Counters of one end of a channel since that end was opened."""

    messages: int = 0
    bytes: int = 0
    waits: int = 0
    """Writer: number of sends that found no room. Reader: number of wake-ups of the loop."""
    spins: int = 0
    """Reader: number of wake-ups avoided because a record arrived while the reader was polling."""
    waiting_ns: int = 0
    """Reader: time in ns between sending and delivery, summed over all messages."""


class Sender(Protocol):
    """The opened writing end of a channel between actors."""

    statistics: EdgeStatistics
    sent_ns: int
    """Send time of the latest record, in ns of the monotonic clock."""
    inline: int
    """Largest size in bytes of arrays that are sent inside the msgpack part. It is 0 in debug mode,
    so that every array is read in place, and its use after release is detected."""

    @property
    def max_record(self) -> int:
        """Maximum size of a record in bytes."""

    def try_send(self, encoded: Encoded) -> bool:
        """Write and publish one record. Return False if there is no room for it now.

        Raises `RecordTooLarge` if the record is larger than `max_record`.
        """

    def has_unread(self) -> bool:
        """Return True if some reader has not read all records that were sent."""

    def when_writable(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call `callback` once, on the loop, when there may be room for another record."""

    def close(self) -> None:
        """Release the memory and the descriptors."""


class Receiver(Protocol):
    """The opened reading end of a channel between actors."""

    statistics: EdgeStatistics

    @property
    def backlog(self) -> int:
        """Number of records that have arrived and have not been delivered yet. They are delivered
        before the loop runs anything else."""

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the backlog is empty. May be called only while there is a
        backlog."""

    def start(self, loop: asyncio.AbstractEventLoop, deliver: Deliver, fatal: Fatal) -> None:
        """Decode and deliver every record on the loop from now on. `fatal` is called with
        errors."""

    def close(self) -> None:
        """Stop delivering messages, and release the memory and the descriptors."""


class SenderEnd(Protocol):
    """Picklable description of a channel's writing end, for the process that will open it."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that the opening process must inherit."""

    def remapped(self, mapping: Mapping[int, int]) -> SenderEnd:
        """Return a copy for another process, in which descriptor n has the number `mapping[n]`."""

    def open(self) -> Sender:
        """Open the end in this process. The returned sender owns the descriptors."""


class ReceiverEnd(Protocol):
    """Picklable description of a channel's reading end, for the process that will open it."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that the opening process must inherit."""

    def remapped(self, mapping: Mapping[int, int]) -> ReceiverEnd:
        """Return a copy for another process, in which descriptor n has the number `mapping[n]`."""

    def open(self) -> Receiver:
        """Open the end in this process. The returned receiver owns the descriptors."""
