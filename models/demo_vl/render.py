"""Random pictures of digits, drawn in batches, with labels."""

from __future__ import annotations

import dataclasses
import functools

import torch
from PIL import Image, ImageDraw, ImageFont

from nanoactor.models.demo_vl.layout import (
    CELL,
    FONT_SIZES,
    HEIGHTS,
    MAX_DIGITS,
    MIN_CONTRAST,
    NO_DIGIT,
    PATCH,
    PLAIN_FONT_SIZE,
    WIDTH_SHARES,
    WIDTHS,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Glyphs:
    """Images of the ten digits in each font size, followed by an empty eleventh image."""

    masks: torch.Tensor
    """Ink coverage (0 to 255) of each glyph, aligned to the top left, float32 (sizes, 11, side,
    side)."""
    boxes: torch.Tensor
    """Left, top, width and height in pixels of the ink relative to the pen, int64 (sizes, 11,
    4)."""
    advances: torch.Tensor
    """Advance of the pen in pixels, int64 (sizes,). All digits of the built-in font are equally
    wide."""


@functools.cache
def draw_glyphs() -> Glyphs:
    """Draw all digits in Pillow's built-in font, in all font sizes."""
    side = max(FONT_SIZES)
    masks = torch.zeros(len(FONT_SIZES), 11, side, side)
    boxes = torch.zeros(len(FONT_SIZES), 11, 4, dtype=torch.int64)
    advances = torch.zeros(len(FONT_SIZES), dtype=torch.int64)
    for row, size in enumerate(FONT_SIZES):
        font = ImageFont.load_default(size)
        advances[row] = round(max(font.getlength(str(digit)) for digit in range(10)))
        for digit in range(10):
            canvas = Image.new("L", (2 * side, 2 * side))
            ImageDraw.Draw(canvas).text((0, 0), str(digit), fill=255, font=font)
            left, top, right, bottom = canvas.getbbox() or (0, 0, 0, 0)
            width, height = right - left, bottom - top
            ink = bytearray(canvas.crop((left, top, right, bottom)).tobytes())
            glyph = torch.frombuffer(ink, dtype=torch.uint8).view(height, width)
            masks[row, digit, :height, :width] = glyph
            boxes[row, digit] = torch.tensor([left, top, width, height])
    return Glyphs(masks, boxes, advances)


@dataclasses.dataclass(frozen=True, slots=True)
class Pictures:
    """A batch of pictures of equal size, with their labels."""

    digits: torch.Tensor
    """Digits from left to right, with `NO_DIGIT` after the last one, int64 (pictures, 3)."""
    pixels: torch.Tensor
    """Integers from 0 to 255, as float32 (pictures, height, width, 3)."""
    classes: torch.Tensor
    """Digit whose center is in each patch, else `NO_DIGIT`, int64 (pictures, patches)."""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the pictures in pixels."""
        return self.pixels.shape[1], self.pixels.shape[2]

    def images(self) -> list[Image.Image]:
        """Return the pictures as PIL images."""
        return [Image.fromarray(pixels.numpy()) for pixels in self.pixels.byte().cpu()]

    def texts(self) -> list[str]:
        """Return the digits of each picture as a string."""
        return ["".join(str(d) for d in row if d != NO_DIGIT) for row in self.digits.tolist()]


class Renderer:
    """Draws random pictures. All random numbers are generated on the CPU, so the pictures do not
    depend on the device."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device
        self._glyphs = draw_glyphs()
        self._masks = self._glyphs.masks.to(device)

    def chance(self) -> float:
        """Return a random number from the uniform distribution over 0 to 1."""
        return float(self._rand())

    def draw(self, count: int, max_digits: int, *, plain: bool) -> Pictures:
        """Draw `count` pictures of the same random size, with 1 to `max_digits` digits each, but at
        most one digit per 32 pixels of width. Higher numbers of digits are more likely.

        If `plain` is True, the digits are white on black, each in its own cell of 32 x 32 pixels.
        """
        height, width = self._size(max_digits, plain)
        digits = self._digits(count, min(max_digits, width // CELL))
        place_digits = self._in_cells if plain else self._anywhere
        sizes, pens = place_digits(digits, height, width)
        boxes = self._glyphs.boxes[sizes[:, None], digits]
        corners = pens + boxes[:, :, :2]
        coverage = self._compose(sizes, digits, corners, height, width)
        ink_color, paper_color = self._colors(count, plain)
        pixels = (paper_color + (ink_color - paper_color) * coverage[..., None] / 255).round()
        classes = patch_classes(digits, corners + boxes[:, :, 2:] // 2, height, width)
        return Pictures(digits.to(self._device), pixels, classes.to(self._device))

    def _rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator)

    def _size(self, max_digits: int, plain: bool) -> tuple[int, int]:
        """Return a random (height, width) in pixels."""
        if plain:
            return CELL, CELL * max_digits
        width = torch.multinomial(torch.tensor(WIDTH_SHARES), 1, generator=self._generator)
        return HEIGHTS[int(self.chance() * len(HEIGHTS))], WIDTHS[int(width)]

    def _digits(self, count: int, max_digits: int) -> torch.Tensor:
        """Return 1 to `max_digits` random digits for each picture, with `NO_DIGIT` after the last
        one, int64 (count, 3)."""
        weights = torch.arange(1.0, max_digits + 1)
        counts = 1 + torch.multinomial(weights, count, replacement=True, generator=self._generator)
        digits = torch.randint(10, (count, MAX_DIGITS), generator=self._generator)
        return digits.where(torch.arange(MAX_DIGITS) < counts[:, None], NO_DIGIT)

    def _in_cells(
        self, digits: torch.Tensor, height: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Place each digit near the middle of its own cell. Return font sizes and pen positions as
        `_anywhere` does."""
        count = len(digits)
        sizes = torch.full((count,), FONT_SIZES.index(PLAIN_FONT_SIZE))
        boxes = self._glyphs.boxes[sizes[:, None], digits]
        pens = (CELL - boxes[:, :, 2:]) // 2 - boxes[:, :, :2]
        pens += (self._rand(count, MAX_DIGITS, 2) * 5).long() - 2
        pens[:, :, 0] += torch.arange(MAX_DIGITS) * CELL
        return sizes, pens

    def _anywhere(
        self, digits: torch.Tensor, height: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Place a line of digits with random font size and spacing at a random position.

        Returns the index of the font size, int64 (count,), and the pen positions in pixels, int64
        (count, 3, 2), x before y. Apart from the random spacing, Pillow would draw the same line.
        """
        count, counts = len(digits), (digits != NO_DIGIT).sum(1)
        boxes, advances = self._glyphs.boxes[:, :NO_DIGIT], self._glyphs.advances
        tops = boxes[:, :, 1].amin(1)
        heights = (boxes[:, :, 1] + boxes[:, :, 3]).amax(1) - tops
        fits = (counts[:, None] * advances <= width) & (heights <= height)
        sizes = self._rand(count, len(FONT_SIZES)).where(fits, -1.0).argmax(1)
        free = width - counts * advances[sizes]
        spacing = (self._rand(count) * ((free // counts).clamp(max=4) + 1)).long()
        x = (self._rand(count) * (free - spacing * (counts - 1) + 1)).long()
        y = (self._rand(count) * (height - heights[sizes] + 1)).long() - tops[sizes]
        steps = torch.arange(MAX_DIGITS) * (advances[sizes] + spacing)[:, None]
        pens = x[:, None] + steps
        return sizes, torch.stack((pens, y[:, None].expand_as(pens)), dim=2)

    def _compose(
        self,
        sizes: torch.Tensor,
        digits: torch.Tensor,
        corners: torch.Tensor,
        height: int,
        width: int,
    ) -> torch.Tensor:
        """Draw each glyph with the top left corner of its ink at `corners`, (count, 3, 2). Return
        the ink coverage (0 to 255), float32 (count, height, width)."""
        side = self._masks.shape[-1]
        sizes, digits, corners = (t.to(self._device) for t in (sizes, digits, corners))
        ink = torch.zeros(len(digits), height, width, device=self._device)
        for index in range(MAX_DIGITS):
            x = torch.arange(width, device=self._device) - corners[:, index, :1]
            y = torch.arange(height, device=self._device) - corners[:, index, 1:]
            inside = ((y >= 0) & (y < side))[:, :, None] & ((x >= 0) & (x < side))[:, None]
            x, y = x.clamp(0, side - 1)[:, None], y.clamp(0, side - 1)[:, :, None]
            glyph = self._masks[sizes[:, None, None], digits[:, index, None, None], y, x]
            ink = torch.maximum(ink, glyph * inside)
        return ink

    def _colors(self, count: int, plain: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose random colors for ink and paper, float32 (count, 1, 1, 3) each.

        One picture in five is white on black or black on white. Plain pictures are white on black.
        """
        paper = (self._rand(count, 1, 3) * 256).floor()
        inks = (self._rand(count, 8, 3) * 256).floor()
        brightness = torch.tensor([0.299, 0.587, 0.114])
        contrast = ((inks - paper) @ brightness).abs().clamp(max=MIN_CONTRAST)
        ink = inks[torch.arange(count), contrast.argmax(1)][:, None]
        chance = torch.zeros(count, 1, 1) if plain else self._rand(count, 1, 1)
        white = torch.where(chance < 0.1, 255.0, 0.0)
        ink = ink.where(chance >= 0.2, white)[:, None]
        paper = paper.where(chance >= 0.2, 255.0 - white)[:, None]
        return ink.to(self._device), paper.to(self._device)


def patch_classes(
    digits: torch.Tensor, centers: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Return the digit whose center is in each patch, else `NO_DIGIT`, int64 (pictures, patches).

    `centers` is int64 (pictures, 3, 2), x before y. If two centers are in one patch, the first
    digit counts.
    """
    rows, columns = height // PATCH, width // PATCH
    classes = torch.full((len(digits), rows, columns), NO_DIGIT)
    picture = torch.arange(len(digits))
    for index in reversed(range(MAX_DIGITS)):
        column = (centers[:, index, 0] // PATCH).clamp(0, columns - 1)
        row = (centers[:, index, 1] // PATCH).clamp(0, rows - 1)
        classes[picture, row, column] = digits[:, index]
    return merge_order(classes[..., None])[..., 0]


def merge_order(grid: torch.Tensor) -> torch.Tensor:
    """Reorder (pictures, rows, columns, size) to (pictures, patches, size), such that the 2 x 2
    patches of a merged token are consecutive."""
    count, rows, columns, size = grid.shape
    squares = grid.view(count, rows // 2, 2, columns // 2, 2, size)
    return squares.transpose(2, 3).reshape(count, rows * columns, size)
