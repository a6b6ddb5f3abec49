"""A block's name says all that its keys and values depend on, and nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.kv.hashing import HASH_BYTES, block_hash, block_hashes

SALT = bytes(range(32))

sizes = st.integers(1, 9)
ids = st.integers(0, 2**31 - 1)
sequences = st.lists(ids | st.integers(0, 3), max_size=50)


def names(tokens, size, salt=SALT, parent=b""):
    hashes = block_hashes(np.array(tokens, np.int32), size, salt, parent)
    assert hashes.dtype == np.uint8
    assert hashes.shape == (len(tokens) // size, HASH_BYTES)
    return [bytes(row) for row in hashes]


def name(parent, tokens, salt=SALT, extra=b""):
    return block_hash(parent, np.array(tokens, np.int32), salt, extra)


@given(sequences, sizes)
def test_only_full_blocks_are_named_each_after_the_one_before(tokens, size):
    parent, expected = b"", []
    for start in range(0, len(tokens) // size * size, size):
        parent = name(parent, tokens[start : start + size])
        expected.append(parent)
    assert names(tokens, size) == expected
    assert len(set(expected)) == len(expected)


@given(sequences, sequences, sequences, sizes)
def test_names_are_equal_exactly_as_far_as_prefixes_are(stem, one, other, size):
    first, second = stem + one, stem + other
    for index, (a, b) in enumerate(zip(names(first, size), names(second, size), strict=False)):
        end = (index + 1) * size
        assert (a == b) == (first[:end] == second[:end])


@given(st.lists(ids, min_size=1, max_size=50), sizes, st.data())
def test_a_name_depends_on_every_token_up_to_its_block(tokens, size, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    bit = data.draw(st.integers(0, 30))
    changed = [*tokens[:at], tokens[at] ^ 1 << bit, *tokens[at + 1 :]]
    before, after = names(tokens, size), names(changed, size)
    untouched = at // size
    assert before[:untouched] == after[:untouched]
    assert not set(before[untouched:]) & set(after[untouched:])


@given(st.lists(ids, min_size=1, max_size=9), st.binary(min_size=16, max_size=64), st.data())
def test_a_name_depends_on_the_salt(tokens, salt, data):
    other = data.draw(st.binary(min_size=16, max_size=64).filter(salt.__ne__))
    assert len(name(b"", tokens, salt)) == HASH_BYTES
    # BLAKE2 pads its key with zeros to 64 bytes, but tells lengths apart.
    assert name(b"", tokens, salt) != name(b"", tokens, other)
    assert name(b"", tokens, salt) != name(b"", tokens, salt + b"\0" if len(salt) < 64 else b"\0")


@given(st.lists(ids, min_size=1, max_size=9), st.binary(max_size=20), st.binary(max_size=20))
def test_a_name_depends_on_what_the_block_means_beyond_its_ids(tokens, one, other):
    assert (name(b"", tokens, extra=one) == name(b"", tokens, extra=other)) == (one == other)
    assert name(b"", tokens) == name(b"", tokens, extra=b"")


@given(st.lists(ids, min_size=1, max_size=9))
def test_the_same_block_has_another_name_behind_another_parent(tokens):
    first = name(b"", tokens)
    assert len({first, name(first, tokens), name(name(first, tokens), tokens)}) == 3


@given(sequences, st.integers(0, 5), sizes)
def test_names_of_a_continuation_go_on_from_its_parent(tokens, blocks, size):
    whole = names(tokens, size)
    cut = min(blocks, len(whole))
    parent = whole[cut - 1] if cut else b""
    assert names(tokens[cut * size :], size, parent=parent) == whole[cut:]


@given(st.lists(ids, min_size=6, max_size=6))
def test_names_do_not_depend_on_how_tokens_lie_in_memory(tokens):
    expected = name(b"", tokens)
    for array in (
        np.array(tokens, np.int64),
        np.repeat(np.array(tokens, np.int32), 2)[::2],
        np.array(tokens[::-1], np.int32)[::-1],
    ):
        assert block_hash(b"", array, SALT) == expected
