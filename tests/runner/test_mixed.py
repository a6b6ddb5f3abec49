"""What captured steps read is what the step has, padded with what changes nothing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.models.devices import open_device
from nanoactor.runner.batch.inputs import VisualInputs
from nanoactor.runner.steps.mixed import FixedInputs

TOKENS = 8


@given(st.lists(st.integers(0, TOKENS), min_size=1, max_size=5), st.integers(0, 1000))
def test_images_in_captured_steps_are_those_of_the_step(counts, seed):
    """Step by step into the same place, whatever the step before has left there."""
    rng = np.random.default_rng(seed)
    arrays = {"rows": ((TOKENS,), -1), "positions": ((3, TOKENS), 0)}
    fixed = FixedInputs(open_device("cpu"), VisualInputs, arrays, in_flight=2)
    rows, positions = fixed.inputs.rows, fixed.inputs.positions
    for count in counts:
        given_rows = rng.integers(-1, 50, count).astype(np.int32)
        given_positions = rng.integers(0, 99, (3, count)).astype(np.int32)
        fixed.fill(VisualInputs(given_rows, given_positions))
        assert rows.tolist() == [*given_rows, *[-1] * (TOKENS - count)]
        assert (positions[:, :count].numpy() == given_positions).all()
        assert not positions[:, count:].any()
