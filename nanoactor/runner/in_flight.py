"""The buffers of a step under way: events, and a page-locked place for its ids."""

from __future__ import annotations

import dataclasses

import torch

from nanoactor.models.device import Device, TimedEvent
from nanoactor.runner.clock import DeviceClock
from nanoactor.runner.protocol import Computed


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
    encodes: bool = False
    """Whether `encoded` was recorded."""

    @classmethod
    def make(cls, device: Device, rows: int) -> InFlight:
        """For steps that sample so many rows at most."""
        event = device.timed_event
        ids = device.pinned(rows, dtype=torch.int32)
        return cls(event(), event(), event(), event(), event(), ids)

    def collect(self, clock: DeviceClock, split: bool) -> Computed:
        """Wait for the step; `split`: events were recorded within it."""
        self.end.wait()
        begin, end = clock.step(self.begin, self.end)

        def when(event: TimedEvent) -> int:
            return begin + round(self.begin.milliseconds_until(event) * 1e6)

        return Computed(
            self.ids[: self.rows].numpy().copy(),
            begin,
            when(self.forwarded) if split else end,
            when(self.sampled) if split else end,
            end,
            when(self.encoded) if self.encodes else 0,
        )
