"""Sum up a trace: was the device kept busy, what was hidden behind it, who is the next limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nanoactor.actors.runner import DEVICE
from nanoactor.actors.scheduler import LOAD
from nanoactor.runtime.intervals import Cover
from nanoactor.runtime.tracing import SPAN_DTYPE, LaneTrace, NodeTrace


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """How long messages of an edge waited between being sent and being handled, in µs."""

    edge: str
    messages: int
    mean: float
    p99: float


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSummary:
    """What the spans of a stretch of time add up to. Shares are of 1."""

    seconds: float
    """Length of the stretch that all lanes remember."""
    steps: int
    device_idle: float
    """Share of the time with requests in the engine in which (the first) device did nothing."""
    hidden: float
    """Share of the actors' work that was done while the device computed."""
    busy: dict[str, float]
    """By lane, devices included: share of the stretch in which it worked."""
    bottleneck: str
    """The busiest actor: the next limit, were the device faster."""
    tokens: int
    """Of output, since the engine's start."""
    cpu_us_per_token: dict[str, float]
    """By actor, since the engine's start, processor time of its process; empty before the first
    token. Actors that share a process share its time in proportion to their spans."""
    waits: tuple[Wait, ...]
    lost: int
    """Older spans that lanes have forgotten: the stretch begins after them."""

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
    """Add up what the lanes of all nodes remember; `tokens` were put out since the start."""
    lanes = [lane for node in nodes for lane in node.lanes]
    devices = [lane for lane in lanes if lane.lane.endswith(f" {DEVICE}")]
    loads = [lane for lane in lanes if lane.lane.endswith(f" {LOAD}")]
    actors = [lane for lane in lanes if lane not in devices and lane not in loads]
    begin, end = _stretch(lanes)
    covers = {lane.lane: _cover([lane]).within(begin, end) for lane in [*devices, *actors]}
    length = max(1, end - begin)
    device = _cover(devices[:1]).within(begin, end)
    load = _cover(loads).within(begin, end)
    work = sum(covers[lane.lane].length for lane in actors)
    hidden = sum(device.overlap(covers[lane.lane]) for lane in actors)
    busy = {name: cover.length / length for name, cover in covers.items()}
    return TraceSummary(
        seconds=length * 1e-9,
        steps=len(_steps(devices[0], begin)) if devices else 0,
        device_idle=1 - device.overlap(load) / load.length if load.length else 0.0,
        hidden=hidden / work if work else 0.0,
        busy=busy,
        bottleneck=max((lane.lane for lane in actors), key=lambda name: busy[name], default=""),
        tokens=tokens,
        cpu_us_per_token=_cpu(nodes, covers, tokens) if tokens else {},
        waits=tuple(wait for lane in actors for wait in _waits(lane, begin)),
        lost=sum(lane.lost for lane in lanes),
    )


def _cover(lanes: Sequence[LaneTrace]) -> Cover:
    """Return when any of these lanes was at work."""
    spans = np.concatenate([np.empty(0, SPAN_DTYPE), *(lane.spans for lane in lanes)])
    return Cover(spans["begin"], spans["end"])


def _stretch(lanes: list[LaneTrace]) -> tuple[int, int]:
    """From when on no lane has forgotten anything, to the last thing that happened."""
    full = [lane for lane in lanes if len(lane.spans)]
    if not full:
        return 0, 0
    forgetful = [int(lane.spans["end"][0]) for lane in full if lane.lost]
    first = min(int(lane.spans["begin"].min()) for lane in full)
    return max(forgetful, default=first), max(int(lane.spans["end"].max()) for lane in full)


def _steps(device: LaneTrace, begin: int) -> set[int]:
    spans = device.spans[device.spans["begin"] >= begin]
    return set(spans["number"].tolist())


def _cpu(nodes: Sequence[NodeTrace], covers: dict[str, Cover], tokens: int) -> dict[str, float]:
    """Processor time per token by actor, in µs; the lanes of a device count for its actor."""
    shares: dict[str, float] = {}
    for node in nodes:
        lanes = [lane.lane for lane in node.lanes if lane.lane in covers]
        actors = [name for name in lanes if " " not in name]
        whole = sum(covers[name].length for name in actors) or 1
        for name in actors:
            part = covers[name].length / whole if len(actors) > 1 else 1.0
            shares[name] = part * node.cpu_seconds / tokens * 1e6
    return shares


def _waits(lane: LaneTrace, begin: int) -> list[Wait]:
    found = []
    for number, kind in enumerate(lane.kinds):
        spans = lane.spans[(lane.spans["kind"] == number) & (lane.spans["begin"] >= begin)]
        if kind.source and len(spans):
            waited = (spans["begin"] - spans["sent"]) * 1e-3
            edge = f"{kind.source} -> {lane.lane} ({kind.name})"
            p99 = float(np.percentile(waited, 99))
            found.append(Wait(edge, len(spans), float(waited.mean()), p99))
    return found
