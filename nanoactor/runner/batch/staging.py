"""Staging of a step's arrays, which are packed into one pinned buffer and sent to the device in a
single copy."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from nanoactor.models.devices.protocols import Device
from nanoactor.runner.batch.inputs import Array, Inputs

_FIRST_WORDS = 1 << 16
_ALIGNMENT = 4
"""Alignment of packed arrays, in int32 words: 16 bytes."""


class Staging:
    """Pinned host buffers, used in rotation, and one device buffer. A single device buffer suffices
    because the device works in order."""

    def __init__(self, device: Device, in_flight: int) -> None:
        """Allocate buffers for at most `in_flight` steps at once."""
        self._device = device
        self._host_buffers = [
            device.empty_pinned(_FIRST_WORDS, dtype=torch.int32) for _ in range(in_flight)
        ]
        self._device_buffer = device.zeros(_FIRST_WORDS, dtype=torch.int32)
        self._current = 0
        self._used = 0

    def begin(self, words: int) -> None:
        """Switch to the next host buffer, which no running step uses. Buffers are enlarged if they
        have fewer than `words` int32 words."""
        self._current = (self._current + 1) % len(self._host_buffers)
        self._used = 0
        if words > len(self._host_buffers[self._current]):
            size = 1 << words.bit_length()
            self._host_buffers[self._current] = self._device.empty_pinned(size, dtype=torch.int32)
        if words > len(self._device_buffer):
            # The allocator does not reuse the old buffer's memory before the device queue is done
            # with it.
            self._device_buffer = self._device.zeros(1 << words.bit_length(), dtype=torch.int32)
        self._array: NDArray[np.int32] = self._host_buffers[self._current].numpy()

    def put(self, array: NDArray[np.generic]) -> torch.Tensor:
        """Pack a contiguous array of 4- or 8-byte numbers. Return a device tensor of the same
        shape, which contains the values once the copy queued by `send` is done."""
        words = array.reshape(-1).view(np.int32)
        begin, end = self._used, self._used + len(words)
        self._array[begin:end] = words
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        dtype = _TORCH_DTYPES[array.dtype.str]
        return self._device_buffer[begin:end].view(dtype).view(array.shape)

    def put_inputs(self, inputs: Inputs[Array]) -> Inputs[torch.Tensor]:
        """Pack all arrays of a step. Return the same structure with device tensors instead of
        arrays."""
        self.begin(words_of(inputs))
        return cast("Inputs[torch.Tensor]", self._put(inputs))

    def _put(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.put(value)
        if isinstance(value, tuple):
            return tuple(map(self._put, value))
        if names := _names(type(value)):
            return type(value)(*(self._put(getattr(value, name)) for name in names))
        return value

    def send(self) -> None:
        """Queue one copy of all packed arrays to the device."""
        if self._used:
            used = min(self._used, len(self._device_buffer))
            self._device_buffer[:used].copy_(
                self._host_buffers[self._current][:used], non_blocking=True
            )


def words_of(value: Any) -> int:
    """Return an upper bound on the number of int32 words that the arrays in `value` take when
    packed. `value` may be an array, a tuple or a dataclass, nested to any depth."""
    if isinstance(value, np.ndarray):
        return value.nbytes // 4 + _ALIGNMENT
    if names := _names(type(value)):
        value = tuple(getattr(value, name) for name in names)
    return sum(map(words_of, value)) if isinstance(value, tuple) else 0


def _names(cls: type) -> tuple[str, ...]:
    return _NAMES.get(cls) or _NAMES.setdefault(cls, _fields(cls))


_NAMES: dict[type, tuple[str, ...]] = {}


def _fields(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


_TORCH_DTYPES = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32}
