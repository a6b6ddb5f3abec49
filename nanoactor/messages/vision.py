"""Messages about images and videos; the messages for all requests are in `engine.py`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@message(4)
class Items:
    """The images and videos of one request, in the order in which they were given; they are not
    decoded."""

    keys: NDArray[np.uint8]
    """(items, 16): hash of each item's content and processing."""
    grids: Int32
    """(items, 3): number of temporal patches, and rows and columns of tokens in each patch."""
    spans: Int32
    """(spans, 3), in the order of the prompt: index of the item, the first of the item's rows in
    this span, and the index of that row's token in the prompt. A span is as long as a temporal
    patch."""
    rope_delta: int
    """Rotary position minus token index for tokens after the prompt."""
    worker: int
    """Index of the vision worker that holds the bytes."""


@message(25)
class EncodeSlices:
    """Parts of images and videos that a step encodes before anything else, one row for each
    part."""

    numbers: Int64
    """Id of each slice's item in the encoder cache."""
    pixels: Int64
    """Number of the `WantPixels` message that requested each slice's pixels."""
    firsts: Int32
    """Index of the first unit of each slice (see `nanoactor.media.units`)."""
    counts: Int32
    """Number of units of each slice."""


@message(33)
class VisionStep:
    """The work of a step on images and videos: they are encoded first, then prompt tokens read the
    results."""

    slices: EncodeSlices
    page_counts: Int32
    """Number of `pages` that belong to each slice's item, whose rows are in these pages, in this
    order."""
    pages: Int32
    tokens: Int32
    """Indices of the step's prompt tokens that read rows of the encoder cache."""
    rows: Int32
    """Row of the encoder cache for each of `tokens`: page x rows per page + offset."""
    positions: Int32
    """Rotary positions of all prompt tokens of the step, (3, tokens): time, height, width."""


@message(41)
class EncoderCredits:
    """The items that were found for admitted sequences, and the pages of the encoder cache that are
    released."""

    items: Int32
    """Number of items of each admitted sequence."""
    refunds: Int32
    """Number of pages debited for each admitted sequence that are shared, or that none of its
    tokens will read."""
    numbers: Int64
    """Id of each item in the encoder cache; negative if all of the item's tokens are computed
    already."""
    units: Int32
    """Number of units of each item that the planned steps encode."""
    freed: Int32
    """Number of pages that each release makes free."""
    fences: Int32
    """Step that must be finished before the pages of each release may be overwritten."""


@message(70, by="uid")
class MediaPiece:
    """Frontend to vision worker: one part of an item's bytes; the parts are sent in order."""

    uid: int
    item: int
    """Index of the item in the request, from 0."""
    tokenizer: int
    """Index of the tokenizer to notify; negative if it was notified before."""
    form: str
    """"" for a file in an image or video format; otherwise "RGB", "RGBA" or "L" for raw pixels."""
    shape: tuple[int, ...]
    """Height and width of raw pixels."""
    area: tuple[int, int]
    """The smallest and the largest area, in pixels, to which the item may be resized."""
    frames: tuple[int, ...]
    """Size in bytes of each frame of a video; empty for an image."""
    size: int
    """Size of the whole item in bytes."""
    offset: int
    data: NDArray[np.uint8]


@message(71)
class ItemsRead:
    """Vision worker to tokenizer: the items that were identified, from their bytes and headers
    only."""

    worker: int
    uids: Int64
    items: Int32
    keys: NDArray[np.uint8]
    """Content hashes, (items, 16)."""
    grids: Int32
    """(items, 3), as in `Items`."""
    errors: list[str]
    """Reason why each item cannot be used; empty if the item can be used."""
    refused: NDArray[np.uint8]
    """True if the cause of each error is the machine, not the item."""


@message(72)
class ResendMedia:
    """Vision worker to frontend: send the bytes of these items again."""

    uids: Int64
    items: Int32


@message(73, by="uid")
class WantPixels:
    """Scheduler to vision worker: decode an item and send its pixels to the runners."""

    pixels: int
    """Number that identifies the pixels from now on; never reused."""
    uid: int
    item: int
    key: bytes


@message(74)
class CancelPixels:
    """Scheduler to vision worker: these pixels are no longer needed."""

    pixels: Int64


@message(75)
class Pixels:
    """Vision worker to every runner: one part of an item's decoded pixels; the parts are sent in
    order."""

    pixels: int
    shape: tuple[int, ...]
    """Shape of all pixels of the item: frames, height, width, channels."""
    offset: int
    data: NDArray[np.uint8]


@message(76)
class NoPixels:
    """Vision worker to every runner: these pixels will not be sent."""

    pixels: Int64


@message(77)
class ItemsReady:
    """Runner to scheduler: the runner holds these pixels."""

    rank: int
    pixels: Int64


@message(78)
class ItemsFailed:
    """Vision worker to scheduler: pixels that cannot be decoded, and the reasons."""

    pixels: Int64
    errors: list[str]
    refused: Int64
    """Subset of `pixels` that failed because of the machine, not because of the image or video."""


@message(79)
class DropPixels:
    """Scheduler to every runner, by way of the block manager: drop these pixels, which may not have
    arrived yet. No later step uses them, and half-encoded temporal patches are encoded again."""

    pixels: Int64
    numbers: Int64
    """Id of each item in the encoder cache."""
