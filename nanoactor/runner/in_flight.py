"""The buffers of a step under way: events, and a page-locked place for its ids."""

from __future__ import annotations

import dataclasses

import torch

from nanoactor.models.device import Device, TimedEvent
from nanoactor.runner.clock import DeviceClock
from nanoactor.runner.protocol import Computed
from nanoactor.runner.published import Published
from nanoactor.runner.scored_rows import ScoredRows
from nanoactor.scores import StepScores


@dataclasses.dataclass(slots=True)
class InFlight:
    """Used again once the step after it is done."""

    begin: TimedEvent
    encoded: TimedEvent
    forwarded: TimedEvent
    sampled: TimedEvent
    end: TimedEvent
    ids: torch.Tensor
    """int32 (rows,), page-locked."""
    rows: int = 0
    """Of them that count."""
    published: Published | None = None
    """Where the step writes them itself."""
    encodes: bool = False
    """Whether `encoded` was recorded."""
    scored: ScoredRows | None = None
    """The rows whose scores are in `scores`; None where there are none."""
    scores: torch.Tensor | None = None
    """int32, page-locked, as large as has been needed."""
    _shape: tuple[int, ...] = (0, 0)

    @classmethod
    def make(cls, device: Device, rows: int) -> InFlight:
        """For steps that sample so many rows at most."""
        event = device.timed_event
        ids = device.pinned(rows, dtype=torch.int32)
        return cls(event(), event(), event(), event(), event(), ids)

    def take_ids(self, chosen: list[torch.Tensor], published: Published | None) -> None:
        """Queue the copy of a step's ids, but where the step has published them."""
        self.published, self.rows = published, sum(map(len, chosen))
        begin = 0
        for part in chosen if published is None else ():
            self.ids[begin : begin + len(part)].copy_(part, non_blocking=True)
            begin += len(part)

    def take_scores(self, device: Device, scored: ScoredRows, table: torch.Tensor) -> None:
        """Queue the copy of a step's scores."""
        if self.scores is None or len(self.scores) < table.numel():
            self.scores = device.pinned(1 << table.numel().bit_length(), dtype=torch.int32)
        self.scored, self._shape = scored, tuple(table.shape)
        self.scores[: table.numel()].copy_(table.flatten(), non_blocking=True)

    def _score_message(self) -> tuple[StepScores, ...]:
        if self.scored is None or self.scores is None:
            return ()
        rows, columns = self._shape
        table = self.scores[: rows * columns].view(rows, columns).numpy()
        message = self.scored.message(table)
        self.scored = None
        return (message,)

    def collect(self, clock: DeviceClock, split: bool) -> Computed:
        """Wait for the step; `split`: events were recorded within it."""
        self.end.wait()
        begin, end = clock.step(self.begin, self.end)

        def when(event: TimedEvent) -> int:
            return begin + round(self.begin.milliseconds_until(event) * 1e6)

        return Computed(
            self.published.ids() if self.published else self.ids[: self.rows].numpy().copy(),
            begin,
            when(self.forwarded) if split else end,
            when(self.sampled) if split else end,
            end,
            encoded=when(self.encoded) if self.encodes else 0,
            scores=self._score_message(),
        )
