"""Captured steps with prompts: where they read their inputs, always in the same place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from nanoactor.models.device import Device
from nanoactor.runner.batch import Prefill, Update, VisionUpdate
from nanoactor.runner.graphs import MixedSize, MixedSizes, most_prompts
from nanoactor.runner.staging import DevicePrefill, DeviceVision


class _Fixed:
    """int32 arrays in one place on the device, and a page-locked copy for each step under way."""

    def __init__(self, device: Device, shapes: tuple[tuple[int, ...], ...], in_flight: int) -> None:
        self._shapes = shapes
        words = sum(int(np.prod(shape)) for shape in shapes)
        self._host = [device.pinned(words, dtype=torch.int32) for _ in range(in_flight)]
        self._there = device.zeros(words, dtype=torch.int32)
        self._arrays = [[view.numpy() for view in self._views(host)] for host in self._host]
        self._current = 0
        self.views = self._views(self._there)

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        views, at = [], 0
        for shape in self._shapes:
            size = int(np.prod(shape))
            views.append(buffer[at : at + size].view(shape))
            at += size
        return views

    def next(self) -> list[NDArray[np.int32]]:
        """Return the arrays to be filled in for the next step."""
        self._current = (self._current + 1) % len(self._host)
        return self._arrays[self._current]

    def send(self) -> None:
        """Queue the copy."""
        self._there.copy_(self._host[self._current], non_blocking=True)


class FixedPrefill:
    """The inputs of steps with so many prompt tokens, padded with what changes nothing."""

    def __init__(
        self, device: Device, tokens: int, tokens_per_program: int, dummy: int, in_flight: int
    ) -> None:
        """`dummy` is the slot of padded tokens and rows; so many steps may be under way at once."""
        rows = most_prompts(tokens)
        tiles = -(-tokens // tokens_per_program) + rows
        shapes = ((tokens,), (tokens,), (tokens,), (4, rows), (2, tiles), (rows,), (rows,))
        self._fixed = _Fixed(device, shapes, in_flight)
        self._padding = (0, 0, dummy, 0, -1, 0, dummy)
        self.inputs = DevicePrefill(*self._fixed.views)
        self.fill(None)

    def fill(self, prefill: Prefill | None) -> None:
        """Queue the copy of a step's inputs."""
        names = [field.name for field in dataclasses.fields(Prefill)]
        for name, array, padding in zip(names, self._fixed.next(), self._padding, strict=True):
            given = getattr(prefill, name) if prefill is not None else array[..., :0]
            array[..., : given.shape[-1]] = given
            array[..., given.shape[-1] :] = padding
        self._fixed.send()


class FixedVision:
    """Buffers for what so many prompt tokens see of pictures; padded tokens see nothing."""

    def __init__(self, device: Device, tokens: int, in_flight: int) -> None:
        """So many steps may be under way at once."""
        self._fixed = _Fixed(device, ((tokens,), (3, tokens)), in_flight)
        self.inputs = DeviceVision(*self._fixed.views)
        self.fill(None)

    def fill(self, vision: VisionUpdate | None) -> None:
        """Queue the copy of a step's inputs."""
        rows, positions = self._fixed.next()
        count = 0 if vision is None else len(vision.rows)
        if vision is not None:
            rows[:count], positions[:, :count] = vision.rows, vision.positions
        rows[count:] = -1
        positions[:, count:] = 0
        self._fixed.send()


class MixedInputs:
    """The inputs of all captured mixed steps."""

    def __init__(self, device: Device, sizes: MixedSizes, in_flight: int) -> None:
        """So many steps may be under way at once."""
        self._device, self._sizes, self._in_flight = device, sizes, in_flight
        self._prefills: dict[int, FixedPrefill] = {}
        self._visions: dict[int, FixedVision] = {}

    @property
    def longest(self) -> int:
        """The most prompt tokens of a step; 0 where none is captured."""
        return max(self._prefills, default=0)

    def make(self, tokens_per_program: int, dummy: int) -> Iterator[MixedSize]:
        """Go through the steps to be captured, largest first; their inputs are there then."""
        for tokens in self._sizes.tokens[::-1]:
            self._prefills[tokens] = FixedPrefill(
                self._device, tokens, tokens_per_program, dummy, self._in_flight
            )
            if self._sizes.sees:
                self._visions[tokens] = FixedVision(self._device, tokens, self._in_flight)
            for rows in self._sizes.rows[::-1]:
                for sees in (True, False) if self._sizes.sees else (False,):
                    yield MixedSize(tokens, rows, sees)

    def of(self, size: MixedSize) -> tuple[DevicePrefill, DeviceVision | None]:
        """Return where steps of this size read."""
        seen = self._visions[size.tokens].inputs if size.sees else None
        return self._prefills[size.tokens].inputs, seen

    def fit(self, update: Update) -> MixedSize | None:
        """Return the least captured step that holds this one."""
        prefill, vision = update.prefill, update.vision
        if not self._prefills or prefill is None:
            return None
        sees = vision is not None and vision.sees
        rows = max(prefill.rows.shape[1], len(prefill.ends))
        return self._sizes.fit(len(prefill.token_ids), rows, update.decode_rows, sees=sees)

    def fill(self, size: MixedSize, update: Update) -> None:
        """Queue the copy of a step's inputs."""
        self._prefills[size.tokens].fill(update.prefill)
        if size.sees:
            self._visions[size.tokens].fill(update.vision)
