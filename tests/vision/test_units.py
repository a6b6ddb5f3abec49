"""However an item is divided, every row and every block of the tower is done once, in order."""

from hypothesis import given
from hypothesis import strategies as st

from nanoactor.media.units import EncodeUnits

SMALL = st.integers(1, 12)


@given(st.tuples(SMALL, SMALL, SMALL), st.integers(1, 60), st.integers(1, 27))
def test_units_cover_an_item_and_each_fits_a_budget(grid, budget, depth):
    units = EncodeUnits.of(grid, budget, depth)
    frames, height, width = grid
    assert units.total_rows == frames * height * width
    assert units.count == frames * units.parts
    assert 1 <= units.cost(budget) <= budget
    blocks = [block for part in range(units.parts) for block in units.blocks(part, depth)]
    assert blocks == [*range(depth)]
    assert all(units.blocks(part, depth) for part in range(units.parts))
    assert units.rows_after(units.count) == units.total_rows
    for done in range(units.count + 1):
        assert units.rows_after(done) == units.rows_after(units.complete_units(done))
        assert units.rows_after(done) // units.rows == done // units.parts
    if height * width <= budget:
        assert units.parts == 1
