"""The threads that launch a runner's steps on its device and wait for their results."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nanoactor.runner.config import RankConfig
from nanoactor.runtime.actor import Context

if TYPE_CHECKING:
    from nanoactor.runner.protocol import Executor, LaunchedStep, StepResult

_POLL_SECONDS = 0.1
"""Interval, in seconds, at which a thread that waits for a device thread checks whether that thread
has failed."""


class DrainMarker:
    """Marker that is queued behind all launched steps of a runner. Its events are set once these
    steps are done."""

    def __init__(self) -> None:
        self.collected, self.done = threading.Event(), threading.Event()
        self.error: BaseException | None = None


class DeviceThreads:
    """The device thread of one runner, which loads the model and launches steps, and the results
    thread, which waits for launched steps if the device is asynchronous. Both report to the
    runner's event loop.

    A step is passed through the queues as a tuple: its number, its inputs or the launched step, and
    whether it may yield a first token.
    """

    context: Context
    """Context of the runner actor. Must be set before a step is launched."""
    _executor: Executor

    def __init__(
        self, on_begun: Callable[[int], None] | None, on_done: Callable[[int, StepResult], None]
    ) -> None:
        """`on_begun` is called on the event loop when a step begins, unless it is None. `on_done`
        is called there with the results of each step, in step order."""
        self._on_begun, self._on_done = on_begun, on_done
        self._prepared: queue.SimpleQueue[tuple[int, Any, bool] | DrainMarker | None] = (
            queue.SimpleQueue()
        )
        self._launched: queue.SimpleQueue[tuple[int, LaunchedStep, bool] | DrainMarker | None] = (
            queue.SimpleQueue()
        )
        self._threads: list[threading.Thread] = []
        self._stopping = self._discards = False
        self._error: BaseException | None = None
        """The error that ended one of the threads; None while all are running."""

    def open(self, config: RankConfig) -> Executor:
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
                self._executor = open_executor(config)
            except BaseException as error:
                opened.set_exception(error)
                return
            opened.set_result(self._executor)
            self._run()

        self._start("device", work)
        executor = opened.result()
        if executor.asynchronous:
            self._start("results", self._collect)
        return executor

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def put(self, step: int, inputs: Any, yields_first_token: bool) -> None:
        """Queue a step for the device thread. `inputs` are the results of `Executor.prepare`. Other
        nodes are woken when a step is done that may yield the first token of a sequence
        (`yields_first_token`)."""
        self._prepared.put((step, inputs, yields_first_token))

    def launch(self, step: int, inputs: Any, yields_first_token: bool) -> bool:
        """Launch a step on the calling thread; the parameters are those of `put`. Return False,
        after reporting the error, if that fails."""
        executor = self._executor
        if not executor.asynchronous:
            self._report_begin(step)
        try:
            launched = executor.launch(inputs)
        except BaseException as error:
            self._fail(error)
            return False
        if not executor.asynchronous:
            return self._report_done(step, launched, yields_first_token)
        self._launched.put((step, launched, yields_first_token))
        return True

    def reset(self) -> None:
        """Discard all queued steps, wait until the device is idle, and reset the executor. Raises
        the error if a thread has failed."""
        self._discards = True
        marker = DrainMarker()
        self._prepared.put(marker)
        self._wait_for(marker.done)
        if marker.error is not None:
            raise marker.error
        self._discards = False

    def stop(self) -> None:
        """Stop the threads once the current step is done; wait at most 1 s for each."""
        self._stopping = True
        self._prepared.put(None)
        self._launched.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _wait_for(self, event: threading.Event) -> None:
        """Wait for an event that a thread sets. Raises the error if a thread has failed."""
        while not event.wait(_POLL_SECONDS):
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        """Run the device thread, which launches prepared steps on the device, or computes them
        itself if the device is the CPU."""
        while (prepared := self._prepared.get()) is not None and not self._stopping:
            if isinstance(prepared, DrainMarker):
                self._drain(prepared)
            elif not self._discards and not self.launch(*prepared):
                return

    def _drain(self, marker: DrainMarker) -> None:
        """Wait for all launched steps, then reset the executor. Runs on the device thread."""
        executor = self._executor
        if executor.asynchronous:
            self._launched.put(marker)
        try:
            if executor.asynchronous:
                self._wait_for(marker.collected)
            executor.reset()
        except BaseException as error:
            marker.error = error
        marker.done.set()

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
        if self._on_begun is not None:
            self.context.call_soon(self._on_begun, step)

    def _report_done(self, step: int, launched: LaunchedStep, yields_first_token: bool) -> bool:
        """Wait for a launched step and report its result. Return False, after reporting the error,
        if the step has failed."""
        try:
            computed = launched.wait()
        except BaseException as error:
            self._fail(error)
            return False
        if not self._stopping:  # otherwise the event loop may be gone
            self.context.call_soon(self._on_done, step, computed)
            if yields_first_token:
                self.context.wake_others()
        return True

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.context.call_soon(self.context.fail, error)
