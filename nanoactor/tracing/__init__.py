"""Traces of all actors, taken at one moment: their sums, and the picture of them."""

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
    """From `AsyncLLM.trace()`: to be summed, or saved and looked at."""

    nodes: tuple[NodeTrace, ...]
    output_tokens: int
    """Since the engine's start."""

    def summary(self) -> TraceSummary:
        """Add up what the spans say."""
        return summarize(self.nodes, self.output_tokens)

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace; open it at ui.perfetto.dev or chrome://tracing.

        Raises `OSError` where the file cannot be written.
        """
        with Path(path).open("w") as file:
            self.write(file)

    def write(self, file: TextIO) -> None:
        """Write the same to an open file."""
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for event in chrome_events(self.nodes):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")
