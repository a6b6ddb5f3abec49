"""Sum up a trace: was the device kept busy, what was hidden behind it, who is the next limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nanoactor.actors.runner import DEVICE
from nanoactor.actors.scheduler import LOAD
from nanoactor.runtime.tracing import SPAN_DTYPE, IntervalSet, NodeTrace, TrackTrace


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """The time that messages of an edge waited between being sent and being handled, in µs."""

    edge: str
    messages: int
    mean: float
    p99: float


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSummary:
    """The sums of the spans in a stretch of time. Shares are of 1."""

    seconds: float
    """Length of the stretch that all tracks remember."""
    steps: int
    device_idle: float
    """Share of the time with requests in the engine in which (the first) device did nothing."""
    hidden: float
    """Share of the actors' work that was done while the device computed."""
    busy: dict[str, float]
    """By track, devices included: share of the stretch in which it worked."""
    bottleneck: str
    """The busiest actor: the next limit, were the device faster."""
    tokens: int
    """Of output, since the engine's start."""
    cpu_us_per_token: dict[str, float]
    """By actor, since the engine's start, processor time of its process; empty before the first
    token. Actors that share a process share its time in proportion to their spans."""
    waits: tuple[Wait, ...]
    lost: int
    """Older spans that tracks have forgotten: the stretch begins after them."""

    @property
    def line(self) -> str:
        """The line that matters."""
        if not self.steps:
            return "no step was computed"
        share = self.busy.get(self.bottleneck, 0.0)
        cost = sum(self.cpu_us_per_token.values())
        return (
            f"device idle {self.device_idle:.1%}, {self.hidden:.0%} of the actors' work hidden "
            f"behind it, busiest actor {self.bottleneck} at {share:.0%}"
            + (f", {cost:.0f} us of CPU per token" if cost else "")
        )


def summarize(nodes: Sequence[NodeTrace], tokens: int) -> TraceSummary:
    """Add up what the tracks of all nodes remember; `tokens` were put out since the start."""
    tracks = [track for node in nodes for track in node.tracks]
    devices = [track for track in tracks if track.track.endswith(f" {DEVICE}")]
    loads = [track for track in tracks if track.track.endswith(f" {LOAD}")]
    actors = [track for track in tracks if track not in devices and track not in loads]
    begin, end = _stretch(tracks)
    covers = {track.track: _cover([track]).within(begin, end) for track in [*devices, *actors]}
    length = max(1, end - begin)
    device = _cover(devices[:1]).within(begin, end)
    load = _cover(loads).within(begin, end)
    work = sum(covers[track.track].length for track in actors)
    hidden = sum(device.overlap(covers[track.track]) for track in actors)
    busy = {name: cover.length / length for name, cover in covers.items()}
    return TraceSummary(
        seconds=length * 1e-9,
        steps=len(_steps(devices[0], begin)) if devices else 0,
        device_idle=1 - device.overlap(load) / load.length if load.length else 0.0,
        hidden=hidden / work if work else 0.0,
        busy=busy,
        bottleneck=max((track.track for track in actors), key=lambda name: busy[name], default=""),
        tokens=tokens,
        cpu_us_per_token=_cpu(nodes, covers, tokens) if tokens else {},
        waits=tuple(wait for track in actors for wait in _waits(track, begin)),
        lost=sum(track.lost for track in tracks),
    )


def _cover(tracks: Sequence[TrackTrace]) -> IntervalSet:
    """Return when any of these tracks was at work."""
    spans = np.concatenate([np.empty(0, SPAN_DTYPE), *(track.spans for track in tracks)])
    return IntervalSet(spans["begin"], spans["end"])


def _stretch(tracks: list[TrackTrace]) -> tuple[int, int]:
    """From when on no track has forgotten anything, to the last thing that happened."""
    full = [track for track in tracks if len(track.spans)]
    if not full:
        return 0, 0
    forgetful = [int(track.spans["end"][0]) for track in full if track.lost]
    first = min(int(track.spans["begin"].min()) for track in full)
    return max(forgetful, default=first), max(int(track.spans["end"].max()) for track in full)


def _steps(device: TrackTrace, begin: int) -> set[int]:
    spans = device.spans[device.spans["begin"] >= begin]
    return set(spans["number"].tolist())


def _cpu(
    nodes: Sequence[NodeTrace], covers: dict[str, IntervalSet], tokens: int
) -> dict[str, float]:
    """Processor time per token by actor, in µs; the tracks of a device count for its actor."""
    shares: dict[str, float] = {}
    for node in nodes:
        tracks = [track.track for track in node.tracks if track.track in covers]
        actors = [name for name in tracks if " " not in name]
        whole = sum(covers[name].length for name in actors) or 1
        for name in actors:
            part = covers[name].length / whole if len(actors) > 1 else 1.0
            shares[name] = part * node.cpu_seconds / tokens * 1e6
    return shares


def _waits(track: TrackTrace, begin: int) -> list[Wait]:
    found = []
    for number, kind in enumerate(track.kinds):
        spans = track.spans[(track.spans["kind"] == number) & (track.spans["begin"] >= begin)]
        if kind.source and len(spans):
            waited = (spans["begin"] - spans["sent"]) * 1e-3
            edge = f"{kind.source} -> {track.track} ({kind.name})"
            p99 = float(np.percentile(waited, 99))
            found.append(Wait(edge, len(spans), float(waited.mean()), p99))
    return found
