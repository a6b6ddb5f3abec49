"""The vision worker actor, which computes the keys (content hashes) of pictures and videos on
arrival, and decodes them on request."""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nanoactor.errors import InvalidRequest
from nanoactor.messages.vision import (
    CancelPixels,
    ItemsFailed,
    ItemsRead,
    MediaPiece,
    NoPixels,
    Pixels,
    ResendMedia,
    WantPixels,
)
from nanoactor.runtime.actor import Actor, Context, Handler, Progress, ReadyInfo
from nanoactor.runtime.native import native_calls
from nanoactor.setup.actors import ActorConfig
from nanoactor.vision.media import PIECE_BYTES, Media, MediaReader, ReadItem, Unusable
from nanoactor.vision.store import MediaStore

T = TypeVar("T")

_MAX_PER_MESSAGE = 256
_MAX_REASON_CHARS = 300
_MAX_DECODE_SECONDS = 120.0
"""Time limit, in seconds, for decoding a picture or one frame of a video."""
# Maximum total size, in bytes, of the undecoded items that a worker keeps. It requests dropped
# items again when they are needed.
STORE_BYTES = 256 << 20


@dataclasses.dataclass(slots=True)
class _Arriving:
    """An item (a picture or video) of which only some bytes have arrived."""

    data: bytearray
    first: MediaPiece


class _Cancelled(Exception):
    """Raised if the pixels being decoded are no longer needed."""


@dataclasses.dataclass(slots=True)
class _Counts:
    """Numbers of items reported and decoded, and the time spent on decoding, since the actor
    started."""

    items: int = 0
    decoded: int = 0
    decode_seconds: float = 0.0


class VisionActor(Actor):
    """Actor that identifies pictures and videos, and decodes them to pixels for the runners. After
    a restart, the bytes and requests that were lost are sent to it again."""

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._arriving: dict[tuple[int, int], _Arriving] = {}
        self._store = MediaStore(STORE_BYTES)
        self._pixel_requests: dict[int, WantPixels] = {}
        """Requests for pixels that have not been sent completely, by their number."""
        self._waiting: dict[tuple[int, int], list[int]] = {}
        """Numbers of the pixel requests that wait for an item's bytes, by (uid, index of the
        item)."""
        self._resends: list[tuple[int, int]] = []
        self._unreported: dict[int, list[tuple[int, int, ReadItem | Unusable]]] = {}
        """(uid, index of the item, result) of each item to report, by index of the tokenizer. The
        result is the item's key and grid, or why it cannot be used."""
        self._failed: list[tuple[int, Unusable]] = []
        self._absent: list[int] = []
        """Numbers of pixels that will not be sent; the runners have yet to be informed."""
        self._sending: deque[tuple[int, NDArray[np.uint8]]] = deque()
        self._sent = 0
        """Number of bytes of the first entry in `_sending` that were already sent."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._videos_to_read = 0
        """Number of videos whose headers the decoding thread has yet to read."""
        self._frames = 0
        """Number of frames that were examined or whose decoding has begun."""
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._counts = _Counts()

    def setup(self) -> None:
        """Import Pillow and start the decoding thread."""
        files = self._config.files
        assert files.images is not None
        salt, max_pixels = self._config.salt, self._config.engine.max_image_pixels
        self._reader = MediaReader(files.images, salt, max_pixels, files.videos)
        self._thread = threading.Thread(target=self._run_thread, name="decode", daemon=True)
        self._thread.start()

    def start(self, context: Context, ready: Mapping[str, ReadyInfo]) -> None:
        """Look up the outboxes to the other actors, and create the trace track."""
        super().start(context, ready)
        self._number = int(context.name.rpartition(".")[2])
        self._decode_track = context.new_track("decode")
        self._decode_kind = self._decode_track.kind("decode picture", "pixels")
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
        return {MediaPiece: "name picture"}

    # -- media bytes ----------------------------------------------------------------------

    def _on_piece(self, event: MediaPiece) -> None:
        item_id = event.uid, event.item
        if item_id not in self._arriving:
            self._arriving[item_id] = _Arriving(
                bytearray(event.size), self.context.owned_copy(event)
            )
        arriving = self._arriving[item_id]
        end = event.offset + len(event.data)
        arriving.data[event.offset : end] = event.data.tobytes()
        if end == event.size:
            del self._arriving[item_id]
            self._complete(item_id, arriving)

    def _complete(self, item_id: tuple[int, int], arriving: _Arriving) -> None:
        first = arriving.first
        media = Media(first.form, first.shape, first.area, arriving.data, first.frames)
        if media.frames:  # a video has many headers, some of which must be decoded to be read
            self._videos_to_read += 1
            self._work.put(functools.partial(self._read_video, item_id, first, media))
        else:
            self._on_read(item_id, first, media, self._read_header(media))

    def _read_header(self, media: Media) -> ReadItem | Unusable:
        try:
            with native_calls():
                return self._reader.read(media, self._note_header)
        except Exception as error:
            return _unusable(error)

    def _read_video(self, item_id: tuple[int, int], first: MediaPiece, media: Media) -> None:
        """Compute the key (content hash) and the grid (size in tokens) of a video. Runs on the
        decoding thread."""
        found = self._read_header(media)
        if not self._stopping:
            self.context.call_soon(self._on_video_read, item_id, first, media, found)

    def _on_video_read(
        self, item_id: tuple[int, int], first: MediaPiece, media: Media, found: ReadItem | Unusable
    ) -> None:
        self._videos_to_read -= 1
        self._on_read(item_id, first, media, found)

    def _on_read(
        self, item_id: tuple[int, int], first: MediaPiece, media: Media, found: ReadItem | Unusable
    ) -> None:
        if isinstance(found, ReadItem):
            self._store.add(found.key, media)
        if first.tokenizer >= 0:
            self._counts.items += 1
            self._unreported.setdefault(first.tokenizer, []).append((*item_id, found))
        for number in self._waiting.pop(item_id, ()):
            self._start_decoding(number, media)
        self._report()

    # -- pixels ---------------------------------------------------------------------------

    def _on_want(self, event: WantPixels) -> None:
        self._pixel_requests[event.pixels] = event
        media = self._store.get(event.key)
        if media is not None:
            self._start_decoding(event.pixels, media)
            return
        item_id = event.uid, event.item
        if item_id not in self._waiting and item_id not in self._arriving:
            self._resends.append(item_id)
        self._waiting.setdefault(item_id, []).append(event.pixels)
        self._report()

    def _start_decoding(self, number: int, media: Media) -> None:
        if number in self._pixel_requests:
            self._queue_decode(number, media)

    def _queue_decode(self, number: int, media: Media) -> None:
        self._work.put(functools.partial(self._decode_item, number, media))

    def _run_thread(self) -> None:
        """Run the decoding thread. Pillow releases the GIL while it decodes."""
        while (work := self._work.get()) is not None and not self._stopping:
            work()

    def _decode_item(self, number: int, media: Media) -> None:
        begin = time.monotonic_ns()
        try:
            with native_calls():
                result: NDArray[np.uint8] | Unusable = self._reader.decode(
                    media, functools.partial(self._note_frame, number)
                )
        except _Cancelled:
            return
        except Exception as error:
            result = _unusable(error)
        if self._stopping:  # the event loop may be gone
            return
        self.context.call_soon(self._note_decoded, number, begin, time.monotonic_ns())
        self.context.call_soon(self._on_decoded, number, result)

    def _note_header(self) -> None:
        """Record progress for the watchdog. Called before each frame of a video is examined."""
        self._frames += 1

    def _note_frame(self, number: int) -> None:
        """Count a frame that is about to be decoded. Raises `_Cancelled` if its pixels are no
        longer needed."""
        if self._stopping or number not in self._pixel_requests:
            raise _Cancelled
        self._frames += 1

    def _note_decoded(self, number: int, begin: int, end: int) -> None:
        self._counts.decode_seconds += (end - begin) * 1e-9
        self._decode_track.add(self._decode_kind, number, begin, end)

    def _on_cancel(self, event: CancelPixels) -> None:
        numbers = [number for number in event.pixels.tolist() if number in self._pixel_requests]
        for number in numbers:
            want = self._pixel_requests.pop(number)
            item_id = want.uid, want.item
            waiting = self._waiting.get(item_id, [])
            if number in waiting:
                waiting.remove(number)
                if not waiting:  # bytes that still arrive only go to the store
                    del self._waiting[item_id]
            if self._sending and self._sending[0][0] == number:
                self._sent = 0
            self._sending = deque(entry for entry in self._sending if entry[0] != number)
        self._absent += numbers
        self._report()

    def _on_decoded(self, number: int, result: NDArray[np.uint8] | Unusable) -> None:
        if number not in self._pixel_requests:
            return
        self._counts.decoded += 1
        if isinstance(result, Unusable):
            del self._pixel_requests[number]
            self._failed.append((number, result))
            self._absent.append(number)
        else:
            self._sending.append((number, result))
        self._report()

    # -- reports --------------------------------------------------------------------------

    def on_ready(self, outbox: Any) -> None:
        """Send what waited because the outbox had no room."""
        self._report()

    def _report(self) -> None:
        """Send reports and pixels while the outboxes have room. The rest is merged and sent
        later."""
        for tokenizer, found in self._unreported.items():
            while found and self._tokenizers[tokenizer].ready:
                self._tokenizers[tokenizer].send(self._items_read(_pop_batch(found)))
        while self._resends and self._frontend.ready:
            uids, items = zip(*_pop_batch(self._resends), strict=True)
            self._frontend.send(ResendMedia(np.array(uids, np.int64), np.array(items, np.int32)))
        while self._failed and self._scheduler.ready:
            failed = _pop_batch(self._failed)
            numbers = [number for number, _ in failed]
            refused = [number for number, why in failed if why.is_machine_fault]
            columns = np.array(numbers, np.int64), [why.reason for _, why in failed]
            self._scheduler.send(ItemsFailed(*columns, np.array(refused, np.int64)))
        while self._absent and self._runners.ready:
            self._runners.send(NoPixels(np.array(_pop_batch(self._absent), np.int64)))
        self._send_pixels()

    def _items_read(self, found: list[tuple[int, int, ReadItem | Unusable]]) -> ItemsRead:
        uids, items, results = zip(*found, strict=True)
        nothing = ReadItem(bytes(16), (0, 0, 0))
        read = [nothing if isinstance(one, Unusable) else one for one in results]
        refused = [isinstance(one, Unusable) and one.is_machine_fault for one in results]
        return ItemsRead(
            self._number,
            np.array(uids, np.int64),
            np.array(items, np.int32),
            keys=np.frombuffer(b"".join(one.key for one in read), np.uint8).reshape(-1, 16),
            grids=np.array([one.grid for one in read], np.int32),
            errors=[one.reason if isinstance(one, Unusable) else "" for one in results],
            refused=np.array(refused, np.uint8),
        )

    def _send_pixels(self) -> None:
        while self._sending and self._runners.ready:
            number, array = self._sending[0]
            data = array.reshape(-1)[self._sent : self._sent + PIECE_BYTES]
            self._runners.send(Pixels(number, array.shape, self._sent, data))
            self._sent += len(data)
            if self._sent == array.size:
                self._sending.popleft()
                self._sent = 0
                del self._pixel_requests[number]

    def progress(self) -> Progress | None:
        """Return (number of pictures and frames processed, time limit for the next one in seconds);
        None if there is no work."""
        done = self._counts.decoded + self._frames + self._counts.items
        return (done, _MAX_DECODE_SECONDS) if self._pixel_requests or self._videos_to_read else None

    def stop(self) -> None:
        """Stop the decoding thread after the current picture; wait at most 1 s."""
        self._stopping = True
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def statistics(self) -> dict[str, Any]:
        """Return counts of items and frames, the seconds spent on decoding, and the bytes kept.

        `wants` is the number of unanswered requests for pixels. `unread` is the number of items not
        reported to a tokenizer yet. `waiting` is the number of items whose bytes or headers are
        still missing.
        """
        return {
            "items": self._counts.items,
            "decoded": self._counts.decoded,
            "frames": self._frames,
            "decode_seconds": self._counts.decode_seconds,
            "stored_bytes": self._store.nbytes,
            "wants": len(self._pixel_requests),
            "unread": sum(map(len, self._unreported.values())) + len(self._arriving),
            "waiting": len(self._waiting) + self._videos_to_read,
        }


def _pop_batch(entries: list[T]) -> list[T]:
    """Remove and return as many entries as fit into one message, oldest first."""
    batch = entries[:_MAX_PER_MESSAGE]
    del entries[:_MAX_PER_MESSAGE]
    return batch


def _unusable(error: Exception) -> Unusable:
    """Convert an error to the reason why a picture cannot be used. No picture may crash the
    engine."""
    if isinstance(error, MemoryError):
        return Unusable("there is not enough memory to decode the picture", is_machine_fault=True)
    known = isinstance(error, InvalidRequest)
    text = str(error) if known else f"the picture cannot be decoded: {error!r}"
    return Unusable(text[:_MAX_REASON_CHARS])
