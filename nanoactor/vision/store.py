"""A cache of pictures and videos as they were given."""

from __future__ import annotations

from collections import OrderedDict

from nanoactor.vision.media import Media


class MediaStore:
    """An LRU cache with a limit in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[bytes, Media] = OrderedDict()
        self.nbytes = 0

    def get(self, key: bytes) -> Media | None:
        """Return the entry of a key and mark it as used; None if it is not cached."""
        media = self._entries.get(key)
        if media is not None:
            self._entries.move_to_end(key)
        return media

    def add(self, key: bytes, media: Media) -> None:
        """Add an entry, and evict the least recently used ones while the limit is exceeded."""
        if self.get(key) is None:
            self._entries[key] = media
            self.nbytes += len(media.data)
        while self.nbytes > self._limit:
            _, evicted = self._entries.popitem(last=False)
            self.nbytes -= len(evicted.data)
