"""A cache of the undecoded images and videos of requests."""

from __future__ import annotations

from collections import OrderedDict

from nanoactor.vision.media import Media


class MediaStore:
    """LRU cache of images and videos by key. Their total size is limited to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[bytes, Media] = OrderedDict()
        self.nbytes = 0

    def get(self, key: bytes) -> Media | None:
        """Return the image or video with this key and mark it as recently used; None if it is not
        cached."""
        media = self._entries.get(key)
        if media is not None:
            self._entries.move_to_end(key)
        return media

    def add(self, key: bytes, media: Media) -> None:
        """Add an image or video, then evict the least recently used ones until the limit is
        met."""
        if self.get(key) is None:
            self._entries[key] = media
            self.nbytes += len(media.data)
        while self.nbytes > self._limit:
            _, evicted = self._entries.popitem(last=False)
            self.nbytes -= len(evicted.data)
