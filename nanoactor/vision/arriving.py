"""Assembly of images and videos whose bytes arrive in pieces."""

from __future__ import annotations

from nanoactor.messages.vision import MediaPiece
from nanoactor.vision.media import Media


class ArrivingMedia:
    """The items (images and videos) of which only some bytes have arrived. Used by the vision
    worker actor."""

    def __init__(self) -> None:
        self._arriving: dict[tuple[int, int], tuple[bytearray, Media, int]] = {}
        """(bytes, item with these bytes, index of the tokenizer to notify) of each item, by (uid,
        index of the item)."""

    def __len__(self) -> int:
        """Return the number of items of which only some bytes have arrived."""
        return len(self._arriving)

    def __contains__(self, item_id: tuple[int, int]) -> bool:
        """Return True if only some bytes of this item have arrived. `item_id` is (uid, index of the
        item)."""
        return item_id in self._arriving

    def add(self, piece: MediaPiece) -> tuple[Media, int] | None:
        """Copy the bytes of a piece. If it is the item's last one, return (item, index of the
        tokenizer to notify), else None. A negative index means that no tokenizer is to be
        notified."""
        item_id = piece.uid, piece.item
        if item_id not in self._arriving:
            buffer = bytearray(piece.size)
            media = Media(piece.form, piece.shape, piece.area, buffer, piece.frames)
            self._arriving[item_id] = buffer, media, piece.tokenizer
        data, media, tokenizer = self._arriving[item_id]
        end = piece.offset + len(piece.data)
        data[piece.offset : end] = piece.data.tobytes()
        if end < piece.size:
            return None
        del self._arriving[item_id]
        return media, tokenizer
