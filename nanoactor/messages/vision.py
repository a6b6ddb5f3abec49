"""Messages about images and videos, which are called items. `engine.py` has the messages that all
requests use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@message(4)
class Items:
    """The images and videos of one request, in the order of the request and before decoding."""

    keys: NDArray[np.uint8]
    """Hashes of each item's content and preprocessing, (items, 16)."""
    grids: Int32
    """(items, 3): number of temporal patches of each item, and rows and columns of tokens per
    temporal patch."""
    spans: Int32
    """(spans, 3), in prompt order. A span is the run of prompt tokens for one temporal patch.
    Columns: index of the item, index of the first of its embedding rows in the span, and prompt
    index of that row's token."""
    rope_delta: int
    """Rotary position minus token index, for the tokens after the prompt."""
    worker: int
    """Index of the vision worker that has the bytes of the items."""


@message(25)
class EncodeSlices:
    """Parts of images and videos that a step encodes before it runs the decoder, one row for each
    part."""

    numbers: Int64
    """Number of each slice's item in the encoder cache."""
    pixels: Int64
    """Number of the `WantPixels` message that requested the pixels of each slice."""
    firsts: Int32
    """Index of the first unit of each slice. A unit is the smallest part of an item's encoding that
    a step can run (`nanoactor.media.units`)."""
    counts: Int32
    """Number of units of each slice."""


@message(33)
class VisionStep:
    """A step's work on images and videos: slices (parts of them) are encoded first, then prompt
    tokens read the encoder's output."""

    slices: EncodeSlices
    page_counts: Int32
    """Number of entries in `pages` for the item of each slice. These pages contain the item's rows,
    in order."""
    pages: Int32
    tokens: Int32
    """Indices of the step's prompt tokens that read a row of the encoder cache."""
    rows: Int32
    """Row of the encoder cache that each of `tokens` reads: page * rows per page + offset."""
    positions: Int32
    """Rotary positions of all prompt tokens of the step, (3, tokens): temporal, height and
    width."""


@message(41)
class EncoderCredits:
    """The part of a block manager's `Answer` about the encoder cache: entries for admitted
    sequences, and released pages."""

    items: Int32
    """Number of items of each admitted sequence."""
    refunds: Int32
    """For each admitted sequence, the number of pages that the scheduler counts as free again,
    because they are shared or none of the sequence's tokens will read them."""
    numbers: Int64
    """Number of each item's entry in the encoder cache; negative if all tokens of the item are
    already computed."""
    units: Int32
    """Number of units (parts encoded at once) of each item that planned steps have encoded or will
    encode."""
    freed: Int32
    """Number of pages freed by each release."""
    fences: Int32
    """Step that must be finished before the pages of each release may be overwritten."""


@message(70, by="uid")
class MediaPiece:
    """Frontend to vision worker: one part of the bytes of an item (an image or video). Parts are
    sent in order."""

    uid: int
    item: int
    """Index of the item in its request, from 0."""
    tokenizer: int
    """Index of the tokenizer to notify; negative if a tokenizer was notified before."""
    form: str
    """Format of the data: "RGB", "RGBA" or "L" for raw pixels; empty for a file in an image or
    video format."""
    shape: tuple[int, ...]
    """(height, width) of raw pixels."""
    area: tuple[int, int]
    """The smallest and the largest area, in pixels, that the item may have after resizing."""
    frames: tuple[int, ...]
    """Size of each frame of a video, in bytes; empty for an image."""
    size: int
    """Size of the whole item, in bytes."""
    offset: int
    data: NDArray[np.uint8]


@message(71)
class ItemsRead:
    """Vision worker to tokenizer: the keys and sizes of items (images and videos), read from their
    bytes and headers, or errors."""

    worker: int
    uids: Int64
    items: Int32
    keys: NDArray[np.uint8]
    """Hashes of the items' content and preprocessing, (items, 16)."""
    grids: Int32
    """Grids, (items, 3), as in `Items`."""
    errors: list[str]
    """Error message of each item that cannot be used; empty for other items."""
    refused: NDArray[np.uint8]
    """For each item, 1 if its error is due to the machine, not to the item; else 0."""


@message(72)
class ResendMedia:
    """Vision worker to frontend: send the bytes of these items (images and videos) again, because
    the worker no longer has them."""

    uids: Int64
    items: Int32


@message(73, by="uid")
class WantPixels:
    """Scheduler to vision worker: decode an item (an image or video) and send its pixels to all
    runners."""

    pixels: int
    """Number that identifies these pixels in later messages; never reused."""
    uid: int
    item: int
    key: bytes


@message(74)
class CancelPixels:
    """Scheduler to vision worker: do not send these pixels, which are no longer needed."""

    pixels: Int64


@message(75)
class Pixels:
    """Vision worker to all runners: one part of the decoded pixels of an item (an image or video).
    Parts are sent in order."""

    pixels: int
    shape: tuple[int, ...]
    """Shape of all pixels of the item: (frames, height, width, channels)."""
    offset: int
    data: NDArray[np.uint8]


@message(76)
class NoPixels:
    """Vision worker to all runners: these pixels will not be sent."""

    pixels: Int64


@message(77)
class ItemsReady:
    """Runner to scheduler: this rank has received all pixels of these items."""

    rank: int
    pixels: Int64


@message(78)
class ItemsFailed:
    """Vision worker to scheduler: pixels that could not be decoded, with error messages."""

    pixels: Int64
    errors: list[str]
    refused: Int64
    """Subset of `pixels` whose failure is due to the machine, not to the image or video."""


@message(79)
class DropPixels:
    """Scheduler to all runners, through the block manager: drop these pixels, which may not have
    arrived yet. No later step uses them, and temporal patches that are only partly encoded are
    encoded again."""

    pixels: Int64
    numbers: Int64
    """Number of each item's entry in the encoder cache."""
