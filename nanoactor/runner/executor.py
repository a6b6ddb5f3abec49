"""Steps laid out on the host and computed operator by operator, on the thread that waits."""

from __future__ import annotations

import dataclasses
import logging
import time

import numpy as np
import torch
from numpy.typing import NDArray

from nanoactor.messages import Int32, Step
from nanoactor.models.batch import AttentionBatch, KVCache, PrefillRow, SamplingBatch
from nanoactor.models.device import Device
from nanoactor.runner.batch import BatchState, Row, StepInputs
from nanoactor.runner.config import ExecutorConfig
from nanoactor.runner.execution import Computed
from nanoactor.runner.model import LoadedModel
from nanoactor.runner.sampling_table import SampledRows

log = logging.getLogger("nanoactor.runner")

# A warm-up pass of the full budget would take minutes for a large model on a CPU; the memory
# that it needs grows in proportion to its tokens.
_WARMUP_TOKENS = 256
_WARMUP_ROWS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class _Queued:
    """A step that the waiting thread computes, where the device is that thread itself."""

    executor: TorchExecutor
    inputs: StepInputs

    def wait(self) -> Computed:
        """Compute it."""
        return self.executor.run(self.inputs)


class TorchExecutor:
    """Runs steps, one after the other, on the thread that waits for them."""

    uncaptured = 0

    def __init__(self, config: ExecutorConfig, device: Device) -> None:
        """Load the weights, size and allocate the KV cache, run both kinds of step once.

        Raises `ModelError` where the model's files are wrong or memory does not suffice.
        """
        self._config = config
        self._device = device
        self.device_name = device.name
        self._model = LoadedModel(config, device)
        self.dtype_name, self.block_size = self._model.dtype_name, self._model.block_size
        self._caches: list[KVCache] = []
        self._last_tokens = torch.zeros(
            config.max_num_seqs, dtype=torch.int64, device=device.torch_device
        )
        used, peak = self._warm_up(self._model.free)
        self.num_blocks = self._model.size_cache(used, peak)
        self._caches = self._model.allocate(self.num_blocks)
        most = -(-config.max_model_len // self.block_size)
        self._batch = BatchState(config.max_num_seqs, most, self.block_size)

    def submit(self, step: Step) -> _Queued:
        """Lay out the inputs; whoever waits computes."""
        return _Queued(self, self._batch.prepare(step))

    # -- memory ---------------------------------------------------------------------------

    def _warm_up(self, free: int) -> tuple[int, int]:
        """Run both kinds of step; returns what the weights take, and a maximal step on top.

        `free` is what the device had before the weights were loaded. The first pass, of one
        token, touches all weights, which until then may lie in their files, and makes what
        libraries make once; only then can a step's own memory be told apart.
        """
        config, size = self._config, self.block_size
        begin = time.monotonic()
        tokens = min(config.max_num_batched_tokens, config.max_model_len - 1, _WARMUP_TOKENS)
        rows = min(config.max_num_seqs, _WARMUP_ROWS)
        blocks = -(-(tokens + 1) // size)
        self._caches = self._model.allocate(blocks)
        self.run(_warmup_prefill(1, np.arange(blocks), size))
        self._device.synchronize()
        used = max(0, free - self._device.memory().free)
        self._device.reset_peak()
        seconds = self._timed(_warmup_prefill(tokens, np.arange(blocks), size))
        peak = self._device.peak() * config.max_num_batched_tokens // max(tokens, 1)
        decoding = self._timed(_warmup_decode(tokens, rows, np.arange(blocks), size))
        self.warmed_up: tuple[tuple[int, float], ...] = ((tokens, seconds), (rows, decoding))
        self._caches = []
        self._last_tokens.zero_()
        log.info("warm-up of prefill and decode took %.2f s", time.monotonic() - begin)
        return used, peak

    def _timed(self, inputs: StepInputs) -> float:
        """Run a step; returns its seconds."""
        begin = time.monotonic()
        self.run(inputs)
        self._device.synchronize()
        return time.monotonic() - begin

    # -- running --------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> Computed:
        """Compute a step; the ids come in the order of its sampling rows."""
        begin = time.monotonic_ns()
        token_ids = self._tensor(inputs.token_ids)
        decode_first = len(inputs.token_ids) - len(inputs.decode_slots)
        token_ids[decode_first:] = self._last_tokens[self._tensor(inputs.decode_slots)]
        batch = AttentionBatch(
            self._tensor(inputs.slot_mapping),
            tuple(self._prefill_row(row) for row in inputs.prefills),
            decode_first,
            self._tensor(inputs.decode_tables),
            self._tensor(inputs.decode_contexts),
        )
        positions = self._tensor(inputs.positions)
        hidden = self._model.network.forward(token_ids, positions, self._caches, batch)
        sampled = inputs.sampled
        forwarded = time.monotonic_ns()
        if not len(sampled.slots):
            return Computed(np.empty(0, np.int32), begin, forwarded, forwarded, forwarded)
        logits = self._model.network.logits(hidden[self._tensor(sampled.token_index)])
        chosen = self._model.sample(logits, self._sampling_batch(sampled))
        if self._config.debug:
            self._model.check_agreement(inputs.step, chosen)
        self._last_tokens[self._tensor(sampled.slots)] = chosen.clamp_min(0)
        sampled_at = time.monotonic_ns()
        ids: Int32 = chosen.to("cpu", torch.int32).numpy()
        return Computed(ids, begin, forwarded, sampled_at, time.monotonic_ns())

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device.torch_device, non_blocking=True)

    def _prefill_row(self, row: Row) -> PrefillRow:
        return PrefillRow(row.first, row.tokens, row.context, self._tensor(row.blocks))

    def _sampling_batch(self, rows: SampledRows) -> SamplingBatch:
        return SamplingBatch(
            temperature=self._tensor(rows.temperature),
            top_k=self._tensor(rows.top_k),
            top_p=self._tensor(rows.top_p),
            min_p=self._tensor(rows.min_p),
            seeds=self._tensor(rows.seeds),
            positions=self._tensor(rows.positions),
            greedy=self._tensor(rows.greedy),
            plain=self._tensor(rows.plain),
            limited=self._tensor(rows.limited),
            unlimited=self._tensor(rows.unlimited),
            nucleus=self._tensor(rows.nucleus),
            masked_rows=self._tensor(rows.masked_rows),
            masked_ids=self._tensor(rows.masked_ids),
        )


def _warmup_prefill(tokens: int, blocks: NDArray[np.int64], size: int) -> StepInputs:
    positions = np.arange(tokens)
    none = np.empty(0, np.int64)
    return StepInputs(
        0,
        np.zeros(tokens, np.int64),
        positions,
        blocks[positions // size] * size + positions % size,
        (Row(0, tokens, tokens, blocks[: -(-tokens // size)]),),
        none,
        np.empty((0, 0), np.int64),
        none,
        _greedy_rows(none, np.array([tokens - 1]), 1),
    )


def _warmup_decode(tokens: int, rows: int, blocks: NDArray[np.int64], size: int) -> StepInputs:
    slots = np.arange(rows)
    positions = np.full(rows, tokens)
    return StepInputs(
        0,
        np.zeros(rows, np.int64),
        positions,
        blocks[positions // size] * size + positions % size,
        (),
        slots,
        np.tile(blocks, (rows, 1)),
        positions + 1,
        _greedy_rows(slots, slots, rows),
    )


def _greedy_rows(
    slots: NDArray[np.int64], token_index: NDArray[np.int64], rows: int
) -> SampledRows:
    ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.float32)
    whole, none = np.zeros(rows, np.int64), np.empty(0, np.int64)
    return SampledRows(
        slots if len(slots) else whole,
        token_index,
        whole,
        ones,
        whole,
        ones,
        zeros,
        whole,
        np.arange(rows),
        *[none] * 6,
    )
