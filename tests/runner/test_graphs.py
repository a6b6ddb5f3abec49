"""Which captured step holds a step."""

from hypothesis import given
from hypothesis import strategies as st

from nanoactor.runner.steps.graphs import (
    MAX_PROMPTS,
    MixedSize,
    MixedSizes,
    decode_sizes,
    max_prompts,
    smallest_at_least,
)


@given(st.integers(1, 2000), st.data())
def test_every_number_of_rows_has_a_capture_that_holds_it(most, data):
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    rows = data.draw(st.integers(0, most))
    found = smallest_at_least(sizes, rows)
    assert found >= rows
    assert found <= max(8, 2 * rows)


@given(st.integers(1, 20_000), st.integers(1, 1500), st.data())
def test_a_mixed_step_gets_the_least_capture_that_holds_it(tokens, seqs, data):
    sees = data.draw(st.booleans())
    sizes = MixedSizes.of(max(tokens, seqs), seqs, sees)
    wanted = data.draw(st.integers(1, max(tokens, seqs)))
    prompts, rows = data.draw(st.integers(1, MAX_PROMPTS + 3)), data.draw(st.integers(0, seqs))
    found = sizes.fit(wanted, prompts, rows, has_images=sees)
    if prompts > max_prompts(sizes.tokens[-1]) or wanted > sizes.tokens[-1]:
        assert found is None
        return
    assert found is not None
    assert found.tokens >= wanted
    assert found.rows >= rows
    assert found.has_images == sees
    assert found.prompts >= prompts
    smaller = [size for size in sizes.tokens if size < found.tokens]
    assert all(size < wanted or max_prompts(size) < prompts for size in smaller)
    assert all(size < rows for size in sizes.rows if size < found.rows)


def test_the_default_budget_holds_a_burst_of_short_prompts():
    """Of 32 to 560 tokens each, as many as fit into a step."""
    sizes = MixedSizes.of(2048, 256)
    for length in (32, 60, 100, 560):
        prompts = -(-2048 // length)
        assert sizes.fit(2048, min(prompts, 2048), 0, has_images=False) is not None, length
    assert sizes.fit(400, 20, 0, has_images=False) == MixedSize(512, 0, False)
    assert sizes.fit(240, 20, 3, has_images=False) == MixedSize(512, 32, False)
    assert sizes.fit(240, 16, 3, has_images=False) == MixedSize(256, 32, False)


@given(st.integers(1, 2048), st.integers(1, 600))
def test_small_budgets_are_captured_whole(tokens, seqs):
    sizes = MixedSizes.of(tokens, seqs)
    assert sizes.fit(tokens, 1, seqs, has_images=False) == MixedSize(tokens, seqs, False)
    assert sizes.fit(1, 1, 0, has_images=False) == MixedSize(sizes.tokens[0], 0, False)
