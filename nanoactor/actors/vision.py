"""The vision worker actor, which computes the keys (content hashes) of images and videos on
arrival, and decodes them on request."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoactor.messages.vision import CancelPixels, MediaPiece, WantPixels
from nanoactor.runtime.actor import Actor, Context, Handler, Progress, ReadyInfo
from nanoactor.setup.actors import ActorConfig
from nanoactor.vision.arriving import ArrivingMedia
from nanoactor.vision.decoding import DecodingThread
from nanoactor.vision.media import Media, MediaReader, ReadItem, Unusable
from nanoactor.vision.pixel_requests import PixelQueue, PixelRequests
from nanoactor.vision.reports import VisionReports
from nanoactor.vision.store import MediaStore

_MAX_DECODE_SECONDS = 120.0
"""Time limit, in seconds, for decoding an image or one frame of a video."""
# Maximum total size, in bytes, of the undecoded items that a worker keeps. It requests dropped
# items again when they are needed.
STORE_BYTES = 256 << 20


@dataclasses.dataclass(slots=True)
class _Counts:
    """Numbers of items reported and decoded, and the time spent on decoding, since the actor
    started."""

    items: int = 0
    decoded: int = 0
    decode_seconds: float = 0.0


class VisionActor(Actor):
    """Actor that identifies images and videos, and decodes them to pixels for the runners. After
    a restart, the bytes and requests that were lost are sent to it again."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._arriving = ArrivingMedia()
        self._store = MediaStore(STORE_BYTES)
        self._requests = PixelRequests()
        self._pixels = PixelQueue()
        self._reports = VisionReports()
        self._thread = DecodingThread(self._requests.__contains__)
        self._videos_to_read = 0
        """Number of videos whose headers the decoding thread has yet to read."""
        self._counts = _Counts()

    def setup(self) -> None:
        """Import Pillow and start the decoding thread."""
        files = self._config.files
        assert files.images is not None
        salt, max_pixels = self._config.salt, self._config.engine.max_image_pixels
        self._thread.start(MediaReader(files.images, salt, max_pixels, files.videos))

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Look up the outboxes to the other actors, and create the trace track."""
        super().start(context, ready)
        self._number = int(context.name.rpartition(".")[2])
        self._decode_track = context.new_track("decode")
        self._decode_kind = self._decode_track.kind("decode image", "pixels")
        tokenizers = range(self._config.engine.num_tokenizers)
        self._tokenizers = [context.outbox(f"tokenizer.{index}") for index in tokenizers]
        self._frontend = context.outbox("frontend")
        self._scheduler = context.outbox("scheduler")
        self._runners = context.outbox("runners")

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handlers of media bytes, which arrive unrequested, and of requests for
        pixels."""
        return {
            MediaPiece: self._on_piece,
            WantPixels: self._on_want,
            CancelPixels: self._on_cancel,
        }

    def span_names(self) -> Mapping[type, str]:
        """Return the trace span name for media bytes. The name refers to computing an item's key
        (content hash), which happens when the last bytes arrive."""
        return {MediaPiece: "name image"}

    # -- media bytes ----------------------------------------------------------------------

    def _on_piece(self, event: MediaPiece) -> None:
        if (arrived := self._arriving.add(event)) is None:
            return
        item_id, (media, tokenizer) = (event.uid, event.item), arrived
        if media.frames:  # a video has many headers, some of which must be decoded to be read
            self._videos_to_read += 1
            done = functools.partial(
                self.context.call_soon, self._on_video_read, item_id, tokenizer, media
            )
            self._thread.read_later(media, done)
        else:
            self._on_read(item_id, tokenizer, media, self._thread.read(media))

    def _on_video_read(
        self, item_id: tuple[int, int], tokenizer: int, media: Media, found: ReadItem | Unusable
    ) -> None:
        self._videos_to_read -= 1
        self._on_read(item_id, tokenizer, media, found)

    def _on_read(
        self, item_id: tuple[int, int], tokenizer: int, media: Media, found: ReadItem | Unusable
    ) -> None:
        if isinstance(found, ReadItem):
            self._store.add(found.key, media)
        if tokenizer >= 0:
            self._counts.items += 1
            self._reports.add_read(tokenizer, item_id, found)
        for number in self._requests.pop_waiting(item_id):
            self._start_decoding(number, media)
        self._report()

    # -- pixels ---------------------------------------------------------------------------

    def _on_want(self, event: WantPixels) -> None:
        self._requests.add(event)
        media = self._store.get(event.key)
        if media is not None:
            self._start_decoding(event.pixels, media)
            return
        item_id = event.uid, event.item
        if self._requests.wait(event) and item_id not in self._arriving:
            self._reports.resends.append(item_id)
        self._report()

    def _start_decoding(self, number: int, media: Media) -> None:
        if number in self._requests:
            done = functools.partial(self.context.call_soon, self._on_decode_done, number)
            self._thread.decode(number, media, done)

    def _on_cancel(self, event: CancelPixels) -> None:
        numbers = [number for number in event.pixels.tolist() if number in self._requests]
        for number in numbers:
            self._requests.cancel(number)
            self._pixels.cancel(number)
        self._reports.absent += numbers
        self._report()

    def _on_decode_done(
        self, number: int, begin: int, end: int, result: NDArray[np.uint8] | Unusable
    ) -> None:
        self._counts.decode_seconds += (end - begin) * 1e-9
        self._decode_track.add(self._decode_kind, number, begin, end)
        self._on_decoded(number, result)

    def _on_decoded(self, number: int, result: NDArray[np.uint8] | Unusable) -> None:
        if number not in self._requests:
            return
        self._counts.decoded += 1
        if isinstance(result, Unusable):
            self._requests.remove(number)
            self._reports.failed.append((number, result))
            self._reports.absent.append(number)
        else:
            self._pixels.add(number, result)
        self._report()

    # -- reports --------------------------------------------------------------------------

    def on_ready(self, outbox: Any) -> None:
        """Send what waited because the outbox had no room."""
        self._report()

    def _report(self) -> None:
        """Send reports and pixels while the outboxes have room. The rest is merged and sent
        later."""
        reports = self._reports
        for tokenizer, found in reports.read.items():
            while found and self._tokenizers[tokenizer].ready:
                self._tokenizers[tokenizer].send(reports.pop_read(tokenizer, self._number))
        while reports.resends and self._frontend.ready:
            self._frontend.send(reports.pop_resends())
        while reports.failed and self._scheduler.ready:
            self._scheduler.send(reports.pop_failed())
        while reports.absent and self._runners.ready:
            self._runners.send(reports.pop_absent())
        while self._pixels and self._runners.ready:
            piece, is_last = self._pixels.pop_piece()
            self._runners.send(piece)
            if is_last:
                self._requests.remove(piece.pixels)

    def progress(self) -> Progress | None:
        """Return (number of images and frames processed, time limit for the next one in seconds);
        None if there is no work."""
        done = self._counts.decoded + self._thread.frames + self._counts.items
        return (done, _MAX_DECODE_SECONDS) if self._requests or self._videos_to_read else None

    def stop(self) -> None:
        """Stop the decoding thread after the current image; wait at most 1 s."""
        self._thread.close()

    def statistics(self) -> dict[str, Any]:
        """Return counts of items and frames, the seconds spent on decoding, and the bytes kept.

        `wants` is the number of unanswered requests for pixels. `unread` is the number of items not
        reported to a tokenizer yet. `waiting` is the number of items whose bytes or headers are
        still missing.
        """
        return {
            "items": self._counts.items,
            "decoded": self._counts.decoded,
            "frames": self._thread.frames,
            "decode_seconds": self._counts.decode_seconds,
            "stored_bytes": self._store.nbytes,
            "wants": len(self._requests),
            "unread": self._reports.num_read + len(self._arriving),
            "waiting": self._requests.num_awaited + self._videos_to_read,
        }
