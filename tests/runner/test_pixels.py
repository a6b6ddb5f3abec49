"""Every number of pixels ends twice, in either order, and then nothing of it is kept."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.messages.vision import EncodeSlices, Pixels
from nanoactor.runner.batch.pixels import PixelStore

SHAPE = (1, 2, 2, 3)
ARRAY = np.arange(12, dtype=np.uint8).reshape(SHAPE)


def pieces(number, size):
    flat = ARRAY.reshape(-1)
    return [Pixels(number, SHAPE, at, flat[at : at + size]) for at in range(0, 12, size)]


def step(number, first, count):
    numbers = np.array([number], np.int64)
    firsts, counts = np.array([first], np.int32), np.array([count], np.int32)
    return SimpleNamespace(
        vision=SimpleNamespace(slices=EncodeSlices(numbers, numbers, firsts, counts))
    )


@given(st.integers(1, 12), st.integers(0, 13), st.booleans())
def test_dropped_pixels_leave_nothing_whenever_that_is(size, drop_at, come):
    """Before the first piece, between two, or behind the last; or they never come whole."""
    store, told = PixelStore(), []
    sent = pieces(5, size) if come else pieces(5, size)[:-1]
    for at, piece in enumerate(sent):
        if at == drop_at:
            store.drop(5)
        told.append(store.add(piece))
    if not come:
        store.note_absent(5)
    if drop_at >= len(sent):
        store.drop(5)
    assert len(store) == 0
    assert store.nbytes == 0
    assert told.count(True) == (come and drop_at >= len(sent))


def test_pixels_are_whole_and_go_with_their_last_unit():
    store = PixelStore()
    assert [store.add(piece) for piece in pieces(3, 5)] == [False, False, True]
    taken = store.consume(step(3, 0, 2), lambda pixels: 3)
    assert np.array_equal(taken[3], ARRAY)
    assert store.nbytes == 12
    store.consume(step(3, 2, 1), lambda pixels: 3)
    assert len(store) == 0
    with pytest.raises(KeyError):
        store.consume(step(3, 0, 1), lambda pixels: 3)
