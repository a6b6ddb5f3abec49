"""Scheduling of pooling requests, which end once the result of their last pooling row arrives."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nanoactor.errors import ProtocolBug
from nanoactor.messages.pooling import Float32
from nanoactor.scheduling.features.feature import Ending, Feature
from nanoactor.scheduling.sequences.ends import End
from nanoactor.scheduling.sequences.sequence import Sequence
from nanoactor.scheduling.steps.output import OutputBuffer
from nanoactor.scheduling.steps.results import Results

_POOLED = End("stop")


class Pooling(Feature):
    """Reports pooled vectors. For mean pooling, also adds up the partial sums of prompts that are
    computed in several steps."""

    def __init__(self, kind: str, output: OutputBuffer) -> None:
        """`kind` is the model's pooling method, as in `PoolingConfig.kind`."""
        self._kind, self._output = kind, output
        self._sums: dict[int, Float32] = {}
        """Partial sum of the hidden states of each unfinished prompt, by uid."""

    def take_results(self, results: Results, step: int) -> Iterable[Ending]:
        """Report the vectors that are complete after this step. Return their sequences, which
        are now finished."""
        endings: list[Ending] = []
        for row, vector in results.pooled:
            sequence = row.sequence
            if not sequence.accepts_step(step):
                continue
            if self._kind == "mean":
                total = self._sums.pop(sequence.uid, 0) + vector
                if row.start + row.length < sequence.length:
                    self._sums[sequence.uid] = total
                    continue
                vector = total / np.float32(sequence.length)
            self._output.add_vector(sequence.uid, vector)
            endings.append((sequence, _POOLED))
        return endings

    def close(self, sequence: Sequence) -> None:
        """Drop the partial sum of a finished sequence."""
        self._sums.pop(sequence.uid, None)

    def check_idle(self) -> None:
        """Raise `ProtocolBug` if any partial sum is left over."""
        if self._sums:
            raise ProtocolBug(f"partial sums of requests {[*self._sums]} are left over")
