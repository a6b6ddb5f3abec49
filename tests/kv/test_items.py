"""What sequences hold of images: rows are named where they are encoded, and given back once."""

import numpy as np
import pytest

from nanoactor.errors import ProtocolBug
from nanoactor.kv.items import HeldItems, ItemManager
from nanoactor.media.units import EncoderLimits
from nanoactor.messages.vision import DropPixels, EncodeSlices, Items

LIMITS = EncoderLimits(pages=4, page_rows=4, budget=6, depth=3)


def items(*grids, at=1, key=0):
    """Images one behind the other, from index `at` on."""
    spans = []
    for number, (_, height, width) in enumerate(grids):
        spans.append((number, 0, at))
        at += height * width + 1
    keys = np.array([[key + number] * 16 for number in range(len(grids))], np.uint8)
    return Items(keys, np.array(grids, np.int32), np.array(spans, np.int32), 0, 0)


def held(keeper, message, computed=0, length=40):
    made = HeldItems.of(message, length, 4)
    keeper.match(made, message, computed)
    return made


def encode(keeper, number, first, count):
    slices = EncodeSlices(
        np.array([number]), np.array([1]), np.array([first], np.int32), np.array([count], np.int32)
    )
    return keeper.bind(slices, [])


def test_rows_are_found_in_their_pages_wherever_a_chunk_is_cut():
    keeper = ItemManager(LIMITS)
    one = held(keeper, items((1, 2, 3)))
    answer = keeper.pop_credits()
    assert (answer.numbers.tolist(), answer.units.tolist()) == ([1], [0])
    step = encode(keeper, 1, 0, 1)
    pages = step.pages.tolist()
    places = [page * 4 + row for page in pages for row in range(4)][:6]
    found = []
    for start, count in ((0, 3), (3, 2), (5, 10)):
        vision = keeper.bind(None, [(None, 7, 2), (one, start, count)])
        assert vision.positions.shape == (3, count + 2)
        found += [
            (start + token - 2, row)
            for token, row in zip(vision.tokens.tolist(), vision.rows.tolist(), strict=True)
        ]
    assert found == [(1 + row, place) for row, place in enumerate(places)]


def test_rows_that_are_not_encoded_or_given_back_are_not_read():
    keeper = ItemManager(LIMITS)
    one = held(keeper, items((1, 3, 3)))  # two parts
    encode(keeper, 1, 0, 1)
    with pytest.raises(ProtocolBug, match="1 rows of item 0 are read, but 0 are encoded"):
        keeper.bind(None, [(one, 0, 2)])
    with pytest.raises(ProtocolBug, match=r"units 0\+1 of item .*, but 1 of its 2"):
        encode(keeper, 1, 0, 1)
    keeper.drop(DropPixels(np.array([1]), np.array([1])))
    encode(keeper, 1, 0, 2)
    keeper.bind(None, [(one, 0, 12)])
    keeper.advance(one, 10, 3)
    with pytest.raises(ProtocolBug, match="are read"):
        keeper.bind(None, [(one, 5, 2)])


def test_pages_are_refunded_or_given_back_but_never_both():
    keeper = ItemManager(LIMITS)
    message = items((1, 2, 2), (1, 2, 3))  # pages: 1 and 2
    one = held(keeper, message)
    two = held(keeper, message)  # the same, held by another
    three = held(keeper, message, computed=6)  # of which the first is computed already
    answer = keeper.pop_credits()
    assert answer.items.tolist() == [2, 2, 2]
    assert answer.refunds.tolist() == [0, 3, 3]
    assert answer.numbers.tolist() == [1, 2, 1, 2, -1, 2]
    keeper.advance(one, 5, 1)
    keeper.free(one, 2)
    keeper.free(two, 3)
    keeper.free(three, 4)
    keeper.free(three, 4)
    answer = keeper.pop_credits()
    assert sum(answer.freed.tolist()) == 3
    assert answer.fences.tolist() == sorted(answer.fences.tolist())
    assert keeper.pop_credits() is None
    keeper.cache.complete(4)
    keeper.check([])


def test_what_a_failing_row_has_read_is_encoded_anew():
    """NaN of one request must not stay in the cache for the next."""
    keeper = ItemManager(LIMITS)
    message = items((1, 2, 2))
    one = held(keeper, message)
    encode(keeper, 1, 0, 1)
    keeper.advance(one, 20, 1)  # it has let go before its failure is known
    keeper.distrust(one)
    keeper.cache.complete(1)
    again = held(keeper, message)
    answers = keeper.pop_credits()
    assert answers.numbers.tolist()[-1] == 2
    assert answers.units.tolist()[-1] == 0
    keeper.free(again, 2)
    keeper.cache.complete(2)
    keeper.check([])
