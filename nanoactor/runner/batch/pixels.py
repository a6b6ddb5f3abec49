"""Decoded pixels on their way to the device: they arrive in pieces and are dropped once encoded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Step
from nanoactor.messages.vision import Pixels
from nanoactor.runner.batch.inputs import EncodeTask, Encoding, SeenPictures, Update
from nanoactor.setup.actors import ENCODER_PAGE_ROWS

PixelsOf = Mapping[int, NDArray[np.uint8]]
NO_PIXELS: PixelsOf = {}


class PixelStore:
    """Stores pixels by identifying number. An entry is removed after two events, in either order: a
    vision worker has sent all of the pixels or reported that they will not arrive, and a step has
    encoded the last of them or they were dropped."""

    def __init__(self) -> None:
        self._partial: dict[int, tuple[NDArray[np.uint8], tuple[int, ...]]] = {}
        self._whole: dict[int, NDArray[np.uint8]] = {}
        self._dropped: set[int] = set()
        """Numbers that were dropped before the worker's last message."""
        self._absent: set[int] = set()
        """Numbers whose pixels will not arrive, and that are not dropped yet."""

    def __len__(self) -> int:
        """Return the number of entries, complete or not, that are not removed yet."""
        return len(self._partial) + len(self._whole) + len(self._dropped) + len(self._absent)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of all pixels held."""
        parts = sum(array.nbytes for array, _ in self._partial.values())
        return parts + sum(array.nbytes for array in self._whole.values())

    def add(self, event: Pixels) -> bool:
        """Add a piece of pixels. Return True if it completes an item that is still wanted."""
        number, end = event.pixels, event.offset + len(event.data)
        size = math.prod(event.shape)
        if number in self._dropped:
            if end == size:
                self._dropped.remove(number)
            return False
        if number not in self._partial:
            self._partial[number] = np.empty(size, np.uint8), event.shape
        array, shape = self._partial[number]
        array[event.offset : end] = event.data
        if end < size:
            return False
        del self._partial[number]
        self._whole[number] = array.reshape(shape)
        return True

    def note_absent(self, number: int) -> None:
        """Record that pixels will not arrive, or not completely."""
        self._partial.pop(number, None)
        if number in self._dropped:
            self._dropped.remove(number)
        else:
            self._absent.add(number)

    def drop(self, number: int) -> None:
        """Drop pixels that are no longer wanted."""
        if number in self._absent:
            self._absent.remove(number)
        elif self._whole.pop(number, None) is None:
            self._partial.pop(number, None)
            self._dropped.add(number)

    def take(self, step: Step, units_of: Callable[[NDArray[np.uint8]], int]) -> PixelsOf:
        """Return the pixels that a step encodes, by number, and drop those whose last unit it
        encodes. `units_of` returns the number of units of an item."""
        taken: dict[int, NDArray[np.uint8]] = {}
        if step.vision is None:
            return taken
        slices = step.vision.slices
        columns = (slices.pixels.tolist(), slices.firsts.tolist(), slices.counts.tolist())
        for number, first, count in zip(*columns, strict=True):
            taken[number] = self._whole[number]
            if first + count == units_of(taken[number]):
                del self._whole[number]
        return taken


def with_vision(
    update: Update, step: Step, pixels: PixelsOf, dropped: Sequence[int] = ()
) -> Update:
    """Return a step's update with its work on images and videos added; `dropped` are the numbers of
    pixels dropped since the previous step."""
    if (vision := step.vision) is None:
        found = Encoding((), tuple(dropped)) if dropped else None
        return dataclasses.replace(update, encoding=found) if found else update
    tasks, at = [], 0
    for index, number in enumerate(vision.slices.pixels.tolist()):
        pages = vision.pages[at : at + int(vision.page_counts[index])].astype(np.int64)
        at += len(pages)
        places = (pages[:, None] * ENCODER_PAGE_ROWS + np.arange(ENCODER_PAGE_ROWS)).ravel()
        first, count = int(vision.slices.firsts[index]), int(vision.slices.counts[index])
        tasks.append(EncodeTask(pixels[number], number, first, count, places))
    inputs = update.inputs
    if tokens := vision.positions.shape[1]:
        rows = np.full(tokens, -1, np.int32)
        rows[vision.tokens] = vision.rows
        inputs = dataclasses.replace(inputs, seen=SeenPictures(rows, vision.positions.copy()))
    encoding = Encoding(tuple(tasks), tuple(dropped))
    return dataclasses.replace(update, inputs=inputs, encoding=encoding)
