"""Images and videos in a prompt: their placeholders, their positions, and their contribution to
the hashes of cached blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nanoactor.errors import InvalidRequest
from nanoactor.messages.vision import Items
from nanoactor.models.vision.config import VisionConfig
from nanoactor.models.vision.mrope import VisualSpan, rope_positions

Int32 = NDArray[np.int32]
Encode = Callable[[str], Sequence[int]]
KEY_BYTES = 16
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PLACEHOLDER = "<|image_pad|>"
"""The image placeholder token, as spelled in Qwen's tokenizers."""


@dataclasses.dataclass(frozen=True, slots=True)
class VisualItem:
    """An image or video of known size that is not decoded yet."""

    key: bytes
    """16-byte hash of the item's content and of how it is processed."""
    height: int
    """Height in tokens of the image, or of one temporal patch of the video."""
    width: int
    times: tuple[float, ...] | None = None
    """Time of each temporal patch (a group of consecutive frames) of a video, in seconds; None for
    an image."""

    @property
    def tokens(self) -> int:
        """Number of the item's tokens in the prompt, one for each output row of the vision
        tower."""
        return self.height * self.width * (1 if self.times is None else len(self.times))


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedSpan:
    """Position of an image, or of one temporal patch (a group of consecutive frames) of a video,
    in a prompt after its placeholders have been expanded."""

    item: int
    """Index of the image or video among the prompt's items."""
    first_row: int
    """Index of the first token's output row, among the vision tower's output rows for the item."""
    span: VisualSpan


@dataclasses.dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt in which each image and video has as many placeholder tokens as the vision tower
    computes output rows for it."""

    token_ids: Int32
    spans: tuple[PlacedSpan, ...]


def expand_prompt(
    token_ids: Int32, items: Sequence[VisualItem], config: VisionConfig, encode: Encode
) -> ExpandedPrompt:
    """Replace each placeholder by as many placeholder tokens as the vision tower computes output
    rows for its item (an image or video).

    The first image placeholder belongs to the first image among the items, and so on; the same
    applies to videos. A video's placeholder becomes, for each temporal patch, its time as text, the
    start token, the placeholders and the end token. `encode` returns the token ids of such a text.
    Raises `InvalidRequest` if the numbers of placeholders and items differ.
    """
    positions = np.flatnonzero(np.isin(token_ids, (config.image_token_id, config.video_token_id)))
    _check_counts(token_ids[positions], items, config)
    parts: list[Int32] = []
    spans: list[PlacedSpan] = []
    length = copied_until = 0

    def add(piece: Int32) -> None:
        nonlocal length
        parts.append(piece)
        length += len(piece)

    images = (index for index, item in enumerate(items) if item.times is None)
    videos = (index for index, item in enumerate(items) if item.times is not None)
    for place in positions.tolist():
        index = next(images if token_ids[place] == config.image_token_id else videos)
        item = items[index]
        add(token_ids[copied_until:place])
        for piece, first_row in _pieces(item, config, encode):
            if first_row is not None:
                span = VisualSpan(length, item.height, item.width)
                spans.append(PlacedSpan(index, first_row, span))
            add(piece)
        copied_until = place + 1
    add(token_ids[copied_until:])
    return ExpandedPrompt(np.concatenate(parts).astype(np.int32), tuple(spans))


def _pieces(
    item: VisualItem, config: VisionConfig, encode: Encode
) -> Iterator[tuple[Int32, int | None]]:
    """Yield the pieces that replace an item's placeholder.

    Each piece is an int32 array of token ids, with the index of the item's output row for its first
    token, or None if the piece is text.
    """
    rows = item.height * item.width
    if item.times is None:
        yield np.full(rows, config.image_token_id, np.int32), 0
        return
    for number, time in enumerate(item.times):
        text = [*encode(f"<{time:.1f} seconds>"), config.start_token_id]
        yield np.array(text, np.int32), None
        yield np.full(rows, config.video_token_id, np.int32), number * rows
        yield np.array([config.end_token_id], np.int32), None


def _check_counts(placeholders: Int32, items: Sequence[VisualItem], config: VisionConfig) -> None:
    for kind, token, given in (
        ("image", config.image_token_id, sum(item.times is None for item in items)),
        ("video", config.video_token_id, sum(item.times is not None for item in items)),
    ):
        found = int((placeholders == token).sum())
        if found != given:
            raise InvalidRequest(
                f"the prompt has {found} {kind} placeholders (token {token}), but the number "
                f"of {kind}s given is {given}; each {kind} needs exactly one placeholder"
            )


def patch_times(times: Sequence[float], frames_per_patch: int) -> tuple[float, ...]:
    """Return the time of each temporal patch (a group of `frames_per_patch` consecutive frames) in
    seconds: the mean of the times of its first and last frames.

    `times` is the time of each frame. If the frames do not fill the last patch, the last frame is
    repeated.
    """
    padded = [*times, *[times[-1]] * (-len(times) % frames_per_patch)]
    firsts, lasts = padded[::frames_per_patch], padded[frames_per_patch - 1 :: frames_per_patch]
    return tuple((first + last) / 2 for first, last in zip(firsts, lasts, strict=True))


def items_message(
    prompt: ExpandedPrompt, items: Sequence[VisualItem], config: VisionConfig, worker: int
) -> Items:
    """Return the message that describes a prompt's images and videos to the scheduler and the
    block manager. `worker` is the index of the vision worker that has their undecoded data."""
    _, delta = rope_positions(len(prompt.token_ids), [placed.span for placed in prompt.spans])
    frames = [1 if item.times is None else len(item.times) for item in items]
    return Items(
        keys=np.frombuffer(b"".join(item.key for item in items), np.uint8).reshape(-1, KEY_BYTES),
        grids=np.array(
            [(n, item.height, item.width) for n, item in zip(frames, items, strict=True)], np.int32
        ),
        spans=np.array([(p.item, p.first_row, p.span.start) for p in prompt.spans], np.int32),
        rope_delta=delta,
        worker=worker,
    )


def visual_spans(items: Items) -> list[VisualSpan]:
    """Return the position and size, in tokens, of each image and each temporal patch of a video,
    in the form that `nanoactor.models.vision.mrope` expects."""
    grids = items.grids.tolist()
    return [
        VisualSpan(start, grids[item][1], grids[item][2]) for item, _, start in items.spans.tolist()
    ]


def block_extras(items: Items, block_size: int) -> dict[int, bytes]:
    """Return, by block index, bytes that make the block's hash depend on the images and videos in
    the block, because their placeholder tokens are always the same.

    The bytes contain the key, height, width and first output row of each image or temporal patch
    that overlaps the block. Its offset in the block is not included, because the hash also depends
    on the preceding blocks, which determine the offset.
    """
    extras: dict[int, bytes] = {}
    for (item, first, _), span in zip(items.spans.tolist(), visual_spans(items), strict=True):
        numbers = (span.height, span.width, first)
        name = bytes(items.keys[item]) + b"".join(n.to_bytes(4, "little") for n in numbers)
        for block in range(span.start // block_size, -(-span.stop // block_size)):
            extras[block] = extras.get(block, b"") + name
    return extras
