"""The device's side of a runner: model, KV cache, and the table of last tokens."""

from __future__ import annotations

import dataclasses
import logging
import time

import numpy as np
import torch
from numpy.typing import NDArray

from nanoactor.messages import Int32
from nanoactor.models.batch import AttentionBatch, KVCache, PrefillRow, SamplingBatch
from nanoactor.models.collective import Alone, Group, Ranks
from nanoactor.models.config import ModelConfig, read_config
from nanoactor.models.device import Device
from nanoactor.models.devices import open_device
from nanoactor.models.errors import RanksDisagree
from nanoactor.models.registry import build_model
from nanoactor.models.sharded_sampling import ShardedSampler
from nanoactor.models.weights import Weights
from nanoactor.runner.batch import Row, SampledRows, StepInputs
from nanoactor.runner.config import ExecutorConfig, check_cache
from nanoactor.runner.execution import Computed

log = logging.getLogger("nanoactor.runner")

# A warm-up pass of the full budget would take minutes for a large model on a CPU; the memory
# that it needs grows in proportion to its tokens.
_WARMUP_TOKENS = 256
_WARMUP_ROWS = 16
_MIB = 1 << 20


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

    def __init__(self, config: ExecutorConfig) -> None:
        """Load the weights, size and allocate the KV cache, run both kinds of step once.

        Raises `ModelError` where the model's files are wrong or memory does not suffice.
        """
        self._config = config
        self._device: Device = open_device(config.device)
        self._device.prepare_thread(config.threads)
        self._model_config = read_config(config.directory)
        self.dtype = self._choose_dtype()
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.block_size = config.block_size or self._device.default_block_size
        begin, free = time.monotonic(), self._device.memory().free
        self._group = self._meet()
        with torch.inference_mode(), self._open_weights() as weights:
            self._model = build_model(
                self._model_config, weights, self._device, config.max_model_len, self._group
            )
        self._sample = self._device.sample if config.ranks == 1 else self._sharded_sampler()
        log.info(
            "loaded %s as %s in %.1f s", config.directory, self.dtype, time.monotonic() - begin
        )
        self._caches: list[KVCache] = []
        self._last_tokens = torch.zeros(
            config.max_num_seqs, dtype=torch.int64, device=self._device.torch_device
        )
        used, peak = self._warm_up(free)
        self.num_blocks = self._group.least(self._size_cache(free, used, peak))
        self._caches = self._allocate(self.num_blocks)

    def submit(self, inputs: StepInputs) -> _Queued:
        """Nothing runs yet: whoever waits computes."""
        return _Queued(self, inputs)

    def _meet(self) -> Group:
        config = self._config
        if config.ranks == 1:
            return Alone()
        backend, listener = self._device.collective_backend, config.meeting_socket
        return Ranks(config.rank, config.ranks, backend, config.meeting_port, listener)

    def _sharded_sampler(self) -> ShardedSampler:
        vocabulary = self._model.shard.vocabulary
        return ShardedSampler(self._group, vocabulary.start, self._model_config.vocab_size)

    def _open_weights(self) -> Weights:
        return Weights(self._config.directory, self.dtype, self._device.torch_device)

    def _choose_dtype(self) -> torch.dtype:
        if self._config.dtype != "auto":
            return getattr(torch, self._config.dtype)  # type: ignore[no-any-return]
        stored: torch.dtype = getattr(torch, self._model_config.dtype)
        if self._device.supports(stored):
            return stored
        fallback = self._device.default_dtype
        log.warning("the checkpoint is %s, which is slow here: computing in %s", stored, fallback)
        return fallback

    # -- memory ---------------------------------------------------------------------------

    def _block_bytes(self) -> int:
        model: ModelConfig = self._model_config
        kv_heads = self._model.shard.kv_heads.size
        elements = 2 * model.num_layers * self.block_size * kv_heads * model.head_dim
        return elements * self.dtype.itemsize

    def _size_cache(self, free: int, used: int, peak: int) -> int:
        """How many blocks the cache gets: as given, or as many as fit and can be used."""
        config = self._config
        needed = -(-config.max_model_len // self.block_size)
        if config.num_kv_blocks is not None:
            blocks, arithmetic = config.num_kv_blocks, "num_kv_blocks"
        else:
            share = config.memory_utilization or self._device.default_memory_utilization
            if self._device.shared_memory:  # and so are the figures of what is free and used
                share, used = share / config.ranks, used // config.ranks
            left = int(free * share) - used - peak
            blocks = min(left // self._block_bytes(), config.max_num_seqs * needed)
            arithmetic = (
                f"{share:.0%} of {free // _MIB} MiB free - {used // _MIB} MiB of weights - "
                f"{peak // _MIB} MiB for a step = {left // _MIB} MiB in blocks of "
                f"{self._block_bytes() / _MIB:.2f} MiB"
            )
        check_cache(blocks, config, self.block_size, arithmetic)
        log.info("KV cache: %d blocks of %d tokens", blocks, self.block_size)
        return blocks

    def _allocate(self, blocks: int) -> list[KVCache]:
        model = self._model_config
        kv_heads = self._model.shard.kv_heads.size
        shape = (blocks, self.block_size, kv_heads, model.head_dim)

        def zeros() -> torch.Tensor:  # padded reads must see finite numbers from the start on
            return self._device.zeros(*shape, dtype=self.dtype)

        return [KVCache(zeros(), zeros()) for _ in range(model.num_layers)]

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
        self._caches = self._allocate(blocks)
        self.run(_warmup_prefill(1, np.arange(blocks), size))
        self._device.synchronize()
        used = max(0, free - self._device.memory().free)
        self._device.reset_peak()
        self.run(_warmup_prefill(tokens, np.arange(blocks), size))
        self._device.synchronize()
        peak = self._device.peak() * config.max_num_batched_tokens // max(tokens, 1)
        self.run(_warmup_decode(tokens, rows, np.arange(blocks), size))
        self._device.synchronize()
        self._caches = []
        self._last_tokens.zero_()
        log.info("warm-up of prefill and decode took %.2f s", time.monotonic() - begin)
        return used, peak

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
        hidden = self._model.forward(token_ids, positions, self._caches, batch)
        sampled = inputs.sampled
        forwarded = time.monotonic_ns()
        if not len(sampled.slots):
            return Computed(np.empty(0, np.int32), begin, forwarded, forwarded, forwarded)
        logits = self._model.logits(hidden[self._tensor(sampled.token_index)])
        chosen = self._sample(logits, self._sampling_batch(sampled))
        if self._config.debug:
            self._check_agreement(inputs.step, chosen)
        self._last_tokens[self._tensor(sampled.slots)] = chosen
        sampled_at = time.monotonic_ns()
        ids: Int32 = chosen.to("cpu", torch.int32).numpy()
        return Computed(ids, begin, forwarded, sampled_at, time.monotonic_ns())

    def _check_agreement(self, step: int, chosen: torch.Tensor) -> None:
        """Raise `RanksDisagree` where another rank has chosen other tokens."""
        weights = torch.arange(1, len(chosen) + 1, device=chosen.device) * 2654435761
        hashes = self._group.gather(((chosen + 1) * weights).sum()[None])
        if (hashes != hashes[0]).any():
            raise RanksDisagree(f"step {step}: the ranks' choices hash to {hashes.tolist()}")

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
        none,
        none,
        none,
        none,
        none,
    )
