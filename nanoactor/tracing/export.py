"""Program that converts a trace to Perfetto's JSON: `python -m nanoactor.tracing.export`.

It reads pickled snapshots, each a list of `NodeTrace`, from its parent on standard input, and
writes JSON to standard output. The trace of a busy minute is tens of megabytes of text. Writing it
in the server would block the event loop.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence

import numpy as np

from nanoactor.runtime.tracing import NodeTrace, TrackTrace
from nanoactor.tracing import Trace


def join_snapshots(snapshots: Sequence[Sequence[NodeTrace]]) -> list[NodeTrace]:
    """Merge overlapping snapshots of a trace. Several are needed for a long trace, because actors
    keep their spans only for a short time."""
    nodes: dict[str, NodeTrace] = {}
    tracks: dict[tuple[str, str], list[TrackTrace]] = {}
    for snapshot in snapshots:
        for node in snapshot:
            nodes[node.node] = node
            for track in node.tracks:
                tracks.setdefault((node.node, track.track), []).append(track)
    return [
        NodeTrace(
            node.node,
            [_join_track(tracks[node.node, track.track]) for track in node.tracks],
            node.cpu_seconds,
            node.taken_at,
        )
        for node in nodes.values()
    ]


def _join_track(parts: list[TrackTrace]) -> TrackTrace:
    """Merge the snapshots of a track, the timeline of an actor or device. Each span appears once,
    ordered by its end. The last snapshot's kinds of spans are valid for all, because a track only
    adds kinds."""
    last = parts[-1]
    spans = np.unique(np.concatenate([part.spans for part in parts]))
    spans = spans[np.argsort(spans["end"], kind="stable")]
    return TrackTrace(last.track, last.node, last.kinds, spans, sum(part.lost for part in parts))


def main() -> None:
    """Convert the snapshots on standard input to JSON on standard output."""
    snapshots = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that has started this one
    Trace(tuple(join_snapshots(snapshots)), 0).write(sys.stdout)


if __name__ == "__main__":
    main()
