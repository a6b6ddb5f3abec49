"""What all actors did lately, taken at one moment."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TextIO

from nanoactor.runtime.tracing import NodeTrace
from nanoactor.tracing.chrome import chrome_events
from nanoactor.tracing.ledger import Ledger, make_ledger


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """From `AsyncLLM.trace()`: to be summed, or saved and looked at."""

    nodes: tuple[NodeTrace, ...]
    output_tokens: int
    """Since the engine's start."""

    def ledger(self) -> Ledger:
        """What the spans add up to."""
        return make_ledger(self.nodes, self.output_tokens)

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace; open it at ui.perfetto.dev or chrome://tracing.

        Raises `OSError` where the file cannot be written.
        """
        with Path(path).open("w") as file:
            self.write(file)

    def write(self, file: TextIO) -> None:
        """The same to an open file."""
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for event in chrome_events(self.nodes):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")
