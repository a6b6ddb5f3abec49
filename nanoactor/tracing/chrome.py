"""Conversion of spans to a Chrome trace, for Perfetto and chrome://tracing.

The format is described in "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (complete events X,
flow events s, t and f, metadata M; times in µs).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from nanoactor.actors.scheduler import ENCODES, ENTERS, LEAVES, LOAD
from nanoactor.runtime.tracing import Kind, NodeTrace

Event = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """A span (an interval of work) of an actor or device, together with its kind. Times are in
    ns."""

    track_id: tuple[int, int]
    """Process number and thread number of the span's track (timeline) in the Chrome trace."""
    kind: Kind
    number: int
    sent: int
    begin: int
    end: int

    @property
    def is_sending(self) -> bool:
        return self.kind.name.startswith("send ")


def chrome_events(nodes: Sequence[NodeTrace]) -> Iterator[Event]:
    """Yield the events of a Chrome trace: names of tracks (timelines), spans, and arrows that
    connect the spans of each step, request and image."""
    track_ids: dict[str, tuple[int, int]] = {}
    spans: list[_Span] = []
    links: dict[str, dict[int, list[int]]] = {
        name: defaultdict(list) for name in (ENTERS, LEAVES, ENCODES)
    }
    """Numbers of the steps in which a request begins or ends, or in which an image is encoded, by
    kind of link and by request or image."""
    for process, node in enumerate(nodes, 1):
        yield _metadata_event("process_name", (process, 0), node.node)
        yield _sort_event("process_sort_index", (process, 0), process)
        # A thread whose number equals that of its process would be shown as the main thread.
        for thread, track in enumerate(node.tracks, 100 * process):
            track_ids[track.track] = process, thread
            yield _metadata_event("thread_name", (process, thread), track.track)
            yield _sort_event("thread_sort_index", (process, thread), thread)
            is_load_track = track.track.endswith(f" {LOAD}")
            for number, linked, sent, begin, end in track.spans.tolist():
                kind = track.kinds[number]
                if is_load_track and kind.name in links:
                    links[kind.name][linked].append(sent)
                    continue
                spans.append(_Span((process, thread), kind, linked, sent, begin, end))
    origin = min((span.begin for span in spans), default=0)
    for span in spans:
        yield _complete_event(span, origin)
    chains = _chains(spans)
    chains["step"].pop(0, None)  # steps count from 1; 0 is before the first
    for step, chain in chains["step"].items():
        yield from _flow_events("step", step, chain, track_ids, origin)
    for uid, chain in chains["uid"].items():
        full_chain = _request_chain(uid, chain, chains["step"], links)
        yield from _flow_events("request", uid, full_chain, track_ids, origin)
    for number, chain in chains["pixels"].items():
        full_chain = chain + _encode_spans(links[ENCODES].get(number, ()), chains["step"])
        yield from _flow_events("image", number, full_chain, track_ids, origin)


def _metadata_event(kind: str, track_id: tuple[int, int], name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": track_id[0], "tid": track_id[1], "args": {"name": name}}


def _sort_event(kind: str, track_id: tuple[int, int], index: int) -> Event:
    event = _metadata_event(kind, track_id, "")
    return event | {"args": {"sort_index": index}}


def _complete_event(span: _Span, origin: int) -> Event:
    arguments: dict[str, Any] = {}
    if span.kind.by:
        arguments["request" if span.kind.by == "uid" else span.kind.by] = span.number
    if span.kind.source:
        waited = (span.begin - span.sent) / 1000
        arguments |= {"from": span.kind.source, "waited_us": waited}
    return {
        "ph": "X",
        "name": span.kind.name,
        "cat": "send" if span.is_sending else "work",
        "pid": span.track_id[0],
        "tid": span.track_id[1],
        "ts": (span.begin - origin) / 1000,
        "dur": (span.end - span.begin) / 1000,
        "args": arguments,
    }


def _chains(spans: list[_Span]) -> dict[str, dict[int, list[_Span]]]:
    """Group spans by step, by request uid and by image. Return each group's spans in order of start
    time, by "step", "uid" or "pixels" and then by number."""
    chains: dict[str, dict[int, list[_Span]]] = {
        "step": defaultdict(list),
        "uid": defaultdict(list),
        "pixels": defaultdict(list),
    }
    for span in sorted(spans, key=lambda s: s.begin):
        if span.kind.by in chains:
            chains[span.kind.by][span.number].append(span)
    return chains


def _request_chain(
    uid: int,
    own_spans: list[_Span],
    steps: dict[int, list[_Span]],
    links: dict[str, dict[int, list[int]]],
) -> list[_Span]:
    """Return a request's own spans, plus those of its first step and of the step that ends it, in
    order of their start time."""
    chain = list(own_spans)
    for link in (ENTERS, LEAVES):
        for step in links[link].get(uid, ())[:1]:
            chain += [s for s in steps.get(step, ()) if s not in chain]
    return sorted(chain, key=lambda s: s.begin)


def _encode_spans(numbers: Sequence[int], steps: dict[int, list[_Span]]) -> list[_Span]:
    """Return the spans in which these steps encode images."""
    return [span for step in numbers for span in steps.get(step, ()) if span.kind.name == "encode"]


def _flow_events(
    category: str,
    number: int,
    chain: list[_Span],
    track_ids: dict[str, tuple[int, int]],
    origin: int,
) -> Iterator[Event]:
    """Yield the events of arrows that connect the spans of a chain in order. The first arrow starts
    where the message that the first span handles was sent. `origin` is the start of the trace in
    ns."""
    if not chain:
        return
    # Use a time inside each span, because a common end of two adjacent spans would be ambiguous.
    points = [
        (span.track_id, span.begin + min(500, (span.end - span.begin) // 2)) for span in chain
    ]
    if chain[0].kind.source in track_ids and chain[0].sent:
        points.insert(0, (track_ids[chain[0].kind.source], chain[0].sent - 1))
    if len(points) < 2:
        return
    for index, ((process, thread), time) in enumerate(points):
        phase = "s" if not index else "f" if index == len(points) - 1 else "t"
        yield {
            "ph": phase,
            "bp": "e",
            "name": f"{category} {number}",
            "cat": category,
            "id": number,
            "pid": process,
            "tid": thread,
            "ts": (time - origin) / 1000,
        }
