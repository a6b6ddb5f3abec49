"""Bytes of pictures and videos that may be wanted again."""

from __future__ import annotations

from collections import OrderedDict

from nanoactor.vision.media import Media


class MediaStore:
    """Keeps what was used last, up to so many bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[bytes, Media] = OrderedDict()
        self.nbytes = 0

    def get(self, key: bytes) -> Media | None:
        """Return what has this key, which is used thereby; None where it is not kept."""
        media = self._kept.get(key)
        if media is not None:
            self._kept.move_to_end(key)
        return media

    def add(self, key: bytes, media: Media) -> None:
        """Keep something; what was used longest ago goes where there is no room."""
        if self.get(key) is None:
            self._kept[key] = media
            self.nbytes += len(media.data)
        while self.nbytes > self._limit:
            _, gone = self._kept.popitem(last=False)
            self.nbytes -= len(gone.data)
