"""Rotary positions of the text, images and video frames in a prompt. Needs only NumPy.

The scheme is Qwen3-VL's interleaved M-RoPE, arXiv:2511.21631.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, slots=True)
class VisualSpan:
    """The tokens of an image, or of one temporal patch of a video, in a prompt. They form a grid
    that is stored row by row."""

    start: int
    """Index of the first token in the prompt."""
    height: int
    """Height of the grid in tokens."""
    width: int

    @property
    def stop(self) -> int:
        """Index after the last token in the prompt."""
        return self.start + self.height * self.width


def rope_positions(length: int, spans: Sequence[VisualSpan]) -> tuple[NDArray[np.int32], int]:
    """Return the positions in time, height and width, int32 (3, length), of a prompt of `length`
    tokens, and an offset for later tokens.

    Each text token advances all three positions by one. The tokens of a span have the same position
    in time, and positions in height and width that follow from their row and column. The text after
    a span starts at the span's first position plus its longer side. A token at index i after the
    prompt has position i + offset in all three.

    Raises `ValueError` if spans are out of order, overlap, or extend past the prompt.
    """
    positions = np.empty((3, length), np.int32)
    index = position = 0
    for span in spans:
        if span.start < index or span.stop > length:
            raise ValueError(
                f"{span} begins before the end of the previous span (index {index}), or extends "
                f"past the end of the prompt ({length} tokens)"
            )
        num_text_tokens = span.start - index
        positions[:, index : span.start] = position + np.arange(num_text_tokens, dtype=np.int32)
        position += num_text_tokens
        span_slice = slice(span.start, span.stop)
        rows, columns = np.indices((span.height, span.width), dtype=np.int32).reshape(2, -1)
        positions[0, span_slice] = position
        positions[1, span_slice] = position + rows
        positions[2, span_slice] = position + columns
        position += max(span.height, span.width)
        index = span.stop
    positions[:, index:] = position + np.arange(length - index, dtype=np.int32)
    return positions, position - index
