"""Leases, under which records are read in place without reading reused memory.

A record's bytes belong to the ring again once its lease is released. Views that numpy or torch made
of them would then show other data, and `memoryview.release()` does not prevent that. Therefore each
record is read through a buffer object of its own, and every view holds a reference to that buffer.
If the buffer has more references than the runtime's own when the lease ends, a view has escaped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from nanoactor.runtime.errors import LeaseEscaped

# The lease's own reference and the argument of getrefcount.
_OWN_REFERENCES = 2


class Lease:
    """Permission to read one record in place, until `release()` is called.

    An actor gets a lease from `Context.hold()`. Records are freed in the order in which they
    arrived, so a lease that is held also keeps the space of all later records. Not thread-safe:
    release it on the node's loop.
    """

    __slots__ = ("_buffer", "_retire", "released")

    def __init__(self, buffer: Any, retire: Callable[[], None]) -> None:
        self._buffer = buffer
        self._retire = retire
        self.released = False

    def release(self) -> None:
        """Release the record; a second call does nothing.

        Raises `LeaseEscaped` if a view of the record is still alive.
        """
        if self.released:
            return
        references = 0 if self._buffer is None else sys.getrefcount(self._buffer)
        if references > _OWN_REFERENCES:
            raise LeaseEscaped(
                f"{references - _OWN_REFERENCES} view(s) of a record outlive its lease; "
                "copy data that is kept longer, or hold the lease until no view is needed"
            )
        self.released = True
        self._buffer = None
        self._retire()
