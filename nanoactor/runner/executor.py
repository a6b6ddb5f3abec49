"""Execution of steps on a device. The batch stays on the device. If the device captures graphs, a
decode step replays a single graph.

A step is laid out on the event loop of the runner's process, with NumPy only, and launched on the
device thread. A launch consists of a copy of the changes to the device, a graph or single
operators, a copy of the token ids to pinned memory, and an event. If the device is asynchronous,
another thread waits for the event.
"""

from __future__ import annotations

from collections.abc import Iterator

from nanoactor.messages.engine import Int32, Step
from nanoactor.models.devices.protocols import Device
from nanoactor.runner.batch.batch import NO_MASKS, HostBatch
from nanoactor.runner.batch.inputs import Update
from nanoactor.runner.batch.pixels import NO_PIXELS, PixelsByNumber, with_vision
from nanoactor.runner.batch.rehearsal_batch import RehearsalBatch
from nanoactor.runner.batch.staging import Staging
from nanoactor.runner.config import RankConfig
from nanoactor.runner.model.model import LoadedModel
from nanoactor.runner.steps.launcher import InFlightStep, StepLauncher, staged
from nanoactor.runner.steps.measuring import WarmUp
from nanoactor.runner.steps.step_buffers import BufferPool
from nanoactor.runner.timing.threads import ThreadChoice
from nanoactor.setup.actors import has_grammars


class DeviceExecutor:
    """The executor of one rank on one device; implements `nanoactor.runner.protocol.Executor`."""

    def __init__(self, config: RankConfig, device: Device) -> None:
        """Load the weights, size and allocate the KV cache, and capture steps.

        Raises `ModelError` if the model's files are malformed or if there is not enough memory.
        """
        engine = config.engine
        self._config, self._device = config, device
        is_single_rank = engine.tensor_parallel_size == 1
        self.allows_any_thread = device.traits.allows_any_thread and is_single_rank
        self.max_depth = engine.steps_in_flight(deep=device.traits.deep_pipeline)
        self._dropped: list[int] = []
        self._rehearsal_staging: Staging | None = None
        """Staging buffers for the dummy steps of `rehearse`; None before its first call."""
        with device.stream():
            self._model = LoadedModel(config, device)
            fused = (
                device.traits.fused_sampling
                if is_single_rank
                else device.traits.sharded_fused_sampling
            )
            self._traits = self._model.batch_traits(fused, engine.max_num_seqs)
            self._rehearsal_batch = RehearsalBatch(self._traits, self.block_size)
            self._pool = BufferPool(device, engine.max_num_seqs)
            # With several ranks, the times measured on one would include waiting for the others.
            can_measure = is_single_rank and not engine.threads and not device.traits.asynchronous
            self._threads = ThreadChoice(self._model.threads) if can_measure else None
            self.num_blocks = self._model.cache_sizing.num_blocks(*self._warm_up())
            self.encoder_pages = self._model.encoder.pages if self._model.encoder else 0
            self._batch, self._launcher = self._make_state(self.num_blocks)
            if self._launcher.captures:
                self._launcher.capture(config.files.max_model_len)
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
        return self._launcher.graphs.too_large

    @property
    def uncaptured(self) -> int:
        """Number of steps so far that were launched operator by operator because their size could
        not be captured."""
        return self._launcher.graphs.uncaptured

    # -- the batch ------------------------------------------------------------------------

    def _warm_up(self) -> tuple[int, int]:
        """Run large steps on a small cache, which is then freed. Return (size of the weights,
        memory that steps need), both in bytes."""
        warm_up = WarmUp(self._config, self._model, self._traits, self._make_state)
        memory = warm_up.run()
        self.warmed_up = warm_up.durations
        return memory

    def _make_state(self, blocks: int) -> tuple[HostBatch, StepLauncher]:
        """Return an empty batch, and a launcher for its steps with a cache of `blocks` blocks."""
        batch = self._empty_batch()
        launcher = StepLauncher(
            self._config.engine,
            self._model,
            self._pool,
            self._threads,
            layout=batch.layout,
            traits=self._traits,
            blocks=blocks,
            in_flight=self.max_depth,
            constrains=has_grammars(self._config.files),
        )
        return batch, launcher

    def _empty_batch(self) -> HostBatch:
        max_blocks = -(-self._config.files.max_model_len // self.block_size)
        pooling = self._model.pooling.kind if self._model.pooling else ""
        return HostBatch(self._config.engine.max_num_seqs, max_blocks, self._traits, pooling)

    def reset(self) -> None:
        """Drop all sequences. No step may be in flight."""
        with self._device.stream():
            self._batch, self._dropped = self._empty_batch(), []
            self._launcher.reset()

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
        captured = self._launcher.graphs.captures_prompts
        yield self._rehearsal_staging.put_inputs(staged(update, captured=captured))

    def launch(self, prepared: Update) -> InFlightStep:
        """Queue a step on the device, or compute it if the device is synchronous."""
        return self._launcher.launch(prepared)
