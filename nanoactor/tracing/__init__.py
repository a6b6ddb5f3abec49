"""Traces, each of which covers all actors over the same period, with a summary and a timeline."""

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
    """A trace from `AsyncLLM.trace()`, to be summarized, or saved and viewed."""

    nodes: tuple[NodeTrace, ...]
    output_tokens: int
    """Number of output tokens since the engine's start."""

    def summary(self) -> TraceSummary:
        """Return a summary of the spans."""
        return summarize(self.nodes, self.output_tokens)

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace; open it at ui.perfetto.dev or chrome://tracing.

        Raises `OSError` if the file cannot be written.
        """
        with Path(path).open("w") as file:
            self.write(file)

    def write(self, file: TextIO) -> None:
        """Write the Chrome trace to an open file."""
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for event in chrome_events(self.nodes):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")
