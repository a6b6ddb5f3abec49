"""Steps on a device: the batch lives there, and a decode step is the replay of one graph where the
device records graphs.

A step is laid out on the node's loop (NumPy alone) and launched on the device's thread: a copy of
what changed, a graph or operators, a copy of the ids to page-locked memory, an event. Where the
device has a queue of its own, another thread waits for the event.
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

from nanoactor.actors.config import has_grammars
from nanoactor.messages import Int32, Step
from nanoactor.models.batch import (
    AttentionBatch,
    DecodeRows,
    KVCache,
    RowBuffers,
    SlotTables,
    decode_batch,
    with_final_rows,
)
from nanoactor.models.columns import WORDS
from nanoactor.models.device import Device, TimedEvent
from nanoactor.models.logit_rules import TokenIds
from nanoactor.models.seq_lens import HostSeqLens
from nanoactor.runner.batch import NO_MASKS, HostBatch
from nanoactor.runner.choosing import TokenChooser
from nanoactor.runner.clock import DeviceClock
from nanoactor.runner.config import RankConfig
from nanoactor.runner.double import BatchDouble
from nanoactor.runner.graphs import CapturedSteps, MixedSize, MixedSizes, decode_sizes
from nanoactor.runner.in_flight import InFlight
from nanoactor.runner.inputs import Array, Inputs, Prefill, SeenPictures, Update
from nanoactor.runner.mixed import MixedInputs
from nanoactor.runner.model import LoadedModel, copy_blocks
from nanoactor.runner.pixels import NO_PIXELS, PixelsOf, with_vision
from nanoactor.runner.protocol import Computed
from nanoactor.runner.published import PublishedIds
from nanoactor.runner.scoring import AT_ONCE
from nanoactor.runner.staging import Staging
from nanoactor.runner.step_choices import StepChoices
from nanoactor.runner.threads import ThreadChoice
from nanoactor.runner.warmup import decode_update, longest_lengths, prefill_step

log = logging.getLogger("nanoactor.runner")

_MIB = 1 << 20
# What the driver takes for a captured step beside its tensors, and for itself: generous estimates.
_GRAPH_BYTES = 4 * _MIB
_DRIVER_BYTES = 256 * _MIB
# Where a step is done when its call returns, a maximal one would take minutes for a large model;
# the memory that it needs grows in proportion to its tokens.
_SMALL_WARMUP_TOKENS, _SMALL_WARMUP_ROWS = 256, 16


@dataclasses.dataclass(frozen=True, slots=True)
class _Launched:
    """A step in the device's queue, or done."""

    executor: DeviceExecutor
    buffers: InFlight

    def wait(self) -> Computed:
        """Block until the ids are on the host."""
        return self.executor.collect(self.buffers)


class DeviceExecutor:
    """One rank on one device."""

    def __init__(self, config: RankConfig, device: Device) -> None:
        """Load the weights, size and allocate the cache, capture the decode steps.

        Raises `ModelError` where the model's files are wrong or memory does not suffice.
        """
        engine = config.engine
        self._config, self._device = engine, device
        self._longest, self._constrains = config.files.max_model_len, has_grammars(config.files)
        self.device_name, self.asynchronous = device.name, device.asynchronous
        alone = engine.tensor_parallel_size == 1
        self._fused = device.fused_sampling if alone else device.fused_sampling_of_ranks
        self._uses_graphs = device.captures_graphs and engine.device_options.graph_mode != "eager"
        self.any_thread = device.any_thread and alone
        self.max_depth = engine.steps_in_flight(deep=device.deep_pipeline)
        self.too_large = self.uncaptured = 0
        self._dropped: list[int] = []
        with device.stream():
            self._model = LoadedModel(config, device)
            self.dtype_name, self.block_size = self._model.dtype_name, self._model.block_size
            self._free_buffers: deque[InFlight] = deque()
            self._last: InFlight | None = None
            """The clock counts from their end; they are used again after the next step."""
            self._sizes = decode_sizes(engine.max_num_seqs)
            self._mixed_sizes = MixedSizes((), ())
            if device.captures_prompts:
                limits = engine.max_num_batched_tokens, engine.max_num_seqs
                self._mixed_sizes = MixedSizes.of(*limits, sees=self._model.encoder is not None)
            self._captured = CapturedSteps(device, self._model.group, self.max_depth)
            self._clock = DeviceClock.started(device)
            # What a rank measures while it waits for the others is theirs.
            alone = engine.tensor_parallel_size == 1 and not engine.threads
            measures = alone and not device.asynchronous
            self._threads = ThreadChoice(self._model.threads) if measures else None
            self.num_blocks = self._model.size_cache(*self._warm_up())
            self.encoder_pages = self._model.encoder.pages if self._model.encoder else 0
            self._make_state(self.num_blocks)
            if self._uses_graphs:
                self._capture()
            device.synchronize()

    # -- the state on the device ----------------------------------------------------------

    def _make_state(self, blocks: int) -> None:
        """Tables, buffers and a cache of so many blocks, and more that padded rows write to."""
        config, model, device = self._config, self._model, self._device
        most = -(-self._longest // self.block_size)
        self._traits = model.batch_traits(self._fused, config.max_num_seqs)
        self._new_batch = functools.partial(HostBatch, config.max_num_seqs, most, self._traits)
        self._batch = self._new_batch()
        self._double = BatchDouble(self._traits, self.block_size)
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
            column(layout.rope_deltas) if model.encoder else None,
            column(layout.sampling, WORDS).view(WORDS, layout.slots),
            self.block_size,
        )
        ids = device.zeros((blocks + dummies) * self.block_size, dtype=torch.int32)
        self._tokens = TokenIds(ids, column(layout.prompt_lengths), self._tables)
        self._chooser = TokenChooser(
            model,
            self._fused,
            self._tokens,
            max_num_seqs=config.max_num_seqs,
            debug=config.debug,
            constrains=self._constrains,
        )
        self._published = PublishedIds(device, self.max_depth + 2, config.max_num_seqs)
        self._choices = StepChoices(model, self._chooser, layout.slots)
        rows = layout.rows, layout.row_positions, layout.row_token_ids
        self._rows = DecodeRows(*map(column, rows))
        self._make_buffers()
        self._point_to_dummy(blocks)

    def _point_to_dummy(self, blocks: int) -> None:
        self._tables.blocks[self._batch.layout.dummy] = blocks
        self._rows.slots.fill_(self._batch.layout.dummy)
        self._rows.positions.fill_(-1)

    def renew(self) -> None:
        """Forget all sequences; nothing is under way."""
        with self._device.stream():
            self._batch, self._dropped = self._new_batch(), []
            self._state.zero_()
            self._point_to_dummy(self.num_blocks)
            if self._model.encoder is not None:
                self._model.encoder.forget()

    def _make_buffers(self) -> None:
        config, device = self._config, self._device
        tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
        self._buffers = RowBuffers.zeros(device.zeros, tokens + rows, rows)
        self._inputs = MixedInputs(device, self._mixed_sizes, self.max_depth + 2)
        self._prompts: torch.Tensor | None = None
        """Hidden states of the prompts' tokens of the step at hand; of captured steps, which all
        write them to the same place, ..."""
        self._kept: torch.Tensor | None = None
        """... here."""
        if sizes := self._mixed_sizes.tokens:
            shape = sizes[-1], self._model.config.hidden_size
            self._kept = device.zeros(*shape, dtype=self._model.dtype)
        self._nothing = device.zeros(4, 1, dtype=torch.int32)[:, :0]
        self._dummies = torch.full_like(self._buffers.contexts, self._batch.layout.dummy)
        self._staging = Staging(device, self.max_depth + 2)
        self._packing: Staging | None = None
        """For rehearsals."""

    # -- memory ---------------------------------------------------------------------------

    def _warm_up(self) -> tuple[int, int]:
        """Run large steps of both kinds on a small cache: (bytes of weights, of a maximal step)."""
        config, device = self._config, self._device
        begin = time.monotonic()
        device.synchronize()
        free = device.memory().free
        used = max(0, self._model.free - free)
        longest = self._longest - 1
        rows = min(-(-config.max_num_batched_tokens // longest), config.max_num_seqs)
        most = min(config.max_num_batched_tokens, rows * longest)
        tokens, decoding = most, config.max_num_seqs
        if not device.asynchronous:
            tokens, decoding = min(most, _SMALL_WARMUP_TOKENS), min(decoding, _SMALL_WARMUP_ROWS)
        prefill = prefill_step(tokens, min(rows, tokens), self.block_size)
        blocks = int(prefill.table_blocks.max()) + 1
        self._make_state(blocks)
        self._run_once(prefill)  # compiles
        # What stays beside the cache: buffers, and what libraries keep for themselves.
        dummies = device.dummy_blocks(config.max_num_seqs, self.block_size)
        cache = (blocks + dummies) * self._model.block_bytes()
        kept = max(0, free - device.memory().free - cache)
        prompted, peak = self._measured(lambda: self._run_once(prefill))
        decoded, captured = self._measured(lambda: self._decode_once(decoding))
        self.warmed_up: tuple[tuple[int, float], ...] = ((tokens, prompted), (decoding, decoded))
        _, cut = self._measured(lambda: self._decode_once(decoding, top_p=0.9))
        _, ruled = self._measured(lambda: self._decode_once(decoding, repetition_penalty=1.1))
        at_once, top = min(AT_ONCE, tokens), config.max_logprobs
        _, scored = self._measured(lambda: self._choices.warm_up(at_once, top))
        captured = max(captured, peak)
        peak = max(peak * most // tokens, captured, cut, ruled, scored)
        peak += self._warm_up_encoder()  # half encoded pictures stay while prompts are computed
        if self._uses_graphs:
            peak += captured + _GRAPH_BYTES * self._count_captures()
        log.info("warm-up took %.1f s", time.monotonic() - begin)
        self._caches = []
        return used, peak + kept + (_DRIVER_BYTES if device.asynchronous else 0)

    def _warm_up_encoder(self) -> int:
        """Return the bytes that the largest picture takes."""
        if (encoder := self._model.encoder) is None:
            return 0
        most = encoder.largest(self._longest)
        rows = most if self._device.asynchronous else min(most, _SMALL_WARMUP_TOKENS)
        encoder.warm_up(rows)
        seconds, taken = self._measured(lambda: encoder.warm_up(rows))
        self.warmed_up += ((rows, seconds),)
        return taken * most // rows

    def _measured(self, work: Callable[[], None]) -> tuple[float, int]:
        """(the seconds that it takes, the bytes)."""
        self._device.reset_peak()
        begin = time.monotonic()
        work()
        return time.monotonic() - begin, self._device.peak()

    def _count_captures(self) -> int:
        # Lengths that the host writes into a graph: one graph for each step under way.
        in_flight = self.max_depth if self._device.needs_host_seq_lens else 1
        return in_flight * len(self._sizes) + len(self._mixed_sizes)

    def _run_once(self, step: Step) -> None:
        self.launch(self.prepare(step)).wait()
        self._device.synchronize()

    def _decode_once(self, rows: int, **sampling: float) -> None:
        dummy, longest = self._batch.layout.dummy, self._longest
        update = decode_update(rows, dummy, self._traits, longest, **sampling)
        self.launch(update).wait()
        self._device.synchronize()

    # -- graphs ---------------------------------------------------------------------------

    def _capture(self) -> None:
        """Largest first, so that the smaller ones find room in what it took."""
        self._model.make_whole_steps(self._sizes)
        begin, before = time.monotonic(), self._device.memory().free
        work = [*self._mixed_captures()]
        work += [functools.partial(self._capture_decode, rows) for rows in self._sizes[::-1]]
        for capture in tqdm(work, desc="capturing steps", disable=None, leave=False):
            capture()
        self._published.restart()
        seconds, taken = time.monotonic() - begin, before - self._device.memory().free
        log.info(
            "captured %d of %d steps in %.1f s: decode up to %d rows%s; they take %d MiB",
            len(work) - self._captured.failed,
            len(work),
            seconds,
            self._sizes[-1],
            f", prompts up to {self._inputs.longest} tokens" if self._inputs.longest else "",
            taken // _MIB,
        )

    def _mixed_captures(self) -> Iterator[Callable[[], None]]:
        dummy, each = self._batch.layout.dummy, self._traits.tokens_per_program
        for size in self._inputs.make(each, dummy):
            yield functools.partial(self._capture_mixed, size)

    def _capture_decode(self, rows: int) -> None:
        longest = longest_lengths(rows, self.num_blocks, self.block_size, self._longest)
        self._captured.add_decode(rows, functools.partial(self._decode, rows), longest)

    def _capture_mixed(self, size: MixedSize) -> None:
        prefill, seen = self._inputs.of(size)
        step = functools.partial(self._mixed, prefill, size.rows, seen, kept=self._kept)
        self._captured.add_mixed(size, step)

    def _decode(self, rows: int, lengths: HostSeqLens) -> torch.Tensor:
        """A whole step of so many rows of the decode batch, dummies included; returns their hidden
        states. (Logits would be kept for each capture: gigabytes.)"""
        device, slots = self._device, self._rows.slots[:rows]
        buffers = self._sliced(0, rows)
        device.advance(self._tables, self._rows.first(rows), buffers, self._tokens.ids)
        where = buffers, slots, self._tables.blocks, self._caches
        if whole := self._model.whole_step(*where, self._chooser.room(rows)):
            hidden, logits = whole
        else:
            batch = decode_batch(buffers, slots, self._tables, self._nothing, lengths)
            hidden, logits = self._forward(buffers, batch, buffers.positions), None
        self._chooser.choose(hidden, slots, logits)
        self._published.publish(self._chooser.chosen[:rows])
        return hidden

    def _forward(
        self, buffers: RowBuffers, batch: AttentionBatch, positions: torch.Tensor
    ) -> torch.Tensor:
        batch = self._device.plan(self._chooser.scratch, batch)
        forward = self._model.network.forward
        return self._device.run(forward, buffers.token_ids, positions, self._caches, batch)

    def _sliced(self, first: int, rows: int) -> RowBuffers:
        buffers, at = self._buffers, slice(first, first + rows)
        return RowBuffers(
            buffers.token_ids[at],
            buffers.positions[at],
            buffers.slot_mapping[at],
            buffers.contexts[:rows],
        )

    # -- running --------------------------------------------------------------------------

    def prepare(self, step: Step, pixels: PixelsOf = NO_PIXELS, masks: Int32 = NO_MASKS) -> Update:
        """Lay a step out; NumPy alone."""
        dropped, self._dropped = self._dropped, []
        return with_vision(self._batch.update(step, masks), step, pixels, dropped)

    def drop_pixels(self, numbers: list[int]) -> None:
        """Have the next step forget what of these is half encoded; those before may add to it."""
        self._dropped += numbers

    def rehearse(self) -> Iterator[object]:
        """Lay out a made-up prompt, and pack it; nothing is sent."""
        update = self._double.update()
        yield update
        self._packing = self._packing or Staging(self._device, in_flight=1)
        yield self._packing.put_inputs(self._packed(update, captured=bool(self._inputs.longest)))

    def launch(self, prepared: Update) -> _Launched:
        """Queue a step, or compute it."""
        with self._device.stream():
            if self._threads is None or not prepared.rows:
                return self._launch(prepared)
            self._device.prepare_thread(self._threads.choose(prepared))
            begin = time.perf_counter()
            launched = self._launch(prepared)
            self._threads.note(prepared, time.perf_counter() - begin)
            return launched

    def _launch(self, update: Update) -> _Launched:
        if self._free_buffers:
            buffers = self._free_buffers.popleft()
        else:
            buffers = InFlight.make(self._device, self._config.max_num_seqs)
        fits = self._fitting(update)
        inputs = self._staging.put_inputs(self._packed(update, captured=fits is not None))
        self._staging.send()
        if fits:
            self._inputs.fill(fits, update)
        buffers.begin.record()
        if inputs.changes:
            self._state[inputs.changes[0]] = inputs.changes[1]
        if inputs.copies:
            copy_blocks(self._caches, self._tokens, *inputs.copies)
        if update.encoding and self._model.encoder:
            self._model.encoder.apply(update.encoding)
            buffers.encoded.record()
        hidden = self._compute(update, inputs, fits)
        self._mark(buffers.forwarded)
        states = self._kept if fits else self._prompts, hidden
        room = fits.prompts if fits else None
        chosen = self._choices.choose(update, inputs, states, buffers, room=room)
        self._mark(buffers.sampled)
        published = None
        if update.prefill is None and update.decode_rows:
            published = self._published.take(update.decodes)
        more = inputs.fallback or inputs.choices or update.resumed
        buffers.take_ids(update, chosen, None if more else published)
        buffers.end.record()
        self._chooser.compare(update.step, *chosen)
        self._prompts = None
        return _Launched(self, buffers)

    def _packed(self, update: Update, *, captured: bool) -> Inputs[Array]:
        """Return what is staged: a captured step reads its prompts from a place of its own."""
        inputs = update.inputs
        return dataclasses.replace(inputs, prefill=None, seen=None) if captured else inputs

    def _compute(
        self, update: Update, inputs: Inputs[torch.Tensor], fits: MixedSize | None
    ) -> torch.Tensor:
        """Hidden states of the rows that sample."""
        if inputs.prefill is not None:
            narrows = self._device.narrows_last_layer and inputs.seen is None
            final = update.final_lengths if narrows else None
            rows = update.decode_rows
            return self._mixed(inputs.prefill, rows, inputs.seen, update.lengths, final=final)
        if fits:
            return self._captured.mixed(fits)
        if not update.decode_rows:  # a step that encodes, or chooses from what is kept
            return self._choices.kept.states[:0]
        return self._decode_step(update)

    def _mark(self, event: TimedEvent) -> None:
        """Record where a step is; one graph holds both, where the device has a queue."""
        if not self.asynchronous:
            event.record()

    def _decode_step(self, update: Update) -> torch.Tensor:
        replayed = self._captured.decode(update.decode_rows, update.lengths)
        if replayed is not None:
            return replayed
        self.uncaptured += self._captured.failed > 0
        return self._decode(update.decode_rows, update.lengths)

    def _fitting(self, update: Update) -> MixedSize | None:
        """The captured mixed step that holds this one."""
        fits = self._inputs.fit(update)
        if fits is None and update.prefill is not None and self._inputs.longest:
            self.too_large += 1
        if fits is not None and not self._captured.has_mixed(fits):
            self.uncaptured += 1
            return None
        return fits

    def _mixed(
        self,
        prefill: Prefill[torch.Tensor],
        rows: int,
        seen: SeenPictures[torch.Tensor] | None,
        lengths: HostSeqLens,
        kept: torch.Tensor | None = None,
        final: HostSeqLens | None = None,
    ) -> torch.Tensor:
        """A step with prompt chunks; returns the hidden states of the rows that sample: prompts
        that end here, then the decode batch. Those of all prompts' tokens are left in `kept`, if
        there is one, else in `_prompts`; with `final` nobody wants them."""
        device, first = self._device, len(prefill.token_ids)
        every, decodes = self._sliced(0, first + rows), self._rows.slots[:rows]
        every.token_ids[:first] = prefill.token_ids
        every.positions[:first] = prefill.positions
        device.locate(self._tables, prefill.slots, prefill.positions, every.slot_mapping[:first])
        buffers = self._sliced(first, rows)
        self._tokens.write(every.slot_mapping[:first], every.token_ids[:first])
        device.advance(self._tables, self._rows.first(rows), buffers, self._tokens.ids)
        batch = AttentionBatch(
            every.slot_mapping,
            self._tables.blocks,
            self.block_size,
            prefill_tokens=first,
            prefill_rows=prefill.rows,
            prefill_tiles=prefill.tiles,
            decode_slots=decodes,
            decode_contexts=buffers.contexts,
            lengths=lengths,
            visual=self._model.encoder.read(seen.rows) if seen and self._model.encoder else None,
        )
        if final is not None:
            plan = functools.partial(device.plan, self._chooser.scratch)
            chunks = prefill.ends, prefill.slots, prefill.positions
            batch = with_final_rows(batch, chunks, final, plan)
        positions = every.positions
        if seen is not None:
            after = buffers.positions.expand(3, -1)
            positions = torch.cat((seen.positions, after), dim=1)
        hidden = sampling = self._forward(every, batch, positions)
        if final is None:
            if kept is None:
                self._prompts = hidden[:first]
            else:
                kept[:first].copy_(hidden[:first])
            sampling = hidden.index_select(0, prefill.ends)
            if rows:
                sampling = torch.cat((sampling, hidden[first:]))
        keeping = self._dummies[: len(prefill.ends) - len(prefill.sampling)]
        self._chooser.choose(sampling, torch.cat((prefill.sampling, keeping, decodes)))
        return sampling

    def collect(self, buffers: InFlight) -> Computed:
        """Wait for a step."""
        with self._model.explaining():
            computed = buffers.collect(self._clock, split=not self.asynchronous)
        if self._last is not None:
            self._free_buffers.append(self._last)
        self._last = buffers
        return computed
