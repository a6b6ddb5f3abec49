"""Token ids that decode steps write to host memory themselves, if the device supports this. A copy
after the step would delay the next step's graph."""

from __future__ import annotations

import dataclasses

import torch

from nanoactor.messages.engine import Int32
from nanoactor.models.devices.protocols import Device

_WORD = 1 << 32


class WrongStep(RuntimeError):
    """Raised if published ids belong to a different step than the host expects."""


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """The token ids that one step writes to host memory, to be read once the step is done."""

    number: int
    record: Int32
    """(1 + rows,): number of the published step, followed by its token ids. A view of the ring."""

    def ids(self) -> Int32:
        """Return a copy of the token ids, int32 (rows,). Raises `WrongStep` if they belong to
        a different step."""
        found = int(self.record[0]) % _WORD
        if found != self.number:
            raise WrongStep(
                f"found the ids of decode step {found} instead of those of {self.number}"
            )
        return self.record[1:].copy()


class PublishedIds:
    """Ring buffer of token ids in pinned memory. Host and device count the published steps
    separately."""

    def __init__(self, device: Device, in_flight: int, rows: int) -> None:
        """Allocate a ring for at most `in_flight` steps, with at most `rows` token ids each."""
        self._publishes = device.traits.publishes_ids
        size = 1 << (in_flight - 1).bit_length()
        self._device = device
        self._ring = device.empty_pinned(size, 1 + rows, dtype=torch.int32)
        self._records: Int32 = self._ring.numpy()
        self._count = device.zeros(1, dtype=torch.int32)
        self._next = 0

    def publish(self, ids: torch.Tensor) -> None:
        """Queue a write of a step's token ids, int32 (rows,), to the ring. In a captured step, this
        write is part of the graph."""
        if self._publishes:
            self._device.publish(ids, self._ring, self._count)

    def restart(self) -> None:
        """Reset the count of published steps to 0. Call after steps whose ids were not claimed,
        such as captures."""
        self._count.zero_()
        self._next = 0

    def claim(self, rows: int) -> Published | None:
        """Return where the next published step will write its `rows` token ids; None if the device
        cannot publish."""
        if not self._publishes:
            return None
        number = self._next
        self._next = (number + 1) % _WORD
        return Published(number, self._records[number % len(self._records), : 1 + rows])
