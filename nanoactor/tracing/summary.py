"""Summary of a trace: device utilization, work of the host that overlaps with the device, and the
next bottleneck."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nanoactor.actors.device_track import DEVICE
from nanoactor.actors.scheduler import LOAD
from nanoactor.runtime.tracing import SPAN_DTYPE, IntervalSet, NodeTrace, TrackTrace


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Statistics of the time, in µs, for which the messages of an edge (a channel between two
    actors) waited between sending and handling."""

    edge: str
    messages: int
    mean: float
    p99: float


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSummary:
    """Summary of the spans in an interval. Fractions are from 0 to 1."""

    seconds: float
    """Length of the interval that all tracks cover, in seconds."""
    steps: int
    device_idle: float
    """Idle time of the first device while there were unfinished requests, as a fraction of the time
    with unfinished requests."""
    hidden: float
    """Fraction of the actors' work that was done while the device was computing."""
    busy: dict[str, float]
    """Fraction of the interval in which each actor or device was busy, by track name."""
    bottleneck: str
    """Name of the busiest actor, which would be the bottleneck with a faster device."""
    tokens: int
    """Number of output tokens since the engine was started."""
    cpu_us_per_token: dict[str, float]
    """CPU time per output token in µs, by actor, since the engine was started. Empty before the
    first token. Actors in the same process share its time in proportion to their spans."""
    waits: tuple[Wait, ...]
    lost: int
    """Number of older spans that the tracks have dropped. The interval starts after these spans."""

    @property
    def line(self) -> str:
        """The summary as one line of text."""
        if not self.steps:
            return "no step was computed"
        share = self.busy.get(self.bottleneck, 0.0)
        cost = sum(self.cpu_us_per_token.values())
        return (
            f"device idle {self.device_idle:.1%}, {self.hidden:.0%} of the actors' work "
            f"overlapped with device work, busiest actor {self.bottleneck} at {share:.0%}"
            + (f", {cost:.0f} us of CPU per token" if cost else "")
        )


def summarize(nodes: Sequence[NodeTrace], tokens: int) -> TraceSummary:
    """Summarize the spans of all nodes, which are processes of the engine. `tokens` is the number
    of output tokens since the engine was started."""
    tracks = [track for node in nodes for track in node.tracks]
    devices = [track for track in tracks if track.track.endswith(f" {DEVICE}")]
    loads = [track for track in tracks if track.track.endswith(f" {LOAD}")]
    actors = [track for track in tracks if track not in devices and track not in loads]
    begin, end = _common_interval(tracks)
    busy_intervals = {
        track.track: _busy_intervals([track]).clip(begin, end) for track in [*devices, *actors]
    }
    length = max(1, end - begin)
    device = _busy_intervals(devices[:1]).clip(begin, end)
    load = _busy_intervals(loads).clip(begin, end)
    work = sum(busy_intervals[track.track].length for track in actors)
    hidden = sum(device.overlap(busy_intervals[track.track]) for track in actors)
    busy = {name: intervals.length / length for name, intervals in busy_intervals.items()}
    return TraceSummary(
        seconds=length * 1e-9,
        steps=len(_step_numbers(devices[0], begin)) if devices else 0,
        device_idle=1 - device.overlap(load) / load.length if load.length else 0.0,
        hidden=hidden / work if work else 0.0,
        busy=busy,
        bottleneck=max((track.track for track in actors), key=lambda name: busy[name], default=""),
        tokens=tokens,
        cpu_us_per_token=_cpu_us_per_token(nodes, busy_intervals, tokens) if tokens else {},
        waits=tuple(wait for track in actors for wait in _waits(track, begin)),
        lost=sum(track.lost for track in tracks),
    )


def _busy_intervals(tracks: Sequence[TrackTrace]) -> IntervalSet:
    """Return the times at which at least one of these tracks was busy."""
    spans = np.concatenate([np.empty(0, SPAN_DTYPE), *(track.spans for track in tracks)])
    return IntervalSet(spans["begin"], spans["end"])


def _common_interval(tracks: list[TrackTrace]) -> tuple[int, int]:
    """Return begin and end, in ns, of the interval that all tracks cover; (0, 0) without spans. It
    begins after the last span that a track has dropped, and ends with the last span of any
    track."""
    non_empty = [track for track in tracks if len(track.spans)]
    if not non_empty:
        return 0, 0
    first_kept_ends = [int(track.spans["end"][0]) for track in non_empty if track.lost]
    first = min(int(track.spans["begin"].min()) for track in non_empty)
    return max(first_kept_ends, default=first), max(
        int(track.spans["end"].max()) for track in non_empty
    )


def _step_numbers(device: TrackTrace, begin: int) -> set[int]:
    spans = device.spans[device.spans["begin"] >= begin]
    return set(spans["number"].tolist())


def _cpu_us_per_token(
    nodes: Sequence[NodeTrace], busy_intervals: dict[str, IntervalSet], tokens: int
) -> dict[str, float]:
    """Return the CPU time per output token in µs, by actor. Tracks of devices are omitted."""
    shares: dict[str, float] = {}
    for node in nodes:
        tracks = [track.track for track in node.tracks if track.track in busy_intervals]
        actors = [name for name in tracks if " " not in name]
        total = sum(busy_intervals[name].length for name in actors) or 1
        for name in actors:
            share = busy_intervals[name].length / total if len(actors) > 1 else 1.0
            shares[name] = share * node.cpu_seconds / tokens * 1e6
    return shares


def _waits(track: TrackTrace, begin: int) -> list[Wait]:
    waits = []
    for number, kind in enumerate(track.kinds):
        spans = track.spans[(track.spans["kind"] == number) & (track.spans["begin"] >= begin)]
        if kind.source and len(spans):
            waited = (spans["begin"] - spans["sent"]) * 1e-3
            edge = f"{kind.source} -> {track.track} ({kind.name})"
            p99 = float(np.percentile(waited, 99))
            waits.append(Wait(edge, len(spans), float(waited.mean()), p99))
    return waits
