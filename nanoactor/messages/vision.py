"""The messages about pictures and videos; those of all requests are in `engine.py`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoactor.runtime.codec import message

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@message(4)
class Items:
    """The pictures and videos of one request, in the order in which they were given; nothing is
    decoded."""

    keys: NDArray[np.uint8]
    """(items, 16): hash of each item's content and processing."""
    grids: Int32
    """(items, 3): temporal patches, and the rows and columns of tokens in each."""
    spans: Int32
    """(spans, 3), in the order of the prompt: which item, its row that comes first here, and the
    index of that token in the prompt. A span is as long as a temporal patch."""
    rope_delta: int
    """Offset from a later token's index to its rotary position."""
    worker: int
    """Index of the vision worker that holds the bytes."""


@message(25)
class EncodeSlices:
    """The parts of pictures and videos that a step encodes before anything else; a row each."""

    numbers: Int64
    """Number of the object in the encoder cache."""
    pixels: Int64
    """Number of the `WantPixels` that the slice's pixels come from."""
    firsts: Int32
    """Index of the first unit of each slice (see `nanoactor.media.units`)."""
    counts: Int32
    """Number of units of each slice."""


@message(33)
class VisionStep:
    """The work of a step on pictures and videos: it encodes first, then prompts read."""

    slices: EncodeSlices
    page_counts: Int32
    """Number of `pages` that belong to each slice's object: its rows are in these pages, in this
    order."""
    pages: Int32
    tokens: Int32
    """Indices of the step's prompt tokens that take rows of the encoder cache."""
    rows: Int32
    """Row of the encoder cache for each of `tokens`: page x rows of a page + offset."""
    positions: Int32
    """Rotary positions of all prompt tokens of the step, (3, tokens): time, height, width."""


@message(41)
class EncoderCredits:
    """The items that matches found, and the encoder cache's pages that are given back."""

    items: Int32
    """Number of items of each answered match."""
    refunds: Int32
    """Number of debited pages of each match that are shared, or that none of its tokens will
    read."""
    numbers: Int64
    """Number of each item's object in the encoder cache; negative if all of its tokens are computed
    already."""
    units: Int32
    """Number of each item's units that the planned steps encode."""
    freed: Int32
    """Pages that became free."""
    fences: Int32
    """Step that must be done before each of `freed` may be rewritten."""


@message(70, by="uid")
class MediaPiece:
    """Frontend to vision worker: some bytes of an item, in order."""

    uid: int
    item: int
    """Index of the item in the request, from 0."""
    tokenizer: int
    """Index of the tokenizer to notify; negative if it was notified before."""
    form: str
    """"" for a file in a format of its own; else "RGB", "RGBA" or "L" for pixels."""
    shape: tuple[int, ...]
    """Height and width of pixels."""
    area: tuple[int, int]
    """The smallest and the largest area, in pixels, to which it may be resized."""
    frames: tuple[int, ...]
    """Size in bytes of each frame of a video; empty for a picture."""
    size: int
    """Size of the whole, in bytes."""
    offset: int
    data: NDArray[np.uint8]


@message(71)
class ItemsRead:
    """Vision worker to tokenizer: the items found, as determined from their bytes and headers
    alone."""

    worker: int
    uids: Int64
    items: Int32
    keys: NDArray[np.uint8]
    """Content hashes, (items, 16)."""
    grids: Int32
    """(items, 3), as in `Items`."""
    errors: list[str]
    """The reason why each item cannot be used; empty if it can."""
    refused: NDArray[np.uint8]
    """Of each item: whether the machine is to blame, not the item."""


@message(72)
class ResendMedia:
    """Vision worker to frontend: the bytes of these items are wanted again."""

    uids: Int64
    items: Int32


@message(73, by="uid")
class WantPixels:
    """Scheduler to vision worker: decode an item and send its pixels to the runners."""

    pixels: int
    """Number that identifies them from here on; never reused."""
    uid: int
    item: int
    key: bytes


@message(74)
class CancelPixels:
    """Scheduler to vision worker: these pixels are no longer wanted."""

    pixels: Int64


@message(75)
class Pixels:
    """Vision worker to every runner: some bytes of decoded pixels, in order."""

    pixels: int
    shape: tuple[int, ...]
    """Frames, height, width, channels, of the whole."""
    offset: int
    data: NDArray[np.uint8]


@message(76)
class NoPixels:
    """Vision worker to every runner: these will not come."""

    pixels: Int64


@message(77)
class ItemsReady:
    """Runner to scheduler: it holds these pixels."""

    rank: int
    pixels: Int64


@message(78)
class ItemsFailed:
    """Vision worker to scheduler: these cannot be decoded, and why."""

    pixels: Int64
    errors: list[str]
    refused: Int64
    """Those that failed because of the machine, not the picture."""


@message(79)
class DropPixels:
    """Scheduler to every runner, by way of the block manager: forget these pixels, which may not
    have arrived yet. No later step names them, and half-encoded items restart."""

    pixels: Int64
    numbers: Int64
    """Number of each one's object in the encoder cache."""
