"""Inputs of steps that reach a runner in messages of their own: pixels and token masks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nanoactor.media.units import EncodeUnits
from nanoactor.messages.engine import Int32, Step
from nanoactor.messages.grammar import DropMasks, Masks, MasksReady
from nanoactor.messages.vision import ItemsReady, NoPixels, Pixels
from nanoactor.runner.batch.masks import MaskStore
from nanoactor.runner.batch.pixels import PixelsByNumber, PixelStore
from nanoactor.runner.config import RankConfig
from nanoactor.runtime.outbox import Outbox


class SideInputs:
    """The pixels and masks of one runner that no step has used yet, and the reports of their
    arrival to the scheduler, which plans a step that needs them only after these reports."""

    def __init__(self, config: RankConfig, scheduler: Callable[[], Outbox]) -> None:
        """`scheduler` returns the outbox to the scheduler. While it has no room, reports wait."""
        self._config, self._scheduler = config, scheduler
        self.pixels, self.masks = PixelStore(), MaskStore()
        self._ready: list[int] = []
        """Numbers of pixels that have arrived but were not reported to the scheduler yet."""
        self._masks_ready: tuple[list[int], list[int]] = [], []
        """Uids and positions of masks that have arrived but were not reported to the scheduler
        yet."""

    def take(self, step: Step) -> tuple[PixelsByNumber, Int32]:
        """Return the pixels of all images and videos that a step encodes, by number, and the masks
        of its constrained rows, int32 (rows, words). What no later step needs is removed."""
        return self.pixels.consume(step, self._units_of), self.masks.pop_masks(step)

    def _units_of(self, pixels: NDArray[np.uint8]) -> int:
        """Return the number of units (parts encoded at once) of an image or video with these
        pixels."""
        files, budget = self._config.files, self._config.engine.max_num_batched_tokens
        assert files.images is not None
        assert files.config.vision is not None
        vision = files.config.vision
        return EncodeUnits.of_pixels(pixels.shape, files.images, vision, budget).count

    def add_pixels(self, event: Pixels) -> None:
        """Add a piece of the pixels of an image or video. Report them once they are complete."""
        if self.pixels.add(event):
            self._ready.append(event.pixels)
            self.report()

    def note_absent(self, event: NoPixels) -> None:
        """Record that pixels will not arrive, or not completely."""
        for number in event.pixels.tolist():
            self.pixels.note_absent(number)

    def drop_pixels(self, numbers: list[int]) -> None:
        """Drop the pixels with these numbers, which are no longer needed."""
        for number in numbers:
            self.pixels.drop(number)

    def add_masks(self, event: Masks) -> None:
        """Add masks and report those that a step may still use."""
        uids, positions = self.masks.add(event)
        self._masks_ready[0].extend(uids)
        self._masks_ready[1].extend(positions)
        self.report()

    def drop_masks(self, event: DropMasks) -> None:
        """Drop the masks of sequences to which no later step refers."""
        self.masks.drop(event)

    def report(self) -> None:
        """Report all arrivals that were not reported yet to the scheduler, unless the outbox has no
        room."""
        outbox, rank = self._scheduler(), self._config.rank
        if self._ready and outbox.ready:
            outbox.send(ItemsReady(rank, np.array(self._ready, np.int64)))
            self._ready.clear()
        uids, positions = self._masks_ready
        if uids and outbox.ready:
            ready = np.array(uids, np.int64), np.array(positions, np.int32)
            outbox.send(MasksReady(rank, *ready))
            self._masks_ready = [], []
