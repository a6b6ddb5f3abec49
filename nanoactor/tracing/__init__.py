"""Traces of an engine's actors, with a summary and a timeline for Perfetto."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TextIO

from nanoactor.runtime.tracing import NodeTrace
from nanoactor.tracing.chrome import chrome_events
from nanoactor.tracing.summary import TraceSummary, Wait, summarize

__all__ = ["Trace", "TraceSummary", "Wait"]


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """A trace of all actors over the same period, as returned by `AsyncLLM.trace()`."""

    nodes: tuple[NodeTrace, ...]
    output_tokens: int
    """Number of output tokens since the engine was started."""

    def summary(self) -> TraceSummary:
        """Return the utilization, waiting times and bottleneck that follow from the trace."""
        return summarize(self.nodes, self.output_tokens)

    def save(self, path: str | Path) -> None:
        """Write the trace to a file in Chrome's format, for ui.perfetto.dev and chrome://tracing.

        Raises `OSError` if the file cannot be written.
        """
        with Path(path).open("w") as file:
            self.write(file)

    def write(self, file: TextIO) -> None:
        """Write the trace in Chrome's format to an open text file."""
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for event in chrome_events(self.nodes):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")
