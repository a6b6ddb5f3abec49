"""Steps on an accelerator: the batch lives there, and a decode step is the replay of one graph.

The loop's thread queues: a copy of what changed, a graph or the operators of a mixed step, a copy
of the ids to page-locked memory, an event. It never waits for the device. The waiting thread
blocks on the event and reads the ids.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
from tqdm import tqdm

from nanoactor.messages import Step
from nanoactor.models.batch import KVCache, ResidentBatch, RowBuffers, SamplingBatch, SlotTables
from nanoactor.models.device import Accelerator, TimedEvent
from nanoactor.models.lengths import HostLengths
from nanoactor.runner.captured import CapturedSteps
from nanoactor.runner.captures import PREFILL_ROWS, MixedSizes, decode_sizes
from nanoactor.runner.clock import DeviceClock
from nanoactor.runner.config import ExecutorConfig
from nanoactor.runner.execution import Computed
from nanoactor.runner.model import LoadedModel
from nanoactor.runner.resident import HostBatch, Prefill, Update
from nanoactor.runner.sampling_table import SampledRows
from nanoactor.runner.staging import DevicePrefill, FixedPrefill, Staging
from nanoactor.runner.warmup import decode_update, longest_lengths, prefill_step

log = logging.getLogger("nanoactor.runner")

_MIB = 1 << 20
# What the driver takes for a captured step beside its tensors, and for itself: generous estimates.
_GRAPH_BYTES = 4 * _MIB
_DRIVER_BYTES = 256 * _MIB


@dataclasses.dataclass(slots=True)
class _Turn:
    """What a step under way has for itself."""

    begin: TimedEvent
    end: TimedEvent
    ids: torch.Tensor
    """int32 (rows,), page-locked."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Launched:
    """A step in the device's queue."""

    executor: AcceleratorExecutor
    turn: _Turn
    rows: int

    def wait(self) -> Computed:
        """Block until the ids are on the host."""
        return self.executor.collect(self.turn, self.rows)


class AcceleratorExecutor:
    """One rank on one device."""

    def __init__(self, config: ExecutorConfig, device: Accelerator) -> None:
        """Load the weights, size and allocate the cache, capture the decode steps.

        Raises `ModelError` where the model's files are wrong or memory does not suffice.
        """
        self._config, self._device = config, device
        self.device_name = device.name
        self._captures = device.captures and not config.enforce_eager
        self.uncaptured = 0
        with device.stream():
            self._model = LoadedModel(config, device)
            self.dtype_name, self.block_size = self._model.dtype_name, self._model.block_size
            self._turns: deque[_Turn] = deque()
            self._last: _Turn | None = None
            """Whose end the clock counts from; its turn comes again after the next step's."""
            self._sizes = decode_sizes(config.max_num_seqs)
            self._mixed_sizes = MixedSizes.of(config.max_num_batched_tokens, config.max_num_seqs)
            self._captured = CapturedSteps(device, self._model.group, config.depth)
            self._clock = self._make_clock()
            used, peak = self._warm_up()
            self.num_blocks = self._model.size_cache(used, peak)
            self._make_state(self.num_blocks)
            if self._captures:
                self._capture()
            device.synchronize()

    def _make_turn(self) -> _Turn:
        begin, end = self._device.timed_event(), self._device.timed_event()
        return _Turn(begin, end, self._device.pinned(self._config.max_num_seqs, dtype=torch.int32))

    def _make_clock(self) -> DeviceClock:
        reference = self._device.timed_event()
        reference.record()
        reference.wait()
        return DeviceClock(reference)

    # -- the state on the device ----------------------------------------------------------

    def _make_state(self, blocks: int) -> None:
        """Tables, buffers and a cache of so many blocks, and more that padded rows write to."""
        config, model, device = self._config, self._model, self._device
        most = -(-config.max_model_len // self.block_size)
        heads, kv_heads = model.network.shard.heads.size, model.network.shard.kv_heads.size
        self._batch = HostBatch(
            config.max_num_seqs,
            most,
            device.tokens_per_program(heads, kv_heads),
            device.takes_lengths,
            device.samples_greedily,
        )
        layout = self._batch.layout
        dummies = device.dummy_blocks(config.max_num_seqs, self.block_size)
        self._caches: list[KVCache] = model.allocate(blocks + dummies)
        self._state = device.zeros(layout.size, dtype=torch.int32)

        def column(start: int, columns: int = 1) -> torch.Tensor:
            return self._state[start : start + columns * layout.slots]

        self._tables = SlotTables(
            self._state[: layout.lengths].view(layout.slots, most),
            column(layout.lengths),
            column(layout.last_tokens),
            column(layout.temperature).view(torch.float32),
            column(layout.top_k),
            column(layout.top_p).view(torch.float32),
            column(layout.min_p).view(torch.float32),
            column(layout.seeds, 2).view(2, layout.slots),
            self.block_size,
        )
        self._tables.blocks[layout.dummy] = blocks
        self._rows = column(layout.rows)
        self._rows.fill_(layout.dummy)
        self._make_buffers(heads, kv_heads)

    def _make_buffers(self, heads: int, kv_heads: int) -> None:
        config, device = self._config, self._device
        tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
        self._buffers = RowBuffers(
            device.zeros(tokens + rows, dtype=torch.int32),
            device.zeros(tokens + rows, dtype=torch.int32),
            device.zeros(tokens + rows, dtype=torch.int64),
            device.zeros(rows, dtype=torch.int32),
        )
        self._chosen = device.zeros(rows + PREFILL_ROWS, dtype=torch.int32)
        self._fixed: dict[int, FixedPrefill] = {}
        self._nothing = device.zeros(4, 0, dtype=torch.int32)
        model = self._model.config
        self._scratch = device.scratch(
            rows + PREFILL_ROWS, heads, kv_heads, model.head_dim, model.vocab_size
        )
        self._staging = Staging(device, config.depth + 2)

    # -- memory ---------------------------------------------------------------------------

    def _warm_up(self) -> tuple[int, int]:
        """Run maximal steps of both kinds on a small cache: (bytes of weights, of steps)."""
        config, device = self._config, self._device
        begin = time.monotonic()
        device.synchronize()
        free = device.memory().free
        used = max(0, self._model.free - free)
        longest = config.max_model_len - 1
        rows = min(-(-config.max_num_batched_tokens // longest), config.max_num_seqs)
        tokens = min(config.max_num_batched_tokens, rows * longest)
        prefill = prefill_step(tokens, rows, self.block_size)
        blocks = int(prefill.table_blocks.max()) + 1
        self._make_state(blocks)
        self._run_once(prefill)  # compiles
        # What stays beside the cache: buffers, and what libraries keep for themselves.
        dummies = device.dummy_blocks(config.max_num_seqs, self.block_size)
        cache = (blocks + dummies) * self._model.block_bytes()
        kept = max(0, free - device.memory().free - cache)
        device.reset_peak()
        prompted = _timed(lambda: self._run_once(prefill))
        peak = device.peak()
        device.reset_peak()
        decoded = _timed(self._decode_once)
        self.warmed_up: tuple[tuple[int, float], ...] = (
            (tokens, prompted),
            (config.max_num_seqs, decoded),
        )
        captured = max(peak, device.peak())
        device.reset_peak()
        self._decode_once(top_p=0.9)
        peak = max(captured, device.peak())
        if self._captures:
            peak += captured + _GRAPH_BYTES * self._count_captures()
        log.info("warm-up took %.1f s", time.monotonic() - begin)
        self._caches = []
        return used, peak + kept + _DRIVER_BYTES

    def _count_captures(self) -> int:
        mixed = self._mixed_sizes if self._device.captures_prompts else MixedSizes((), ())
        # Lengths that the host writes into a graph: one graph for each step under way.
        turns = self._config.depth if self._device.takes_lengths else 1
        return turns * len(self._sizes) + len(mixed.tokens) * len(mixed.rows)

    def _run_once(self, step: Step) -> None:
        self.submit(step).wait()
        self._device.synchronize()

    def _decode_once(self, top_p: float = 1.0) -> None:
        update = decode_update(self._config.max_num_seqs, self._batch.layout.dummy, top_p)
        self._launch(0, update).wait()
        self._device.synchronize()

    # -- graphs ---------------------------------------------------------------------------

    def _capture(self) -> None:
        """Largest first, so that the smaller ones find room in what it took."""
        begin, before = time.monotonic(), self._device.memory().free
        work: list[Callable[[], None]] = []
        if self._device.captures_prompts:
            work += self._mixed_captures()
        work += [functools.partial(self._capture_decode, rows) for rows in self._sizes[::-1]]
        for capture in tqdm(work, desc="capturing steps", disable=None, leave=False):
            capture()
        seconds, taken = time.monotonic() - begin, before - self._device.memory().free
        log.info(
            "captured %d of %d steps in %.1f s: decode up to %d rows%s; they take %d MiB",
            len(work) - self._captured.failed,
            len(work),
            seconds,
            self._sizes[-1],
            f", prompts up to {max(self._fixed)} tokens" if self._fixed else "",
            taken // _MIB,
        )

    def _mixed_captures(self) -> Iterator[Callable[[], None]]:
        dummy, each = self._batch.layout.dummy, self._batch.tokens_per_program
        for tokens in self._mixed_sizes.tokens[::-1]:
            turns = self._config.depth + 2
            self._fixed[tokens] = FixedPrefill(self._device, tokens, each, dummy, turns)
            for rows in self._mixed_sizes.rows[::-1]:
                yield functools.partial(self._capture_mixed, tokens, rows)

    def _capture_decode(self, rows: int) -> None:
        longest = longest_lengths(
            rows, self.num_blocks, self.block_size, self._config.max_model_len
        )
        self._captured.add_decode(rows, functools.partial(self._decode, rows), longest)

    def _capture_mixed(self, tokens: int, rows: int) -> None:
        run = functools.partial(self._mixed, self._fixed[tokens].inputs, rows)
        self._captured.add_mixed((tokens, rows), run)

    def _decode(self, rows: int, lengths: HostLengths) -> torch.Tensor:
        """A whole step of so many rows of the decode set, dummies included; returns their hidden
        states. (Logits would be kept for each capture: gigabytes.)"""
        device, slots = self._device, self._rows[:rows]
        buffers = self._sliced(0, rows)
        device.advance(self._tables, slots, buffers)
        batch = ResidentBatch(
            buffers.slot_mapping,
            self._tables.blocks,
            0,
            self._nothing,
            self._nothing[:2],
            slots,
            buffers.contexts,
            lengths,
            None,
        )
        hidden = self._forward(buffers, batch)
        self._choose(hidden, slots)
        return hidden

    def _forward(self, buffers: RowBuffers, batch: ResidentBatch) -> torch.Tensor:
        batch = self._device.plan(self._scratch, batch)
        forward = self._model.network.forward
        return self._device.run(forward, buffers.token_ids, buffers.positions, self._caches, batch)

    def _sliced(self, first: int, rows: int) -> RowBuffers:
        buffers, at = self._buffers, slice(first, first + rows)
        return RowBuffers(
            buffers.token_ids[at],
            buffers.positions[at],
            buffers.slot_mapping[at],
            buffers.contexts[:rows],
        )

    def _choose(self, hidden: torch.Tensor, slots: torch.Tensor) -> None:
        if self._config.ranks == 1:
            chosen = self._chosen[: len(slots)]
            logits = self._model.network.logits(hidden)
            self._device.sample_rows(logits, slots, self._tables, self._scratch, chosen)

    # -- running --------------------------------------------------------------------------

    def submit(self, step: Step) -> _Launched:
        """Queue a step."""
        with self._device.stream():
            return self._launch(step.step, self._batch.update(step, self._config.ranks > 1))

    def _launch(self, number: int, update: Update) -> _Launched:
        turn = self._turns.popleft() if self._turns else self._make_turn()
        prefill = update.prefill
        fits = self._fitting(prefill, update.decodes) if prefill else None
        staging = self._staging
        staging.begin(update.words)
        changes = [staging.put(array) for array in update.changes]
        staged = self._staged(prefill) if prefill and not fits else None
        special = [self._staged_sampling(part) for part in update.special]
        staging.send()
        if prefill and fits:
            self._fixed[fits[0]].fill(prefill)
        turn.begin.record()
        if changes:
            self._state[changes[0]] = changes[1]
        if staged is not None:
            hidden = self._mixed(staged, update.decodes, update.lengths)
        elif fits:
            hidden = self._captured.mixed(fits)
        else:
            hidden = self._decode_step(update)
        prompts = len(prefill.sampling) if prefill else 0
        padded = PREFILL_ROWS if fits else prompts
        for part in special:
            self._choose_special(number, hidden, *part, prompts, padded)
        count = prompts + update.decodes
        if prompts:
            turn.ids[:prompts].copy_(self._chosen[:prompts], non_blocking=True)
        if update.decodes:
            decoded = self._chosen[padded : padded + update.decodes]
            turn.ids[prompts:count].copy_(decoded, non_blocking=True)
        turn.end.record()
        return _Launched(self, turn, count)

    def _decode_step(self, update: Update) -> torch.Tensor:
        replayed = self._captured.decode(update.decodes, update.lengths)
        if replayed is not None:
            return replayed
        self.uncaptured += self._captured.failed > 0
        return self._decode(update.decodes, update.lengths)

    def _fitting(self, prefill: Prefill, rows: int) -> tuple[int, int] | None:
        """The captured mixed step that holds this one."""
        if not self._fixed:
            return None
        fits = self._mixed_sizes.fit(len(prefill.token_ids), prefill.rows.shape[1], rows)
        if fits is not None and not self._captured.has_mixed(fits):
            self.uncaptured += 1
            return None
        return fits

    def _staged(self, prefill: Prefill) -> DevicePrefill:
        fields = dataclasses.fields(Prefill)
        return DevicePrefill(*(self._staging.put(getattr(prefill, field.name)) for field in fields))

    def _mixed(self, prefill: DevicePrefill, rows: int, lengths: HostLengths) -> torch.Tensor:
        """A step with prompt chunks; returns the hidden states of the rows that sample: prompts
        that end here, then the decode set."""
        device, first = self._device, len(prefill.token_ids)
        every, decodes = self._sliced(0, first + rows), self._rows[:rows]
        every.token_ids[:first] = prefill.token_ids
        every.positions[:first] = prefill.positions
        device.locate(self._tables, prefill.slots, prefill.positions, every.slot_mapping[:first])
        buffers = self._sliced(first, rows)
        device.advance(self._tables, decodes, buffers)
        batch = ResidentBatch(
            every.slot_mapping,
            self._tables.blocks,
            first,
            prefill.rows,
            prefill.tiles,
            decodes,
            buffers.contexts,
            lengths,
            None,
        )
        hidden = self._forward(every, batch)
        sampling = hidden.index_select(0, prefill.ends)
        if rows:
            sampling = torch.cat((sampling, hidden[first:]))
        self._choose(sampling, torch.cat((prefill.sampling, decodes)))
        return sampling

    def _staged_sampling(
        self, rows: SampledRows
    ) -> tuple[torch.Tensor, torch.Tensor, SamplingBatch]:
        put = self._staging.put
        fields = [field.name for field in dataclasses.fields(SamplingBatch)]
        batch = SamplingBatch(**{name: put(getattr(rows, name)) for name in fields})
        return put(rows.token_index), put(rows.slots), batch

    def _choose_special(
        self,
        step: int,
        hidden: torch.Tensor,
        index: torch.Tensor,
        slots: torch.Tensor,
        batch: SamplingBatch,
        prompts: int,
        padded: int,
    ) -> None:
        """Rows that the fused sampler does not do; or all, where there are other ranks."""
        if padded > prompts:
            index = torch.where(index < prompts, index, index + (padded - prompts))
        logits = self._model.network.logits(hidden.index_select(0, index))
        chosen = self._model.sample(logits, batch)
        if self._config.debug and self._config.ranks > 1:
            self._model.check_agreement(step, chosen)
        self._chosen[index] = chosen.int()
        self._tables.last_tokens[slots] = chosen.int().clamp_min(0)

    def collect(self, turn: _Turn, rows: int) -> Computed:
        """Wait for a step; runs on the waiting thread."""
        turn.end.wait()
        begin, end = self._clock.step(turn.begin, turn.end)
        ids = turn.ids[:rows].numpy().copy()
        if self._last is not None:
            self._turns.append(self._last)
        self._last = turn
        return Computed(ids, begin, end, end, end)


def _timed(work: Callable[[], None]) -> float:
    """The seconds that it takes."""
    begin = time.monotonic()
    work()
    return time.monotonic() - begin
