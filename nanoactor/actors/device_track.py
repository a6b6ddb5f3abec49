"""The trace track of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoactor.runtime.actor import Context

if TYPE_CHECKING:
    from nanoactor.runner.protocol import StepResult

DEVICE = "device"
"""Name of the trace track that shows when the device is busy and with what."""


class DeviceTrack:
    """Trace track of one runner's device, with spans for the parts of each step."""

    def __init__(self, context: Context) -> None:
        self._track = context.new_track(DEVICE)
        names = ("encode", "forward", "sample", "copy")
        self._kinds = [self._track.kind(name, "step") for name in names]

    def add(self, step: int, computed: StepResult) -> None:
        """Add spans for the parts of a step, at the times that the device reported."""
        times = (
            computed.begin,
            computed.encoded or computed.begin,
            computed.forwarded,
            computed.sampled,
            computed.end,
        )
        for kind, begin, end in zip(self._kinds, times, times[1:], strict=False):
            if end > begin:
                self._track.add(kind, step, begin, end)
