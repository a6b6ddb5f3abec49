"""Which captured step holds a step."""

from hypothesis import given
from hypothesis import strategies as st

from nanoactor.runner.graphs import PREFILL_ROWS, MixedSizes, decode_sizes, smallest


@given(st.integers(1, 2000), st.data())
def test_every_number_of_rows_has_a_capture_that_holds_it(most, data):
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    rows = data.draw(st.integers(0, most))
    found = smallest(sizes, rows)
    assert found >= rows
    assert found <= max(8, 2 * rows)


@given(st.integers(1, 20_000), st.integers(1, 1500), st.data())
def test_a_mixed_step_gets_the_least_capture_that_holds_it(tokens, seqs, data):
    sizes = MixedSizes.of(max(tokens, seqs), seqs)
    wanted = data.draw(st.integers(1, max(tokens, seqs)))
    prompts, rows = data.draw(st.integers(1, PREFILL_ROWS + 3)), data.draw(st.integers(0, seqs))
    found = sizes.fit(wanted, prompts, rows)
    if prompts > PREFILL_ROWS or wanted > sizes.tokens[-1]:
        assert found is None
        return
    assert found is not None
    assert found[0] >= wanted
    assert found[1] >= rows
    assert all(size < wanted for size in sizes.tokens if size < found[0])
    assert all(size < rows for size in sizes.rows if size < found[1])


@given(st.integers(1, 2048), st.integers(1, 600))
def test_small_budgets_are_captured_whole(tokens, seqs):
    sizes = MixedSizes.of(tokens, seqs)
    assert sizes.fit(tokens, 1, seqs) == (tokens, seqs)
    assert sizes.fit(1, 1, 0) == (sizes.tokens[0], 0)
