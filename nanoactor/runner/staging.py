"""A step's arrays on their way to the device: packed into one page-locked buffer, one copy."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from nanoactor.models.batch import SamplingGroups
from nanoactor.models.device import Device
from nanoactor.models.logit_rules import LogitRules
from nanoactor.runner.batch import Update, VisionUpdate
from nanoactor.runner.deferred_rows import DeferredRows
from nanoactor.runner.ruled_rows import RuledRows
from nanoactor.runner.sampling_table import SampledRows
from nanoactor.runner.scored_rows import ScoredRows

_FIRST_WORDS = 1 << 16
_ALIGNMENT = 4
"""In int32 words: whatever is packed begins at 16 bytes."""


class Staging:
    """Buffers on the host, used in turn; the device has one, as its work is in order."""

    def __init__(self, device: Device, in_flight: int) -> None:
        """So many steps may be under way at once."""
        self._device = device
        self._host = [device.pinned(_FIRST_WORDS, dtype=torch.int32) for _ in range(in_flight)]
        self._there = device.zeros(_FIRST_WORDS, dtype=torch.int32)
        self._current = 0
        self._used = 0

    def begin(self, words: int) -> None:
        """Take the next buffer, whose last step is done, for at most so many int32 numbers."""
        self._current = (self._current + 1) % len(self._host)
        self._used = 0
        if words > len(self._host[self._current]):
            size = 1 << words.bit_length()
            self._host[self._current] = self._device.pinned(size, dtype=torch.int32)
        if words > len(self._there):
            # The allocator gives the old one's memory to nobody before the queue is through.
            self._there = self._device.zeros(1 << words.bit_length(), dtype=torch.int32)
        self._array: NDArray[np.int32] = self._host[self._current].numpy()

    def put(self, array: NDArray[np.generic]) -> torch.Tensor:
        """Pack a contiguous array of 4- or 8-byte numbers; returns where it will be on the device,
        of the same shape, once `send` is done."""
        words = array.reshape(-1).view(np.int32)
        begin, end = self._used, self._used + len(words)
        self._array[begin:end] = words
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        kind = _TORCH[array.dtype.str]
        return self._there[begin:end].view(kind).view(array.shape)

    def put_sampling(self, rows: SampledRows) -> DeviceRows:
        """Pack how some rows sample."""
        fields = [field.name for field in dataclasses.fields(SamplingGroups)]
        groups = SamplingGroups(**{name: self.put(getattr(rows, name)) for name in fields})
        rules = self._put_rules(rows.rules) if rows.rules else None
        masks = None if rows.masks is None else self.put(rows.masks)
        index, slots = self.put(rows.index), self.put(rows.slots)
        return DeviceRows(index, slots, groups, rules, masks, rows.fused)

    def _put_rules(self, rules: RuledRows) -> LogitRules:
        fields = [field.name for field in dataclasses.fields(LogitRules)]
        arrays = {name: self.put(getattr(rules, name)) for name in fields if name != "longest"}
        return LogitRules(**arrays, longest=rules.longest)

    def put_scores(self, scores: ScoredRows) -> DeviceScores:
        """Pack which rows are scored."""
        rows = (self.put(scores.prompt_rows), self.put(scores.targets), self.put(scores.places))
        return DeviceScores(*rows, scores.most)

    def put_deferred(self, rows: DeferredRows) -> DeviceDeferred:
        """Pack what becomes of constrained rows."""
        return DeviceDeferred(
            self.put(rows.prompt_slots),
            self.put(rows.continued_slots),
            [self.put_sampling(part) for part in rows.choices],
        )

    def put_update(self, update: Update, captured: bool) -> DeviceUpdate:
        """Pack all that a step needs, but for what a captured one reads from a place of its own."""
        self.begin(update.words)
        changes = [self.put(array) for array in update.changes]
        prefill, vision = (None, None) if captured else (update.prefill, update.vision)
        fields = dataclasses.fields(DevicePrefill)
        return DeviceUpdate(
            changes,
            DevicePrefill(*(self.put(getattr(prefill, f.name)) for f in fields))
            if prefill
            else None,
            DeviceVision.staged(self, vision) if vision and vision.sees else None,
            [self.put_sampling(part) for part in update.fallback],
            self.put_scores(update.scores) if update.scores else None,
            [self.put(blocks) for blocks in update.copies],
            deferred=self.put_deferred(update.deferred) if update.deferred else None,
        )

    def send(self) -> None:
        """Queue the copy."""
        if self._used:
            used = min(self._used, len(self._there))
            self._there[:used].copy_(self._host[self._current][:used], non_blocking=True)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRows:
    """`SampledRows` on the device."""

    index: torch.Tensor
    slots: torch.Tensor
    groups: SamplingGroups
    rules: LogitRules | None
    masks: torch.Tensor | None
    """int32 (rows, words)."""
    fused: bool


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceDeferred:
    """`DeferredRows` on the device."""

    prompt_slots: torch.Tensor
    continued_slots: torch.Tensor
    choices: list[DeviceRows]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceScores:
    """`ScoredRows` on the device."""

    prompt_rows: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    most: int


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePrefill:
    """`Prefill` on the device."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    tiles: torch.Tensor
    ends: torch.Tensor
    sampling: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceVision:
    """The pictures that a step's prompts see, on the device."""

    rows: torch.Tensor
    """int32 (prompt tokens,): which row of the encoder cache each stands for; -1 for text."""
    positions: torch.Tensor
    """int32 (3, prompt tokens)."""

    @classmethod
    def staged(cls, staging: Staging, vision: VisionUpdate) -> DeviceVision:
        """Pack them with a step's other arrays."""
        return cls(staging.put(vision.rows), staging.put(vision.positions))


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceUpdate:
    """`Update` on the device."""

    changes: list[torch.Tensor]
    """Indices and values, or nothing."""
    prefill: DevicePrefill | None
    seen: DeviceVision | None
    fallback: list[DeviceRows]
    scores: DeviceScores | None
    copies: list[torch.Tensor]
    """Blocks: from where, and to where; or nothing."""
    deferred: DeviceDeferred | None


_TORCH = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32}
