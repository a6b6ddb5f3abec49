"""A simulated device, which takes time but computes nothing, for measuring the engine itself.

The device has its own timeline. A step starts when it is submitted or when the previous one ends,
whichever is later. Its duration is fixed or depends on its number of tokens. Late wake-ups of the
host do not lengthen a step. Submitting the next step late appears as idle time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator

import numpy as np

from nanoactor.messages.engine import Int32, Step
from nanoactor.messages.pooling import StepVectors
from nanoactor.messages.scores import StepScores
from nanoactor.models.limits import NOTHING_ALLOWED
from nanoactor.options.config import simulated_times
from nanoactor.runner.batch.batch import BatchTraits, HostBatch
from nanoactor.runner.batch.inputs import Long, PooledRows, Update
from nanoactor.runner.batch.pixels import PixelsByNumber
from nanoactor.runner.batch.rehearsal_batch import RehearsalBatch
from nanoactor.runner.config import RankConfig, check_cache
from nanoactor.runner.protocol import StepResult
from nanoactor.setup.actors import encoder_pages

_BLOCK_SIZE = 16
# Knuth's multiplicative hash yields random-looking token ids, so that there is text to decode.
_HASH_MULTIPLIER = 2654435761


def _pick_allowed(mask: Int32, seed: int) -> int:
    """Return a token id that the bit mask `mask`, int32 (words,), allows and that otherwise depends
    only on `seed`; `NOTHING_ALLOWED` if there is none. Only one word of the mask is unpacked,
    because unpacking all takes 0.4 ms per row for 150,000 ids."""
    words = np.flatnonzero(mask)
    if not len(words):
        return NOTHING_ALLOWED
    quotient, word_index = divmod(seed, len(words))
    word = int(words[word_index])
    bits = np.flatnonzero(np.unpackbits(mask[word : word + 1].view(np.uint8), bitorder="little"))
    return 32 * word + int(bits[quotient % len(bits)])


@dataclasses.dataclass(frozen=True, slots=True)
class _ScheduledStep:
    """A step with its results, and its start and end on the device's timeline, in ns of the
    monotonic clock."""

    rows: int
    counts: Int32
    token_ids: Int32
    begin: int
    end: int
    scores: StepScores | None
    vectors: StepVectors | None

    def wait(self) -> StepResult:
        """Sleep until the step has ended, and return its results."""
        remaining = self.end - time.monotonic_ns()
        if remaining > 0:
            time.sleep(remaining * 1e-9)
        return StepResult(
            self.counts,
            self.token_ids,
            self.begin,
            forwarded=self.end,
            sampled=self.end,
            end=self.end,
            scores=self.scores,
            vectors=self.vectors,
        )


class SimulatedExecutor:
    """Executor of simulated steps. With device `simulated:5`, every step takes 5 ms. With
    `simulated:5+20`, each prompt token and each decode token takes another 20 us."""

    dtype_name = "none"
    device_name = "a simulated device"
    asynchronous = allows_any_thread = False
    too_large = uncaptured = 0

    def __init__(self, config: RankConfig) -> None:
        engine, files = config.engine, config.files
        self.max_depth = engine.steps_in_flight(deep=True)
        milliseconds, microseconds = simulated_times(engine.device)
        self._step_ns, self._token_ns = round(milliseconds * 1e6), round(microseconds * 1e3)
        self.warmed_up: tuple[tuple[int, float], ...] = ((1, self._step_ns * 1e-9),)
        self._vocabulary = files.config.vocab_size
        self.block_size = engine.block_size or _BLOCK_SIZE
        max_blocks = -(-files.max_model_len // self.block_size)
        self.num_blocks = engine.num_kv_blocks or engine.max_num_seqs * max_blocks
        check_cache(self.num_blocks, files, self.block_size, "num_kv_blocks")
        self.encoder_pages = encoder_pages(engine, files)
        traits = BatchTraits(fallback_at_once=engine.max_num_seqs)
        pooling = files.pooling
        self._width = pooling.width(files.config.hidden_size) if pooling else 0
        self._new_batch = functools.partial(
            HostBatch, engine.max_num_seqs, max_blocks, traits, pooling.kind if pooling else ""
        )
        self._rehearsal_batch = RehearsalBatch(traits, self.block_size)
        self.reset()

    def reset(self) -> None:
        """Drop all simulated sequences and restart the timeline."""
        self._free_at, self._batch = 0, self._new_batch()

    def drop_pixels(self, numbers: list[int]) -> None:
        """Do nothing, because no partial encodings are kept."""

    def prepare(self, step: Step, pixels: PixelsByNumber, masks: Int32) -> _ScheduledStep:
        """Schedule a step after all previous ones, and compute its results."""
        update = self._batch.update(step, masks)
        begin = max(time.monotonic_ns(), self._free_at)
        self._free_at = begin + self._step_ns + self._token_ns * update.rows
        ids, seeds = np.empty(len(update.positions), np.int32), self._batch.sampling.seeds
        for part in update.inputs.fallback:
            ids[part.index] = self._tokens(update.positions[part.index], seeds(part.slots))
        first = len(ids) - sum(len(part.slots) for part in update.inputs.choices)
        for part in update.inputs.choices:
            at = slice(first, first + len(part.slots))
            assert part.masks is not None
            ids[at] = self._masked(part.masks, update.positions[at], seeds(part.slots))
            first = at.stop
        return _ScheduledStep(
            update.rows,
            update.counts,
            ids if update.order is None else ids[update.order],
            begin,
            end=self._free_at,
            scores=None if update.scored is None else self._scored(update),
            vectors=None if update.pooled is None else self._pooled(update.pooled),
        )

    def launch(self, prepared: _ScheduledStep) -> _ScheduledStep:
        """Return the step, which `prepare` has already scheduled."""
        return prepared

    def rehearse(self) -> Iterator[object]:
        """Lay out and yield a dummy step in a separate batch, to warm up the CPU caches."""
        yield self._rehearsal_batch.update()

    def _scored(self, update: Update) -> StepScores:
        """Return log-probabilities according to which all tokens are equally likely."""
        assert update.scored is not None
        num_top = min(update.scored.max_logprobs, self._vocabulary)
        table = np.zeros((len(update.scored.counts), 2 + 2 * num_top), np.int32)
        words = np.full(1, -math.log(self._vocabulary), np.float32).view(np.int32)
        table[:, 0], table[:, 1], table[:, 2 + num_top :] = words, 1, words
        table[:, 2 : 2 + num_top] = np.arange(num_top)
        return update.scored.message(table)

    def _pooled(self, rows: PooledRows) -> StepVectors:
        """Return a vector of ones for each pooling row."""
        return rows.message(np.ones((len(rows.numbers), self._width), np.float32))

    def _tokens(self, positions: Long, seeds: Long) -> Int32:
        """Return token ids that depend only on position and seed, like the random numbers of a real
        sampler."""
        mixed = (positions * 7919 + seeds % 65521) * _HASH_MULTIPLIER
        return ((mixed >> 16) % self._vocabulary).astype(np.int32)

    def _masked(self, masks: Int32, positions: Long, seeds: Long) -> Int32:
        """Return token ids that `masks`, (rows, words), allow and that otherwise depend only on
        position and seed."""
        pairs = zip(masks, self._tokens(positions, seeds).tolist(), strict=True)
        return np.array([_pick_allowed(mask, wanted) for mask, wanted in pairs], np.int32)
