"""The buffers of steps in flight: events, and pinned memory for the results."""

from __future__ import annotations

import dataclasses
from collections import deque

import torch

from nanoactor.messages.pooling import StepVectors
from nanoactor.messages.scores import StepScores
from nanoactor.models.devices.protocols import Device, TimedEvent
from nanoactor.runner.batch.inputs import PooledRows, ScoredResults, Update
from nanoactor.runner.protocol import StepResult
from nanoactor.runner.steps.published import Published
from nanoactor.runner.timing.clock import DeviceClock


@dataclasses.dataclass(slots=True)
class StepBuffers:
    """The buffers of one step. They are reused once the next step has finished."""

    begin: TimedEvent
    encoded: TimedEvent
    forwarded: TimedEvent
    sampled: TimedEvent
    end: TimedEvent
    ids: torch.Tensor
    """Sampled token ids, int32 (max rows,), in pinned memory."""
    rows: int = 0
    """Number of valid ids in `ids`."""
    update: Update | None = None
    """The update with which the step was launched; None before the first use."""
    published: Published | None = None
    """Where to read the ids if the step writes them to host memory itself; None if they are copied
    to `ids`."""
    scored: ScoredResults | None = None
    """Layout of `scores`; None if the step has no scores."""
    scores: torch.Tensor | None = None
    """Pinned int32 buffer; grows to the largest size needed so far."""
    _shape: tuple[int, ...] = (0, 0)
    _width: int = 0
    pooled: PooledRows | None = None
    """Layout of `vectors`; None if the step has no pooling rows."""
    vectors: torch.Tensor | None = None
    """Pinned float32 buffer; grows to the largest size needed so far."""

    @classmethod
    def allocate(cls, device: Device, rows: int) -> StepBuffers:
        """Allocate buffers for steps in which at most `rows` rows sample."""
        event = device.timed_event
        ids = device.empty_pinned(rows, dtype=torch.int32)
        return cls(event(), event(), event(), event(), event(), ids)

    def copy_ids(
        self, update: Update, chosen: list[torch.Tensor], published: Published | None
    ) -> None:
        """Queue a copy of a step's token ids to the host, unless the step writes them to host
        memory itself (`published` is not None)."""
        self.update, self.published, self.rows = update, published, sum(map(len, chosen))
        begin = 0
        for part in chosen if published is None else ():
            self.ids[begin : begin + len(part)].copy_(part, non_blocking=True)
            begin += len(part)

    def copy_scores(self, device: Device, scored: ScoredResults, table: torch.Tensor) -> None:
        """Queue a copy of `table`, a step's log-probabilities in the int32 format of
        `models/sampling/token_scores.py`, to the host."""
        if self.scores is None or len(self.scores) < table.numel():
            self.scores = device.empty_pinned(1 << table.numel().bit_length(), dtype=torch.int32)
        self.scored, self._shape = scored, tuple(table.shape)
        self.scores[: table.numel()].copy_(table.flatten(), non_blocking=True)

    def _score_message(self) -> StepScores | None:
        if self.scored is None or self.scores is None:
            return None
        rows, columns = self._shape
        table = self.scores[: rows * columns].view(rows, columns).numpy()
        message = self.scored.message(table)
        self.scored = None
        return message

    def copy_vectors(self, device: Device, pooled: PooledRows, values: torch.Tensor) -> None:
        """Queue a copy of the results of a step's pooling rows, float32 (rows, width), to the
        host."""
        if self.vectors is None or len(self.vectors) < values.numel():
            self.vectors = device.empty_pinned(
                1 << values.numel().bit_length(), dtype=torch.float32
            )
        self.pooled, self._width = pooled, values.shape[1]
        self.vectors[: values.numel()].copy_(values.flatten(), non_blocking=True)

    def _vector_message(self) -> StepVectors | None:
        if self.pooled is None or self.vectors is None:
            return None
        pooled, self.pooled = self.pooled, None
        rows = len(pooled.numbers)
        width = self._width
        return pooled.message(self.vectors[: rows * width].view(rows, width).numpy().copy())

    def collect(self, clock: DeviceClock, has_inner_events: bool) -> StepResult:
        """Wait for the step to end and return its results. `has_inner_events` is True if the events
        `forwarded` and `sampled` were recorded."""
        self.end.wait()
        assert self.update is not None
        begin, end = clock.step(self.begin, self.end)

        def time_of(event: TimedEvent) -> int:
            return begin + round(self.begin.milliseconds_until(event) * 1e6)

        has_encoded = self.update.encoding is not None and self.update.encoding.tasks
        ids = self.published.ids() if self.published else self.ids[: self.rows].numpy().copy()
        return StepResult(
            self.update.counts,
            ids if self.update.order is None else ids[self.update.order],
            begin,
            forwarded=time_of(self.forwarded) if has_inner_events else end,
            sampled=time_of(self.sampled) if has_inner_events else end,
            end=end,
            encoded=time_of(self.encoded) if has_encoded else 0,
            scores=self._score_message(),
            vectors=self._vector_message(),
        )


class BufferPool:
    """The buffers of all steps of an executor, which are reused from step to step, and the clock
    that dates the steps."""

    def __init__(self, device: Device, rows: int) -> None:
        """Start the clock; the device must be idle. Each step's buffers will have room for `rows`
        token ids."""
        self._device, self._rows = device, rows
        self._free: deque[StepBuffers] = deque()
        self._last_collected: StepBuffers | None = None
        """Buffers of the latest collected step; None before the first one. The clock measures from
        the end of that step, so they are reused only after the next step is collected."""
        self._clock = DeviceClock.started(device)

    def take(self) -> StepBuffers:
        """Return buffers that no step uses. New ones are allocated if there are none."""
        if self._free:
            return self._free.popleft()
        return StepBuffers.allocate(self._device, self._rows)

    def collect(self, buffers: StepBuffers) -> StepResult:
        """Wait for a step and return its results. This also frees the buffers of the previous
        step."""
        has_inner_events = not self._device.traits.asynchronous
        computed = buffers.collect(self._clock, has_inner_events=has_inner_events)
        if self._last_collected is not None:
            self._free.append(self._last_collected)
        self._last_collected = buffers
        return computed
