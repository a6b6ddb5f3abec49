"""Launching of steps over a batch that stays on the device. If the device captures graphs, a decode
step replays a single graph."""

from __future__ import annotations

import dataclasses
import time

from nanoactor.models.devices.protocols import TimedEvent
from nanoactor.options.config import EngineConfig
from nanoactor.runner.batch.batch import BatchTraits, StateLayout
from nanoactor.runner.batch.inputs import Array, Inputs, Update
from nanoactor.runner.batch.staging import Staging
from nanoactor.runner.model.model import LoadedModel
from nanoactor.runner.model.resident import ResidentBatch
from nanoactor.runner.protocol import StepResult
from nanoactor.runner.steps.choosing import TokenChooser
from nanoactor.runner.steps.forward import StepForward
from nanoactor.runner.steps.graph_runner import GraphRunner
from nanoactor.runner.steps.graphs import MixedSizes
from nanoactor.runner.steps.published import PublishedIds
from nanoactor.runner.steps.step_buffers import BufferPool, StepBuffers
from nanoactor.runner.steps.step_choices import StepChoices
from nanoactor.runner.steps.warmup import longest_lengths
from nanoactor.runner.timing.threads import ThreadChoice


def staged(update: Update, *, captured: bool) -> Inputs[Array]:
    """Return the inputs to copy through the staging buffers. The prompts of a captured step are
    left out, because `GraphRunner.fill` copies them to fixed memory."""
    inputs = update.inputs
    return dataclasses.replace(inputs, prefill=None, visual=None) if captured else inputs


@dataclasses.dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was queued on the device or, on a synchronous device, has finished."""

    launcher: StepLauncher
    buffers: StepBuffers

    def wait(self) -> StepResult:
        """Wait until the token ids are on the host, and return the step's results."""
        return self.launcher.collect(self.buffers)


class StepLauncher:
    """A KV cache of fixed size, the tables and buffers of steps, and the captured graphs: all that
    is on the device besides the model. An executor has one at a time: at first one with a small
    cache, for the warm-up, then the one that runs all steps."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        pool: BufferPool,
        threads: ThreadChoice | None,
        *,
        layout: StateLayout,
        traits: BatchTraits,
        blocks: int,
        in_flight: int,
        constrains: bool,
    ) -> None:
        """Allocate tables, buffers and a cache of `blocks` blocks. `threads` chooses the number of
        threads for each step; None if it is fixed. `in_flight` is the maximum number of steps in
        flight. `constrains` is True if requests may use grammars."""
        self._config, self._model, self._device = config, model, model.device
        self._pool, self._threads = pool, threads
        self._traits, self._blocks = traits, blocks
        self.resident = ResidentBatch(model, layout, blocks)
        chooser = TokenChooser(
            model,
            traits.fused_sampling,
            self.resident.tokens,
            max_num_seqs=config.max_num_seqs,
            debug=config.debug,
            constrains=constrains,
        )
        self.choices = StepChoices(model, chooser, layout.slots)
        tokens, mixed = config.max_num_batched_tokens, MixedSizes((), ())
        if self._device.traits.captures_prompts:
            mixed = MixedSizes.of(tokens, config.max_num_seqs, has_images=model.encoder is not None)
        self.forward = StepForward(
            model,
            self.resident,
            chooser,
            PublishedIds(self._device, in_flight + 2, config.max_num_seqs),
            max_tokens=tokens,
            captured_tokens=max(mixed.tokens, default=0),
        )
        self.graphs = GraphRunner(config, model, self.forward, mixed, in_flight)
        self._staging = Staging(self._device, in_flight + 2)

    @property
    def captures(self) -> bool:
        """True if steps are to be captured as graphs."""
        return (
            self._device.traits.captures_graphs
            and self._config.device_options.graph_mode != "eager"
        )

    def capture(self, max_model_len: int) -> None:
        """Capture steps for sequences of up to `max_model_len` tokens."""
        limits = self._blocks, self._model.block_size, max_model_len
        tokens_per_program, dummy = self._traits.tokens_per_program, self.resident.dummy
        self.graphs.capture(tokens_per_program, dummy, lambda rows: longest_lengths(rows, *limits))
        self.forward.published.restart()

    def reset(self) -> None:
        """Drop all sequences. No step may be in flight."""
        self.resident.reset()
        if self._model.encoder is not None:
            self._model.encoder.reset()

    def launch(self, update: Update) -> InFlightStep:
        """Queue a step on the device, or compute it if the device is synchronous."""
        with self._device.stream():
            if self._threads is None or not update.rows:
                return self._launch(update)
            self._device.prepare_thread(self._threads.choose(update))
            begin = time.perf_counter()
            launched = self._launch(update)
            self._threads.note(update, time.perf_counter() - begin)
            return launched

    def _launch(self, update: Update) -> InFlightStep:
        buffers = self._pool.take()
        captured_size = self.graphs.fit(update)
        inputs = self._staging.put_inputs(staged(update, captured=captured_size is not None))
        self._staging.send()
        if captured_size:
            self.graphs.fill(captured_size, update)
        buffers.begin.record()
        self.resident.apply(inputs)
        if update.encoding and self._model.encoder:
            self._model.encoder.apply(update.encoding)
            buffers.encoded.record()
        states = self.graphs.run(update, inputs, captured_size)
        self._mark(buffers.forwarded)
        prompt_capacity = captured_size.prompts if captured_size else None
        chosen = self.choices.choose(
            update, inputs, states, buffers, prompt_capacity=prompt_capacity
        )
        self._mark(buffers.sampled)
        published = None
        if update.prefill is None and update.decode_rows:
            published = self.forward.published.claim(update.decodes)
        has_other_ids = inputs.fallback or inputs.choices or update.resumed
        buffers.copy_ids(update, chosen, None if has_other_ids else published)
        buffers.end.record()
        return InFlightStep(self, buffers)

    def _mark(self, event: TimedEvent) -> None:
        """Record an event within a step, but only on a synchronous device. On other devices, a
        single graph may contain the work before and after the event."""
        if not self._device.traits.asynchronous:
            event.record()

    def collect(self, buffers: StepBuffers) -> StepResult:
        """Wait for a step and return its results. This also frees the buffers of the previous
        step."""
        with self._model.translating_errors():
            return self._pool.collect(buffers)
