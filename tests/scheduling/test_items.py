"""Who is asked for pixels, and what becomes of it when requests leave."""

from types import SimpleNamespace

import numpy as np

from nanoactor.media.units import EncoderLimits
from nanoactor.messages.vision import (
    CancelPixels,
    EncoderCredits,
    Items,
    ItemsFailed,
    ItemsReady,
    WantPixels,
)
from nanoactor.scheduling.features.items import Images
from nanoactor.scheduling.sequences.item_state import SequenceItems
from nanoactor.scheduling.sequences.sequence import Phase

LIMITS = EncoderLimits(pages=20, page_rows=4, budget=8, depth=3, ranks=2)


def sequence(uid, worker, *grids, key=0):
    """A request that needs images, one behind the other from index 1 on."""
    at, spans = 1, []
    for item, (_, height, width) in enumerate(grids):
        spans.append((item, 0, at))
        at += height * width + 1
    keys = np.array([[key + item] * 16 for item in range(len(grids))], np.uint8)
    made = Items(keys, np.array(grids, np.int32), np.array(spans, np.int32), 0, worker)
    return SimpleNamespace(
        uid=uid, items=SequenceItems.of(made, LIMITS), scheduled=0, phase=Phase.MATCHING
    )


def matched(book, one, numbers, units=None, turn=1):
    book.admit(one, turn)
    answered(book, one, numbers, units or [0] * len(numbers), turn)


def answered(book, one, numbers, units, turn):
    """The block manager has found these objects for a request's images."""
    none = np.empty(0, np.int32)
    encoder = EncoderCredits(
        items=np.array([len(numbers)], np.int32),
        numbers=np.array(numbers, np.int64),
        units=np.array(units, np.int32),
        refunds=none,
        freed=none,
        fences=none,
    )
    book.answer(SimpleNamespace(turn=turn, encoder=encoder), [one])


def ready(book, rank, *pixels):
    assert not book.HANDLERS[ItemsReady](book, ItemsReady(rank, np.array(pixels, np.int64)))


def failed(book, pixels):
    event = ItemsFailed(np.array([pixels], np.int64), ["broken"], ())
    return [sequence_.uid for sequence_, _ in book.HANDLERS[ItemsFailed](book, event)]


def said(book):
    """(worker, kind, request or pixels) of all messages since the last call."""
    out, book.pixels.out = book.pixels.out, []
    return [
        (worker, "want", message.uid, message.pixels)
        if isinstance(message, WantPixels)
        else (worker, "unwant", *message.pixels.tolist())
        for worker, message in out
        if isinstance(message, WantPixels | CancelPixels)
    ]


def test_pixels_are_wanted_once_and_again_from_another_when_their_source_leaves():
    """Its bytes go with it: who stays has them with a worker of its own."""
    book = Images(LIMITS)
    one, two = sequence(4, 0, (1, 2, 2)), sequence(7, 1, (1, 2, 2))
    matched(book, one, [1])
    matched(book, two, [1])
    assert said(book) == [(0, "want", 4, 1)]
    ready(book, 0, 1)
    book.leave(one)
    assert said(book) == [(0, "unwant", 1), (1, "want", 7, 2)]
    assert book.pixels.drops == [(1, 1)]
    ready(book, 1, 1, 2)  # late news of the old ones is nothing
    assert book.plan_encoding([two]) is None
    ready(book, 0, 2)
    slices = book.plan_encoding([two])
    assert (slices.numbers.tolist(), slices.pixels.tolist()) == ([1], [2])
    book.leave(two)
    assert said(book) == []
    assert book.entries == {}


def test_an_image_goes_on_though_its_source_leaves_when_every_rank_has_it():
    book = Images(LIMITS)
    one, two = sequence(4, 0, (1, 4, 6)), sequence(7, 1, (1, 4, 6))  # three parts
    matched(book, one, [1])
    matched(book, two, [1])
    for rank in (0, 1):
        ready(book, rank, 1)
    assert book.plan_encoding([one, two]).counts.tolist() == [1]
    book.leave(one)
    assert said(book)[1:] == []
    assert book.plan_encoding([two]).firsts.tolist() == [1]
    book.leave(two)  # half encoded: it begins anew, for whoever comes
    assert said(book) == [(0, "unwant", 1)]
    assert book.pixels.drops == [(1, 1)]


def test_a_prompt_ends_where_its_next_image_is_not_encoded():
    book = Images(LIMITS)
    one = sequence(4, 0, (1, 2, 2), (1, 2, 3))
    assert one.items.prefill_end(0, 20) == 20  # nobody has looked yet
    matched(book, one, [1, 2])
    assert one.items.prefill_end(0, 20) == 1
    for rank in (0, 1):
        ready(book, rank, 1, 2)
    assert book.plan_encoding([one]).numbers.tolist() == [1]  # 4 + 6 rows are more than 8
    assert one.items.prefill_end(0, 20) == 6
    assert one.items.prefill_end(8, 20) == 8  # in the middle of one that is to be encoded anew
    assert book.plan_encoding([one]).numbers.tolist() == [2]
    assert one.items.prefill_end(0, 20) == 20
    one.scheduled = 5
    book.plan_rows(1, [SimpleNamespace(sequence=one)])
    assert [work is None for work in one.items.entries] == [True, False]


def test_a_video_is_read_as_far_as_its_patches_are_encoded():
    """Each temporal patch is a unit, and text stands between them."""
    grids, spans = np.array([(3, 2, 2)], np.int32), [(0, 0, 1), (0, 4, 8), (0, 8, 15)]
    made = Items(np.ones((1, 16), np.uint8), grids, np.array(spans, np.int32), 0, 0)
    book = Images(LIMITS)
    one = SimpleNamespace(
        uid=1, items=SequenceItems.of(made, LIMITS), scheduled=0, phase=Phase.MATCHING
    )
    matched(book, one, [1])
    ready(book, 0, 1)
    ready(book, 1, 1)
    assert one.items.prefill_end(0, 30) == 1
    assert book.plan_encoding([one]).counts.tolist() == [2]  # eight rows a step
    assert one.items.prefill_end(0, 30) == 15
    assert one.items.prefill_end(9, 12) == 12
    one.scheduled = 12
    book.plan_rows(1, [SimpleNamespace(sequence=one)])
    assert one.items.entries[0] is not None  # the last patch is still to be read
    assert book.plan_encoding([one]).counts.tolist() == [1]
    assert one.items.prefill_end(9, 30) == 30
    one.scheduled = 19
    book.plan_rows(1, [SimpleNamespace(sequence=one)])
    assert one.items.entries == [None]


def test_who_needs_pixels_that_fail_is_told_once_and_nothing_is_wanted_again():
    book = Images(LIMITS)
    one, two = sequence(4, 0, (1, 2, 2)), sequence(7, 1, (1, 2, 2))
    matched(book, one, [1])
    matched(book, two, [1])
    said(book)
    assert failed(book, 1) == [4, 7]
    assert failed(book, 1) == []
    for sequence_ in (one, two):
        book.leave(sequence_)
    assert said(book) == []
    assert book.pixels.drops == [(1, 1)]
    assert not book.is_waiting


def test_progress_outlives_its_users_while_a_match_is_under_way():
    """The answer was written before the latest slice; what the book knows is newer."""
    book = Images(LIMITS)
    one, two = sequence(4, 0, (1, 2, 2)), sequence(7, 1, (1, 2, 2))
    matched(book, one, [1])
    for rank in (0, 1):
        ready(book, rank, 1)
    book.admit(two, turn=2)
    book.plan_encoding([one])
    book.leave(one)
    said(book)
    answered(book, two, [1], [0], turn=2)
    assert said(book) == []
    assert two.items.prefill_end(0, 9) == 9
    book.leave(two)
    assert book.entries == {}
