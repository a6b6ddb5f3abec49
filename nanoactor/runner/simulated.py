"""A device that takes time and computes nothing: what remains to be seen is the engine.

Its timeline is its own: a step starts when it was submitted or when the one before has ended,
whichever is later, and ends a fixed time after that. Late wake-ups of the host do not lengthen
a step; that the host was late to submit the next one shows as idle time.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from nanoactor.messages import Int32, Step
from nanoactor.models.config import read_config
from nanoactor.runner.batch import BatchState
from nanoactor.runner.config import SIMULATED, ExecutorConfig, check_cache
from nanoactor.runner.execution import Computed
from nanoactor.runner.sampling_table import SampledRows

_BLOCK_SIZE = 16
# Knuth's multiplicative hash: tokens that look random, so that there is text to decode.
_SPREAD = 2654435761


@dataclasses.dataclass(frozen=True, slots=True)
class _Promise:
    """A step with its place in the timeline."""

    token_ids: Int32
    begin: int
    end: int

    def wait(self) -> Computed:
        """Sleep until the step has ended."""
        left = self.end - time.monotonic_ns()
        if left > 0:
            time.sleep(left * 1e-9)
        return Computed(self.token_ids, self.begin, self.end, self.end, self.end)


class SimulatedExecutor:
    """`simulated:5` takes 5 ms for each step, whatever is in it."""

    dtype_name = "none"
    device_name = "a simulated device"
    uncaptured = 0

    def __init__(self, config: ExecutorConfig) -> None:
        self._nanoseconds = round(float(config.device.removeprefix(SIMULATED)) * 1e6)
        self.warmed_up: tuple[tuple[int, float], ...] = ((1, self._nanoseconds * 1e-9),)
        self._vocabulary = read_config(config.directory).vocab_size
        self.block_size = config.block_size or _BLOCK_SIZE
        each = -(-config.max_model_len // self.block_size)
        self.num_blocks = config.num_kv_blocks or config.max_num_seqs * each
        check_cache(self.num_blocks, config, self.block_size, "num_kv_blocks")
        self._free_at = 0
        self._batch = BatchState(config.max_num_seqs, each, self.block_size)

    def submit(self, step: Step) -> _Promise:
        """Put the step behind those before it."""
        inputs = self._batch.prepare(step)
        begin = max(time.monotonic_ns(), self._free_at)
        self._free_at = begin + self._nanoseconds
        return _Promise(self._tokens(inputs.sampled), begin, self._free_at)

    def _tokens(self, sampled: SampledRows) -> Int32:
        """Tokens that depend on position and seed alone, like those of a real sampler."""
        mixed = (sampled.positions * 7919 + sampled.seeds % 65521) * _SPREAD
        return ((mixed >> 16) % self._vocabulary).astype(np.int32)
