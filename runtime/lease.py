"""Leases: permissions to read a record in a ring's memory without copying it.

Once a record's lease is released, the ring may overwrite the record's bytes. A numpy or torch view
of them would then show other data, and `memoryview.release()` does not prevent that. Therefore each
record is read through its own buffer object, to which every view holds a reference. If the lease is
released while anyone but the runtime holds a reference to that buffer, a view has escaped, and
`LeaseEscaped` is raised.
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

    An actor obtains a lease from `Context.hold_lease()`. Space is freed in the order in which
    records arrived, so an unreleased lease also keeps the space of all later records occupied. Not
    thread-safe: release it on the node's loop.
    """

    __slots__ = ("_buffer", "_retire", "released")

    def __init__(self, buffer: Any, retire: Callable[[], None]) -> None:
        self._buffer = buffer
        self._retire = retire
        self.released = False

    def release(self) -> None:
        """Return the record's space to the ring. A second call does nothing.

        Raises `LeaseEscaped` if a view of the record is still alive.
        """
        if self.released:
            return
        references = 0 if self._buffer is None else sys.getrefcount(self._buffer)
        if references > _OWN_REFERENCES:
            raise LeaseEscaped(
                f"{references - _OWN_REFERENCES} view(s) of a record are still in use after "
                "the end of its lease; copy data that is kept longer, or hold the lease until "
                "no view is needed"
            )
        self.released = True
        self._buffer = None
        self._retire()
