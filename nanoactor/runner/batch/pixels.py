"""Decoded pixels on their way to the device. They arrive in pieces and are dropped once encoded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.engine import Step
from nanoactor.messages.vision import Pixels
from nanoactor.runner.batch.inputs import EncodeTask, Encoding, Update, VisualInputs
from nanoactor.setup.actors import ENCODER_PAGE_ROWS

PixelsByNumber = Mapping[int, NDArray[np.uint8]]
NO_PIXELS: PixelsByNumber = {}


class PixelStore:
    """Stores the pixels of images and videos, by the number under which they were requested. An
    entry is removed after two events, which may occur in either order. One is the vision worker's
    last message: the last piece, or a report that the pixels will not arrive. The other is that a
    step encodes the last of the pixels, or that they are dropped."""

    def __init__(self) -> None:
        self._partial: dict[int, tuple[NDArray[np.uint8], tuple[int, ...]]] = {}
        self._complete: dict[int, NDArray[np.uint8]] = {}
        self._dropped: set[int] = set()
        """Numbers of the entries that were dropped before the worker's last message arrived."""
        self._absent: set[int] = set()
        """Numbers of the entries whose pixels will not arrive and which have not been dropped
        yet."""

    def __len__(self) -> int:
        """Return the number of entries that have not been removed yet, with or without pixels."""
        return len(self._partial) + len(self._complete) + len(self._dropped) + len(self._absent)

    @property
    def nbytes(self) -> int:
        """Total size of all stored pixels, in bytes."""
        parts = sum(array.nbytes for array, _ in self._partial.values())
        return parts + sum(array.nbytes for array in self._complete.values())

    def add(self, event: Pixels) -> bool:
        """Add a piece of the pixels of an image or video. Return True if all pieces have now
        arrived and the entry was not dropped."""
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
        self._complete[number] = array.reshape(shape)
        return True

    def note_absent(self, number: int) -> None:
        """Record that the pixels with this number will not arrive, or not completely."""
        self._partial.pop(number, None)
        if number in self._dropped:
            self._dropped.remove(number)
        else:
            self._absent.add(number)

    def drop(self, number: int) -> None:
        """Drop the pixels with this number, which are no longer needed."""
        if number in self._absent:
            self._absent.remove(number)
        elif self._complete.pop(number, None) is None:
            self._partial.pop(number, None)
            self._dropped.add(number)

    def consume(self, step: Step, units_of: Callable[[NDArray[np.uint8]], int]) -> PixelsByNumber:
        """Return the pixels of all images and videos that a step encodes, by number. Entries whose
        last unit the step encodes are removed from the store. `units_of` returns the number of
        units in which an image or video is encoded, given its pixels."""
        pixels: dict[int, NDArray[np.uint8]] = {}
        if step.vision is None:
            return pixels
        slices = step.vision.slices
        columns = (slices.pixels.tolist(), slices.firsts.tolist(), slices.counts.tolist())
        for number, first, count in zip(*columns, strict=True):
            pixels[number] = self._complete[number]
            if first + count == units_of(pixels[number]):
                del self._complete[number]
        return pixels


def with_vision(
    update: Update, step: Step, pixels: PixelsByNumber, dropped: Sequence[int] = ()
) -> Update:
    """Return a step's update with its work on images and videos added. `pixels` maps the number of
    each image or video that the step encodes to its pixels. `dropped` are the numbers of those that
    were dropped since the previous step."""
    if (vision := step.vision) is None:
        encoding = Encoding((), tuple(dropped)) if dropped else None
        return dataclasses.replace(update, encoding=encoding) if encoding else update
    tasks, offset = [], 0
    for index, number in enumerate(vision.slices.pixels.tolist()):
        pages = vision.pages[offset : offset + int(vision.page_counts[index])].astype(np.int64)
        offset += len(pages)
        cache_rows = (pages[:, None] * ENCODER_PAGE_ROWS + np.arange(ENCODER_PAGE_ROWS)).ravel()
        first, count = int(vision.slices.firsts[index]), int(vision.slices.counts[index])
        tasks.append(EncodeTask(pixels[number], number, first, count, cache_rows))
    inputs = update.inputs
    if tokens := vision.positions.shape[1]:
        rows = np.full(tokens, -1, np.int32)
        rows[vision.tokens] = vision.rows
        inputs = dataclasses.replace(inputs, visual=VisualInputs(rows, vision.positions.copy()))
    encoding = Encoding(tuple(tasks), tuple(dropped))
    return dataclasses.replace(update, inputs=inputs, encoding=encoding)
