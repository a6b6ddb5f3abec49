"""Items come in any order, before or after their request; nothing is kept of what is over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.errors import InvalidRequest
from nanoactor.vision.gather import ItemCollector
from nanoactor.vision.media import ReadItem, Unusable


def item(number):
    return ReadItem(number.to_bytes(16, "little"), (1, number, 1))


@given(st.permutations([(uid, n) for uid in range(3) for n in range(3)]), st.integers(0, 9))
def test_a_request_that_is_over_leaves_nothing_whenever_that_was(order, over_at):
    gathering = ItemCollector()
    for at, (uid, number) in enumerate(order):
        if at == over_at:
            gathering.finish(1, 3)
        gathering.add(uid, number, item(number))
        if uid != 1 and gathering.is_complete(uid, 3):
            assert gathering.collect(uid, ["image"] * 3) == [item(n) for n in range(3)]
            gathering.finish(uid, 3)
    if over_at >= len(order):
        gathering.finish(1, 3)
    assert len(gathering) == 0


def test_the_first_item_that_cannot_be_used_is_named():
    gathering = ItemCollector()
    for number, found in enumerate([item(0), Unusable("too narrow"), Unusable("broken")]):
        gathering.add(7, number, found)
    with pytest.raises(InvalidRequest, match="image 2 of 3: too narrow"):
        gathering.collect(7, ["image"] * 3)
    with pytest.raises(InvalidRequest, match="image 1 of 2: too narrow"):
        gathering.collect(7, ["video", "image", "image"])
