"""Recording of spans: what an actor did, and from when to when. A span costs a fraction of a
microsecond.

A track is one row of a timeline: an actor, or a device or thread that works for it. A span is five
int64 values in the track's ring buffer, where the newest spans overwrite the oldest. Nothing is
allocated per span. Names are stored in a separate table and are read only when a trace is
collected.
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
"""Number of spans that a track keeps: about three seconds at ten spans per step and a thousand
steps per second."""
SPAN_DTYPE = np.dtype(
    [(name, np.int64) for name in ("kind", "number", "sent", "begin", "end")], align=False
)


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Properties that all spans of one kind share."""

    name: str
    by: str = ""
    """Name of the message field from which a span's `number` is read. Spans with the same field and
    number belong together."""
    source: str = ""
    """Name of the track from which the handled message came; empty if the span handles no
    message."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrackTrace:
    """Snapshot of the spans of one track (timeline row)."""

    track: str
    node: str
    kinds: list[Kind]
    spans: NDArray[np.void]
    """Array of `SPAN_DTYPE`, in the order in which the spans ended. Times are in ns of the
    monotonic clock. `kind` is an index into `kinds`. `sent` is the send time of the handled
    message, or 0."""
    lost: int
    """Number of older spans that were overwritten and are missing."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeTrace:
    """Snapshot of all tracks (timeline rows) of one node, and the CPU time of the node's
    process."""

    node: str
    tracks: list[TrackTrace]
    cpu_seconds: float
    """CPU time of the process in seconds since its actors were started."""
    taken_at: int
    """Time at which the snapshot was taken, in ns of the monotonic clock."""


class Track:
    """Ring buffer of the spans on one timeline row. Every actor has one. A device or thread that
    works for the actor may have another."""

    def __init__(self, name: str, capacity: int = CAPACITY) -> None:
        self.name = name
        self._kinds: list[Kind] = []
        self._numbers: dict[Kind, int] = {}
        self._size = capacity * _SPAN.size
        self._buffer = bytearray(self._size)
        self._at = 0
        self._pack = _SPAN.pack_into
        self._wraps = 0

    def kind(self, name: str, by: str = "", source: str = "") -> int:
        """Register a kind of span and return its number. Callers should store the number instead of
        calling this for every span."""
        kind = Kind(name, by, source)
        if kind not in self._numbers:
            self._numbers[kind] = len(self._kinds)
            self._kinds.append(kind)
        return self._numbers[kind]

    def add(self, kind: int, number: int, begin: int, end: int, sent: int = 0) -> None:
        """Record a span. Must always be called from the same thread.

        `kind` is a number from `kind()`. `begin`, `end` and `sent` are times from
        `time.monotonic_ns()`.
        """
        at = self._at
        self._pack(self._buffer, at, kind, number, sent, begin, end)
        at += 40
        if at == self._size:
            at = 0
            self._wraps += 1
        self._at = at

    def close(self) -> None:
        """Drop all spans and free the memory. Spans that are recorded afterwards are lost."""
        self._buffer, self._size, self._at = bytearray(_SPAN.size), _SPAN.size, 0

    def spans(self, since: int = 0) -> NDArray[np.void]:
        """Return a copy of the recorded spans that ended after `since` (ns), oldest first, as an
        array of `SPAN_DTYPE`."""
        spans = np.frombuffer(self._buffer, SPAN_DTYPE)
        next_index = self._at // _SPAN.size
        older = spans[next_index:] if self._wraps else spans[:0]
        parts = (older, spans[:next_index])
        # Spans are added when they end, so each part is sorted by end.
        return np.concatenate([p[np.searchsorted(p["end"], since, "right") :] for p in parts])

    def trace(self, node: str, since: int = 0) -> TrackTrace:
        """Return a snapshot of the spans that ended after `since`, in ns of the monotonic clock."""
        spans = self.spans(since)
        capacity, next_index = self._size // _SPAN.size, self._at // _SPAN.size
        lost = 0
        if len(spans) == capacity or not since:
            lost = max(0, self._wraps - 1) * capacity + (next_index if self._wraps else 0)
        return TrackTrace(self.name, node, list(self._kinds), spans, lost)

    def activity(self, begin: int, width: int, bins: int) -> NDArray[np.float32]:
        """Return the busy fraction (0 to 1) of the track in each of `bins` intervals, as float32.

        The intervals start at `begin` and are `width` long, both in ns of the monotonic clock.
        """
        spans = self.spans(begin)
        edges = begin + width * np.arange(bins + 1, dtype=np.int64)
        covered = IntervalSet(spans["begin"], spans["end"]).covered_before(edges)
        return (np.diff(covered) / width).astype(np.float32)


class IntervalSet:
    """Union of time intervals, stored as sorted, disjoint intervals in ns."""

    def __init__(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        order = np.argsort(begins, kind="stable")
        begins, latest_end = begins[order], np.maximum.accumulate(ends[order])
        # An interval opens a new stretch if it begins after all earlier ones have ended.
        starts_stretch = np.ones(len(begins), np.bool_)
        starts_stretch[1:] = begins[1:] > latest_end[:-1]
        ends_stretch = np.append(starts_stretch[1:], True)[: len(begins)]
        self.begins, self.ends = begins[starts_stretch], latest_end[ends_stretch]
        lengths = self.ends - self.begins
        self._boundaries = np.stack((self.begins, self.ends), 1).ravel()
        before = np.cumsum(lengths) - lengths
        self._covered = np.stack((before, before + lengths), 1).ravel()

    @property
    def length(self) -> int:
        """Total length of the intervals, in ns; overlaps count once."""
        return int(self._covered[-1]) if len(self._covered) else 0

    def covered_before(self, times: Any) -> NDArray[np.float64]:
        """Return, for each of `times`, the total length in ns of the intervals before that time. A
        time inside an interval counts the part before it."""
        if not len(self._boundaries):
            return np.zeros(np.shape(times))
        values: NDArray[np.float64] = np.interp(times, self._boundaries, self._covered)
        return values

    def overlap(self, other: IntervalSet) -> float:
        """Return the length of the intersection with another set, in ns."""
        return float((self.covered_before(other.ends) - self.covered_before(other.begins)).sum())

    def clip(self, begin: int, end: int) -> IntervalSet:
        """Return the part of the set between two times, in ns."""
        begins, ends = self.begins.clip(begin, end), self.ends.clip(begin, end)
        kept = ends > begins
        return IntervalSet(begins[kept], ends[kept])


def nanoseconds_per_span(repetitions: int = 200_000) -> float:
    """Return the average cost of recording a span on this machine, in ns: two clock reads and one
    `Track.add`."""
    track = Track("measured")
    kind, clock = track.kind("span"), time.monotonic_ns
    begin = clock()
    for number in range(repetitions):
        track.add(kind, number, clock(), clock())
    return (clock() - begin) / repetitions
