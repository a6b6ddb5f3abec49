"""Blocks that were left half written, against a plain search for the one that has most."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.kv.hashing import block_hash
from nanoactor.kv.holding import Holding
from nanoactor.kv.leftovers import Leftovers
from nanoactor.kv.pool import BlockPool

SALT = bytes(16)
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=5)


def hashes_of(tokens, size):
    found = [b""]
    for at in range(0, len(tokens) - size + 1, size):
        found.append(block_hash(found[-1], np.array(tokens[at : at + size], np.int32), SALT, b""))
    return found[1:]


def left_by(sequences, size, images=()):
    """A pool in which sequences have left their blocks, and the tokens of each of these."""
    pool = BlockPool(5 * 9)
    leftovers = Leftovers(pool, size)
    written = {}
    for number, tokens in enumerate(sequences):
        table = [pool.allocate() for _ in range(-(-len(tokens) // size))]
        extras = {0: b"an image"} if number in images else {}
        holding = Holding(number, hashes_of(tokens, size), table, extras=extras)
        leftovers.add(holding, np.array(tokens, np.int32))
        pool.release(table[::-1], 0)
        written |= {block: tokens[at * size :][:size] for at, block in enumerate(table)}
    return pool, leftovers, written


def follow(pool, leftovers, tokens, size):
    """What a request takes over that goes on behind these tokens: blocks, and how many tokens."""
    hashes, table = hashes_of(tokens, size), []
    for content in hashes:
        if (block := pool.find(content)) is None:
            break
        pool.share(block)
        table.append(block)
    begin = len(table) * size
    begun = leftovers.claim(hashes[: len(table)], np.array(tokens[begin:], np.int32))
    return (table, begin) if begun is None else ([*table, begun.block], begin + begun.positions)


@given(sequences=SEQUENCES, asked=SEQUENCES, size=st.integers(1, 4))
def test_what_is_taken_over_is_what_was_asked_for_and_nobody_elses(sequences, asked, size):
    pool, leftovers, written = left_by(sequences, size)
    begun = set()
    for tokens in asked:
        table, count = follow(pool, leftovers, tokens, size)
        for at, block in enumerate(table):
            mine = tokens[at * size : min(count, (at + 1) * size)]
            assert written[block][: len(mine)] == mine
        assert begun.isdisjoint(table), "somebody writes on in it"
        if count > len(table) * size - size and count % size:
            begun.add(table[-1])
            assert pool.content_of(table[-1]) is None


@given(sequences=SEQUENCES, size=st.integers(1, 4), cut=st.integers(0, 4))
def test_who_goes_on_first_finds_all_that_it_had(sequences, size, cut):
    """Though its reader was some tokens behind, as long as that is less than a block."""
    for tokens in sequences:
        pool, leftovers, _ = left_by(sequences, size)
        told = tokens[: max(0, len(tokens) - cut % size)]
        _, count = follow(pool, leftovers, told, size)
        assert count == len(told)


def test_blocks_with_images_are_not_taken_over():
    pool, leftovers, _ = left_by([[1, 2]], 4, images={0})
    assert follow(pool, leftovers, [1, 2, 0], 4) == ([], 0)


def test_what_was_evicted_is_not_found():
    pool, leftovers, _ = left_by([[1, 2], [2, 1]], 4)
    for _ in range(45):
        pool.allocate()
    assert follow(pool, leftovers, [1, 2, 0], 4) == ([], 0)
