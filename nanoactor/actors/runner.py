"""The runner actor, which prepares step N+1 on its node's event loop while the device computes step
N."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nanoactor.actors.device_threads import DeviceThreads
from nanoactor.actors.device_track import DeviceTrack
from nanoactor.actors.side_inputs import SideInputs
from nanoactor.messages.engine import Step, StepDone, StepWanted
from nanoactor.messages.grammar import DropMasks, Masks
from nanoactor.messages.rows import DECODE, SAMPLE
from nanoactor.messages.vision import DropPixels, NoPixels, Pixels
from nanoactor.runner.config import RankConfig
from nanoactor.runner.timing.deadline import StepDeadline
from nanoactor.runner.timing.pace import DeviceTime, StepRequests
from nanoactor.runtime.actor import Actor, Context, Handler, Progress, ReadyInfo
from nanoactor.setup.actors import RunnerReady

if TYPE_CHECKING:
    from nanoactor.runner.protocol import StepResult


class RunnerActor(Actor):
    """Actor that runs steps on the device of one tensor-parallel rank. Only rank 0 reports sampled
    tokens to the scheduler."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        # True if this rank requests each step from the scheduler.
        self._requests_steps = config.rank == 0 and config.engine.plan_lead == "late"
        on_begun = self._on_begun if self._requests_steps else None
        self._threads = DeviceThreads(on_begun, self._on_done)
        self._deadline = StepDeadline()
        self._cache = secrets.randbits(62)
        self._ahead = 0
        """Number of steps that were prepared while an earlier step was queued or running."""
        self._requests, self._device_time = StepRequests(), DeviceTime()
        self._reset_steps()

    def _reset_steps(self) -> None:
        """Drop the state of all steps, pixels and masks."""
        self._queued_tokens: deque[int] = deque()
        """Number of tokens of each step that is queued or running. For a step that encodes
        images, the encoder's token budget is added."""
        self._received = self._completed = 0
        self._requests.reset()
        self._side_inputs = SideInputs(self._config, lambda: self.context.outbox("scheduler"))

    def setup(self) -> RunnerReady:
        """Load the model. Return the properties of the runner that all actors need, such as the
        size of the KV cache."""
        self._executor = self._threads.open(self._config)
        for tokens, seconds in self._executor.warmed_up:
            self._deadline.note(tokens, seconds)
        return self._ready_info()

    def _ready_info(self) -> RunnerReady:
        return RunnerReady(
            num_blocks=self._executor.num_blocks,
            block_size=self._executor.block_size,
            dtype=self._executor.dtype_name,
            device=self._executor.device_name,
            encoder_pages=self._executor.encoder_pages,
            max_depth=self._executor.max_depth,
            cache=self._cache,
        )

    def reset(self) -> RunnerReady:
        """Wait until the device is idle and the executor has dropped the state of all sequences.
        The model and the memory of the KV cache are kept. Return the same information as
        `setup`."""
        self._threads.reset()
        self._reset_steps()
        return self._ready_info()

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Create the trace tracks. From now on, steps may arrive."""
        super().start(context, ready)
        self._threads.context = context
        self._device_track = DeviceTrack(context)
        self._report_kind = context.track.kind("report", "step")

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers of steps, which arrive in order, and of pixels and masks, which
        arrive independently of steps."""
        return {
            Step: self._on_step,
            Pixels: self._side_inputs.add_pixels,
            NoPixels: self._side_inputs.note_absent,
            DropPixels: self._on_drop,
            Masks: self._side_inputs.add_masks,
            DropMasks: self._side_inputs.drop_masks,
        }

    def span_names(self) -> Mapping[type, str]:
        """Return the trace span name for preparing a step's inputs and passing them to the
        device."""
        return {Step: "prepare"}

    def _on_step(self, step: Step) -> None:
        """Prepare a step, possibly while the previous one is still running, and launch it or queue
        it for the device thread."""
        self._ahead += bool(self._queued_tokens)
        prepared = self._executor.prepare(step, *self._side_inputs.take(step))
        self._received = step.step
        self._requests.note_prepared(step.step, self.context.now())
        encodes = step.vision is not None and len(step.vision.slices.counts)
        budget = self._config.engine.max_num_batched_tokens if encodes else 0
        self._queued_tokens.append(prepared.rows + budget)
        rows = step.rows
        # Rows that sample right after prompt tokens, possibly a sequence's first token.
        first_tokens = ((rows.wants & (SAMPLE | DECODE)) == SAMPLE) & (rows.counts > 0)
        yields_first_token = self._config.rank == 0 and bool(first_tokens.any())
        self.context.allow_sleep()  # from here on, other threads need the GIL
        if len(self._queued_tokens) == 1 and self._executor.allows_any_thread:
            # All earlier steps are done, so the device is idle and the device thread sleeps. Waking
            # the thread would only add a delay.
            self._threads.launch(step.step, prepared, yields_first_token)
        else:
            self._threads.put(step.step, prepared, yields_first_token)

    def _on_drop(self, event: DropPixels) -> None:
        numbers = event.pixels.tolist()
        self._side_inputs.drop_pixels(numbers)
        self._executor.drop_pixels(numbers)

    def on_ready(self, outbox: Any) -> None:
        """Report pixels and masks that waited because the outbox to the scheduler had no room."""
        self._side_inputs.report()

    def _on_begun(self, step: int) -> None:
        """React to the start of a step: request the next one shortly before this one is expected to
        end."""
        if (wait := self._requests.delay) > 0:
            self.context.call_later(wait, lambda: self._request_step(step + 1))
        else:
            self._request_step(step + 1)

    def _request_step(self, step: int) -> None:
        if self._requests.request(step, self._received, self.context.now()):
            self.context.outbox("scheduler").send(StepWanted(step))

    def _on_done(self, step: int, computed: StepResult) -> None:
        begin, seconds = time.monotonic_ns(), (computed.end - computed.begin) * 1e-9
        if self._config.rank == 0:  # the other ranks have sampled the same tokens
            self._send_done(step, computed, seconds)
        # Report the tokens before doing the bookkeeping.
        self._device_track.add(step, computed)
        tokens = self._queued_tokens.popleft()
        self._completed = step
        self._device_time.note(computed.begin, computed.end)
        self._requests.note_done(seconds)
        self._deadline.note(tokens, seconds)
        self.context.track.add(self._report_kind, step, begin, time.monotonic_ns())

    def _send_done(self, step: int, computed: StepResult, seconds: float) -> None:
        done = StepDone(
            step,
            computed.counts,
            computed.token_ids,
            seconds,
            began=computed.begin,
            scores=computed.scores,
            vectors=computed.vectors,
        )
        self.context.outbox("scheduler").send(done)

    def may_stay_awake(self) -> bool:
        """Return False while a step is queued or running, because its threads need the GIL."""
        return not self._queued_tokens

    def rehearse(self) -> Iterator[object]:
        """Prepare a dummy step to warm up the CPU caches, unless real steps are queued or
        running."""
        return self._executor.rehearse() if not self._queued_tokens else iter(())

    def progress(self) -> Progress | None:
        """Return (number of the last finished step, time limit of the current step in seconds,
        whether this process computes it); None if no step is queued or running."""
        if not self._queued_tokens:
            return None
        # While an asynchronous device computes, this process only waits or spins.
        computes_here = not self._executor.asynchronous
        return self._completed, self._deadline.seconds(self._queued_tokens[0]), computes_here

    def stop(self) -> None:
        """Stop the threads once the current step is done; wait at most 1 s for each."""
        self._threads.stop()

    def statistics(self) -> dict[str, Any]:
        """Return counters of steps, pixels and masks, and the device's busy and idle time in
        seconds.

        `ahead` counts the steps that were prepared while the device was busy with an earlier one.
        `steps_uncaptured` and `steps_too_large` count the steps launched operator by operator,
        because their size could not be captured as a graph or because they are larger than every
        captured graph. `queued` is the number of steps queued or running, and `step_may_take` is
        the time limit of the first of these, in seconds. `step_at` is the end of the latest step,
        in ns of the monotonic clock.
        """
        may_take = (self.progress() or (0, 0.0))[1]
        return {
            "step_may_take": may_take,
            "steps": self._received,
            "steps_done": self._completed,
            "steps_uncaptured": self._executor.uncaptured,
            "steps_too_large": self._executor.too_large,
            "ahead": self._ahead,
            "queued": len(self._queued_tokens),
            "pixels": len(self._side_inputs.pixels),
            "pixel_bytes": self._side_inputs.pixels.nbytes,
            "masks": len(self._side_inputs.masks),
            "busy_seconds": self._device_time.busy * 1e-9,
            "idle_seconds": self._device_time.idle * 1e-9,
            "step_at": self._device_time.free_at,
        }
