"""Inputs of captured steps with prompts. A graph reads its inputs from the same device memory in
every replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from nanoactor.models.devices.protocols import Device
from nanoactor.runner.batch.inputs import Prefill, Update, VisualInputs
from nanoactor.runner.steps.graphs import MixedSize, MixedSizes, max_prompts

D = TypeVar("D", Prefill[torch.Tensor], VisualInputs[torch.Tensor])
Padding = int | list[list[int]]
"""Padding value of an array, or a column with one value per row."""


class FixedInputs(Generic[D]):
    """The int32 arrays of a dataclass in fixed device memory, padded with values that have no
    effect. For each step in flight, there is a pinned copy on the host."""

    def __init__(
        self,
        device: Device,
        kind: type[D],
        arrays: dict[str, tuple[tuple[int, ...], Padding]],
        in_flight: int,
    ) -> None:
        """Allocate the arrays of dataclass `kind`; `arrays` maps each field to its shape and
        padding. At most `in_flight` steps may be in flight."""
        self._arrays = arrays
        words = sum(int(np.prod(shape)) for shape, _ in arrays.values())
        self._host_buffers = [
            device.empty_pinned(words, dtype=torch.int32) for _ in range(in_flight)
        ]
        self._device_buffer = device.zeros(words, dtype=torch.int32)
        self._current = 0
        self.inputs: D = kind(**self._views(self._device_buffer))
        self.fill(None)

    def _views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        views, offset = {}, 0
        for name, (shape, _) in self._arrays.items():
            size = int(np.prod(shape))
            views[name] = buffer[offset : offset + size].view(shape)
            offset += size
        return views

    def fill(
        self, inputs: Prefill[NDArray[np.int32]] | VisualInputs[NDArray[np.int32]] | None
    ) -> None:
        """Queue a copy of a step's inputs to the device. If `inputs` is None, only padding is
        copied."""
        self._current = (self._current + 1) % len(self._host_buffers)
        for name, view in self._views(self._host_buffers[self._current]).items():
            array = view.numpy()
            values = getattr(inputs, name) if inputs is not None else array[..., :0]
            array[..., : values.shape[-1]] = values
            array[..., values.shape[-1] :] = self._arrays[name][1]
        self._device_buffer.copy_(self._host_buffers[self._current], non_blocking=True)


def fixed_prefill(
    device: Device, tokens: int, tokens_per_program: int, dummy: int, in_flight: int
) -> FixedInputs[Prefill[torch.Tensor]]:
    """Allocate the inputs of captured steps with `tokens` prompt tokens. `tokens_per_program` is
    the number of tokens that one program of the prefill kernel processes, and `dummy` is the slot
    (index in the batch) of padding tokens."""
    rows = max_prompts(tokens)
    tiles = -(-tokens // tokens_per_program) + rows
    arrays: dict[str, tuple[tuple[int, ...], Padding]] = {
        "token_ids": ((tokens,), 0),
        "positions": ((tokens,), 0),
        "slots": ((tokens,), dummy),
        "rows": ((4, rows), [[dummy], [0], [0], [0]]),
        "tiles": ((2, tiles), -1),
        "ends": ((rows,), 0),
        "sampling": ((rows,), dummy),
    }
    return FixedInputs(device, Prefill, arrays, in_flight)


class MixedInputs:
    """The inputs of all captured mixed steps (steps with prompts), by size."""

    def __init__(self, device: Device, sizes: MixedSizes, in_flight: int) -> None:
        """Prepare without allocating anything yet. At most `in_flight` steps may be in flight."""
        self._device, self._sizes, self._in_flight = device, sizes, in_flight
        self._prefills: dict[int, FixedInputs[Prefill[torch.Tensor]]] = {}
        self._images: dict[int, FixedInputs[VisualInputs[torch.Tensor]]] = {}

    @property
    def max_tokens(self) -> int:
        """Maximum number of prompt tokens in a captured step; 0 if none are captured."""
        return max(self._prefills, default=0)

    def allocate(self, tokens_per_program: int, dummy: int) -> Iterator[MixedSize]:
        """Allocate the inputs of each size to capture, and yield the sizes, largest first. `dummy`
        is the slot (index in the batch) of padding tokens."""
        for tokens in self._sizes.tokens[::-1]:
            limits = tokens, tokens_per_program, dummy, self._in_flight
            self._prefills[tokens] = fixed_prefill(self._device, *limits)
            if self._sizes.has_images:
                arrays: dict[str, tuple[tuple[int, ...], Padding]] = {
                    "rows": ((tokens,), -1),
                    "positions": ((3, tokens), 0),
                }
                self._images[tokens] = FixedInputs(
                    self._device, VisualInputs, arrays, self._in_flight
                )
            for rows in self._sizes.rows[::-1]:
                for has_images in (True, False) if self._sizes.has_images else (False,):
                    yield MixedSize(tokens, rows, has_images)

    def inputs_of(
        self, size: MixedSize
    ) -> tuple[Prefill[torch.Tensor], VisualInputs[torch.Tensor] | None]:
        """Return the device buffers from which the captured steps of this size read their inputs.
        The second buffer is None without images."""
        visual = self._images[size.tokens].inputs if size.has_images else None
        return self._prefills[size.tokens].inputs, visual

    def fit(self, update: Update) -> MixedSize | None:
        """Return the smallest captured size into which a step fits; None if there is none."""
        if not self._prefills or (prefill := update.prefill) is None:
            return None
        has_images = update.inputs.visual is not None
        rows = max(prefill.rows.shape[1], len(prefill.ends))
        return self._sizes.fit(
            len(prefill.token_ids), rows, update.decode_rows, has_images=has_images
        )

    def fill(self, size: MixedSize, update: Update) -> None:
        """Queue a copy of a step's inputs to the device buffers from which the captured steps of
        this size read."""
        self._prefills[size.tokens].fill(update.prefill)
        if size.has_images:
            self._images[size.tokens].fill(update.inputs.visual)
