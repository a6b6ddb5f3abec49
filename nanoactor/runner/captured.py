"""Steps that a device has recorded, by size: what fits is replayed, padded."""

from __future__ import annotations

import bisect
import logging

import torch

from nanoactor.models.collective import Group
from nanoactor.models.device import Accelerator, Captured, CapturedFunction
from nanoactor.models.lengths import HostLengths
from nanoactor.runner.captures import smallest

log = logging.getLogger("nanoactor.runner")


class CapturedSteps:
    """Decode steps by rows, mixed ones by (prompt tokens, rows).

    What the device cannot capture is left out: its steps run in the next larger size, or operator
    by operator where there is none.
    """

    def __init__(self, device: Accelerator, group: Group, turns: int) -> None:
        """So many steps may be under way at once. What one rank cannot capture none replays: they
        must be of the same size everywhere."""
        self._device, self._group, self._turns = device, group, turns
        self._decode: dict[int, Captured] = {}
        self._sizes: list[int] = []
        self._mixed: dict[tuple[int, int], Captured] = {}
        self.failed = 0

    def add_decode(self, rows: int, function: CapturedFunction, lengths: HostLengths) -> None:
        """Record a decode step for so many rows."""
        captured = self._record(f"decode steps of {rows} rows", function, lengths)
        if captured is not None:
            self._decode[rows] = captured
            bisect.insort(self._sizes, rows)

    def add_mixed(self, size: tuple[int, int], function: CapturedFunction) -> None:
        """Record a mixed step."""
        name = f"steps of {size[0]} prompt tokens and {size[1]} decode rows"
        captured = self._record(name, function, HostLengths([], [], []))
        if captured is not None:
            self._mixed[size] = captured

    def _record(
        self, name: str, function: CapturedFunction, lengths: HostLengths
    ) -> Captured | None:
        function(lengths)  # compiles what is special to this size
        self._device.synchronize()
        captured: Captured | None = None
        why = "another rank cannot"
        try:
            captured = self._device.capture(function, lengths, self._turns)
        except RuntimeError as error:
            why = str(error)
        if self._group.least(int(captured is not None)):
            return captured
        if not self.failed:
            log.warning(
                "%s cannot be captured, and perhaps others: decode steps are padded to the next "
                "size that can, the rest is launched operator by operator, which may cost several "
                "times the speed: %s",
                name,
                why,
            )
        self.failed += 1
        return None

    def decode(self, rows: int, lengths: HostLengths) -> torch.Tensor | None:
        """Queue the least decode step that holds so many rows; None where there is none."""
        if not self._sizes or rows > self._sizes[-1]:
            return None
        size = smallest(self._sizes, rows)
        return self._decode[size].replay(lengths.padded(size))

    def has_mixed(self, size: tuple[int, int]) -> bool:
        """Whether it was captured."""
        return size in self._mixed

    def mixed(self, size: tuple[int, int]) -> torch.Tensor:
        """Queue a mixed step."""
        return self._mixed[size].replay(HostLengths([], [], []))
