"""Exceptions of the actor runtime, one class for each kind of error. Each message gives the cause
and, where there is one, the fix."""

from __future__ import annotations

import errno

_RESOURCE_ERRNOS = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC})


class RuntimeFault(Exception):
    """Base class of every error that the actor runtime raises."""


class TopologyError(RuntimeFault):
    """The declared actors, nodes (processes) and edges (channels) do not form a valid system."""


class CodecError(RuntimeFault):
    """A message class or a record does not follow the wire format."""


class SchemaMismatch(CodecError):
    """Two processes disagree about the layout of a message class, because they run different
    versions of the code."""


class RecordTooLarge(RuntimeFault):
    """A message is larger than half its channel's capacity, or 4 GiB or more."""


class OutboxOverflow(RuntimeFault):
    """More messages are queued on a channel than its bound allows, which means a bug in the
    protocol between the actors."""


class PeerBroken(RuntimeFault):
    """The process at the other end of a channel is dead, so messages sent to it would be lost."""


class LeaseEscaped(RuntimeFault):
    """An array that was read in place is still in use although its lease (permission to read the
    memory) was released. The array would soon show other data."""


class RingCorrupted(RuntimeFault):
    """A record's sequence number, length or checksum is wrong: memory was overwritten."""


class StartupFailed(RuntimeFault):
    """A node (process) did not become ready: it raised an exception, died or missed the
    deadline."""


class NodeDied(RuntimeFault):
    """A node (process) ended while it was still needed."""


class NodeStalled(RuntimeFault):
    """A node (process), or work that it waits for, made no progress for too long. The node or the
    whole system was ended."""


class UnsupportedPlatform(RuntimeFault):
    """The platform lacks something that the runtime needs, such as an interpreter or memfd."""


class ReplayDiverged(RuntimeFault):
    """A replayed actor behaves differently from its recording: its code has changed, or it has
    inputs other than messages."""


class NotUsableHere(RuntimeFault):
    """The system is used on a different event loop, or in a different process, from the one in
    which it was started."""


def is_out_of_resources(error: BaseException) -> bool:
    """Return True if an error means that the machine is out of memory, threads, processes,
    descriptors or disk space. A later attempt may succeed."""
    if isinstance(error, OSError):
        return error.errno in _RESOURCE_ERRNOS
    no_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    return no_thread or isinstance(error, MemoryError)
