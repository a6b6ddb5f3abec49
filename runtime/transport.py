"""The interface of a transport to the outboxes and mailboxes above it.

A transport carries records from one writer to one or more readers, in order, each once. The pieces
are created in the supervisor's process as *ends*: plain descriptions of inherited file descriptors
that are opened, in any process, into a `Sender` or a `Receiver`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nanoactor.runtime.codec import Encoded
from nanoactor.runtime.lease import Lease

Deliver = Callable[[Any, Lease | None, int], bool]
"""Called with each message in turn, the lease it is read under, if it needs one, and its send time,
in ns of the host's monotonic clock.

Returns True if the callee keeps the lease; else the receiver releases it at once.
"""

Fatal = Callable[[BaseException], None]
"""Called when reading or handling failed: the node cannot continue."""


@dataclasses.dataclass(slots=True)
class EdgeStatistics:
    """Counters of one end of an edge, since it was opened."""

    messages: int = 0
    bytes: int = 0
    waits: int = 0
    """Writer: sends that found no room. Reader: wake-ups."""
    spins: int = 0
    """Reader: wake-ups avoided because a record came during the bounded spin."""
    waiting_ns: int = 0
    """Reader: time between send and delivery, summed over messages."""


class Sender(Protocol):
    """The writing end of an edge."""

    statistics: EdgeStatistics
    sent_ns: int
    """When the latest record left."""
    inline: int
    """Largest size in bytes of arrays sent inside the msgpack part: none in debug mode, where every
    array is read in place, so that escapes from a lease are caught."""

    @property
    def max_record(self) -> int:
        """The longest record that can ever be sent, in bytes."""

    def try_send(self, encoded: Encoded) -> bool:
        """Write and publish one record; return False if there is no room for it now.

        Raises `RecordTooLarge` if there never will be.
        """

    def unread(self) -> bool:
        """Return True if some reader has not yet taken everything that was sent."""

    def when_writable(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when room may have appeared."""

    def close(self) -> None:
        """Close memory and descriptors."""


class Receiver(Protocol):
    """The reading end of an edge."""

    statistics: EdgeStatistics

    @property
    def backlog(self) -> int:
        """Count records that have arrived and are delivered before the loop does anything else."""

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call back once when the backlog is gone; called while there is one."""

    def start(self, loop: asyncio.AbstractEventLoop, deliver: Deliver, fatal: Fatal) -> None:
        """Deliver every record on the loop from now on."""

    def close(self) -> None:
        """Stop delivering; release memory and descriptors."""


class SenderEnd(Protocol):
    """A writing end before it is opened; picklable."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that the opening process must inherit."""

    def moved(self, places: Mapping[int, int]) -> SenderEnd:
        """Return the same end under the numbers that its descriptors have in another process."""

    def open(self) -> Sender:
        """Open it in this process, which takes over the descriptors."""


class ReceiverEnd(Protocol):
    """A reading end before it is opened; picklable."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that the opening process must inherit."""

    def moved(self, places: Mapping[int, int]) -> ReceiverEnd:
        """Return the same end under the numbers that its descriptors have in another process."""

    def open(self) -> Receiver:
        """Open it in this process, which takes over the descriptors."""
