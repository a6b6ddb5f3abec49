"""What a vision worker keeps: pieces, requests that wait, and what is to be sent."""

import queue

import numpy as np
import pytest

from nanoactor.errors import InvalidRequest
from nanoactor.messages.vision import MediaPiece, WantPixels
from nanoactor.vision.arriving import ArrivingMedia
from nanoactor.vision.decoding import DecodingThread
from nanoactor.vision.media import PIECE_BYTES, Media, ReadItem, Unusable
from nanoactor.vision.pixel_requests import PixelQueue, PixelRequests
from nanoactor.vision.reports import VisionReports


def piece(item, offset, data, size, tokenizer=0):
    return MediaPiece(
        7,
        item,
        tokenizer,
        form="",
        shape=(),
        area=(1, 9),
        frames=(),
        size=size,
        offset=offset,
        data=np.frombuffer(data, np.uint8),
    )


def test_items_arrive_in_pieces_that_may_alternate():
    arriving = ArrivingMedia()
    assert arriving.add(piece(0, 0, b"ab", 3, tokenizer=2)) is None
    assert arriving.add(piece(1, 0, b"xy", 4)) is None
    assert (7, 0) in arriving
    assert len(arriving) == 2
    media, tokenizer = arriving.add(piece(0, 2, b"c", 3))
    assert (media.data, media.area, tokenizer) == (b"abc", (1, 9), 2)
    assert (7, 0) not in arriving
    assert arriving.add(piece(1, 2, b"zz", 4))[0].data == b"xyzz"
    assert not len(arriving)


def test_only_the_first_request_that_waits_asks_for_bytes():
    requests = PixelRequests()
    wants = [WantPixels(number, 7, 0, bytes(16)) for number in (1, 2, 3)]
    for want in wants:
        requests.add(want)
    assert [requests.wait(want) for want in wants] == [True, False, False]
    requests.cancel(2)
    assert requests.num_awaited == 1
    assert requests.pop_waiting((7, 0)) == [1, 3]
    assert 2 not in requests
    for number in (1, 3):
        requests.remove(number)
    assert len(requests) == requests.num_awaited == 0


def test_the_last_request_that_is_cancelled_waits_no_more():
    requests = PixelRequests()
    want = WantPixels(1, 7, 0, bytes(16))
    requests.add(want)
    requests.wait(want)
    requests.cancel(1)
    assert len(requests) == requests.num_awaited == 0
    assert not requests.pop_waiting((7, 0))


def test_pixels_leave_in_pieces_and_not_at_all_when_cancelled():
    pixels = PixelQueue()
    large = np.arange(PIECE_BYTES // 4 * 5, dtype=np.uint32).astype(np.uint8)[None]
    for number in (1, 2):
        pixels.add(number, large)
    first, is_last = pixels.pop_piece()
    assert (first.pixels, first.offset, len(first.data), is_last) == (1, 0, PIECE_BYTES, False)
    pixels.cancel(1)
    pieces = [pixels.pop_piece() for _ in range(2)]
    assert [(one.pixels, one.offset, last) for one, last in pieces] == [
        (2, 0, False),
        (2, PIECE_BYTES, True),
    ]
    assert np.array_equal(np.concatenate([one.data for one, _ in pieces]), large[0])
    assert not len(pixels)


def test_a_report_has_as_many_entries_as_fit():
    reports = VisionReports()
    for item in range(300):
        found = ReadItem(item.to_bytes(16, "little"), (1, 2, item)) if item else Unusable("narrow")
        reports.add_read(1, (7, item), found)
    messages = [reports.pop_read(1, worker=4) for _ in range(2)]
    assert [len(one.items) for one in messages] == [256, 44]
    assert reports.num_read == 0
    assert (messages[0].worker, messages[0].errors[:2]) == (4, ["narrow", ""])
    assert messages[1].grids[-1].tolist() == [1, 2, 299]
    reports.failed += [(1, Unusable("broken")), (2, Unusable("full", is_machine_fault=True))]
    failed = reports.pop_failed()
    assert failed.pixels.tolist() == [1, 2]
    assert failed.refused.tolist() == [2]


class Reader:
    """Stands where a `MediaReader` does."""

    def read(self, media, before_frame):
        raise InvalidRequest("too narrow")

    def decode(self, media, before_frame):
        before_frame()
        if media.form:
            raise MemoryError
        return np.zeros((1, 1, 1, 3), np.uint8)


@pytest.fixture
def decoder():
    thread = DecodingThread(lambda number: number != 2)
    thread.start(Reader())
    yield thread
    thread.close()


def test_a_thread_decodes_what_is_still_wanted(decoder):
    results = queue.SimpleQueue()
    for number, form in enumerate(["", "RGB", ""]):
        media = Media(form, (), (1, 1), b"")
        decoder.decode(number, media, lambda *found, number=number: results.put((number, found)))
    decoder.read_later(media, results.put)
    number, (begin, end, pixels) = results.get(timeout=10)
    assert number == 0
    assert begin <= end
    assert pixels.shape == (1, 1, 1, 3)
    number, (_, _, unusable) = results.get(timeout=10)
    assert number == 1
    assert unusable.is_machine_fault
    assert results.get(timeout=10) == Unusable("too narrow")
    assert decoder.frames == 2
