"""Where pictures and videos stand in a prompt: placeholders, positions, and names of blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nanoactor.errors import InvalidRequest
from nanoactor.models.mrope import VisualSpan
from nanoactor.models.vision_config import VisionConfig

Int32 = NDArray[np.int32]
Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class VisualItem:
    """A picture, or a video, of which the size is known and nothing is decoded yet."""

    key: bytes
    """16 bytes that name its content and how it is processed."""
    height: int
    """In tokens, of the picture or of each temporal patch."""
    width: int
    times: tuple[float, ...] | None = None
    """Seconds into a video, one for each temporal patch; None for a picture."""

    @property
    def tokens(self) -> int:
        """Rows that the vision tower gives for it."""
        return self.height * self.width * (1 if self.times is None else len(self.times))


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedSpan:
    """Where a picture, or one temporal patch of a video, stands in the expanded prompt."""

    item: int
    """Which of the items."""
    first_row: int
    """The item's row that the first token stands for."""
    span: VisualSpan


@dataclasses.dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt with a token for each row of its pictures."""

    token_ids: Int32
    spans: tuple[PlacedSpan, ...]


def expand_prompt(
    token_ids: Int32, items: Sequence[VisualItem], config: VisionConfig, encode: Encode
) -> ExpandedPrompt:
    """Replace each placeholder by as many as its item has rows, in the order of the items.

    A video's placeholder becomes, for each temporal patch, its time as text, the start token,
    placeholders and the end token. `encode` gives the ids of such a text. Raises `InvalidRequest`
    where placeholders and items disagree.
    """
    at = np.flatnonzero(np.isin(token_ids, (config.image_token_id, config.video_token_id)))
    _check(token_ids[at], items, config)
    parts: list[Int32] = []
    spans: list[PlacedSpan] = []
    length = before = 0

    def add(piece: Int32) -> None:
        nonlocal length
        parts.append(piece)
        length += len(piece)

    for index, (place, item) in enumerate(zip(at.tolist(), items, strict=True)):
        add(token_ids[before:place])
        for piece, first_row in _pieces(item, config, encode):
            if first_row is not None:
                span = VisualSpan(length, item.height, item.width)
                spans.append(PlacedSpan(index, first_row, span))
            add(piece)
        before = place + 1
    add(token_ids[before:])
    return ExpandedPrompt(np.concatenate(parts).astype(np.int32), tuple(spans))


def _pieces(
    item: VisualItem, config: VisionConfig, encode: Encode
) -> Iterator[tuple[Int32, int | None]]:
    """What replaces a placeholder: ids, and the item's first row where they are of the item."""
    rows = item.height * item.width
    if item.times is None:
        yield np.full(rows, config.image_token_id, np.int32), 0
        return
    for number, time in enumerate(item.times):
        text = [*encode(f"<{time:.1f} seconds>"), config.start_token_id]
        yield np.array(text, np.int32), None
        yield np.full(rows, config.video_token_id, np.int32), number * rows
        yield np.array([config.end_token_id], np.int32), None


def _check(placeholders: Int32, items: Sequence[VisualItem], config: VisionConfig) -> None:
    for kind, token, given in (
        ("image", config.image_token_id, sum(item.times is None for item in items)),
        ("video", config.video_token_id, sum(item.times is not None for item in items)),
    ):
        found = int((placeholders == token).sum())
        if found != given:
            raise InvalidRequest(
                f"the prompt has {found} {kind} placeholders (token {token}), but {given} {kind}s "
                "were given: each needs one, in the same order"
            )
    for number, (token, item) in enumerate(zip(placeholders.tolist(), items, strict=True)):
        if (token == config.image_token_id) != (item.times is None):
            wanted, got = "an image", "a video"
            if token == config.video_token_id:
                wanted, got = got, wanted
            raise InvalidRequest(
                f"placeholder {number + 1} of the prompt stands for {wanted}, but its item is "
                f"{got}: give items in the order of their placeholders"
            )


def patch_times(times: Sequence[float], together: int) -> tuple[float, ...]:
    """Return the time of each temporal patch: the mean of its first and its last frame's, in
    seconds. The last frame is repeated where frames do not fill a patch."""
    padded = [*times, *[times[-1]] * (-len(times) % together)]
    firsts, lasts = padded[::together], padded[together - 1 :: together]
    return tuple((first + last) / 2 for first, last in zip(firsts, lasts, strict=True))


def block_extras(
    prompt: ExpandedPrompt, items: Sequence[VisualItem], block_size: int
) -> dict[int, bytes]:
    """Return, by block, what tells it from blocks of the same ids: the key and the shape of each
    item in it. Which rows these are follows from the blocks before, on which its name depends."""
    extras: dict[int, bytes] = {}
    for placed in prompt.spans:
        span = placed.span
        for block in range(span.start // block_size, -(-span.stop // block_size)):
            shape = span.height.to_bytes(4, "little") + span.width.to_bytes(4, "little")
            extras[block] = extras.get(block, b"") + items[placed.item].key + shape
    return extras
