"""Masks on a runner's host: each answer ends twice, and a row without its mask is a bug."""

import dataclasses
import itertools

import numpy as np
import pytest

from nanoactor.errors import ProtocolBug
from nanoactor.messages.grammar import DropMasks, Masks
from nanoactor.runner.batch.masks import MaskStore
from nanoactor.runner.steps.warmup import admissions
from tests.runner.steps import SAMPLE, step_of


def masks(*pairs, closed=()):
    rows = np.arange(2 * len(pairs), dtype=np.int32).reshape(-1, 2)
    uids, positions = zip(*pairs, strict=True) if pairs else ((), ())
    return Masks(
        np.array(uids, np.int64),
        np.array(positions, np.int32),
        rows,
        np.array(closed, np.int64),
    )


def step(*pairs):
    """One in which requests, each in a slot of its own, choose at these positions."""
    uids, positions = zip(*pairs, strict=True)
    new = admissions(np.arange(len(pairs), dtype=np.int32))
    new = dataclasses.replace(new, uids=np.array(uids, np.int64))
    rows = [(slot, position, 0, SAMPLE) for slot, position in enumerate(positions)]
    return step_of((9, 0, 4, SAMPLE), *rows, new=new)


def drop(*uids):
    return DropMasks(np.array(uids, np.int64))


def test_a_step_takes_each_mask_once_in_the_order_of_its_rows():
    store = MaskStore()
    assert store.add(masks((5, 10), (3, 7))) == ([5, 3], [10, 7])
    assert store.pop_masks(step((3, 7), (5, 10))).tolist() == [[2, 3], [0, 1]]
    with pytest.raises(ProtocolBug, match="request 5 for position 10, but it holds no mask"):
        store.pop_masks(step((5, 10)))


def test_the_mask_of_another_position_is_refused():
    store = MaskStore()
    store.add(masks((5, 10)))
    with pytest.raises(
        ProtocolBug, match="request 5 for position 11, but it holds the mask for 10"
    ):
        store.pop_masks(step((5, 11)))


def test_masks_are_kept_when_their_message_is_overwritten():
    store, event = MaskStore(), masks((5, 10))
    store.add(event)
    event.masks[:] = -1
    assert store.pop_masks(step((5, 10))).tolist() == [[0, 1]]


@pytest.mark.parametrize(
    "order", list(itertools.permutations(("mask", "closed", "dropped"))), ids=str
)
def test_nothing_is_left_of_an_answer_that_has_ended_twice(order):
    """The grammar's last word comes behind its masks; the scheduler's comes at any time."""
    if order.index("mask") > order.index("closed"):
        order = tuple(reversed(order))
    store, told = MaskStore(), []
    for what in order:
        if what == "dropped":
            store.drop(drop(5))
        else:
            told += store.add(masks((5, 10)) if what == "mask" else masks(closed=[5]))[0]
    assert len(store) == 0
    assert told == ([5] if order.index("mask") < order.index("dropped") else [])
