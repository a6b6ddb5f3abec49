"""Images that have no room are refused; requests wait for theirs, and leave nothing behind."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from nanoactor.admission.held import HeldRequests
from nanoactor.errors import InvalidRequest
from nanoactor.media.prompt import VisualItem
from nanoactor.media.units import EncoderLimits
from nanoactor.messages.vision import ItemsRead
from nanoactor.vision.placing import ItemPlacer
from tests.api.test_admission import submit
from tests.vision.test_prompt import CONFIG, IMAGE, encode

PROMPT = np.array([5, IMAGE, 6], np.int32)


def placer(pages=4, vision=CONFIG):
    files = SimpleNamespace(config=SimpleNamespace(vision=vision), max_model_len=20)
    return ItemPlacer(files, EncoderLimits(pages=pages, page_rows=4), encode)


def test_an_image_gets_its_tokens():
    tokens, items = placer().place(PROMPT, [VisualItem(bytes(16), 2, 3)], worker=1)
    assert tokens.tolist() == [5, *[IMAGE] * 6, 6]
    assert items.worker == 1
    plain = np.array([5, 6], np.int32)
    for own in (placer(), placer(vision=None)):
        tokens, items = own.place(plain, [], worker=-1)
        assert tokens is plain
        assert items is None


@pytest.mark.parametrize(
    ("pages", "height", "error"),
    [(4, 38, "max_model_len is 20"), (1, 5, "encoder cache, which holds 4 tokens")],
)
def test_an_image_without_room_is_refused(pages, height, error):
    with pytest.raises(InvalidRequest, match=error):
        placer(pages).place(PROMPT, [VisualItem(bytes(16), height, 1)], worker=0)


def request(uid, items):
    return dataclasses.replace(submit(), uid=uid, item_times=((),) * items)


def read(*pairs, worker=2):
    uids, items = zip(*pairs, strict=True)
    return ItemsRead(
        worker,
        np.array(uids, np.int64),
        np.array(items, np.int32),
        keys=np.zeros((len(pairs), 16), np.uint8),
        grids=np.array([(1, 2, item + 1) for item in items], np.int32),
        errors=[""] * len(pairs),
        refused=np.zeros(len(pairs), np.uint8),
    )


def test_requests_are_released_with_their_last_image():
    held = HeldRequests()
    first, second = request(1, 2), request(5, 1)
    assert held.has_items(request(9, 0))
    for event in (first, second):
        assert not held.has_items(event)
        held.hold(event, "encoded")
    released = list(held.release(read((1, 1), (5, 0), (1, 0))))
    assert released == [(second, "encoded"), (first, "encoded")]
    assert [item.width for item in held.collect(first)] == [1, 2]
    assert held.worker_of(first) == 2
    for event in (first, second):
        held.forget(event)
    assert len(held) == 0


def test_a_request_that_is_gone_drops_images_that_come_late():
    held = HeldRequests()
    event = request(1, 2)
    held.hold(event, "encoded")
    assert held.pop(1) is event
    assert held.pop(1) is None
    held.forget(event)
    assert not list(held.release(read((1, 0), (1, 1))))
    assert len(held) == 0
    assert held.worker_of(event) == -1
