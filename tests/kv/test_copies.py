"""Copies that wait for the next step."""

import torch

from nanoactor.kv.copies import PendingCopies
from nanoactor.models.layers.state import SlotArrays


def taken(copies):
    return [
        c and dict(zip(c.targets.tolist(), c.sources.tolist(), strict=True)) for c in copies.drain()
    ]


def test_slots_swap_and_a_copy_of_a_copy_is_one_of_its_source():
    copies = PendingCopies(slots=True)
    copies.copy_slots([0, 1], [1, 0])
    copies.copy_slots([2, 0], [0, 3])  # slot 0 holds what slot 1 did
    assert taken(copies) == [None, {0: 3, 1: 0, 2: 1}]
    assert taken(copies) == [None, None]


def test_a_block_that_is_given_up_is_no_target():
    copies = PendingCopies(slots=False)
    copies.copy_block(4, 7)
    copies.copy_block(7, 9)
    copies.copy_block(5, 6)
    copies.copy_slots([0], [1])  # nothing is kept of slots
    copies.drop_blocks([6, 8])
    assert taken(copies) == [{7: 4, 9: 4}, None]


def test_all_sources_are_read_before_a_target_is_written():
    arrays = SlotArrays((torch.arange(4.0), torch.arange(8).view(4, 2)))
    arrays.copy(torch.tensor([1, 0, 1]), torch.tensor([0, 1, 3]))
    assert arrays.arrays[0].tolist() == [1, 0, 2, 1]
    assert arrays.arrays[1].tolist() == [[2, 3], [0, 1], [4, 5], [2, 3]]
    arrays.zero(torch.tensor([0, 2]))
    assert arrays.arrays[0].tolist() == [0, 0, 0, 1]
