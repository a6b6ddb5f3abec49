"""Prefixes that are found, indexed and forgotten, without a block manager."""

import numpy as np

from nanoactor.kv.computed import ComputedPositions
from nanoactor.kv.holding import Holding
from nanoactor.kv.pool import BlockPool
from nanoactor.kv.prefix_index import PrefixIndex
from nanoactor.kv.tables import BlockTables

SALT = bytes(16)
PROMPT = np.arange(10, dtype=np.int32)


def made(is_enabled=True):
    tables = BlockTables(BlockPool(16), 4, 4, 32, has_slot_state=False)
    return tables, PrefixIndex(tables, SALT, is_enabled)


def assigned(tables, index, slot, tokens=PROMPT, request=0, indexed=0):
    hashes = index.complete_hashes([], tokens, {})
    table = [tables.pool.allocate() for _ in range(-(-len(tokens) // 4))]
    holding = Holding(slot, hashes, table, request=request)
    holding.shareable = len(tokens) // 4
    tables.assign(slot, holding, tokens, indexed)
    return holding


def test_full_blocks_are_found_up_to_the_first_that_is_not_indexed():
    tables, index = made()
    holding = assigned(tables, index, 0)
    index.queue_full_blocks(np.array([0], np.int32), np.array([8]))
    assert index.find(holding.hashes, request=1) == []
    index.update()
    assert index.find(holding.hashes, request=1) == holding.table[:2]
    other = index.complete_hashes([], np.array([*range(4), *range(9, 13)], np.int32), {})
    assert index.find(other, request=1) == holding.table[:1]


def test_without_prefix_caching_only_answers_to_the_same_request_are_found():
    tables, index = made(is_enabled=False)
    holding = assigned(tables, index, 0, request=7)
    index.index_full_blocks(0, 8)
    assert index.find([b""] * 2, request=7) == []  # nothing is computed yet
    holding.filled = 10
    assert index.find([b""] * 2, request=7) == holding.table[:2]
    assert index.find([b""], request=7) == holding.table[:1]
    assert index.find([b""] * 2, request=8) == []


def test_an_order_to_forget_is_followed_once_and_holds_for_those_who_are_there():
    tables, index = made()
    old = assigned(tables, index, 0)
    index.index_full_blocks(0, 8)
    index.forget_all(1)
    index.index_full_blocks(0, 10)
    assert index.find(old.hashes, request=1) == []
    new = assigned(tables, index, 1)
    index.index_full_blocks(1, 8)
    index.forget_all(1)
    assert index.find(new.hashes, request=2) == new.table[:2]


def test_a_restart_keeps_what_steps_that_are_done_have_computed():
    tables, index = made()
    holding = assigned(tables, index, 0)
    for step, end in ((1, 4), (2, 10)):
        index.step = step
        tables.computed.plan(step, np.array([0]), np.array([end]))
        index.index_full_blocks(0, end)
    index.complete(1)
    tables.computed.complete(1)
    index.restart()
    index.keep(0, holding)
    assert index.find(holding.hashes, request=1) == holding.table[:1]


def test_what_is_discarded_is_not_computed_when_the_steps_in_flight_are_done():
    computed = ComputedPositions(2)
    slots = np.array([0, 1])
    computed.plan(1, slots, np.array([6, 6]))
    computed.plan(2, slots, np.array([7, 7]))
    computed.complete(1)
    computed.discard(np.array([1], np.int32), np.array([5]))
    assert [computed.of(slot) for slot in (0, 1)] == [6, 5]
    computed.complete(2)
    assert [computed.of(slot) for slot in (0, 1)] == [7, 5]
    computed.begin(0)
    assert [computed.of(slot) for slot in (0, 1)] == [0, 5]
