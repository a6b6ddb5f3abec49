"""Figures for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nanoactor.doctor.machine import Device

_GIB = 1 << 30


def gibibytes(size: int) -> str:
    """A size."""
    return f"{size / _GIB:.1f} GiB"


def devices(found: Sequence[Device]) -> str:
    """How many there are, and each with its memory."""
    return f"{len(found)}: " + "; ".join(
        f"{index} {device.name}, {_memory(device)}" for index, device in enumerate(found)
    )


def _memory(device: Device) -> str:
    if device.free is None or device.total is None:
        return device.trouble or "memory unknown"
    return f"{gibibytes(device.free)} of {gibibytes(device.total)} free"


def mostly_taken(found: Iterable[Device]) -> bool:
    """Whether less than half of a device's memory is left."""
    return any(device.total and (device.free or 0) < device.total / 2 for device in found)


def number_ranges(numbers: Iterable[int]) -> str:
    """As 1-3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
