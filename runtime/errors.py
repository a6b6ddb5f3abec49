"""Exceptions of the runtime, one class for each kind of error. The message gives the cause and the
fix."""

from __future__ import annotations

import errno

_RESOURCE_ERRNOS = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC})


class RuntimeFault(Exception):
    """Base class of every error that the actor runtime raises."""


class TopologyError(RuntimeFault):
    """The declared actors, nodes and edges do not form a valid system."""


class CodecError(RuntimeFault):
    """A message class or a record does not follow the wire format."""


class SchemaMismatch(CodecError):
    """Two nodes disagree about the message classes: they run different versions of the code."""


class RecordTooLarge(RuntimeFault):
    """A message is larger than its edge can carry, which is half the ring's capacity."""


class OutboxOverflow(RuntimeFault):
    """An actor queued more messages on an edge than the edge's bound allows: a bug in the
    protocol."""


class PeerBroken(RuntimeFault):
    """The node at the other end of an edge is dead: nothing sent on it will be received."""


class LeaseEscaped(RuntimeFault):
    """An array that was read in place outlived its lease: it would read reused memory."""


class RingCorrupted(RuntimeFault):
    """A record's sequence number, length or checksum is wrong: memory was overwritten."""


class StartupFailed(RuntimeFault):
    """A node did not become ready: it raised, died or missed the deadline."""


class NodeDied(RuntimeFault):
    """A node ended while it was still needed."""


class NodeStalled(RuntimeFault):
    """A node, or what it waits for, made no progress for too long, so the node or the system was
    ended."""


class UnsupportedPlatform(RuntimeFault):
    """The platform lacks something that the runtime needs, such as an interpreter or memfd."""


class ReplayDiverged(RuntimeFault):
    """An actor does not follow its recording: it changed, or has inputs besides messages."""


class NotUsableHere(RuntimeFault):
    """The system is used on a different event loop or in a different process than it was started
    in."""


def is_out_of_resources(error: BaseException) -> bool:
    """Return True if an error means that the machine is out of a resource: memory, threads,
    processes, descriptors or disk space. A later attempt may succeed."""
    if isinstance(error, OSError):
        return error.errno in _RESOURCE_ERRNOS
    no_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    return no_thread or isinstance(error, MemoryError)
