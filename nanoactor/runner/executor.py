"""Execution of steps on a device. The batch stays on the device. If the device captures graphs, a
decode step replays a single graph.

A step is laid out on the event loop of the runner's process, with NumPy only, and launched on the
device thread. A launch consists of a copy of the changes to the device, a graph or single
operators, a copy of the token ids to pinned memory, and an event. If the device is asynchronous,
another thread waits for the event.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

from nanoactor.messages.engine import Int32, Step
from nanoactor.models.devices.protocols import Device, TimedEvent
from nanoactor.runner.batch.batch import NO_MASKS, HostBatch
from nanoactor.runner.batch.inputs import Array, Inputs, Update
from nanoactor.runner.batch.pixels import NO_PIXELS, PixelsByNumber, with_vision
from nanoactor.runner.batch.rehearsal_batch import RehearsalBatch
from nanoactor.runner.batch.staging import Staging
from nanoactor.runner.config import RankConfig
from nanoactor.runner.model.model import LoadedModel
from nanoactor.runner.model.resident import ResidentBatch
from nanoactor.runner.protocol import StepResult
from nanoactor.runner.steps.choosing import TokenChooser
from nanoactor.runner.steps.forward import StepForward
from nanoactor.runner.steps.graph_runner import GraphRunner
from nanoactor.runner.steps.graphs import MixedSizes
from nanoactor.runner.steps.published import PublishedIds
from nanoactor.runner.steps.scoring import AT_ONCE
from nanoactor.runner.steps.step_buffers import StepBuffers
from nanoactor.runner.steps.step_choices import StepChoices
from nanoactor.runner.steps.warmup import decode_update, longest_lengths, prefill_step
from nanoactor.runner.timing.clock import DeviceClock
from nanoactor.runner.timing.threads import ThreadChoice
from nanoactor.setup.actors import has_grammars

log = logging.getLogger("nanoactor.runner")

_MIB = 1 << 20
# Upper estimates of driver memory: per captured step, in addition to its tensors, and in total.
_GRAPH_BYTES = 4 * _MIB
_DRIVER_BYTES = 256 * _MIB
# Maximum size of a warm-up step on synchronous devices, on which the largest step of a large model
# would take minutes. The memory that a step needs is proportional to its tokens.
_SMALL_WARMUP_TOKENS, _SMALL_WARMUP_ROWS = 256, 16


@dataclasses.dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step that was queued on the device or, on a synchronous device, has finished."""

    executor: DeviceExecutor
    buffers: StepBuffers

    def wait(self) -> StepResult:
        """Wait until the token ids are on the host, and return the step's results."""
        return self.executor.collect(self.buffers)


class DeviceExecutor:
    """The executor of one rank on one device; implements `nanoactor.runner.protocol.Executor`."""

    def __init__(self, config: RankConfig, device: Device) -> None:
        """Load the weights, size and allocate the KV cache, and capture steps.

        Raises `ModelError` if the model's files are malformed or if there is not enough memory.
        """
        engine = config.engine
        self._config, self._device, self._max_model_len = engine, device, config.files.max_model_len
        is_single_rank = engine.tensor_parallel_size == 1
        self.allows_any_thread = device.traits.allows_any_thread and is_single_rank
        self.max_depth = engine.steps_in_flight(deep=device.traits.deep_pipeline)
        self._dropped: list[int] = []
        with device.stream():
            self._model = LoadedModel(config, device)
            fused = (
                device.traits.fused_sampling
                if is_single_rank
                else device.traits.sharded_fused_sampling
            )
            self._traits = self._model.batch_traits(fused, engine.max_num_seqs)
            self._rehearsal_batch = RehearsalBatch(self._traits, self.block_size)
            self._free_buffers: deque[StepBuffers] = deque()
            self._last_collected: StepBuffers | None = None
            """Buffers of the latest collected step; None before the first one. The clock measures
            from the end of that step, so they are reused only after the next step is collected."""
            self._clock = DeviceClock.started(device)
            # With several ranks, the times measured on one would include waiting for the others.
            can_measure = is_single_rank and not engine.threads and not device.traits.asynchronous
            self._threads = ThreadChoice(self._model.threads) if can_measure else None
            constrains = has_grammars(config.files)
            self.num_blocks = self._model.cache_sizing.num_blocks(*self._warm_up(constrains))
            self.encoder_pages = self._model.encoder.pages if self._model.encoder else 0
            self._make_state(self.num_blocks, constrains)
            if self._captures:
                self._capture()
            device.synchronize()

    @property
    def device_name(self) -> str:
        """Human-readable name of the device."""
        return self._device.traits.name

    @property
    def asynchronous(self) -> bool:
        """True if `launch` returns before the step is done."""
        return self._device.traits.asynchronous

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in which the model computes, such as "bfloat16"."""
        return self._model.dtype_name

    @property
    def block_size(self) -> int:
        """Number of tokens in a KV cache block."""
        return self._model.block_size

    @property
    def too_large(self) -> int:
        """Number of steps with prompts so far that were larger than all captured steps."""
        return self._graphs.too_large

    @property
    def uncaptured(self) -> int:
        """Number of steps so far that were launched operator by operator because their size could
        not be captured."""
        return self._graphs.uncaptured

    # -- the state on the device ----------------------------------------------------------

    def _make_state(self, blocks: int, constrains: bool) -> None:
        """Allocate tables, buffers and a cache of `blocks` blocks. `constrains` is True if requests
        may use grammars."""
        config, model, device = self._config, self._model, self._device
        self._batch = self._empty_batch()
        self._resident = ResidentBatch(model, self._batch.layout, blocks)
        chooser = TokenChooser(
            model,
            self._traits.fused_sampling,
            self._resident.tokens,
            max_num_seqs=config.max_num_seqs,
            debug=config.debug,
            constrains=constrains,
        )
        self._choices = StepChoices(model, chooser, self._batch.layout.slots)
        tokens, mixed = config.max_num_batched_tokens, MixedSizes((), ())
        if device.traits.captures_prompts:
            mixed = MixedSizes.of(tokens, config.max_num_seqs, has_images=model.encoder is not None)
        self._forward = StepForward(
            model,
            self._resident,
            chooser,
            PublishedIds(device, self.max_depth + 2, config.max_num_seqs),
            max_tokens=tokens,
            captured_tokens=max(mixed.tokens, default=0),
        )
        self._graphs = GraphRunner(config, model, self._forward, mixed, self.max_depth)
        self._staging = Staging(device, self.max_depth + 2)
        self._rehearsal_staging: Staging | None = None
        """Staging buffers for the dummy steps of `rehearse`; None before its first call."""

    def _empty_batch(self) -> HostBatch:
        max_blocks = -(-self._max_model_len // self.block_size)
        pooling = self._model.pooling.kind if self._model.pooling else ""
        return HostBatch(self._config.max_num_seqs, max_blocks, self._traits, pooling)

    def reset(self) -> None:
        """Drop all sequences. No step may be in flight."""
        with self._device.stream():
            self._batch, self._dropped = self._empty_batch(), []
            self._resident.reset()
            if self._model.encoder is not None:
                self._model.encoder.reset()

    @property
    def _captures(self) -> bool:
        return (
            self._device.traits.captures_graphs
            and self._config.device_options.graph_mode != "eager"
        )

    def _capture(self) -> None:
        limits = self.num_blocks, self.block_size, self._max_model_len
        tokens_per_program, dummy = self._traits.tokens_per_program, self._resident.dummy
        self._graphs.capture(tokens_per_program, dummy, lambda rows: longest_lengths(rows, *limits))
        self._forward.published.restart()

    # -- memory ---------------------------------------------------------------------------

    def _warm_up(self, constrains: bool) -> tuple[int, int]:
        """Run large prefill and decode steps on a small cache. Return (size of the weights, memory
        that steps need), both in bytes."""
        config, device = self._config, self._device
        begin = time.monotonic()
        device.synchronize()
        free = device.memory().free
        used = max(0, self._model.free_bytes - free)
        max_prompt = self._max_model_len - 1
        rows = min(-(-config.max_num_batched_tokens // max_prompt), config.max_num_seqs)
        max_tokens = min(config.max_num_batched_tokens, rows * max_prompt)
        tokens, decode_rows = max_tokens, config.max_num_seqs
        if not device.traits.asynchronous:
            tokens, decode_rows = (
                min(max_tokens, _SMALL_WARMUP_TOKENS),
                min(decode_rows, _SMALL_WARMUP_ROWS),
            )
        prefill = prefill_step(tokens, min(rows, tokens), self.block_size)
        blocks = int(prefill.table_blocks.max()) + 1
        self._make_state(blocks, constrains)
        self._run_once(prefill)  # compiles
        # Memory needed in addition to the cache: buffers, and the libraries' own allocations.
        dummies = device.dummy_blocks(config.max_num_seqs, self.block_size)
        cache = (blocks + dummies) * self._model.cache_sizing.block_bytes
        overhead = max(0, free - device.memory().free - cache)
        prefill_seconds, peak = self._measure(lambda: self._run_once(prefill))
        decode_seconds, decode_peak = self._measure(lambda: self._decode_once(decode_rows))
        self.warmed_up: tuple[tuple[int, float], ...] = (
            (tokens, prefill_seconds),
            (decode_rows, decode_seconds),
        )
        _, top_p_peak = self._measure(lambda: self._decode_once(decode_rows, top_p=0.9))
        _, rules_peak = self._measure(
            lambda: self._decode_once(decode_rows, repetition_penalty=1.1)
        )
        score_rows, num_logprobs = min(AT_ONCE, tokens), config.max_logprobs
        _, scores_peak = self._measure(lambda: self._choices.warm_up(score_rows, num_logprobs))
        decode_peak = max(decode_peak, peak)
        peak = max(peak * max_tokens // tokens, decode_peak, top_p_peak, rules_peak, scores_peak)
        peak += self._warm_up_encoder()  # partial encodings stay allocated during prefill
        if self._captures:
            peak += decode_peak + _GRAPH_BYTES * len(self._graphs)
        log.info("warm-up took %.1f s", time.monotonic() - begin)
        self._resident.states.clear()
        return used, peak + overhead + (_DRIVER_BYTES if device.traits.asynchronous else 0)

    def _warm_up_encoder(self) -> int:
        """Warm up the encoder, if there is one. Return the memory that encoding the largest image
        takes, in bytes."""
        if (encoder := self._model.encoder) is None:
            return 0
        max_rows = encoder.max_rows(self._max_model_len)
        rows = max_rows if self._device.traits.asynchronous else min(max_rows, _SMALL_WARMUP_TOKENS)
        encoder.warm_up(rows)
        seconds, peak = self._measure(lambda: encoder.warm_up(rows))
        self.warmed_up += ((rows, seconds),)
        return peak * max_rows // rows

    def _measure(self, work: Callable[[], None]) -> tuple[float, int]:
        """Run `work`. Return (duration in seconds, peak memory in bytes)."""
        self._device.reset_peak_memory()
        begin = time.monotonic()
        work()
        return time.monotonic() - begin, self._device.peak_memory()

    def _run_once(self, step: Step) -> None:
        self.launch(self.prepare(step)).wait()
        self._device.synchronize()

    def _decode_once(self, rows: int, **sampling: float) -> None:
        dummy, max_model_len = self._resident.dummy, self._max_model_len
        update = decode_update(rows, dummy, self._traits, max_model_len, **sampling)
        self.launch(update).wait()
        self._device.synchronize()

    # -- running --------------------------------------------------------------------------

    def prepare(
        self, step: Step, pixels: PixelsByNumber = NO_PIXELS, masks: Int32 = NO_MASKS
    ) -> Update:
        """Lay out a step, with NumPy only. `pixels` maps the number of each image or video that the
        step encodes to its pixels. `masks`, int32 (rows, words), are bit masks of the token ids
        that constrained rows may sample."""
        dropped, self._dropped = self._dropped, []
        return with_vision(self._batch.update(step, masks), step, pixels, dropped)

    def drop_pixels(self, numbers: list[int]) -> None:
        """Schedule the partial encodings of the images and videos with these numbers to be dropped
        by the next step. Steps that are already laid out may still continue them."""
        self._dropped += numbers

    def rehearse(self) -> Iterator[object]:
        """Lay out and pack a dummy prompt to warm up the CPU caches, without sending anything to
        the device. Yields after each of the two parts."""
        update = self._rehearsal_batch.update()
        yield update
        self._rehearsal_staging = self._rehearsal_staging or Staging(self._device, in_flight=1)
        captured = self._graphs.captures_prompts
        yield self._rehearsal_staging.put_inputs(_staged(update, captured=captured))

    def launch(self, prepared: Update) -> _LaunchedStep:
        """Queue a step on the device, or compute it if the device is synchronous."""
        with self._device.stream():
            if self._threads is None or not prepared.rows:
                return self._launch(prepared)
            self._device.prepare_thread(self._threads.choose(prepared))
            begin = time.perf_counter()
            launched = self._launch(prepared)
            self._threads.note(prepared, time.perf_counter() - begin)
            return launched

    def _launch(self, update: Update) -> _LaunchedStep:
        if self._free_buffers:
            buffers = self._free_buffers.popleft()
        else:
            buffers = StepBuffers.allocate(self._device, self._config.max_num_seqs)
        captured_size = self._graphs.fit(update)
        inputs = self._staging.put_inputs(_staged(update, captured=captured_size is not None))
        self._staging.send()
        if captured_size:
            self._graphs.fill(captured_size, update)
        buffers.begin.record()
        self._resident.apply(inputs)
        if update.encoding and self._model.encoder:
            self._model.encoder.apply(update.encoding)
            buffers.encoded.record()
        states = self._graphs.run(update, inputs, captured_size)
        self._mark(buffers.forwarded)
        prompt_capacity = captured_size.prompts if captured_size else None
        chosen = self._choices.choose(
            update, inputs, states, buffers, prompt_capacity=prompt_capacity
        )
        self._mark(buffers.sampled)
        published = None
        if update.prefill is None and update.decode_rows:
            published = self._forward.published.claim(update.decodes)
        has_other_ids = inputs.fallback or inputs.choices or update.resumed
        buffers.copy_ids(update, chosen, None if has_other_ids else published)
        buffers.end.record()
        return _LaunchedStep(self, buffers)

    def _mark(self, event: TimedEvent) -> None:
        """Record an event within a step, but only on a synchronous device. On other devices, a
        single graph may contain the work before and after the event."""
        if not self.asynchronous:
            event.record()

    def collect(self, buffers: StepBuffers) -> StepResult:
        """Wait for a step and return its results. This also frees the buffers of the previous
        step."""
        with self._model.translating_errors():
            computed = buffers.collect(self._clock, has_inner_events=not self.asynchronous)
        if self._last_collected is not None:
            self._free_buffers.append(self._last_collected)
        self._last_collected = buffers
        return computed


def _staged(update: Update, *, captured: bool) -> Inputs[Array]:
    """Return the inputs to copy through the staging buffers. The prompts of a captured step are
    left out, because `GraphRunner.fill` copies them to fixed memory."""
    inputs = update.inputs
    return dataclasses.replace(inputs, prefill=None, visual=None) if captured else inputs
