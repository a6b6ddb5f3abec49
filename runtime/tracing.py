"""Spans: what an actor did when, in a bounded buffer that costs a fraction of a microsecond.

A track is one row of a timeline: an actor, or a device or thread that works for it. A span is five
int64 in the track's ring buffer; nothing is allocated per span, and the oldest are overwritten.
Names are kept in a separate table and become readable only when a trace is taken.
"""

from __future__ import annotations

import dataclasses
import struct
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SPAN = struct.Struct("=5q")
CAPACITY = 1 << 15
"""Spans that a track keeps: at ten a step and a thousand steps a second, three seconds."""
SPAN_DTYPE = np.dtype(
    [(name, np.int64) for name in ("kind", "number", "sent", "begin", "end")], align=False
)


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The properties that all spans of a kind share."""

    name: str
    by: str = ""
    """The message field that their `number` comes from; spans of one number belong together."""
    source: str = ""
    """Track that sent the handled message; empty if the span is not a handler's."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrackTrace:
    """The memory of a track."""

    track: str
    node: str
    kinds: list[Kind]
    spans: NDArray[np.void]
    """Array of `SPAN_DTYPE`, in the order in which the spans ended; times in ns of the monotonic
    clock. `kind` is an index into `kinds`, `sent` the send time of the message, or 0."""
    lost: int
    """Number of older entries that were overwritten."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeTrace:
    """The memory of all tracks of a node, and the processor time of its process."""

    node: str
    tracks: list[TrackTrace]
    cpu_seconds: float
    """CPU time of the process since its actors were started."""
    taken_at: int
    """When, in ns of the monotonic clock."""


class Track:
    """The writing side: one for each actor, and more if it asks for them."""

    def __init__(self, name: str, capacity: int = CAPACITY) -> None:
        self.name = name
        self._kinds: list[Kind] = []
        self._numbers: dict[Kind, int] = {}
        self._size = capacity * _SPAN.size
        self._buffer = bytearray(self._size)
        self._at = 0
        self._pack = _SPAN.pack_into
        self._rounds = 0

    def kind(self, name: str, by: str = "", source: str = "") -> int:
        """Return the number of a kind of span, to be requested once."""
        kind = Kind(name, by, source)
        if kind not in self._numbers:
            self._numbers[kind] = len(self._kinds)
            self._kinds.append(kind)
        return self._numbers[kind]

    def add(self, kind: int, number: int, begin: int, end: int, sent: int = 0) -> None:
        """Record a span; times are `time.monotonic_ns()`. Called from one thread."""
        at = self._at
        self._pack(self._buffer, at, kind, number, sent, begin, end)
        at += 40
        if at == self._size:
            at = 0
            self._rounds += 1
        self._at = at

    def close(self) -> None:
        """Drop all spans and free the memory; later ones are lost."""
        self._buffer, self._size, self._at = bytearray(_SPAN.size), _SPAN.size, 0

    def spans(self, since: int = 0) -> NDArray[np.void]:
        """Return a copy of the recorded spans that ended after `since`, oldest first."""
        spans = np.frombuffer(self._buffer, SPAN_DTYPE)
        cut = self._at // _SPAN.size
        older = spans[cut:] if self._rounds else spans[:0]
        parts = (older, spans[:cut])
        # They are added as they end, so each part is in that order.
        return np.concatenate([p[np.searchsorted(p["end"], since, "right") :] for p in parts])

    def trace(self, node: str, since: int = 0) -> TrackTrace:
        """Return the entries after `since`."""
        spans = self.spans(since)
        capacity, cut = self._size // _SPAN.size, self._at // _SPAN.size
        lost = 0
        if len(spans) == capacity or not since:
            lost = max(0, self._rounds - 1) * capacity + (cut if self._rounds else 0)
        return TrackTrace(self.name, node, list(self._kinds), spans, lost)

    def activity(self, begin: int, width: int, bins: int) -> NDArray[np.float32]:
        """Return the busy share of each of `bins` intervals of `width` ns from `begin` on."""
        spans = self.spans(begin)
        edges = begin + width * np.arange(bins + 1, dtype=np.int64)
        until = IntervalSet(spans["begin"], spans["end"]).until(edges)
        return (np.diff(until) / width).astype(np.float32)


class IntervalSet:
    """The union of intervals."""

    def __init__(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        order = np.argsort(begins, kind="stable")
        begins, reached = begins[order], np.maximum.accumulate(ends[order])
        # An interval opens a new stretch where it begins after all before it have ended.
        opens = np.ones(len(begins), np.bool_)
        opens[1:] = begins[1:] > reached[:-1]
        closes = np.append(opens[1:], True)[: len(begins)]
        self.begins, self.ends = begins[opens], reached[closes]
        lengths = self.ends - self.begins
        self._knots = np.stack((self.begins, self.ends), 1).ravel()
        before = np.cumsum(lengths) - lengths
        self._measure = np.stack((before, before + lengths), 1).ravel()

    @property
    def length(self) -> int:
        """Return the total length."""
        return int(self._measure[-1]) if len(self._measure) else 0

    def until(self, times: Any) -> NDArray[np.float64]:
        """Return the total length before each of these times."""
        if not len(self._knots):
            return np.zeros(np.shape(times))
        values: NDArray[np.float64] = np.interp(times, self._knots, self._measure)
        return values

    def overlap(self, other: IntervalSet) -> float:
        """Return the length of the intersection."""
        return float((self.until(other.ends) - self.until(other.begins)).sum())

    def within(self, begin: int, end: int) -> IntervalSet:
        """Return the part between two times."""
        begins, ends = self.begins.clip(begin, end), self.ends.clip(begin, end)
        kept = ends > begins
        return IntervalSet(begins[kept], ends[kept])


def nanoseconds_per_span(repetitions: int = 200_000) -> float:
    """Measure the cost of a span here: two clock reads and the record."""
    track = Track("measured")
    kind, clock = track.kind("span"), time.monotonic_ns
    begin = clock()
    for number in range(repetitions):
        track.add(kind, number, clock(), clock())
    return (clock() - begin) / repetitions
