"""The runner actor, which prepares step N+1 on its node's event loop while the device computes step
N."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.media.units import EncodeUnits
from nanoactor.messages.engine import Step, StepDone, StepWanted
from nanoactor.messages.grammar import DropMasks, Masks, MasksReady
from nanoactor.messages.rows import DECODE, SAMPLE
from nanoactor.messages.vision import DropPixels, ItemsReady, NoPixels, Pixels
from nanoactor.runner.batch.masks import MaskStore
from nanoactor.runner.batch.pixels import PixelStore
from nanoactor.runner.config import RankConfig
from nanoactor.runner.timing.deadline import StepDeadline
from nanoactor.runner.timing.pace import DeviceTime, StepRequests
from nanoactor.runtime.actor import Actor, Context, Handler, Progress, ReadyInfo
from nanoactor.setup.actors import RunnerReady

if TYPE_CHECKING:
    from nanoactor.runner.protocol import Executor, LaunchedStep, StepResult

DEVICE = "device"
"""Name of the trace track that shows when the device is busy and with what."""

_POLL_SECONDS = 0.1
"""Interval, in seconds, at which a thread that waits for a device thread checks whether that thread
has failed."""


class DrainMarker:
    """Marker that is queued behind all launched steps of a runner. Its events are set once these
    steps are done."""

    def __init__(self) -> None:
        self.collected, self.done = threading.Event(), threading.Event()
        self.error: BaseException | None = None


class RunnerActor(Actor):
    """Actor that runs steps on the device of one tensor-parallel rank. Only rank 0 reports sampled
    tokens to the scheduler."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        # True if this rank requests each step from the scheduler.
        self._requests_steps = config.rank == 0 and config.engine.plan_lead == "late"
        self._prepared: queue.SimpleQueue[tuple[int, Any] | DrainMarker | None] = (
            queue.SimpleQueue()
        )
        self._launched: queue.SimpleQueue[tuple[int, LaunchedStep] | DrainMarker | None] = (
            queue.SimpleQueue()
        )
        self._threads: list[threading.Thread] = []
        self._stopping = self._discards = False
        self._thread_error: BaseException | None = None
        """The error that ended one of the device threads; None while all are running."""
        self._deadline = StepDeadline()
        self._cache = secrets.randbits(62)
        self._ahead = 0
        """Number of steps that were prepared while an earlier step was queued or running."""
        self._requests, self._device_time = StepRequests(), DeviceTime()
        self._reset_steps()

    def _reset_steps(self) -> None:
        """Drop the state of all steps, pixels and masks."""
        self._first_token_steps: set[int] = set()
        """Numbers of the steps that sample right after prompt tokens, possibly a sequence's first
        token."""
        self._queued_tokens: deque[int] = deque()
        """Number of tokens of each step that is queued or running. For a step that encodes
        pictures, the encoder's token budget is added."""
        self._received = self._completed = 0
        self._requests.reset()
        self._pixels = PixelStore()
        self._ready: list[int] = []
        """Numbers of pixels that have arrived but were not reported to the scheduler yet."""
        self._masks = MaskStore()
        self._masks_ready: tuple[list[int], list[int]] = [], []
        """Uids and positions of masks that have arrived but were not reported to the scheduler
        yet."""

    def setup(self) -> RunnerReady:
        """Load the model. Return the properties of the runner that all actors need, such as the
        size of the KV cache."""
        self._executor = self._open_on_thread()
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
        self._discards = True
        marker = DrainMarker()
        self._prepared.put(marker)
        self._wait_for(marker.done)
        if marker.error is not None:
            raise marker.error
        self._discards = False
        self._reset_steps()
        return self._ready_info()

    def _wait_for(self, event: threading.Event) -> None:
        """Wait for an event that a device thread sets. Raises the error if a device thread has
        failed."""
        while not event.wait(_POLL_SECONDS):
            if self._thread_error is not None:
                raise self._thread_error

    def _open_on_thread(self) -> Executor:
        """Start the device thread, which loads the model and launches steps; return the executor.

        Loading runs on the same thread as the steps, because OpenMP keeps a thread pool for each
        thread that computes. A second pool would mean more threads than cores, and OpenMP would no
        longer spin between operators. On two cores, a normalization of 64 rows would then take 300
        us instead of 40 us.
        """
        from nanoactor.runner.open import open_executor

        opened: Future[Executor] = Future()

        def work() -> None:
            try:
                executor = open_executor(self._config)
            except BaseException as error:
                opened.set_exception(error)
                return
            opened.set_result(executor)
            self._launch(executor)

        self._start_thread("device", work)
        executor = opened.result()
        if executor.asynchronous:
            self._start_thread("results", self._collect)
        return executor

    def _start_thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Create the trace tracks. From now on, steps may arrive."""
        super().start(context, ready)
        self._open_tracks()

    def _open_tracks(self) -> None:
        self._device_track = self.context.new_track(DEVICE)
        names = ("encode", "forward", "sample", "copy")
        self._span_kinds = [self._device_track.kind(name, "step") for name in names]
        self._report_kind = self.context.track.kind("report", "step")

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers of steps, which arrive in order, and of pixels and masks, which
        arrive independently of steps."""
        return {
            Step: self._on_step,
            Pixels: self._on_pixels,
            NoPixels: self._on_no_pixels,
            DropPixels: self._on_drop,
            Masks: self._on_masks,
            DropMasks: self._masks.drop,
        }

    def span_names(self) -> Mapping[type, str]:
        """Return the trace span name for preparing a step's inputs and passing them to the
        device."""
        return {Step: "prepare"}

    def _on_step(self, step: Step) -> None:
        """Prepare a step, possibly while the previous one is still running, and launch it or queue
        it for the device thread."""
        self._ahead += bool(self._queued_tokens)
        pixels, masks = self._pixels.consume(step, self._units_of), self._masks.pop_masks(step)
        prepared = self._executor.prepare(step, pixels, masks)
        self._received = step.step
        self._requests.note_prepared(step.step, self.context.now())
        encodes = step.vision is not None and len(step.vision.slices.counts)
        budget = self._config.engine.max_num_batched_tokens if encodes else 0
        self._queued_tokens.append(prepared.rows + budget)
        rows = step.rows
        yields_first_token = ((rows.wants & (SAMPLE | DECODE)) == SAMPLE) & (rows.counts > 0)
        if self._config.rank == 0 and yields_first_token.any():
            self._first_token_steps.add(step.step)
        self.context.allow_sleep()  # from here on, other threads need the GIL
        if len(self._queued_tokens) == 1 and self._executor.allows_any_thread:
            # All earlier steps are done, so the device is idle and the device thread sleeps. Waking
            # the thread would only add a delay.
            self._launch_step(self._executor, step.step, prepared)
        else:
            self._prepared.put((step.step, prepared))

    def _units_of(self, pixels: NDArray[np.uint8]) -> int:
        """Return the number of units (parts encoded at once) of an image or video with these
        pixels."""
        files, budget = self._config.files, self._config.engine.max_num_batched_tokens
        assert files.images is not None
        assert files.config.vision is not None
        vision = files.config.vision
        return EncodeUnits.of_pixels(pixels.shape, files.images, vision, budget).count

    def _on_pixels(self, event: Pixels) -> None:
        if self._pixels.add(event):
            self._ready.append(event.pixels)
            self._report_ready()

    def _on_no_pixels(self, event: NoPixels) -> None:
        for number in event.pixels.tolist():
            self._pixels.note_absent(number)

    def _on_masks(self, event: Masks) -> None:
        uids, positions = self._masks.add(event)
        self._masks_ready[0].extend(uids)
        self._masks_ready[1].extend(positions)
        self._report_ready()

    def _on_drop(self, event: DropPixels) -> None:
        numbers = event.pixels.tolist()
        for number in numbers:
            self._pixels.drop(number)
        self._executor.drop_pixels(numbers)

    def _report_ready(self) -> None:
        outbox, rank = self.context.outbox("scheduler"), self._config.rank
        if self._ready and outbox.ready:
            outbox.send(ItemsReady(rank, np.array(self._ready, np.int64)))
            self._ready.clear()
        uids, positions = self._masks_ready
        if uids and outbox.ready:
            ready = np.array(uids, np.int64), np.array(positions, np.int32)
            outbox.send(MasksReady(rank, *ready))
            self._masks_ready = [], []

    def on_ready(self, outbox: Any) -> None:
        """Report pixels and masks that waited because the outbox to the scheduler had no room."""
        self._report_ready()

    def _launch(self, executor: Executor) -> None:
        """Run the device thread, which launches prepared steps on the device, or computes them
        itself if the device is the CPU."""
        while (prepared := self._prepared.get()) is not None and not self._stopping:
            if isinstance(prepared, DrainMarker):
                self._drain(executor, prepared)
            elif not self._discards and not self._launch_step(executor, *prepared):
                return

    def _drain(self, executor: Executor, marker: DrainMarker) -> None:
        """Wait for all launched steps, then reset the executor. Runs on the device thread."""
        if executor.asynchronous:
            self._launched.put(marker)
        try:
            if executor.asynchronous:
                self._wait_for(marker.collected)
            executor.reset()
        except BaseException as error:
            marker.error = error
        marker.done.set()

    def _launch_step(self, executor: Executor, step: int, inputs: Any) -> bool:
        """Launch a step on the device. Return False, after reporting the error, if that fails."""
        if not executor.asynchronous:
            self._report_begin(step)
        try:
            launched = executor.launch(inputs)
        except BaseException as error:
            self._thread_error = error
            self.context.call_soon(self.context.fail, error)
            return False
        if not executor.asynchronous:
            return self._report_done(step, launched)
        self._launched.put((step, launched))
        return True

    def _collect(self) -> None:
        """Run the results thread of an asynchronous device, which waits for launched steps in
        order."""
        while (launched := self._launched.get()) is not None and not self._stopping:
            if isinstance(launched, DrainMarker):
                launched.collected.set()
                continue
            self._report_begin(launched[0])
            if not self._report_done(*launched):
                return

    def _report_begin(self, step: int) -> None:
        if self._requests_steps:
            self.context.call_soon(self._on_begun, step)

    def _report_done(self, step: int, launched: LaunchedStep) -> bool:
        """Wait for a launched step and report its result. Return False, after reporting the error,
        if the step has failed."""
        try:
            computed = launched.wait()
        except BaseException as error:
            self._thread_error = error
            self.context.call_soon(self.context.fail, error)
            return False
        if not self._stopping:  # otherwise the event loop may be gone
            self.context.call_soon(self._on_done, step, computed)
            if step in self._first_token_steps:
                self._first_token_steps.discard(step)
                self.context.wake_others()
        return True

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
        self._trace_device(step, computed)
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

    def _trace_device(self, step: int, computed: StepResult) -> None:
        """Add trace spans for the parts of a step on the device, at the times that the device
        reported."""
        times = (
            computed.begin,
            computed.encoded or computed.begin,
            computed.forwarded,
            computed.sampled,
            computed.end,
        )
        for kind, begin, end in zip(self._span_kinds, times, times[1:], strict=False):
            if end > begin:
                self._device_track.add(kind, step, begin, end)

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
        self._stopping = True
        self._prepared.put(None)
        self._launched.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

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
            "pixels": len(self._pixels),
            "pixel_bytes": self._pixels.nbytes,
            "masks": len(self._masks),
            "busy_seconds": self._device_time.busy * 1e-9,
            "idle_seconds": self._device_time.idle * 1e-9,
            "step_at": self._device_time.free_at,
        }
