"""Errors of the runtime, one type each; the message gives the cause and the fix."""

from __future__ import annotations

import errno

_REFUSALS = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC})


class RuntimeFault(Exception):
    """Base of every error that the actor runtime raises."""


class TopologyError(RuntimeFault):
    """The declared actors, nodes and edges do not form a valid system."""


class CodecError(RuntimeFault):
    """A message class or a record does not follow the wire format."""


class SchemaMismatch(CodecError):
    """Two nodes disagree about the message classes: they run different versions of the code."""


class RecordTooLarge(RuntimeFault):
    """A message exceeds what its edge can carry: half the ring's capacity."""


class OutboxOverflow(RuntimeFault):
    """An actor sent more on an edge than the edge's declared bound: a bug in the protocol."""


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
    """A node, or what it waits for, has made no progress for too long; the system was ended."""


class UnsupportedPlatform(RuntimeFault):
    """The operating system lacks something that the chosen transport needs."""


class ReplayDiverged(RuntimeFault):
    """An actor does not follow its recording: it changed, or has inputs besides messages."""


class NotUsableHere(RuntimeFault):
    """The system is used from another event loop or another process than it was started in."""


def machine_refuses(error: BaseException) -> bool:
    """Return True if an error means that the machine is out of a resource: memory, threads,
    processes, descriptors, disk space. A later attempt may succeed."""
    if isinstance(error, OSError):
        return error.errno in _REFUSALS
    no_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    return no_thread or isinstance(error, MemoryError)
