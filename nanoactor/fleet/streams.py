"""Streams of an ingress: the parts (requests or single sequences of them) that run on replicas."""

from __future__ import annotations

from nanoactor.fleet import wire
from nanoactor.fleet.replica import Replica
from nanoactor.fleet.requests import Part


class Streams:
    """The running parts of one ingress's requests: the replica on which each of them runs, and the
    number of its stream there. The `Fleet` uses it. Only this class changes `Replica.parts`."""

    def __init__(self) -> None:
        self._running: dict[Part, tuple[Replica, int]] = {}
        """For each running part: its replica, and the number of its stream there."""
        self._last_stream = 0

    def __len__(self) -> int:
        """Return the number of running streams."""
        return len(self._running)

    def new_number(self) -> int:
        """Return the number of the next stream."""
        self._last_stream += 1
        return self._last_stream

    def add(self, part: Part, replica: Replica, stream: int) -> None:
        """Record that a part runs on a replica as stream number `stream`."""
        replica.parts[stream] = part
        self._running[part] = replica, stream

    def end(self, replica: Replica, stream: int) -> Part | None:
        """Remove a stream that the replica has ended. Return its part, or None if there is no such
        stream."""
        part = replica.parts.pop(stream, None)
        if part is not None:
            self._running.pop(part, None)
        return part

    def abort(self, part: Part) -> Replica | None:
        """Abort the stream of a part, and return its replica. Return None if the part does not
        run."""
        if part not in self._running:
            return None
        replica, stream = self._running.pop(part)
        del replica.parts[stream]
        replica.link.send(wire.Abort(stream))
        return replica

    def forget(self, part: Part) -> None:
        """Remove the stream of a part whose replica is lost."""
        self._running.pop(part, None)
