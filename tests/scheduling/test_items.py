"""Who is asked for pixels, and what becomes of it when requests leave."""

from types import SimpleNamespace

import numpy as np

from nanoactor.scheduling.items import ItemBook, SequenceItems
from nanoactor.vision.messages import Items, Unwant, Want
from nanoactor.vision.units import EncoderLimits

LIMITS = EncoderLimits(pages=20, page_rows=4, budget=8, depth=3, ranks=2)


def sequence(uid, worker, *grids, key=0):
    """A request that needs pictures, one behind the other from index 1 on."""
    at, spans = 1, []
    for item, (_, height, width) in enumerate(grids):
        spans.append((item, 0, at))
        at += height * width + 1
    keys = np.array([[key + item] * 16 for item in range(len(grids))], np.uint8)
    made = Items(keys, np.array(grids, np.int32), np.array(spans, np.int32), 0, worker)
    return SimpleNamespace(uid=uid, items=SequenceItems.of(made, LIMITS), scheduled=0)


def matched(book, one, numbers, units=None):
    book.note_match(one)
    book.take(one, numbers, units or [0] * len(numbers))
    book.note_answer()


def said(book):
    """(worker, kind, request or pixels) of all messages since the last call."""
    out, book.out = book.out, []
    return [
        (worker, "want", message.uid, message.pixels)
        if isinstance(message, Want)
        else (worker, "unwant", *message.pixels.tolist())
        for worker, message in out
        if isinstance(message, Want | Unwant)
    ]


def test_pixels_are_wanted_once_and_again_from_another_when_their_source_leaves():
    """Its bytes go with it: who stays has them with a worker of its own."""
    book = ItemBook(LIMITS)
    one, two = sequence(4, 0, (1, 2, 2)), sequence(7, 1, (1, 2, 2))
    matched(book, one, [1])
    matched(book, two, [1])
    assert said(book) == [(0, "want", 4, 1)]
    book.note_ready(0, [1])
    book.leave(one)
    assert said(book) == [(0, "unwant", 1), (1, "want", 7, 2)]
    assert book.drops == [(1, 1)]
    book.note_ready(1, [1, 2])  # late news of the old ones is nothing
    assert book.choose([two]) is None
    book.note_ready(0, [2])
    slices = book.choose([two])
    assert (slices.numbers.tolist(), slices.pixels.tolist()) == ([1], [2])
    book.leave(two)
    assert said(book) == []
    assert book.works == {}


def test_a_picture_goes_on_though_its_source_leaves_when_every_rank_has_it():
    book = ItemBook(LIMITS)
    one, two = sequence(4, 0, (1, 4, 6)), sequence(7, 1, (1, 4, 6))  # three parts
    matched(book, one, [1])
    matched(book, two, [1])
    for rank in (0, 1):
        book.note_ready(rank, [1])
    assert book.choose([one, two]).counts.tolist() == [1]
    book.leave(one)
    assert said(book)[1:] == []
    assert book.choose([two]).firsts.tolist() == [1]
    book.leave(two)  # half encoded: it begins anew, for whoever comes
    assert said(book) == [(0, "unwant", 1)]
    assert book.drops == [(1, 1)]


def test_a_prompt_ends_where_its_next_picture_is_not_encoded():
    book = ItemBook(LIMITS)
    one = sequence(4, 0, (1, 2, 2), (1, 2, 3))
    assert one.items.reach(0, 20) == 20  # nobody has looked yet
    matched(book, one, [1, 2])
    assert one.items.reach(0, 20) == 1
    for rank in (0, 1):
        book.note_ready(rank, [1, 2])
    assert book.choose([one]).numbers.tolist() == [1]  # 4 + 6 rows are more than 8
    assert one.items.reach(0, 20) == 6
    assert one.items.reach(8, 20) == 8  # in the middle of one that is to be encoded anew
    assert book.choose([one]).numbers.tolist() == [2]
    assert one.items.reach(0, 20) == 20
    one.scheduled = 5
    book.advance(one)
    assert [work is None for work in one.items.works] == [True, False]


def test_a_video_is_read_as_far_as_its_patches_are_encoded():
    """Each temporal patch is a unit, and text stands between them."""
    grids, spans = np.array([(3, 2, 2)], np.int32), [(0, 0, 1), (0, 4, 8), (0, 8, 15)]
    made = Items(np.ones((1, 16), np.uint8), grids, np.array(spans, np.int32), 0, 0)
    book = ItemBook(LIMITS)
    one = SimpleNamespace(uid=1, items=SequenceItems.of(made, LIMITS), scheduled=0)
    matched(book, one, [1])
    book.note_ready(0, [1])
    book.note_ready(1, [1])
    assert one.items.reach(0, 30) == 1
    assert book.choose([one]).counts.tolist() == [2]  # eight rows a step
    assert one.items.reach(0, 30) == 15
    assert one.items.reach(9, 12) == 12
    one.scheduled = 12
    book.advance(one)
    assert one.items.works[0] is not None  # the last patch is still to be read
    assert book.choose([one]).counts.tolist() == [1]
    assert one.items.reach(9, 30) == 30
    one.scheduled = 19
    book.advance(one)
    assert one.items.works == [None]


def test_who_needs_pixels_that_fail_is_told_once_and_nothing_is_wanted_again():
    book = ItemBook(LIMITS)
    one, two = sequence(4, 0, (1, 2, 2)), sequence(7, 1, (1, 2, 2))
    matched(book, one, [1])
    matched(book, two, [1])
    said(book)
    assert book.failed(1) == [4, 7]
    assert book.failed(1) == []
    for sequence_ in (one, two):
        book.leave(sequence_)
    assert said(book) == []
    assert book.drops == [(1, 1)]
    assert book.wanted == 0


def test_progress_outlives_its_users_while_a_match_is_under_way():
    """The answer was written before the latest slice; what the book knows is newer."""
    book = ItemBook(LIMITS)
    one, two = sequence(4, 0, (1, 2, 2)), sequence(7, 1, (1, 2, 2))
    matched(book, one, [1])
    for rank in (0, 1):
        book.note_ready(rank, [1])
    book.note_match(two)
    book.choose([one])
    book.leave(one)
    said(book)
    book.take(two, [1], [0])
    book.note_answer()
    assert said(book) == []
    assert two.items.reach(0, 9) == 9
    book.leave(two)
    assert book.works == {}
