"""How the CPU groups decode rows: everything is in one group, and padding is bounded."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from nanoactor.models.devices.cpu_attention import group_rows

BLOCKS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(BLOCKS, st.integers(0, 100), st.integers(1, 400))
def test_each_row_is_in_one_group_that_is_padded_and_large_as_allowed(blocks, worth, most):
    groups = group_rows(blocks, worth, most)
    assert sorted(row for group in groups for row in group) == list(range(len(blocks)))
    for group in groups:
        longest = max(blocks[row] for row in group)
        assert sum(longest - blocks[row] for row in group) <= worth
        assert len(group) == 1 or len(group) * longest <= most


@given(BLOCKS, st.integers(0, 100), st.integers(1, 400))
def test_no_two_neighbouring_groups_could_be_one(blocks, worth, most):
    groups = group_rows(blocks, worth, most)
    for first, second in itertools.pairwise(groups):
        longest, row = blocks[first[0]], second[0]
        padding = sum(longest - blocks[each] for each in [*first, row])
        assert padding > worth or (len(first) + 1) * longest > most


@given(st.lists(st.just(7), min_size=1, max_size=20))
def test_rows_of_one_length_keep_their_order(blocks):
    assert group_rows(blocks, 0, 1000) == [list(range(len(blocks)))]
